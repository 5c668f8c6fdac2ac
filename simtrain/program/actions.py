"""The schedule list: what a schedule returns, what prints as a grid, what torch runs.

An action prints as PyTorch's ``torch.distributed.pipelining`` prints it (``2F0``, ``0B3``) and parses back.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from simtrain.errors import ProgramError


class ActionKind(StrEnum):
    """What a pipeline rank does with one stage and one microbatch; the letters are PyTorch's."""

    FORWARD = "F"
    BACKWARD = "B"
    """Full backward: input and weight gradients."""
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


class Action(NamedTuple):
    """``(stage, kind, microbatch)``: a value, comparable and hashable."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Inverse of ``str``; raises ``ProgramError`` on anything else."""
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip())
        if not match:
            raise ProgramError(f"not an action: {text!r} (expected e.g. 2F0: stage, one of F B I W, microbatch)")
        return Action(int(match[1]), ActionKind(match[2]), int(match[3]))


Program = tuple[tuple[Action, ...], ...]
"""For each pipeline rank its actions in issue order."""
