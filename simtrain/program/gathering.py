"""When ZeRO-3 gathers a wrap unit and frees it again: the state of each unit as a rank works through its actions.

Counted in torch 2.13 with FSDP2, 4 blocks and a root: 5 gathers in forward and 4 in backward (5 where the root reshards
too); without resharding after forward 5 a microbatch; without resharding after backward 10 in the first, then 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from simtrain.program.actions import Action, ActionKind
from simtrain.program.lowered import Piece, PieceKind
from simtrain.program.shards import Unit, kept_after_recompute
from simtrain.scenario.scenario import Scenario

GRADIENT_ACTIONS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)
"""Actions that complete gradients."""

_Key = tuple[int, str]


class Gather(NamedTuple):
    """One gather of a unit."""

    unit: Unit
    axis: str
    """All that share the states (``Scenario.shard_axis``), or secondary."""
    elements: float
    """Parameters a tensor rank."""
    calls: int


class GatheredUnits:
    """Which units of a rank are gathered."""

    def __init__(self, scenario: Scenario, finals: Iterable[Action]) -> None:
        self._scenario = scenario
        self._finals = frozenset(finals)
        near = scenario.parallelism.layout.secondary * scenario.parallelism.layout.cp
        self._kept = 1.0 / near if near else 0.0
        """Share of a unit that a rank keeps from forward to backward (resharding to a secondary group)."""
        self._whole: set[_Key] = set()
        self._second: set[_Key] = set()

    def through(
        self, units: Sequence[Unit], pieces: tuple[Piece, ...], action: Action
    ) -> tuple[tuple[Piece, ...], dict[int, Gather]]:
        """Go through an action: its pieces with what they release, and the gathers by index of the piece that waits."""
        needs: dict[int, Gather] = {}
        releases: dict[int, float] = {}
        for unit in units:
            key = (action.stage, unit.name)
            start, end = first(pieces, unit), last(pieces, unit)
            if key not in self._whole and action.kind is not ActionKind.WEIGHT_GRAD:
                axis = "secondary" if key in self._second else self._scenario.shard_axis(unit.axis)
                needs[start] = Gather(unit, axis, unit.elements, unit.calls)
                self._whole.add(key)
                if self._scenario.stack.gather_by_module and pieces[start].kind is PieceKind.RECOMPUTE:
                    self._again(unit, pieces, needs, releases)
            freed = self._freed(unit, key, action)
            if freed:
                releases[end] = releases.get(end, 0.0) + freed
        freeing = tuple(
            piece._replace(releases=releases[i]) if i in releases else piece for i, piece in enumerate(pieces)
        )
        return freeing, needs

    def _freed(self, unit: Unit, key: _Key, action: Action) -> float:
        """Parameters of the unit that its last piece of the action frees."""
        parallelism = self._scenario.parallelism
        if key not in self._whole:
            return 0.0
        if not self._scenario.has_backward(*unit.parts[-1]):  # frozen, and nothing before it is trained
            self._whole.remove(key)
            return unit.elements
        if action.kind is ActionKind.FORWARD:
            if not (parallelism.reshard_after_forward and (unit.is_block or parallelism.reshard_root)):
                return 0.0
            self._whole.remove(key)
            if key in self._second or not self._kept:
                return unit.elements
            self._second.add(key)
            return unit.elements * (1.0 - self._kept)
        if action.kind not in GRADIENT_ACTIONS:
            return 0.0
        if not parallelism.reshard_after_backward and action not in self._finals:
            return 0.0
        self._whole.remove(key)
        kept = self._kept if key in self._second else 0.0
        self._second.discard(key)
        return unit.elements * (1.0 + kept)

    def _again(
        self, unit: Unit, pieces: tuple[Piece, ...], needs: dict[int, Gather], releases: dict[int, float]
    ) -> None:
        """Modules release their weights after recomputation and gather them once more for the backward."""
        mine = [i for i, piece in enumerate(pieces) if (piece.part, piece.layer) in unit.parts]
        back = [i for i in mine if pieces[i].kind is not PieceKind.RECOMPUTE and not pieces[i].axis]
        recomputed = max(i for i in mine if pieces[i].kind is PieceKind.RECOMPUTE)
        kept = kept_after_recompute(self._scenario, unit)
        releases[recomputed] = unit.elements - kept
        axis = self._scenario.shard_axis(unit.axis)
        needs[back[0]] = Gather(unit, axis, unit.elements - kept, unit.calls - (kept > 0))


def last_backwards(actions: Iterable[Action]) -> set[Action]:
    """The last action of each stage that completes gradients."""
    return set({action.stage: action for action in actions if action.kind in GRADIENT_ACTIONS}.values())


def touches(pieces: tuple[Piece, ...], unit: Unit) -> bool:
    """Whether any piece is of a unit."""
    return any((piece.part, piece.layer) in unit.parts for piece in pieces)


def first(pieces: tuple[Piece, ...], unit: Unit) -> int:
    """Index of the first piece of a unit."""
    return next(i for i, piece in enumerate(pieces) if (piece.part, piece.layer) in unit.parts)


def last(pieces: tuple[Piece, ...], unit: Unit) -> int:
    """Index of the last piece of a unit."""
    return max(i for i, piece in enumerate(pieces) if (piece.part, piece.layer) in unit.parts)
