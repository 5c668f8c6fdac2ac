"""Can this program run? Each action once, on one rank a stage, inputs before outputs, no deadlock.

A program may hold the model twice (DualPipe): then every stage sits on two ranks, which share all their stages, and
each microbatch passes a stage on one of them.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from simtrain.errors import ProgramError
from simtrain.program.actions import Action, ActionKind, Program, actions_of, flat
from simtrain.program.grid import marked
from simtrain.program.timing import replay

F, B, I, W = ActionKind  # noqa: E741


def _refuse(why: str, program: Program, places: Collection[tuple[int, int]]) -> ProgramError:
    return ProgramError(f"{why}\n{marked(program, places)}", places)


def validate(program: Program, stages: int, microbatches: int) -> None:
    """Check that a program runs every stage on every microbatch, forward and backward, and comes to its end.

    Parameters
    ----------
    program
        Per pipeline rank its actions in issue order.
    stages
        Stages of the model, over all ranks.
    microbatches
        Microbatches a step.

    Raises
    ------
    ProgramError
        An action out of range, twice or missing; a stage on two ranks; B beside I or W; a backward before its forward;
        a deadlock. The message shows the grid with the place marked ``>2F0<``.
    """
    _check_once(program, stages, microbatches)
    _check_order(program)


def _plainly_complete(program: Program, stages: int, microbatches: int) -> bool:
    """Counting alone: as many different F and B as there can be, all in range, no stage on two ranks. Fast."""
    ranks = [list(flat(steps)) for steps in program]
    every = list(chain.from_iterable(ranks))
    if not len(every) == len(set(every)) == 2 * stages * microbatches:
        return False
    stage_of, kind_of, microbatch_of = map(set, zip(*every, strict=True))
    homes = [{action[0] for action in actions} for actions in ranks]
    return (
        stage_of <= set(range(stages))
        and kind_of == {F, B}
        and microbatch_of <= set(range(microbatches))
        and sum(map(len, homes)) == stages
    )


def _check_once(program: Program, stages: int, microbatches: int) -> None:
    if _plainly_complete(program, stages, microbatches):
        return
    placed: dict[Action, tuple[int, int]] = {}
    home: dict[int | tuple[int, int], int] = {}
    twice = held_twice(program)
    for rank, steps in enumerate(program):
        for index, action in ((index, action) for index, step in enumerate(steps) for action in actions_of(step)):
            if action in placed:
                raise _refuse(f"{action} twice", program, {placed[action], (rank, index)})
            key = (action.stage, action.microbatch) if twice else action.stage
            if home.setdefault(key, rank) != rank:
                why = f"stage {action.stage} on rank {home[key]} and on rank {rank}"
                raise _refuse(why, program, {(rank, index)})
            placed[action] = (rank, index)
    for action, place in placed.items():
        if not (0 <= action.stage < stages and 0 <= action.microbatch < microbatches):
            raise _refuse(f"{action} out of range: {stages} stages x {microbatches} microbatches", program, {place})
    for stage in range(stages):
        for m in range(microbatches):
            _check_complete(program, placed, stage, m)


def _check_complete(program: Program, placed: dict[Action, tuple[int, int]], stage: int, m: int) -> None:
    if (stage, F, m) in placed and (stage, B, m) in placed:
        clash = [placed[a] for a in (Action(stage, I, m), Action(stage, W, m)) if a in placed]
        if clash:
            why = f"{Action(stage, B, m)} beside a split backward of the same stage and microbatch"
            raise _refuse(why, program, clash)
        return
    wanted = [F, I, W] if (stage, I, m) in placed or (stage, W, m) in placed else [F, B]
    missing = [str(Action(stage, kind, m)) for kind in wanted if (stage, kind, m) not in placed]
    if missing:
        near = [place for action, place in placed.items() if (action.stage, action.microbatch) == (stage, m)]
        raise _refuse(f"missing: {', '.join(missing)}", program, near)


def held_twice(program: Program) -> bool:
    """Whether every stage sits on two ranks that hold the same stages: the model once in each direction."""
    held = [frozenset(action.stage for action in flat(steps)) for steps in program]
    return (
        len(held) > 1
        and all(held.count(stages) == 2 for stages in held)
        and len(set().union(*held)) == sum(map(len, held)) // 2
    )


def _check_order(program: Program) -> None:
    stuck = replay(program).blocked(program)
    for rank, at in stuck.items():
        later = set(flat(program[rank][at:]))
        for action in actions_of(program[rank][at]):
            needs = {B: F, I: F, W: I}.get(action.kind)
            if needs and Action(action.stage, needs, action.microbatch) in later:
                why = f"rank {rank}: {action} before {Action(action.stage, needs, action.microbatch)}"
                raise _refuse(why, program, {(rank, at)})
    if stuck:
        waits = "; ".join(
            f"rank {r} at {program[r][at]}, which waits for {' and '.join(map(_wait, actions_of(program[r][at])))}"
            for r, at in stuck.items()
        )
        raise _refuse(f"deadlock: {waits}", program, set(stuck.items()))


def _wait(action: Action) -> str:
    stage, kind, m = action
    if kind is F:
        return str(Action(stage - 1, F, m))
    return f"{stage + 1}B{m} (or {stage + 1}I{m})"
