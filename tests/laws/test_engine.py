"""Laws of the engine, on random small jobs: what must hold whatever is scheduled."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtrain.engine.ranks import COMPUTE
from simtrain.engine.run import run
from simtrain.engine.sharing import fits, rates
from simtrain.program.demand import Demand
from simtrain.program.lowered import Lowered, Task
from simtrain.trace.spans import Trace
from tests.unit.engine.jobs import REDUCE, SEND, B, F, group, job, work

TINY = 1e-9
NICS = 2


@dataclass(frozen=True)
class Job:
    lowered: Lowered
    demands: list[Demand]
    activities: list[tuple[tuple[int, int], ...]]
    """In an order that respects all that waits: (rank, task) of each party."""

    def run(self) -> Trace:
        return run(self.lowered, self.demands)

    def tasks(self, rank: int) -> tuple[Task, ...]:
        return self.lowered.lists[self.lowered.ranks[rank].tasks].tasks

    def alone(self) -> Job:
        """The same without anything shared."""
        free = [dataclasses.replace(demand, sm_share=0.0, network_share=0.0) for demand in self.demands]
        return dataclasses.replace(self, demands=free)

    def seconds(self, activity: tuple[tuple[int, int], ...]) -> float:
        """Uncontended, by the rule in words: computing x the largest slowdown of the parties."""
        slowdown = max(self.lowered.ranks[rank].slowdown for rank, _ in activity)
        longest = 0.0
        for rank, task in activity:
            index = self.tasks(rank)[task].work
            exposed = self.demands[index].split[1][1]
            computing = self.demands[index].duration - exposed
            slow = self.lowered.works[index].pieces[0].kind in COMPUTE
            longest = max(longest, exposed + computing * (slowdown if slow else 1.0))
        return longest


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Activities in a global order, each alone or of a group, each after earlier ones: such a job cannot deadlock."""
    count = draw(st.integers(1, 4))
    short = st.sampled_from([0.0, 0.1, 1 / 3, 1.0, 2.5])
    share = st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0])
    works = [
        work(
            kind,
            seconds := draw(short),
            units=draw(share if kind in COMPUTE else st.sampled_from([0.0, 0.05, 0.3])),
            network=draw(share),
            exposed=draw(st.sampled_from([0.0, seconds])),
        )
        for kind in (F, B, SEND, REDUCE, REDUCE)
    ]
    party_sets = draw(st.lists(st.sets(st.integers(0, count - 1), min_size=1), min_size=1, max_size=4))
    loads = st.lists(
        st.tuples(st.integers(0, NICS - 1), st.sampled_from([0.5, 1.0, 3.0])),
        max_size=2,
        unique_by=lambda load: load[0],
    )
    groups = [group(*sorted(parties), loads=draw(loads)) for parties in party_sets]
    streams = [draw(st.integers(0, 2)) for _ in groups]
    lists: list[list[Task]] = [[] for _ in range(count)]
    activities = []
    for _ in range(draw(st.integers(0, 20))):
        slot = draw(st.integers(-1, len(groups) - 1))
        parties = groups[slot].parties if slot >= 0 else (draw(st.integers(0, count - 1)),)
        stream = streams[slot] if slot >= 0 else draw(st.integers(0, 2))
        alike = draw(st.sampled_from([(0, 1), (2, 3, 4)]))  # all parties compute, or all communicate
        activity = []
        for rank in parties:
            deps = draw(st.sets(st.integers(0, len(lists[rank]) - 1), max_size=2)) if lists[rank] else ()
            activity.append((rank, len(lists[rank])))
            lists[rank].append(Task(stream, draw(st.sampled_from(alike)), 0, tuple(sorted(deps)), slot))
        activities.append(tuple(activity))
    slowdowns = draw(st.lists(st.sampled_from([1.0, 1.25]), min_size=count, max_size=count))
    slots = [range(len(groups))] * count
    return Job(*job(works, lists, groups=groups, slots=slots, slowdowns=slowdowns, resources=NICS), activities)


def times(trace: Trace) -> dict[tuple[int, int], tuple[float, float]]:
    keys = zip(trace.sim_rank.tolist(), trace.task.tolist(), strict=True)
    return dict(zip(keys, zip(trace.start.tolist(), trace.end.tolist(), strict=True), strict=True))


def longest_path(some: Job) -> dict[tuple[int, int], float]:
    """Ends without contention, by a walk over the activities in their order."""
    ends: dict[tuple[int, int], float] = {}
    last: dict[tuple[int, int], float] = defaultdict(float)
    for activity in some.activities:
        start = 0.0
        for rank, index in activity:
            task = some.tasks(rank)[index]
            start = max([start, last[rank, task.stream], *(ends[rank, dep] for dep in task.deps)])
        for rank, index in activity:
            ends[rank, index] = last[rank, some.tasks(rank)[index].stream] = start + some.seconds(activity)
    return ends


@given(jobs())
def test_every_task_runs_once_after_what_it_waits_for_and_alone_on_its_stream(some: Job) -> None:
    trace = some.run()
    found = times(trace)
    assert len(trace.end) == len(found) == some.lowered.task_count
    assert (np.diff(trace.end) >= 0).all()
    for rank in range(len(some.lowered.ranks)):
        free = [0.0] * 3
        for index, task in enumerate(some.tasks(rank)):
            start, end = found[rank, index]
            assert end >= start >= max([free[task.stream], *(found[rank, dep][1] for dep in task.deps)])
            free[task.stream] = end


@given(jobs())
def test_parties_of_a_joint_activity_start_and_end_at_once(some: Job) -> None:
    found = times(some.run())
    for activity in some.activities:
        assert len({found[party] for party in activity}) == 1


@given(jobs())
def test_released_by_ends_when_the_task_starts(some: Job) -> None:
    """So that the critical path can be followed to the start of the step without a gap."""
    trace = some.run()
    for span, by in enumerate(trace.released_by):
        assert by < span
        assert trace.start[span] == (trace.end[by] if by >= 0 else 0.0)


@given(jobs())
def test_without_contention_ends_are_those_of_the_longest_path(some: Job) -> None:
    found = times(some.alone().run())
    for party, end in longest_path(some).items():
        assert found[party][1] == pytest.approx(end, rel=1e-12, abs=1e-300)


@given(jobs())
def test_contention_only_lengthens(some: Job) -> None:
    """Each end is at or after that of the longest path: the uncontended critical path is a lower bound."""
    found = times(some.run())
    for party, end in longest_path(some).items():
        assert found[party][1] >= end * (1 - 1e-12)
    for activity in some.activities:
        start, end = found[activity[0]]
        assert end - start >= some.seconds(activity) * (1 - 1e-12) - 1e-14


@given(jobs())
def test_a_network_resource_never_carries_more_than_it_can(some: Job) -> None:
    """Whatever lies within a window asked for no more resource-seconds than the window has."""
    found = times(some.run())
    for nic in range(NICS):
        uses = []
        for activity in some.activities:
            rank, index = activity[0]
            slot = some.tasks(rank)[index].slot
            load = dict(some.lowered.groups[slot].loads).get(nic, 0.0) if slot >= 0 else 0.0
            share = max(some.demands[some.tasks(r)[i].work].network_share for r, i in activity)
            if load * share:
                uses.append((*found[rank, index], load * share * some.seconds(activity)))
        for begin in {use[0] for use in uses}:
            for finish in {use[1] for use in uses}:
                inside = sum(used for start, end, used in uses if begin <= start and end <= finish)
                assert inside <= max(0.0, finish - begin) + TINY


@given(jobs())
def test_computing_gets_what_communication_leaves_of_a_rank(some: Job) -> None:
    """On each rank, what computing did within a window and what communication held in it fit in the window."""
    found = times(some.run())
    for rank in range(len(some.lowered.ranks)):
        computing, holding = [], []
        for activity in some.activities:
            for task in [some.tasks(rank)[index] for r, index in activity if r == rank]:
                units = some.demands[task.work].sm_share
                if some.lowered.works[task.work].pieces[0].kind in COMPUTE:
                    computing.append((*found[activity[0]], units * some.seconds(activity)))
                else:
                    holding.append((*found[activity[0]], units))
        for begin in {use[0] for use in computing}:
            for finish in {use[1] for use in computing}:
                inside = sum(used for start, end, used in computing if begin <= start and end <= finish)
                held = sum(units * max(0.0, min(end, finish) - max(start, begin)) for start, end, units in holding)
                assert not inside or inside + held <= finish - begin + TINY


def claims(some: Job, activity: tuple[tuple[int, int], ...]) -> tuple[dict[int, float], dict[int, float], float]:
    """(shares, held units, weight), by the rules in words. Units of ranks are numbered -1 - rank, networks from 0."""
    shares: dict[int, float] = {}
    held: dict[int, float] = {}
    demands = [some.demands[some.tasks(rank)[index].work] for rank, index in activity]
    network = max(demand.network_share for demand in demands)
    for (rank, index), demand in zip(activity, demands, strict=True):
        kind = some.lowered.works[some.tasks(rank)[index].work].pieces[0].kind
        (shares if kind in COMPUTE else held)[-1 - rank] = demand.sm_share
    slot = some.tasks(activity[0][0])[activity[0][1]].slot
    if slot >= 0:
        shares.update({nic: load * network for nic, load in some.lowered.groups[slot].loads})
    units = max(demand.sm_share for demand in demands)
    return {r: share for r, share in shares.items() if share}, held, 1 / (network or units or 1.0)


def fluid(some: Job) -> dict[tuple[int, int], float]:
    """Ends by brute force: all rates of all running activities anew whenever one starts or ends."""
    waits: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank in range(len(some.lowered.ranks)):
        last: dict[int, int] = {}
        for index, task in enumerate(some.tasks(rank)):
            before = {*task.deps, *([last[task.stream]] if task.stream in last else [])}
            waits[rank, index] = [(rank, dep) for dep in before]
            last[task.stream] = index
    ends: dict[tuple[int, int], float] = {}
    pending, running, now = list(some.activities), dict[tuple[tuple[int, int], ...], float](), 0.0
    while pending or running:
        for activity in [a for a in pending if all(before in ends for party in a for before in waits[party])]:
            pending.remove(activity)
            running[activity] = some.seconds(activity)
        what = [claims(some, activity) for activity in running]
        held = {-1 - r: sum(h.get(-1 - r, 0.0) for _, h, _ in what) for r in range(len(some.lowered.ranks))}
        capacity = dict.fromkeys(range(NICS), 1.0) | {r: 1.0 - units for r, units in held.items()}
        speed = rates([shares for shares, _, _ in what], [weight for *_, weight in what], capacity)
        step = min(left / rate for left, rate in zip(running.values(), speed, strict=True))
        now += step
        for (activity, left), rate in zip([*running.items()], speed, strict=True):
            running[activity] = left - rate * step
            if running[activity] <= 1e-13:
                del running[activity]
                ends.update(dict.fromkeys(activity, now))
    return ends


@given(jobs())
def test_ends_are_those_of_a_brute_force_fluid_model(some: Job) -> None:
    """What the engine saves (resources left out, components, void timeouts, one look an instant) changes nothing."""
    found = times(some.run())
    for party, end in fluid(some).items():
        assert found[party][1] == pytest.approx(end, rel=1e-9, abs=1e-11)


@given(jobs())
def test_same_job_same_arrays(some: Job) -> None:
    one, other = some.run(), some.run()
    for column in ("sim_rank", "task", "start", "end", "released_by"):
        assert getattr(one, column).tobytes() == getattr(other, column).tobytes()


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[dict[int, float]], list[float], dict[int, float]]:
    positive = st.floats(0.01, 4.0)
    shares = draw(st.lists(st.dictionaries(st.integers(0, 3), positive, max_size=3), max_size=7))
    weights = draw(st.lists(st.floats(0.1, 100.0), min_size=len(shares), max_size=len(shares)))
    capacity = draw(st.fixed_dictionaries({resource: st.floats(0.05, 2.0) for resource in range(4)}))
    return shares, weights, capacity


@settings(max_examples=300)
@given(crowds())
def test_rates_are_feasible_and_max_min_fair(
    crowd: tuple[list[dict[int, float]], list[float], dict[int, float]],
) -> None:
    shares, weights, capacity = crowd
    found = rates(shares, weights, capacity)
    assert all(0 < rate <= 1 for rate in found)
    used = {r: sum(s.get(r, 0.0) * x for s, x in zip(shares, found, strict=True)) for r in capacity}
    assert all(used[r] <= capacity[r] * (1 + TINY) for r in capacity)
    level = [rate / weight for rate, weight in zip(found, weights, strict=True)]
    for i, rate in enumerate(found):
        if rate < 1:  # it has a bottleneck: a full resource on which nobody stands higher
            assert any(
                used[r] >= capacity[r] * (1 - TINY)
                and all(level[j] <= level[i] * (1 + TINY) for j, other in enumerate(shares) if r in other)
                for r in shares[i]
            )
    if all(fits(sum(s.get(r, 0.0) for s in shares), capacity[r]) for r in capacity):
        assert found == [1.0] * len(shares)
