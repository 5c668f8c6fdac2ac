"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from simtrain.program.actions import Action, ActionKind, Program
from simtrain.program.schedules.weave import weave


def gpipe(ranks: int, microbatches: int, virtual: int) -> Program:
    """One stage a rank; a rank holds the activations of all microbatches at the turn.

    Source: Huang et al., NeurIPS 2019, figure 2c; backwards in the order 0, 1, ... as in PyTorch's ``ScheduleGPipe``.
    """
    return tuple(
        weave(
            [Action(stage, ActionKind.FORWARD, m) for m in range(microbatches)],
            [Action(stage, ActionKind.BACKWARD, m) for m in range(microbatches)],
            lead=microbatches,
        )
        for stage in range(ranks)
    )
