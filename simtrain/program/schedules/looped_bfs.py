"""Breadth-first pipeline: a rank runs all microbatches through one of its stages before it turns to the next."""

from __future__ import annotations

from simtrain.program.actions import Action, ActionKind, Program


def looped_bfs(ranks: int, microbatches: int, virtual: int) -> Program:
    """Rank r runs the stages r, r + ranks, ...; the memory of GPipe, and a stage's gradients are whole early.

    Source: Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism"; the order is that of PyTorch's
    ``ScheduleLoopedBFS``, which runs the backwards of a stage from the last microbatch to the first.
    """
    numbers = range(microbatches)

    def actions(rank: int) -> tuple[Action, ...]:
        mine = range(rank, ranks * virtual, ranks)
        forwards = (Action(stage, ActionKind.FORWARD, m) for stage in mine for m in numbers)
        backwards = (Action(stage, ActionKind.BACKWARD, m) for stage in reversed(mine) for m in reversed(numbers))
        return (*forwards, *backwards)

    return tuple(actions(rank) for rank in range(ranks))
