"""1F1B: after a short warm-up each forward is followed by a backward, so that few microbatches are in flight."""

from __future__ import annotations

from simtrain.program.actions import Action, ActionKind, Program
from simtrain.program.schedules.weave import weave


def one_f_one_b(ranks: int, microbatches: int, virtual: int) -> Program:
    """One stage a rank; stage s has at most ``min(microbatches, ranks - s)`` microbatches in flight.

    With one rank it is gradient accumulation: F0 B0 F1 B1 ...

    Source: PipeDream-Flush, Narayanan et al., SC21, figure 4; PyTorch's ``Schedule1F1B`` executes the same order.
    """
    return tuple(
        weave(
            [Action(stage, ActionKind.FORWARD, m) for m in range(microbatches)],
            [Action(stage, ActionKind.BACKWARD, m) for m in range(microbatches)],
            lead=ranks - stage - 1,
        )
        for stage in range(ranks)
    )
