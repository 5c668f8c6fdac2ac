"""Small lowered jobs for tests, written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from simtrain.program.demand import Demand, TimeKind
from simtrain.program.lowered import Group, Lowered, Piece, PieceKind, SimRank, Stream, Task, TaskList, Work
from simtrain.scenario.model import Part

F, B, SEND, RECV = PieceKind.FORWARD, PieceKind.BACKWARD, PieceKind.SEND, PieceKind.RECV
REDUCE = PieceKind.ALL_REDUCE
COMPUTE, COMM, MORE = 0, 1, 2
"""Streams of every rank here."""

Priced = tuple[Work, Demand]


def work(
    kind: PieceKind,
    seconds: float,
    *,
    units: float = 0.0,
    network: float = 0.0,
    exposed: float = 0.0,
    name: str = "",
) -> Priced:
    """A work of one piece; ``exposed`` of its seconds are tensor-parallel communication."""
    split = ((TimeKind.COMPUTE, seconds - exposed), (TimeKind.TP, exposed))
    demand = Demand(seconds, split, flops=3e9, wire_bytes=5e6, sm_share=units, network_share=network)
    return Work((Piece(kind, Part.MLP),), 1, name or kind.value), demand


def group(*parties: int, axis: str = "dp", loads: Sequence[tuple[int, float]] = ()) -> Group:
    return Group(axis, parties, len(parties), 1, len(parties), tuple(loads))


def job(
    works: Sequence[Priced],
    lists: Sequence[Sequence[Task]],
    *,
    groups: Sequence[Group] = (),
    slots: Sequence[Sequence[int]] = (),
    slowdowns: Sequence[float] = (),
    resources: int = 0,
) -> tuple[Lowered, list[Demand]]:
    """Rank i (global rank 10 i) runs ``lists[i]`` with the groups ``slots[i]`` at ``slowdowns[i]``."""
    tables = list(dict.fromkeys(tuple(tasks) for tasks in lists))
    streams = (Stream.COMPUTE, Stream.REDUCE, Stream.GATHER)
    ranks = tuple(
        SimRank(
            rank=10 * i,
            multiplicity=2,
            coordinate=(),
            tasks=tables.index(tuple(tasks)),
            groups=tuple(slots[i]) if slots else (),
            slowdown=slowdowns[i] if slowdowns else 1.0,
        )
        for i, tasks in enumerate(lists)
    )
    lowered = Lowered(
        tuple(work for work, _ in works),
        tuple(TaskList(tasks, streams) for tasks in tables),
        ranks,
        tuple(groups),
        tuple(f"nic {i}" for i in range(resources)),
    )
    return lowered, [demand for _, demand in works]
