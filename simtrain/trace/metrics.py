"""Spans -> numbers. Pure functions of a ``Trace``; seconds and bytes unless a name says otherwise.

A rank's step divides into the time its compute stream is busy, split as its demands say, and the gaps between. A gap is
explained backwards from the task that ends it along ``released_by``: while a communication of this very rank was in
flight it is *exposed communication*, otherwise the rank waited for another one: *bubble*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simtrain.program.demand import EXPOSED_COMMUNICATION, TimeKind
from simtrain.program.lowered import Stream
from simtrain.trace.spans import STREAMS, Columns, Trace

KINDS = tuple(TimeKind)
COMPUTE_STREAM = STREAMS.index(Stream.COMPUTE)
_STREAM_KIND = {
    Stream.COMPUTE: TimeKind.BUBBLE,
    Stream.GATHER: TimeKind.DP_GATHER,
    Stream.REDUCE: TimeKind.DP_REDUCE,
    Stream.REPLICA: TimeKind.DP_REDUCE,
    Stream.SEND: TimeKind.PP,
    Stream.RECV: TimeKind.PP,
    Stream.TO_HOST: TimeKind.OFFLOAD,
    Stream.FROM_HOST: TimeKind.OFFLOAD,
    Stream.HOST: TimeKind.OFFLOAD,
}
NAMES = {
    TimeKind.COMPUTE: "compute",
    TimeKind.RECOMPUTE: "recomputation",
    TimeKind.OPTIMIZER: "optimizer",
    TimeKind.HOST: "host launches",
    TimeKind.TP: "tensor-parallel communication",
    TimeKind.CP: "context-parallel communication",
    TimeKind.DP_REDUCE: "gradient reduction",
    TimeKind.DP_GATHER: "parameter gathers",
    TimeKind.PP: "pipeline messages",
    TimeKind.EP: "expert-parallel communication",
    TimeKind.CONTENTION: "contention",
    TimeKind.BUBBLE: "pipeline bubble",
    TimeKind.INPUT: "input stall",
    TimeKind.OFFLOAD: "offload",
}
"""What a reader calls each kind of time."""


def time_split(trace: Trace, rank_index: int | None = None) -> dict[TimeKind, float]:
    """Where the step goes.

    Parameters
    ----------
    trace
        One step.
    rank_index
        Index into ``trace.lowered.ranks``; None = mean over ranks, weighted by multiplicity.

    Returns
    -------
    dict
        Seconds by kind, every kind present; they add up to ``trace.step_time``.
    """
    columns = trace.columns
    exposed, bubble = gaps(trace, columns)
    by_rank = _split_by_rank(trace, columns, exposed, bubble)
    values = by_rank[rank_index] if rank_index is not None else rank_weights(trace) @ by_rank
    return dict(zip(KINDS, values.tolist(), strict=True))


def summarise_time(split: Mapping[TimeKind, float]) -> dict[str, Any]:
    """The ``time`` part of a summary from a ``time_split``: named parts in s, which add up, and ``by_kind``."""
    return {
        "compute_s": split[TimeKind.COMPUTE],
        "recompute_s": split[TimeKind.RECOMPUTE],
        "optimizer_s": split[TimeKind.OPTIMIZER],
        "host_s": split[TimeKind.HOST],
        "exposed_communication_s": sum(split[kind] for kind in EXPOSED_COMMUNICATION),
        "contention_s": split[TimeKind.CONTENTION],
        "bubble_s": split[TimeKind.BUBBLE],
        "input_stall_s": split[TimeKind.INPUT],
        "offload_s": split[TimeKind.OFFLOAD],
        "by_kind": {kind.value: split[kind] for kind in KINDS},
    }


def bubble_fraction(trace: Trace) -> float:
    """Time waited for other ranks over the rest of the step, mean over ranks.

    GPipe and 1F1B give (p-1)/m where communication is free and stages are equal (Narayanan et al., SC21, section 2.2).
    """
    bubble = time_split(trace)[TimeKind.BUBBLE]
    return bubble / (trace.step_time - bubble) if trace.step_time > bubble else 0.0


def streams_busy(trace: Trace, rank_index: int) -> dict[Stream, float]:
    """Seconds during which each class of streams of one rank has work in flight; overlap in a class counts once."""
    columns, mine = trace.columns, trace.sim_rank == rank_index
    return {
        stream: _union(trace.start[chosen], trace.end[chosen])
        for code, stream in enumerate(STREAMS)
        if (chosen := mine & (columns.stream == code)).any()
    }


def critical_path(trace: Trace) -> list[int]:
    """Ids of the spans that set the step time, in order of time: from the last end back along ``released_by``."""
    path: list[int] = []
    span = int(np.argmax(trace.end - trace.begins[trace.sim_rank])) if len(trace.end) else -1
    while span >= 0 and len(path) < len(trace.end):
        path.append(span)
        span = int(trace.released_by[span])
    return path[::-1]


def binds(trace: Trace, *, matrix_peak: float = 0.0, memory_bandwidth: float = 0.0) -> dict[str, Any]:
    """Say what binds the step.

    Parameters
    ----------
    trace
        One step.
    matrix_peak, memory_bandwidth
        FLOP/s and byte/s of a device; where both are given, compute is told apart by the longer side of its roofline.

    Returns
    -------
    dict
        ``what`` (a phrase), ``share`` (of the step, mean over ranks), ``text`` (with the runner-up, and the stage that
        sets the pace where stages are uneven by more than 2 %).
    """
    split = time_split(trace)
    ordered = sorted(split, key=lambda kind: (-split[kind], KINDS.index(kind)))
    step = trace.step_time or 1.0
    names = {**NAMES, TimeKind.COMPUTE: _compute_side(trace, matrix_peak, memory_bandwidth)}
    first, second = ordered[:2]
    text = f"{names[first]} ({split[first] / step:.0%} of the step)"
    if split[second] > 0.005 * step:
        text += f", then {names[second]} ({split[second] / step:.0%})"
    return {"what": names[first], "share": split[first] / step, "text": text + _pace(trace)}


def span_kinds(trace: Trace, columns: Columns) -> NDArray[np.int64]:
    """Kind of communication that each span stands for (index into ``KINDS``): by its demand, else by its stream."""
    of_work = np.full(len(trace.demands), -1, dtype=np.int64)
    for work, demand in enumerate(trace.demands):
        spent = [(seconds, -KINDS.index(kind)) for kind, seconds in demand.split if kind in EXPOSED_COMMUNICATION]
        of_work[work] = -max(spent)[1] if spent else -1
    of_stream = np.array([KINDS.index(_STREAM_KIND[stream]) for stream in STREAMS], dtype=np.int64)
    known = of_work[columns.work]
    return np.where(known >= 0, known, of_stream[columns.stream])


def rank_weights(trace: Trace) -> NDArray[np.float64]:
    """Share of all real ranks that each simulated rank stands for."""
    weights = np.array([rank.multiplicity for rank in trace.lowered.ranks], dtype=np.float64)
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def _split_matrix(trace: Trace) -> NDArray[np.float64]:
    """Uncontended seconds, work x kind."""
    matrix = np.zeros((len(trace.demands), len(KINDS)))
    for work, demand in enumerate(trace.demands):
        for kind, seconds in demand.split:
            matrix[work, KINDS.index(kind)] += seconds
    return matrix


def stretch(trace: Trace, columns: Columns) -> NDArray[np.float64]:
    """Factor between each span's uncontended split and what it took but for contention: the rank's slow-down."""
    duration = np.array([demand.duration for demand in trace.demands], dtype=np.float64)[columns.work]
    slow = np.array([rank.slowdown for rank in trace.lowered.ranks], dtype=np.float64)[trace.sim_rank]
    ratio = np.divide(trace.end - trace.start, duration, out=np.ones_like(duration), where=duration > 0)
    return np.where(ratio > slow * (1 + 1e-9), slow, ratio)  # rounding is no contention


def _split_by_rank(
    trace: Trace, columns: Columns, exposed: NDArray[np.float64], bubble: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Seconds, simulated rank x kind."""
    ranks = len(trace.lowered.ranks)
    result = np.zeros((ranks, len(KINDS)))
    on = columns.stream == COMPUTE_STREAM
    owner = trace.sim_rank[on]
    spent = _split_matrix(trace)[columns.work[on]] * stretch(trace, columns)[on, None]
    busy = (trace.end - trace.start)[on]
    spent[:, KINDS.index(TimeKind.CONTENTION)] += np.maximum(0.0, busy - spent.sum(axis=1))
    for kind in range(len(KINDS)):
        result[:, kind] = np.bincount(owner, weights=spent[:, kind], minlength=ranks)
    np.add.at(result, (trace.sim_rank[~on], span_kinds(trace, columns)[~on]), exposed[~on])
    result[:, KINDS.index(TimeKind.BUBBLE)] += bubble
    return result


def gaps(trace: Trace, columns: Columns) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Explain every gap of every compute stream: seconds exposed by span, seconds of bubble by simulated rank.

    All gaps walk back along ``released_by`` together, so the cost is that of the longest chain, not of their number.
    Where the chain goes through a communication of another rank and one of the waiting rank ended at the same instant
    (its share of the same collective, say), the latter counts: ranks that are alike get alike splits however ties fell.
    """
    own_instead = _own_ends(trace, columns)
    rank, lower, upper, cursor = _gap_bounds(trace, columns)
    exposed, bubble = np.zeros(len(trace.end)), np.zeros(len(trace.lowered.ranks))
    for _ in range(len(trace.end) + 1):
        open_ = upper > lower
        rank, lower, upper, cursor = rank[open_], lower[open_], upper[open_], cursor[open_]
        if not len(rank):
            break
        cursor = own_instead(cursor, rank)
        known = cursor >= 0
        start = np.where(known, trace.start[cursor], lower)
        end = np.where(known, trace.end[cursor], lower)
        until = np.clip(end, lower, upper)
        since = np.clip(start, lower, until)
        own = known & (trace.sim_rank[cursor] == rank) & (columns.stream[cursor] != COMPUTE_STREAM)
        np.add.at(exposed, cursor[own], (until - since)[own])
        waited = (upper - until) + np.where(own, 0.0, until - since)
        bubble += np.bincount(rank, weights=waited, minlength=len(bubble))
        upper, cursor = since, np.where(known, trace.released_by[cursor], -1)
    return exposed, bubble


_Ids = NDArray[np.int64]


def _own_ends(trace: Trace, columns: Columns) -> Callable[[_Ids, _Ids], _Ids]:
    """Function (spans, ranks) -> spans: a rank's own communication in place of another's that ended that instant."""
    communicates = columns.stream != COMPUTE_STREAM
    ids = np.flatnonzero(communicates & (trace.end > trace.start))
    if not len(ids):
        return lambda spans, ranks: spans
    instants, instant = np.unique(trace.end, return_inverse=True)
    codes = trace.sim_rank[ids].astype(np.int64) * len(instants) + instant[ids]
    order = np.argsort(codes, kind="stable")
    codes, ids = codes[order], ids[order]

    def own(spans: _Ids, ranks: _Ids) -> _Ids:
        wanted = ranks * len(instants) + instant[spans]
        at = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        foreign = (spans >= 0) & communicates[spans] & (trace.sim_rank[spans] != ranks)
        found: _Ids = np.where(foreign & (codes[at] == wanted), ids[at], spans)
        return found

    return own


def _gap_bounds(trace: Trace, columns: Columns) -> tuple[NDArray[Any], ...]:
    """Rank, start, end and releasing span of each gap on a compute stream, the one after the last task included."""
    ids = np.flatnonzero(columns.stream == COMPUTE_STREAM)
    ids = ids[np.lexsort((trace.task[ids], trace.sim_rank[ids]))]
    owner = trace.sim_rank[ids]
    follows = np.concatenate([[False], owner[1:] == owner[:-1]])[: len(ids)]
    before = np.where(follows, np.roll(trace.end[ids], 1), trace.begins[owner])
    ranks = np.arange(len(trace.lowered.ranks))
    done, last = trace.begins.copy(), np.full(len(ranks), -1, dtype=np.int64)
    done[owner] = trace.end[ids]
    by_end = np.argsort(trace.end, kind="stable")
    last[trace.sim_rank[by_end]] = by_end
    return (
        np.concatenate([owner, ranks]).astype(np.int64),
        np.concatenate([before, done]),
        np.concatenate([trace.start[ids], trace.begins + trace.step_time]),
        np.concatenate([trace.released_by[ids], last]),
    )


def _union(start: NDArray[np.float64], end: NDArray[np.float64]) -> float:
    """Length of the union of intervals."""
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    before = np.concatenate([start[:1], reach[:-1]])
    return float(np.maximum(0.0, reach - np.maximum(start, before)).sum())


def _compute_side(trace: Trace, matrix_peak: float, memory_bandwidth: float) -> str:
    """``matrix math`` or ``memory bandwidth``: the longer side of the roofline of all that the compute streams did."""
    if matrix_peak <= 0 or memory_bandwidth <= 0:
        return NAMES[TimeKind.COMPUTE]
    work = trace.columns.work
    flops = sum(trace.demands[index].flops for index in work.tolist())
    moved = sum(trace.demands[index].hbm_bytes for index in work.tolist())
    return "matrix math" if flops / matrix_peak >= moved / memory_bandwidth else "memory bandwidth"


def _pace(trace: Trace) -> str:
    """Names the rank that is busier than the mean, where that is by more than 2 %."""
    columns = trace.columns
    on = columns.stream == COMPUTE_STREAM
    ranks = trace.lowered.ranks
    busy = np.bincount(trace.sim_rank[on], weights=(trace.end - trace.start)[on], minlength=len(ranks))
    mean = float(rank_weights(trace) @ busy)
    slowest = int(np.argmax(busy)) if len(busy) else 0
    if mean <= 0 or busy[slowest] <= 1.02 * mean:
        return ""
    place = dict(ranks[slowest].coordinate).get("pp")
    who = f"stage {place}" if place is not None else f"rank {ranks[slowest].rank}"
    return f"; {who} sets the pace, {busy[slowest] / mean - 1:.0%} busier than the mean"
