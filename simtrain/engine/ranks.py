"""What the interpreter looks up while it runs: tables by task list, shared by all ranks that run the list."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simtrain.engine.sharing import fits
from simtrain.errors import ProgramError
from simtrain.program.demand import EXPOSED_COMMUNICATION, Demand
from simtrain.program.lowered import Lowered, PieceKind, TaskList, Work

COMPUTE = frozenset(
    {
        PieceKind.FORWARD,
        PieceKind.BACKWARD,
        PieceKind.INPUT_GRAD,
        PieceKind.WEIGHT_GRAD,
        PieceKind.RECOMPUTE,
        PieceKind.OPTIMIZER,
    }
)
"""Works that begin with one of these slow down with their rank, and get the compute units that communication leaves."""


@dataclass(frozen=True, slots=True)
class ListTable:
    """One task list, by task index."""

    work: tuple[int, ...]
    slot: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    """Tasks that wait for this one: the next on its stream, then those that name it in ``deps``."""
    predecessors: tuple[int, ...]
    """How many ends a task waits for."""
    slot_streams: dict[int, int]
    """The one stream from which a slot is used."""


def tabulate(tasks: TaskList) -> ListTable:
    """Turn a list inside out: from what a task waits for to what waits for it.

    Raises ``ProgramError`` where a dependency does not exist or a slot is used from two streams.
    """
    count = len(tasks.tasks)
    successors: list[list[int]] = [[] for _ in range(count)]
    predecessors = [0] * count
    last: dict[int, int] = {}
    slot_streams: dict[int, int] = {}
    for index, task in enumerate(tasks.tasks):
        before = task.deps if task.stream not in last else (last[task.stream], *task.deps)
        for dep in before:
            if not 0 <= dep < count:
                raise ProgramError(f"task {index} waits for task {dep}, but the list has {count} tasks")
            successors[dep].append(index)
        predecessors[index] = len(before)
        last[task.stream] = index
        if task.slot >= 0 and slot_streams.setdefault(task.slot, task.stream) != task.stream:
            raise ProgramError(f"task {index} uses slot {task.slot} from a second stream ({task.stream})")
    return ListTable(
        tuple(task.work for task in tasks.tasks),
        tuple(task.slot for task in tasks.tasks),
        tuple(map(tuple, successors)),
        tuple(predecessors),
        slot_streams,
    )


def seconds(work: Work, demand: Demand, slowdown: float) -> float:
    """Uncontended duration on a rank whose computing takes ``slowdown`` times as long (communication does not)."""
    if slowdown == 1 or not any(piece.kind in COMPUTE for piece in work.pieces):
        return demand.duration
    computing = demand.duration - sum(part for kind, part in demand.split if kind in EXPOSED_COMMUNICATION)
    return demand.duration + (slowdown - 1) * computing


class Plan:
    """A lowered job with its prices, checked and laid out for the interpreter."""

    def __init__(self, lowered: Lowered, demands: Sequence[Demand]) -> None:
        _check(lowered, demands)
        self.lowered = lowered
        self.demands = demands
        self.tables = [tabulate(tasks) for tasks in lowered.lists]
        self.computes = [any(piece.kind in COMPUTE for piece in work.pieces) for work in lowered.works]
        self._priced: dict[float, list[float]] = {}
        self.rank_seconds = [self._seconds(rank.slowdown) for rank in lowered.ranks]
        self.group_seconds = [
            self._seconds(max(lowered.ranks[party].slowdown for party in group.parties)) for group in lowered.groups
        ]
        _check_slots(lowered, self.tables)
        self.shared_units = self._shared_units()
        shared_network = self._shared_network()
        self.loads = [[load for load in group.loads if load[0] in shared_network] for group in lowered.groups]
        """Of each group, the loads on network resources that can be oversubscribed."""

    def _seconds(self, slowdown: float) -> list[float]:
        """Duration by work, one table for all ranks of a slowdown."""
        if slowdown not in self._priced:
            pairs = zip(self.lowered.works, self.demands, strict=True)
            self._priced[slowdown] = [seconds(work, demand, slowdown) for work, demand in pairs]
        return self._priced[slowdown]

    def _shared_units(self) -> list[bool]:
        """Of each rank, whether its compute units can be oversubscribed: by the largest share of each stream."""
        crowded = []
        for tasks in self.lowered.lists:
            largest = [0.0] * len(tasks.streams)
            for task in tasks.tasks:
                largest[task.stream] = max(largest[task.stream], self.demands[task.work].sm_share)
            crowded.append(not fits(sum(largest)))
        return [crowded[rank.tasks] for rank in self.lowered.ranks]

    def _shared_network(self) -> set[int]:
        """Network resources that can be oversubscribed: groups used from one stream of a rank take turns."""
        slot_shares = [_slot_shares(table, self.demands) for table in self.tables]
        shares: dict[int, float] = {}
        turns: dict[int, tuple[int, int]] = {}
        for sim, rank in enumerate(self.lowered.ranks):
            for slot, share in slot_shares[rank.tasks].items():
                group = rank.groups[slot]
                shares[group] = max(shares.get(group, 0.0), share)
                turns.setdefault(group, (sim, self.tables[rank.tasks].slot_streams[slot]))
        largest: dict[int, dict[tuple[int, int], float]] = {}
        for group, share in shares.items():
            for resource, load in self.lowered.groups[group].loads:
                at = largest.setdefault(resource, {})
                at[turns[group]] = max(at.get(turns[group], 0.0), share * load)
        return {resource for resource, at in largest.items() if not fits(sum(at.values()))}


def _slot_shares(table: ListTable, demands: Sequence[Demand]) -> dict[int, float]:
    shares = dict.fromkeys(table.slot_streams, 0.0)
    for work, slot in zip(table.work, table.slot, strict=True):
        if slot >= 0:
            shares[slot] = max(shares[slot], demands[work].network_share)
    return shares


def _check(lowered: Lowered, demands: Sequence[Demand]) -> None:
    if len(demands) != len(lowered.works):
        raise ProgramError(f"{len(lowered.works)} works but {len(demands)} demands")
    for work, demand in zip(lowered.works, demands, strict=True):
        numbers = (demand.duration, demand.sm_share, demand.network_share)
        if not all(0 <= number < math.inf for number in numbers):
            raise ProgramError(f"work {work.name!r} has a negative or infinite duration or share: {demand}")
    for group in lowered.groups:
        if not group.parties or len(set(group.parties)) != len(group.parties):
            raise ProgramError(f"a {group.axis} group needs each party once: {group.parties}")
        if any(not 0 <= resource < len(lowered.resources) or load < 0 for resource, load in group.loads):
            raise ProgramError(f"a {group.axis} group loads an unknown resource or a negative amount: {group.loads}")


def _check_slots(lowered: Lowered, tables: Sequence[ListTable]) -> None:
    for sim, rank in enumerate(lowered.ranks):
        met: set[int] = set()
        for slot in tables[rank.tasks].slot_streams:
            if slot >= len(rank.groups):
                raise ProgramError(f"rank {rank.rank} uses slot {slot} but has {len(rank.groups)} groups")
            group = rank.groups[slot]
            if sim not in lowered.groups[group].parties:
                raise ProgramError(f"rank {rank.rank} uses slot {slot} of a group that it is no party of")
            if group in met:
                raise ProgramError(f"rank {rank.rank} uses one {lowered.groups[group].axis} group by two slots")
            met.add(group)


def unfinished(plan: Plan, ended: Sequence[set[int]], waiting: Sequence[list[int]]) -> Iterator[str]:
    """One line for each task at the head of its stream that never started: who, what, and what it waits for.

    Parameters
    ----------
    plan
        What was run.
    ended
        Of each simulated rank, the tasks that ended.
    waiting
        Of each simulated rank and task, how many ends it still waited for.
    """
    lowered = plan.lowered
    for sim, rank in enumerate(lowered.ranks):
        tasks = lowered.lists[rank.tasks]
        heads: dict[int, int] = {}
        for index, task in enumerate(tasks.tasks):
            if index not in ended[sim]:
                heads.setdefault(task.stream, index)
        for stream, index in heads.items():
            task = tasks.tasks[index]
            name = lowered.works[task.work].name
            who = f"rank {rank.rank}, stream {stream} ({tasks.streams[stream].value}), task {index} {name!r} waits for"
            if waiting[sim][index]:
                deps = [dep for dep in task.deps if dep not in ended[sim]]
                yield f"{who} " + ", ".join(f"task {d} {lowered.works[tasks.tasks[d].work].name!r}" for d in deps)
            else:
                group = lowered.groups[rank.groups[task.slot]]
                others = ", ".join(str(lowered.ranks[party].rank) for party in group.parties if party != sim)
                yield f"{who} its {group.axis} group with rank {others}"
