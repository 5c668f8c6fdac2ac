"""What is refused, and what a deadlock says."""

import dataclasses

import pytest

from simtrain.engine.ranks import tabulate
from simtrain.engine.run import run
from simtrain.errors import ProgramError
from simtrain.program.lowered import Task
from tests.unit.engine.jobs import COMM, COMPUTE, MORE, RECV, SEND, F, group, job, work


def test_table_of_a_list() -> None:
    lowered, _ = job(
        [work(F, 1.0)], [[Task(COMPUTE, 0, 0), Task(COMM, 0, 0, (0,), slot=2), Task(COMPUTE, 0, 0, (1, 0))]]
    )
    table = tabulate(lowered.lists[0])
    assert table.predecessors == (0, 1, 3)  # the stream's last is counted beside the dep that says the same
    assert table.successors == ((1, 2, 2), (2,), ())
    assert table.slot_streams == {2: COMM}


def test_deadlock_of_mismatched_slots_names_who_waits_for_whom() -> None:
    works = [work(F, 1.0, name="F"), work(SEND, 1.0, name="send 0F0"), work(RECV, 1.0)]
    sender = [Task(COMPUTE, 0, 0), Task(COMM, 1, 0, (0,), slot=0), Task(COMM, 1, 1, slot=0)]
    receiver = [Task(COMM, 2, 0, slot=0)]
    lowered, demands = job(works, [sender, receiver], groups=[group(0, 1, axis="pp")], slots=[(0,), (0,)])
    with pytest.raises(ProgramError) as caught:
        run(lowered, demands)
    assert str(caught.value).splitlines() == [
        "deadlock: 1 tasks can never start",
        "  rank 0, stream 1 (reduce), task 2 'send 0F0' waits for its pp group with rank 10",
    ]


def test_deadlock_of_a_cycle_names_the_tasks() -> None:
    works = [work(F, 1.0, name="a"), work(F, 1.0, name="b")]
    with pytest.raises(ProgramError) as caught:
        run(*job(works, [[Task(COMPUTE, 0, 0, (1,)), Task(COMM, 1, 0, (0,))]]))
    assert str(caught.value).splitlines() == [
        "deadlock: 2 tasks can never start",
        "  rank 0, stream 0 (compute), task 0 'a' waits for task 1 'b'",
        "  rank 0, stream 1 (reduce), task 1 'b' waits for task 0 'a'",
    ]


def test_deadlock_of_crossed_order() -> None:
    """Each rank sends first what the other receives second, on one stream."""
    works = [work(SEND, 1.0), work(RECV, 1.0)]
    lists = [[Task(COMM, 0, 0, slot=0), Task(COMM, 1, 0, slot=1)], [Task(COMM, 0, 0, slot=1), Task(COMM, 1, 0, slot=0)]]
    with pytest.raises(ProgramError, match="deadlock: 4 tasks") as caught:
        run(*job(works, lists, groups=[group(0, 1), group(0, 1)], slots=[(0, 1)] * 2))
    assert "rank 10, stream 1 (reduce), task 0 'send' waits for its dp group with rank 0" in str(caught.value)


def test_a_long_deadlock_is_cut() -> None:
    lists = [[Task(COMPUTE, 0, 0, (0,))]] * 30
    with pytest.raises(ProgramError) as caught:
        run(*job([work(F, 1.0)], lists))
    assert len(str(caught.value).splitlines()) == 10
    assert str(caught.value).endswith("...")


ONE = [work(F, 1.0)]
BAD = {
    "waits for task 3": (job(ONE, [[Task(COMPUTE, 0, 0, (3,))]])),
    "second stream": job(
        ONE, [[Task(COMPUTE, 0, 0, slot=0), Task(COMM, 0, 0, slot=0)]], groups=[group(0)], slots=[(0,)]
    ),
    "slot 1 but has 1 groups": job(ONE, [[Task(COMPUTE, 0, 0, slot=1)]], groups=[group(0)], slots=[(0,)]),
    "no party of": job(ONE, [[Task(COMPUTE, 0, 0, slot=0)], []], groups=[group(1)], slots=[(0,), ()]),
    "by two slots": job(ONE, [[Task(COMM, 0, 0, slot=0), Task(MORE, 0, 0, slot=1)]], groups=[group(0)], slots=[(0, 0)]),
    "each party once": job(ONE, [[]], groups=[group(0, 0)]),
    "unknown resource": job(ONE, [[]], groups=[group(0, loads=[(0, 1.0)])]),
    "1 works but 0 demands": (job(ONE, [[]])[0], []),
    "negative or infinite": job([work(F, -1.0)], [[]]),
    "'late' has a negative or infinite": job([work(F, float("nan"), name="late")], [[]]),
}


@pytest.mark.parametrize("message", BAD)
def test_inconsistent_jobs_are_refused(message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        run(*BAD[message])


def test_infinite_share_is_refused() -> None:
    lowered, demands = job(ONE, [[]])
    with pytest.raises(ProgramError, match="share"):
        run(lowered, [dataclasses.replace(demands[0], sm_share=float("inf"))])
