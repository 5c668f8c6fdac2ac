"""The record: one span a finished piece of work, simulated or measured, one schema.

Column          meaning
------          -------
id              0, 1, ... in order of end
step            training step, from 0
rank            global rank (the representative where folded)
multiplicity    ranks this span stands for
stream          compute, gather, reduce, send, recv
kind            what it is: forward, backward, optimizer, send, all_reduce, ... (``PieceKind`` of its first piece)
unit            name of the work
stage           pipeline stage; -1 where none applies
microbatch      -1 where none applies
group           axis of the process group of a joint activity; empty otherwise
bytes           bytes one rank sends
flops           matrix FLOPs of one rank
start, end      s from the start of the step
released_by     id of the span whose end let this one start; -1 at the very start
cause           cause of a wait; empty for work
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simtrain.program.demand import Demand
from simtrain.program.lowered import Lowered, PieceKind, Stream

if TYPE_CHECKING:
    from pandas import Categorical, DataFrame

SCHEMA_VERSION = 1
STREAMS = tuple(Stream)


@dataclass(frozen=True, slots=True)
class Columns:
    """What the tasks of a trace's spans say, one entry a span."""

    work: NDArray[np.intp]
    stream: NDArray[np.intp]
    """Index into ``STREAMS``."""
    lane: NDArray[np.intp]
    """Index of the stream in its rank's list."""
    microbatch: NDArray[np.intp]
    slot: NDArray[np.intp]


@dataclass(frozen=True)
class Trace:
    """Spans as columns, ordered by end. ``lowered`` and ``demands`` say what the indices mean."""

    lowered: Lowered
    demands: tuple[Demand, ...]
    """By work index."""
    sim_rank: NDArray[np.int32]
    """Index into ``lowered.ranks``."""
    task: NDArray[np.int32]
    """Index into that rank's list."""
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    released_by: NDArray[np.int64]

    @property
    def step_time(self) -> float:
        """s from one step to the next: from the start to the last end, of all ranks or (rolling) of the slowest."""
        return float((self.end - self.begins[self.sim_rank]).max()) if len(self.end) else 0.0

    @cached_property
    def begins(self) -> NDArray[np.float64]:
        """s at which the step of each simulated rank begins: 0, or where steps flow into each other its first task.

        There a rank ends as much later as it began later, and begins the next step at once: all repeats every
        ``step_time``, and the ramps before the first task and behind the last are the work of the steps around.
        """
        found = np.zeros(len(self.lowered.ranks))
        if self.lowered.rolling:
            mine = self.columns.stream != STREAMS.index(Stream.RECV)
            found[:] = np.inf
            np.minimum.at(found, self.sim_rank[mine], self.start[mine])
        return found

    @property
    def extent(self) -> float:
        """s from the first start to the last end of any rank."""
        return float(self.end.max()) if len(self.end) else 0.0

    @cached_property
    def columns(self) -> Columns:
        """What every span's task says."""
        lists, ranks = self.lowered.lists, self.lowered.ranks
        tasks = [task for one in lists for task in one.tasks]
        lane, work, microbatch, _, slot = zip(*tasks, strict=True) if tasks else ((),) * 5
        first = _offsets([len(one.tasks) for one in lists])
        entry = first[np.array([rank.tasks for rank in ranks], np.intp)][self.sim_rank] + self.task
        stream = [STREAMS.index(one.streams[task.stream]) for one in lists for task in one.tasks]
        return Columns(*(np.array(column, np.intp)[entry] for column in (work, stream, lane, microbatch, slot)))

    def frame(self) -> DataFrame:
        """The spans as a pandas DataFrame with the columns documented above; text columns are categorical."""
        import pandas as pd

        lowered, columns = self.lowered, self.columns
        work = columns.work
        axis = ["", *(group.axis for group in lowered.groups)]

        def text(values: Sequence[str], index: NDArray[np.intp], also: Iterable[str] = ()) -> Categorical[str]:
            """``values[index]``, whose categories are the ``values`` that there are and ``also``."""
            codes = {value: code for code, value in enumerate(dict.fromkeys([*also, *values]))}
            of_value = np.array([codes[value] for value in values], np.intp)
            return pd.Categorical.from_codes(of_value[index], pd.Index([str(value) for value in codes]))

        return pd.DataFrame(
            {
                "id": np.arange(len(self.end)),
                "step": np.zeros(len(self.end), np.int32),
                "rank": np.array([rank.rank for rank in lowered.ranks], np.int64)[self.sim_rank],
                "multiplicity": np.array([rank.multiplicity for rank in lowered.ranks], np.int64)[self.sim_rank],
                "stream": text(STREAMS, columns.stream),
                "kind": text([work.kind for work in lowered.works], work, PieceKind),
                "unit": text([work.name for work in lowered.works], work),
                "stage": np.array([work.stage for work in lowered.works], np.int32)[work],
                "microbatch": columns.microbatch.astype(np.int32),
                "group": text(axis, self._group() + 1),
                "bytes": np.array([demand.wire_bytes for demand in self.demands], np.float64)[work],
                "flops": np.array([demand.flops for demand in self.demands], np.float64)[work],
                "start": self.start,
                "end": self.end,
                "released_by": self.released_by,
                "cause": text([""], np.zeros(len(self.end), np.intp)),
            }
        )

    def _group(self) -> NDArray[np.intp]:
        """Index of each span's process group, -1 where alone: slot -> group of the rank."""
        lowered, slot = self.lowered, self.columns.slot
        first = _offsets([len(rank.groups) for rank in lowered.ranks])[self.sim_rank]
        groups = np.array([*(group for rank in lowered.ranks for group in rank.groups), -1], np.intp)
        return groups[np.where(slot >= 0, first + slot, -1)]


def _offsets(lengths: Sequence[int]) -> NDArray[np.intp]:
    """Where each of several concatenated tables begins."""
    return np.array([0, *itertools.accumulate(lengths)], np.intp)[:-1]
