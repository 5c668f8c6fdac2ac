"""Which rank runs a stage for a microbatch, whom it passes messages to, and in which order they arrive."""

from __future__ import annotations

from collections.abc import Iterator

from simtrain.program.actions import Action, ActionKind, Program, flat


class Homes:
    """Of one program. A stage has one rank, or two where the model is held twice: one for each microbatch."""

    def __init__(self, program: Program, stages: int) -> None:
        self.stages = stages
        self._rank = {
            (action.stage, action.microbatch): rank for rank, steps in enumerate(program) for action in flat(steps)
        }
        self.sent: dict[tuple[int, bool, int, int], list[int]] = {}
        """(stage, forward, its rank, receiving rank) -> microbatches in the order in which their messages leave."""
        beside: list[set[int]] = [set() for _ in program]
        for here, action, there in self._messages(program):
            self.sent.setdefault((action.stage, is_forward(action), here, there), []).append(action.microbatch)
            beside[here].add(there)
            beside[there].add(here)
        self.neighbours = tuple(sorted(ranks) for ranks in beside)
        """By pipeline rank: those that it exchanges messages with."""

    def source(self, action: Action) -> int:
        """Rank that makes the input of an action; -1 where it needs none from another stage."""
        return self._beside(action, -1)

    def target(self, action: Action) -> int:
        """Rank that needs the output of an action; -1 where none does."""
        return self._beside(action, 1)

    def _beside(self, action: Action, way: int) -> int:
        if action.kind is ActionKind.WEIGHT_GRAD:
            return -1
        stage = action.stage + (way if is_forward(action) else -way)
        return self._rank[stage, action.microbatch] if 0 <= stage < self.stages else -1

    def _messages(self, program: Program) -> Iterator[tuple[int, Action, int]]:
        for here, steps in enumerate(program):
            for action in flat(steps):
                there = self.target(action)
                if there not in (-1, here):
                    yield here, action, there


def is_forward(action: Action) -> bool:
    """Whether an action passes activations on, not gradients."""
    return action.kind is ActionKind.FORWARD
