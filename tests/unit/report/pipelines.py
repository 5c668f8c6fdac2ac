"""Traces made by hand: a 1F1B pipeline without the engine, and a builder of small lowered jobs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simtrain.program.demand import Demand, TimeKind
from simtrain.program.lowered import Group, Lowered, Piece, PieceKind, SimRank, Span, Stream, Task, TaskList, Work
from simtrain.scenario.model import Part
from simtrain.trace.spans import Trace

K = PieceKind


def job(
    lists: Sequence[TaskList],
    works: Sequence[Work],
    groups: Sequence[Group] = (),
    slots: Sequence[tuple[int, ...]] = (),
) -> Lowered:
    """A lowered job of one rank a list."""
    ranks = tuple(
        SimRank(rank=i, multiplicity=1, coordinate=(("pp", i),), tasks=i, groups=slots[i] if slots else ())
        for i in range(len(lists))
    )
    return Lowered(tuple(works), tuple(lists), ranks, tuple(groups))


def trace(lowered: Lowered, demands: Sequence[Demand], spans: Sequence[tuple[int, int, float, float, int]]) -> Trace:
    """Spans as (simulated rank, task, start, end, released by)."""
    rank, task, start, end, by = (list(column) for column in zip(*spans, strict=True))
    return Trace(
        lowered,
        tuple(demands),
        np.array(rank, dtype=np.int32),
        np.array(task, dtype=np.int32),
        np.array(start, dtype=np.float64),
        np.array(end, dtype=np.float64),
        np.array(by, dtype=np.int64),
    )


def simple(duration: float, kind: TimeKind = TimeKind.COMPUTE, *, wire: float = 0.0) -> Demand:
    """A demand of one kind of time."""
    return Demand(duration, ((kind, duration),), wire_bytes=wire)


STREAMS = (Stream.COMPUTE, Stream.REDUCE, Stream.RECV, Stream.SEND, Stream.RECV, Stream.SEND)
FORWARD, BACKWARD, SEND, RECV, SEND_GRAD, RECV_GRAD, REDUCE, STEP = range(8)


def pipeline(stages: int, microbatches: int, *, message: float = 0.0, reduce: float = 0.0, dp: int = 16) -> Trace:
    """1F1B: forward 1 s (a fifth of it tensor-parallel), backward 2.5 s (0.5 s recomputation), optimizer 0.5 s."""
    lists = tuple(TaskList(tuple(_tasks(s, stages, microbatches, message > 0)), STREAMS) for s in range(stages))
    ends = range(stages - 1)
    groups = [Group("pp", (s, s + 1), 2, 2, 1) for s in ends] + [Group("pp", (s, s + 1), 2, 2, 1) for s in ends]
    slots = tuple((s - 1, s, stages - 1 + s, stages - 2 + s) for s in range(stages))
    ranks = tuple(SimRank(8 * dp * s, 8 * dp, (("pp", s),), s, slots[s]) for s in range(stages))
    tp, pp, data = Span(8, 1, 8), Span(2, 2, 1), Span(dp, dp, 1)
    works = tuple(
        Work(pieces, stage, name)
        for stage in range(stages)
        for name, pieces in (
            ("F", (Piece(K.FORWARD, Part.MLP), Piece(K.ALL_REDUCE, Part.MLP, axis="tp", span=tp))),
            ("B", (Piece(K.RECOMPUTE, Part.MLP), Piece(K.BACKWARD, Part.MLP))),
            ("send", (Piece(K.SEND, Part.BOUNDARY, axis="pp", span=pp),)),
            ("recv", (Piece(K.RECV, Part.BOUNDARY, axis="pp", span=pp),)),
            ("send gradient", (Piece(K.SEND, Part.BOUNDARY, axis="pp", span=pp, backward=True),)),
            ("recv gradient", (Piece(K.RECV, Part.BOUNDARY, axis="pp", span=pp, backward=True),)),
            ("reduce bucket 0", (Piece(K.ALL_REDUCE, Part.GRADIENT, axis="dp", span=data),)),
            ("optimizer", (Piece(K.OPTIMIZER, Part.PARAMETER),)),
        )
    )
    demands = (
        Demand(1.0, ((TimeKind.COMPUTE, 0.8), (TimeKind.TP, 0.2)), flops=8e11, hbm_bytes=1e9, wire_bytes=4e6),
        Demand(2.5, ((TimeKind.COMPUTE, 2.0), (TimeKind.RECOMPUTE, 0.5)), flops=25e11, hbm_bytes=2e9),
        *(simple(message, TimeKind.PP, wire=sent) for sent in (1e6, 0.0, 1e6, 0.0)),
        simple(reduce, TimeKind.DP_REDUCE, wire=7e6),
        simple(0.5, TimeKind.OPTIMIZER),
    )
    return run(Lowered(works, lists, ranks, tuple(groups)), demands * stages)


def _tasks(stage: int, stages: int, microbatches: int, messages: bool) -> list[Task]:
    """Messages are always there (of no duration when free), so that the dependencies stay."""
    warm_up = min(stages - stage - 1, microbatches)
    order = [(FORWARD, m) for m in range(warm_up)]
    for m in range(microbatches - warm_up):
        order += [(FORWARD, m + warm_up), (BACKWARD, m)]
    order += [(BACKWARD, m) for m in range(microbatches - warm_up, microbatches)]
    tasks: list[Task] = []
    for kind, m in order:
        deps: tuple[int, ...] = ()
        before = stage > 0 if kind == FORWARD else stage < stages - 1
        after = stage < stages - 1 if kind == FORWARD else stage > 0
        if before:
            deps = (len(tasks),)
            tasks.append(Task(2, RECV, m, (), 0) if kind == FORWARD else Task(4, RECV_GRAD, m, (), 2))
        tasks.append(Task(0, kind, m, deps))
        if after:
            done = (len(tasks) - 1,)
            tasks.append(Task(3, SEND, m, done, 1) if kind == FORWARD else Task(5, SEND_GRAD, m, done, 3))
    last = max(i for i, task in enumerate(tasks) if task.work == BACKWARD)
    tasks.append(Task(1, REDUCE, -1, (last,)))
    tasks.append(Task(0, STEP, -1, (len(tasks) - 1,)))
    return [task._replace(work=task.work + stage * (STEP + 1)) for task in tasks]


def run(lowered: Lowered, demands: Sequence[Demand]) -> Trace:
    """Earliest start of every task, by passes over the ranks until nothing moves."""
    ready: dict[tuple[int, int], tuple[float, tuple[int, int] | None]] = {}
    spans: dict[tuple[int, int], tuple[float, float, tuple[int, int] | None]] = {}
    queues = {
        (r, s): [i for i, task in enumerate(lowered.lists[rank.tasks].tasks) if task.stream == s][::-1]
        for r, rank in enumerate(lowered.ranks)
        for s in range(len(lowered.lists[rank.tasks].streams))
    }
    last: dict[tuple[int, int], tuple[int, int]] = {}
    met: dict[tuple[int, int], list[tuple[int, int]]] = {}
    counts: dict[tuple[int, int], int] = {}
    moved = True
    while moved:
        moved = False
        for (r, stream), queue in queues.items():
            while queue:
                task = lowered.lists[lowered.ranks[r].tasks].tasks[queue[-1]]
                key = (r, queue[-1])
                needs = [(r, dep) for dep in task.deps] + ([last[r, stream]] if (r, stream) in last else [])
                if key not in ready:
                    if not all(need in spans for need in needs):
                        break
                    latest = max(needs, key=lambda need: spans[need][1], default=None)
                    ready[key] = (spans[latest][1] if latest else 0.0, latest)
                    if task.slot >= 0:
                        group = lowered.ranks[r].groups[task.slot]
                        nth = counts.get((r, task.slot), 0)
                        counts[r, task.slot] = nth + 1
                        met.setdefault((group, nth), []).append(key)
                        if len(met[group, nth]) == len(lowered.groups[group].parties):
                            start, by = max(ready[party] for party in met[group, nth])
                            for party in met[group, nth]:
                                spans[party] = (start, start + demands[task.work].duration, by)
                    else:
                        start, by = ready[key]
                        spans[key] = (start, start + demands[task.work].duration, by)
                if key not in spans:
                    break
                queue.pop()
                last[r, stream] = key
                moved = True
    order = sorted(spans, key=lambda key: (spans[key][1], spans[key][0], key))
    ids = {key: i for i, key in enumerate(order)}
    return trace(lowered, demands, [(*key, *spans[key][:2], ids[by] if (by := spans[key][2]) else -1) for key in order])
