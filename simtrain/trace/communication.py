"""What a step communicates: one row an axis, kind of collective and reach."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simtrain.program.demand import EXPOSED_COMMUNICATION, Demand, TimeKind
from simtrain.program.lowered import Piece, PieceKind, Work
from simtrain.trace.metrics import COMPUTE_STREAM, gaps, rank_weights, stretch
from simtrain.trace.spans import Trace

_AXIS_KIND = {"tp": TimeKind.TP, "cp": TimeKind.CP, "ep": TimeKind.EP, "etp": TimeKind.EP, "pp": TimeKind.PP}
COMMUNICATION = (
    PieceKind.ALL_REDUCE,
    PieceKind.ALL_GATHER,
    PieceKind.REDUCE_SCATTER,
    PieceKind.ALL_TO_ALL,
    PieceKind.RING,
    PieceKind.SEND,
    PieceKind.RECV,
)


def communication_table(trace: Trace, *, inside: str = "", between: str = "") -> list[dict[str, Any]]:
    """What is communicated, a rank and step (mean over ranks, weighted by multiplicity).

    A collective inside a merged compute work takes that work's time of its kind; where several sorts of collective
    share one work and one kind of time, time and bytes are divided by number of calls.

    Parameters
    ----------
    trace
        One step.
    inside, between
        Names of the network within a machine and of the one between machines.

    Returns
    -------
    list of dict
        ``axis``, ``kind``, ``calls``, ``bytes`` sent, ``seconds`` in flight, ``exposed_seconds`` (compute waits),
        ``group_size``, ``machines`` that one group spans (0 = unknown), ``network``; longest exposed first.
    """
    columns = trace.columns
    exposed, _ = gaps(trace, columns)
    on = columns.stream == COMPUTE_STREAM
    slow = stretch(trace, columns)
    works = len(trace.demands)
    code = columns.work + works * on
    weight = rank_weights(trace)[trace.sim_rank]
    times = np.bincount(code, weights=weight, minlength=2 * works)
    flight = np.bincount(code, weights=weight * np.where(on, slow, trace.end - trace.start), minlength=2 * works)
    waited = np.bincount(code, weights=weight * np.where(on, slow, exposed), minlength=2 * works)
    rows: dict[_Call, NDArray[np.float64]] = {}
    for index in np.flatnonzero(times).tolist():
        demand = trace.demands[index % works]
        calls = Counter(
            _call(piece) for piece in _pieces(trace.lowered.works[index % works]) if piece.kind in COMMUNICATION
        )
        spent = _seconds(demand, calls)
        total = sum(spent.values())
        moved = _bytes(demand, calls)
        for call, count in calls.items():
            share = spent[call] / total if total else count / calls.total()
            seconds = spent[call] if index >= works else share
            row = rows.setdefault(call, np.zeros(4))
            row += (
                count * times[index],
                moved.get(call, demand.wire_bytes * share) * times[index],
                flight[index] * seconds,
                waited[index] * seconds,
            )
    table = [
        {
            "axis": call.axis,
            "kind": call.kind.value,
            "calls": calls,
            "bytes": sent,
            "seconds": seconds,
            "exposed_seconds": exposed_seconds,
            "group_size": call.size,
            "machines": call.machines,
            "network": between if call.machines > 1 else inside if call.machines else "",
        }
        for call, (calls, sent, seconds, exposed_seconds) in ((call, row.tolist()) for call, row in rows.items())
    ]
    return sorted(table, key=lambda row: (-row["exposed_seconds"], -row["seconds"], row["axis"], row["kind"]))


def _pieces(work: Work) -> tuple[Piece, ...]:
    return work.pieces + work.beside


class _Call(NamedTuple):
    """Collectives that share a row of the communication table."""

    axis: str
    kind: PieceKind
    size: int
    machines: int

    @property
    def time_kind(self) -> TimeKind:
        return _AXIS_KIND.get(
            self.axis, TimeKind.DP_GATHER if self.kind is PieceKind.ALL_GATHER else TimeKind.DP_REDUCE
        )


def _call(piece: Piece) -> _Call:
    axis = piece.axis or ("pp" if piece.kind in (PieceKind.SEND, PieceKind.RECV) else "")
    return _Call(axis, piece.kind, *(piece.span[:2] if piece.span else (0, 0)))


def _bytes(demand: Demand, calls: Counter[_Call]) -> dict[_Call, float]:
    """Bytes that a work sends by sort of call, where it says so by kind: divided within a kind by number of calls."""
    by_kind = dict(demand.sent)
    alike: Counter[TimeKind] = Counter()
    for call, count in calls.items():
        alike[call.time_kind] += count
    return {
        call: by_kind[call.time_kind] * count / alike[call.time_kind]
        for call, count in calls.items()
        if call.time_kind in by_kind
    }


def _seconds(demand: Demand, calls: Counter[_Call]) -> dict[_Call, float]:
    """Uncontended seconds of a work by sort of call: its time of that kind, divided by number of calls."""
    by_kind = {kind: seconds for kind, seconds in demand.split if kind in EXPOSED_COMMUNICATION}
    alike: Counter[TimeKind] = Counter()
    for call, count in calls.items():
        alike[call.time_kind] += count
    spent = {call: by_kind.get(call.time_kind, 0.0) * count / alike[call.time_kind] for call, count in calls.items()}
    if any(spent.values()):
        return spent
    return {call: sum(by_kind.values()) * count / calls.total() for call, count in calls.items()}
