"""Memory is a fold over the trace: every span's start allocates, its end releases, whoever recorded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simtrain.program.demand import Memory, MemoryBytes
from simtrain.trace.spans import Trace

_CATEGORIES = tuple(Memory)
_COLUMN = {category: column for column, category in enumerate(_CATEGORIES)}


@dataclass(frozen=True)
class MemoryProfile:
    """Memory of every simulated rank over one step."""

    capacity: float
    """byte."""
    ranks: tuple[int, ...]
    """Indices of simulated ranks; the other fields are in this order."""
    times: tuple[NDArray[np.float64], ...]
    """By rank: s, strictly increasing, from 0 on."""
    curves: tuple[Mapping[Memory, NDArray[np.float64]], ...]
    """By rank: bytes by category from each of ``times`` on, resting level included; unused categories are left out."""

    def total(self, index: int) -> NDArray[np.float64]:
        """Bytes of rank ``index`` from each of its times on."""
        return sum(self.curves[index].values(), np.zeros(len(self.times[index])))

    def peak(self, index: int) -> tuple[float, float, dict[Memory, float]]:
        """Return time (s), bytes in all, and bytes by category of the first peak of rank ``index``."""
        total = self.total(index)
        at = int(total.argmax())
        by_category = {category: float(curve[at]) for category, curve in self.curves[index].items()}
        return float(self.times[index][at]), float(total[at]), by_category

    @property
    def worst(self) -> int:
        """Index of the rank with the highest peak (the first of equals)."""
        return max(range(len(self.ranks)), key=lambda index: self.peak(index)[1])


def profile(trace: Trace, resting: Sequence[Mapping[Memory, float]], capacity: float) -> MemoryProfile:
    """Fold the spans of a step into memory curves.

    Parameters
    ----------
    trace
        One step; ``demands`` say what each work keeps, frees and holds.
    resting
        By simulated rank: bytes by category held all step.
    capacity
        byte of one device.

    Returns
    -------
    MemoryProfile
        Changes at one instant count together: what ends there is released before what starts there allocates.
    """
    allocate = np.array([_row(demand.keeps) + _row(demand.transient) for demand in trace.demands])
    release = np.array([_row(demand.frees) + _row(demand.transient) for demand in trace.demands])
    works = [np.array([task.work for task in tasks.tasks], dtype=np.intp) for tasks in trace.lowered.lists]
    folded = [
        _fold(trace, rank, works[sim.tasks], (allocate, release), resting[rank])
        for rank, sim in enumerate(trace.lowered.ranks)
    ]
    return MemoryProfile(
        capacity=capacity,
        ranks=tuple(range(len(folded))),
        times=tuple(times for times, _ in folded),
        curves=tuple(curve for _, curve in folded),
    )


def _row(amounts: MemoryBytes) -> NDArray[np.float64]:
    row = np.zeros(len(_CATEGORIES))
    for category, count in amounts:
        row[_COLUMN[category]] += count
    return row


def _fold(
    trace: Trace,
    rank: int,
    works: NDArray[np.intp],
    changes: tuple[NDArray[np.float64], NDArray[np.float64]],
    resting: Mapping[Memory, float],
) -> tuple[NDArray[np.float64], dict[Memory, NDArray[np.float64]]]:
    """Sum the changes of one rank by time, and keep the level after each distinct time."""
    allocate, release = changes
    mine = np.flatnonzero(trace.sim_rank == rank)
    work = works[trace.task[mine]]
    moves = (allocate[work] != 0).any(axis=1) | (release[work] != 0).any(axis=1)
    mine, work = mine[moves], work[moves]
    times = np.concatenate([[0.0], trace.start[mine], trace.end[mine]])
    deltas = np.concatenate([[_row(tuple(resting.items()))], allocate[work], -release[work]])
    order = np.argsort(times, kind="stable")
    times, levels = times[order], np.rint(np.cumsum(deltas[order], axis=0))
    last = np.append(times[1:] != times[:-1], True)
    times, levels = times[last], levels[last]
    used = [column for column in range(len(_CATEGORIES)) if levels[:, column].any()]
    return times, {_CATEGORIES[column]: levels[:, column] for column in used}
