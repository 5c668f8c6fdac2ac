"""The schedule list: what a schedule returns, what prints as a grid, what torch runs.

An action prints as PyTorch's ``torch.distributed.pipelining`` prints it (``2F0``, ``0B3``, ``(0F3;1B2)OVERLAP_F_B``)
and parses back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from simtrain.errors import ProgramError

_OVERLAP = "OVERLAP_F_B"


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


class Pair(NamedTuple):
    """A forward and a backward woven into one another, each hiding the communication of the other."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){_OVERLAP}"


Step = Action | Pair
Program = tuple[tuple[Step, ...], ...]
"""For each pipeline rank its steps in issue order."""


def parse(text: str) -> Step:
    """Inverse of ``str`` for an action or a pair; raises ``ProgramError`` on anything else."""
    match = re.fullmatch(rf"\((.*);(.*)\){_OVERLAP}", text.strip())
    if not match:
        return Action.parse(text)
    forward, backward = Action.parse(match[1]), Action.parse(match[2])
    if forward.kind is not ActionKind.FORWARD or backward.kind not in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
        raise ProgramError(f"not a pair: {text!r} (expected e.g. (0F3;1B2){_OVERLAP}: a forward, then a B or I)")
    return Pair(forward, backward)


def actions_of(step: Step) -> tuple[Action, ...]:
    """The actions of a step: itself, or both of a pair."""
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)


def flat(steps: Iterable[Step]) -> Iterator[Action]:
    """All actions in issue order, the forward of a pair first."""
    for step in steps:
        if isinstance(step, Pair):
            yield from step
        else:
            yield step
