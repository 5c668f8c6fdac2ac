"""Runs the pieces of one microbatch of one device in order, as a lowered list does, and follows the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from simtrain.cost.memory import piece_memory, resting
from simtrain.program.actions import Action, ActionKind
from simtrain.program.demand import Memory
from simtrain.program.gathering import Gather, GatheredUnits, last
from simtrain.program.lowered import Piece, PieceKind, Span
from simtrain.program.recipe import Recipe
from simtrain.program.shards import wrap_units
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Scenario, Zero

K = PieceKind
A = ActionKind


def forward_and_backward(scenario: Scenario, stage: int = 0, backward: PieceKind = K.BACKWARD) -> tuple[Piece, ...]:
    """Pieces of forward and backward of one microbatch, with ZeRO's gathers and reductions, and the step."""
    recipe = Recipe(scenario, Span(scenario.parallelism.layout.tp, 1, scenario.parallelism.layout.tp))
    passes = {A.FORWARD: recipe.forward(stage), A.BACKWARD: recipe.backward(stage, backward)}
    if backward is K.INPUT_GRAD:
        passes = {
            A.FORWARD: passes[A.FORWARD],
            A.INPUT_GRAD: passes[A.BACKWARD],
            A.WEIGHT_GRAD: recipe.weight_grad(stage),
        }
    actions = {kind: Action(stage, kind, 0) for kind in passes}
    units = GatheredUnits(scenario, actions.values())
    pieces = [p for kind, run in passes.items() for p in _with_gathers(scenario, stage, run, actions[kind], units)]
    owned = sum(scenario.part_parameters(part, layer) for part, layer in scenario.parts(stage))
    owned /= scenario.replicas if scenario.parallelism.zero else 1
    return (*pieces, Piece(K.OPTIMIZER, Part.PARAMETER, elements=owned))


def _with_gathers(
    scenario: Scenario, stage: int, run: tuple[Piece, ...], action: Action, units: GatheredUnits
) -> Iterator[Piece]:
    """Gathers before the first piece of each unit, reductions behind its last backward piece."""
    wrapped = wrap_units(scenario, stage) if scenario.replicas > 1 else ()
    needs: dict[int, Gather] = {}
    if scenario.parallelism.zero is Zero.PARAMETERS and wrapped:
        run, needs = units.through(wrapped, run, action)
    reducing = scenario.parallelism.zero >= Zero.GRADIENTS and run[-1].kind in (K.BACKWARD, K.WEIGHT_GRAD)
    ends = [last(run, unit) for unit in wrapped]
    for i, piece in enumerate(run):
        if i in needs:
            yield Piece(K.ALL_GATHER, Part.PARAMETER, axis="dp", elements=needs[i].elements)
        yield piece
        for unit, end in zip(wrapped, ends, strict=True):
            if reducing and i == end:
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
