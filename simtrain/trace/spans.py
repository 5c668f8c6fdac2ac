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

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simtrain.program.demand import Demand
from simtrain.program.lowered import Lowered

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA_VERSION = 1


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
        """s from the start of the step to its last end."""
        return float(self.end.max()) if len(self.end) else 0.0

    def frame(self) -> DataFrame:
        """The spans as a pandas DataFrame with the columns documented above."""
        raise NotImplementedError
