"""Worked examples: every number here was computed by hand."""

import math

import pytest
from numpy.testing import assert_allclose

from simtrain.engine.run import run
from simtrain.program.lowered import Task
from tests.unit.engine.jobs import COMM, COMPUTE, MORE, RECV, REDUCE, SEND, B, F, group, job, work


def spans(lowered, demands):
    """(rank index, task) -> (start, end)."""
    trace = run(lowered, demands)
    ids = zip(trace.sim_rank.tolist(), trace.task.tolist(), strict=True)
    return dict(zip(ids, zip(trace.start.tolist(), trace.end.tolist(), strict=True), strict=True))


def test_two_ranks_exchange() -> None:
    """F on 0 (1 s), message (0.5 s), F on 1 (2 s), message back, B on 0; rank 0 meanwhile does a second F."""
    works = [work(F, 1.0), work(F, 2.0), work(SEND, 0.5), work(RECV, 0.5), work(B, 3.0)]
    first = [
        Task(COMPUTE, 0, 0),
        Task(COMM, 2, 0, (0,), slot=0),
        Task(COMPUTE, 0, 1),
        Task(MORE, 3, 0, slot=1),
        Task(COMPUTE, 4, 0, (3,)),
    ]
    second = [Task(COMM, 3, 0, slot=0), Task(COMPUTE, 1, 0, (0,)), Task(MORE, 2, 0, (1,), slot=1)]
    lowered, demands = job(works, [first, second], groups=[group(0, 1), group(0, 1)], slots=[(0, 1)] * 2)
    assert spans(lowered, demands) == {
        (0, 0): (0.0, 1.0),
        (0, 1): (1.0, 1.5),
        (1, 0): (1.0, 1.5),
        (0, 2): (1.0, 2.0),
        (1, 1): (1.5, 3.5),
        (1, 2): (3.5, 4.0),
        (0, 3): (3.5, 4.0),
        (0, 4): (4.0, 7.0),
    }
    trace = run(lowered, demands)
    assert trace.released_by[-1] == trace.frame().query("rank == 0 and unit == 'recv'").id.item()
    assert trace.step_time == 7.0


def collective(*computing: float):
    works = [work(REDUCE, 1.0), *(work(F, seconds) for seconds in computing)]
    lists = [[Task(COMPUTE, i + 1, 0), Task(COMM, 0, -1, (0,), slot=0)] for i in range(len(computing))]
    return job(works, lists, groups=[group(*range(len(computing)))], slots=[(0,)] * len(computing))


def test_a_collective_waits_for_the_last_party_and_ends_for_all() -> None:
    lowered, demands = collective(1.0, 5.0, 2.0)
    found = spans(lowered, demands)
    assert [found[rank, 1] for rank in range(3)] == [(5.0, 6.0)] * 3
    trace = run(lowered, demands)
    last = [i for i in range(6) if trace.sim_rank[i] == 1 and trace.task[i] == 0]
    assert trace.released_by.tolist() == [-1, -1, -1, *last * 3]


def test_a_collective_takes_the_longest_of_its_parties() -> None:
    works = [work(REDUCE, 1.0), work(REDUCE, 1.5)]
    lowered, demands = job(
        works, [[Task(COMM, 0, 0, slot=0)], [Task(COMM, 1, 0, slot=0)]], groups=[group(0, 1)], slots=[(0,)] * 2
    )
    assert set(spans(lowered, demands).values()) == {(0.0, 1.5)}


def test_the_nth_meets_the_nth() -> None:
    """Two collectives in a row between a rank that is early and one that is late."""
    works = [work(REDUCE, 1.0), work(F, 4.0)]
    early = [Task(COMM, 0, 0, slot=0), Task(COMM, 0, 1, slot=0)]
    late = [Task(COMM, 0, 0, slot=0), Task(COMPUTE, 1, 0, (0,)), Task(COMM, 0, 1, (1,), slot=0)]
    found = spans(*job(works, [early, late], groups=[group(0, 1)], slots=[(0,)] * 2))
    assert found[0, 0] == found[1, 0] == (0.0, 1.0)
    assert found[0, 1] == found[1, 2] == (5.0, 6.0)


def flows(*each: tuple[float, float, float], load: float = 1.0):
    """One rank a flow: waits, then a message of (seconds, share) over one NIC."""
    works = [w for wait, seconds, share in each for w in (work(F, wait), work(SEND, seconds, network=share))]
    lists = [[Task(COMPUTE, 2 * i, 0), Task(COMM, 2 * i + 1, 0, (0,), slot=0)] for i in range(len(each))]
    groups = [group(i, loads=[(0, load)]) for i in range(len(each))]
    found = spans(*job(works, lists, groups=groups, slots=[(i,) for i in range(len(each))], resources=1))
    return [found[i, 1] for i in range(len(each))]


def test_two_flows_the_second_enters_late() -> None:
    """0.5 s alone, 1 s at half rate for both, then the second finishes alone."""
    assert flows((0.0, 1.0, 1.0), (0.5, 1.0, 1.0)) == [(0.0, 1.5), (0.5, 2.0)]


def test_three_flows_of_different_shares() -> None:
    """Fair in bytes: 0.4 + 0.4 + 0.2 until the small one ends at 1 s, then halves until 2.2 s, then one alone."""
    found = flows((0.0, 1.0, 1.0), (0.0, 2.0, 1.0), (0.0, 1.0, 0.2))
    assert_allclose([end for _, end in found], [2.2, 3.2, 1.0], rtol=1e-14)


def test_flows_that_fit_together_are_not_slowed() -> None:
    assert flows((0.0, 1.0, 0.3), (0.5, 1.0, 0.7)) == [(0.0, 1.0), (0.5, 1.5)]


def test_a_flow_that_ends_just_as_another_starts_is_alone() -> None:
    assert flows((0.0, 1.0, 1.0), (1.0, 1.0, 1.0)) == [(0.0, 1.0), (1.0, 2.0)]


def test_eight_groups_on_one_nic_take_eight_times_as_long_folded_or_not() -> None:
    assert flows((0.0, 1.0, 1.0), load=8.0) == [(0.0, 8.0)]
    assert flows(*[(0.0, 1.0, 1.0)] * 8) == [(0.0, 8.0)] * 8


def test_unfolded_groups_on_two_nics_slow_only_where_they_meet() -> None:
    """A long collective over both NICs against a short one on the first: both at half rate for 2 s."""
    works = [work(REDUCE, 3.0, network=1.0), work(REDUCE, 1.0, network=1.0)]
    lists = [[Task(COMM, 0, 0, slot=0)], [Task(COMM, 0, 0, slot=0)], [Task(COMM, 1, 0, slot=0)]]
    groups = [group(0, 1, loads=[(0, 1.0), (1, 1.0)]), group(2, loads=[(0, 1.0)])]
    found = spans(*job(works, lists, groups=groups, slots=[(0,), (0,), (1,)], resources=2))
    assert found == {(2, 0): (0.0, 2.0), (0, 0): (0.0, 4.0), (1, 0): (0.0, 4.0)}


def beside(compute: float, message: float, *, units: float, network: float = 0.0, load: float = 1.0):
    works = [work(F, compute, units=1.0), work(SEND, message, units=units, network=network)]
    lists = [[Task(COMPUTE, 0, 0), Task(COMM, 1, 0, slot=0)]]
    found = spans(*job(works, lists, groups=[group(0, loads=[(0, load)])], slots=[(0,)], resources=1))
    return found[0, 0][1], found[0, 1][1]


def test_communication_goes_first_and_compute_gets_what_it_leaves() -> None:
    """0.9 of rate 1 for 1 s, then 1.1 s more."""
    assert beside(2.0, 1.0, units=0.1) == pytest.approx((2.1, 1.0), rel=1e-14)


def test_a_message_slowed_by_the_network_still_holds_its_units() -> None:
    """The message takes 2 s at half rate; the compute gets 0.9 for these 2 s, then 1.2 s more."""
    assert beside(3.0, 1.0, units=0.1, network=1.0, load=2.0) == pytest.approx((3.2, 2.0), rel=1e-14)


def test_compute_waits_while_communication_holds_all_units() -> None:
    assert beside(2.0, 1.0, units=1.0) == pytest.approx((3.0, 1.0), abs=1e-5)


def test_two_computes_on_one_rank_share_its_units() -> None:
    works = [work(F, 1.0, units=1.0), work(B, 2.0, units=1.0)]
    assert spans(*job(works, [[Task(COMPUTE, 0, 0), Task(MORE, 1, 0)]])) == {(0, 0): (0.0, 2.0), (0, 1): (0.0, 3.0)}


def test_ranks_do_not_share_units() -> None:
    works = [work(F, 1.0, units=1.0), work(B, 2.0, units=1.0)]
    lists = [[Task(COMPUTE, 0, 0), Task(MORE, 1, 0)], [Task(COMPUTE, 0, 0)]]
    assert spans(*job(works, lists))[1, 0] == (0.0, 1.0)


def test_slowdown_is_of_computing_not_of_communicating() -> None:
    """Alone: 2 s x 1.5. Joint: the slowest party's 2.0 on the 3 s of computing, 1 s of message unchanged."""
    works = [work(F, 2.0), work(B, 4.0, exposed=1.0), work(REDUCE, 1.0)]
    tasks = [Task(COMPUTE, 0, 0), Task(COMPUTE, 1, 0, slot=0), Task(COMM, 2, 0, (1,), slot=1)]
    groups = [group(0, 1, axis="tp"), group(0, 1)]
    found = spans(*job(works, [tasks, tasks], groups=groups, slots=[(0, 1)] * 2, slowdowns=[1.5, 2.0]))
    assert found[0, 0] == (0.0, 3.0)
    assert found[1, 0] == (0.0, 4.0)
    assert found[0, 1] == found[1, 1] == (4.0, 11.0)
    assert found[0, 2] == (11.0, 12.0)


def test_what_released_a_task_is_the_last_that_it_waited_for() -> None:
    works = [work(F, 1.0), work(F, 2.0), work(F, 3.0)]
    tasks = [
        Task(COMPUTE, 1, 0),
        Task(COMM, 2, 0),
        Task(MORE, 0, 0),
        Task(COMPUTE, 0, 0, (1, 2)),
        Task(MORE, 0, 0, (0,)),
    ]
    trace = run(*job(works, [tasks]))
    assert trace.task.tolist() == [2, 0, 1, 4, 3]
    assert trace.released_by.tolist() == [-1, -1, -1, 1, 2]


def test_zero_durations_neither_recurse_nor_take_time() -> None:
    count = 100_000
    works = [work(F, 0.0, units=1.0), work(SEND, 0.0, units=0.5, network=1.0)]
    chain = [Task(COMPUTE, 0, 0)] + [Task(i % 2, i % 2, 0, (i - 1,), slot=-(i % 2 == 0)) for i in range(1, count)]
    trace = run(*job(works, [chain], groups=[group(0, loads=[(0, 3.0)])], slots=[(0,)], resources=1))
    assert len(trace.end) == count
    assert trace.step_time == 0.0


@pytest.mark.parametrize("units", [0.0, 1.0])
def test_a_long_chain_ends_when_the_exact_sum_says(units: float) -> None:
    """Plain addition is off by 1e-12 and more here. With ``units`` the chain goes the way of contended activities."""
    seconds = [0.1, 1e-3 / 3, 0.0, 0.7e-6]
    works = [work(F, one, units=units) for one in seconds] + [work(F, 1e-9, units=units)]
    chain = [Task(COMPUTE, i % 4, i) for i in range(40_000)]
    lowered, demands = job(works, [[*chain, Task(COMM, 4, 0)]])
    exact = math.fsum(seconds * 10_000) + (1e-9 if units else 0.0)  # shared for 2 ns, of which 1 is the other's
    assert abs(run(lowered, demands).step_time / exact - 1) < 4e-16


def test_faster_computing_can_make_a_step_slower_under_contention() -> None:
    """The anomaly kept as an example: rank 1's message is critical, and rank 0's no longer comes after it."""

    def step(first: float) -> float:
        works = [work(F, first), work(SEND, 1.0, network=1.0), work(B, 1.0)]
        lists = [
            [Task(COMPUTE, 0, 0), Task(COMM, 1, 0, (0,), slot=0)],
            [Task(COMM, 1, 0, slot=0), Task(COMPUTE, 2, 0, (0,))],
        ]
        groups = [group(0, loads=[(0, 1.0)]), group(1, loads=[(0, 1.0)])]
        return run(*job(works, lists, groups=groups, slots=[(0,), (1,)], resources=1)).step_time

    assert step(1.0) == 2.0
    assert step(0.0) == 3.0


def test_empty_job() -> None:
    assert run(*job([], [])).step_time == 0.0
    assert run(*job([], [[]])).step_time == 0.0
