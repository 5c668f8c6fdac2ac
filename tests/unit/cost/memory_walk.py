"""Runs the pieces of one microbatch of one device in order, as a lowered list does, and follows the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from simtrain.cost.memory import piece_memory, resting
from simtrain.program.demand import Memory
from simtrain.program.lowered import Piece, PieceKind, Span
from simtrain.program.recipe import Recipe
from simtrain.program.shards import wrap_units
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Scenario, Zero

K = PieceKind


def forward_and_backward(scenario: Scenario, stage: int = 0, backward: PieceKind = K.BACKWARD) -> tuple[Piece, ...]:
    """Pieces of forward and backward of one microbatch, with ZeRO's gathers and reductions, and the step."""
    recipe = Recipe(scenario, Span(scenario.parallelism.layout.tp, 1, scenario.parallelism.layout.tp))
    passes = [recipe.forward(stage), recipe.backward(stage, backward)]
    if backward is K.INPUT_GRAD:
        passes.append(recipe.weight_grad(stage))
    pieces = [piece for i, run in enumerate(passes) for piece in _with_gathers(scenario, stage, run, again=i == 1)]
    owned = sum(scenario.part_parameters(part, layer) for part, layer in scenario.parts(stage))
    owned /= scenario.replicas if scenario.parallelism.zero else 1
    return (*pieces, Piece(K.OPTIMIZER, Part.PARAMETER, elements=owned))


def _with_gathers(scenario: Scenario, stage: int, run: tuple[Piece, ...], *, again: bool) -> Iterator[Piece]:
    """Gathers before the first piece of each unit, reductions behind its last backward piece."""
    units = wrap_units(scenario, stage) if scenario.replicas > 1 else ()
    gathered = units if scenario.parallelism.zero is Zero.PARAMETERS and run[0].kind is not K.WEIGHT_GRAD else ()
    if again:
        gathered = tuple(u for u in gathered if u.is_block and scenario.parallelism.reshard_after_forward)
    reducing = scenario.parallelism.zero >= Zero.GRADIENTS and run[-1].kind in (K.BACKWARD, K.WEIGHT_GRAD)
    places = [[i for i, piece in enumerate(run) if (piece.part, piece.layer) in unit.parts] for unit in units]
    for i, piece in enumerate(run):
        for unit, at in zip(units, places, strict=True):
            if unit in gathered and i == at[0]:
                yield Piece(K.ALL_GATHER, Part.PARAMETER, axis="dp", elements=unit.elements)
        yield piece
        for unit, at in zip(units, places, strict=True):
            if reducing and i == at[-1]:
                yield Piece(K.REDUCE_SCATTER, Part.GRADIENT, axis="dp", elements=unit.elements)


def walk(scenario: Scenario, pieces: Iterable[Piece]) -> tuple[dict[Memory, float], dict[Memory, float]]:
    """Return bytes by category at the highest moment, and after the last piece."""
    level, top = resting(scenario, 0), dict[Memory, float]()
    for piece in pieces:
        keeps, frees, transient = piece_memory(scenario, piece)
        for category, count in keeps:
            level[category] = level.get(category, 0.0) + count
        reached = dict(level)
        for category, count in transient:
            reached[category] = reached.get(category, 0.0) + count
        if sum(reached.values()) > sum(top.values()):
            top = reached
        for category, count in frees:
            level[category] -= count
    return top, level
