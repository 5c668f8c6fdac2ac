"""What is gathered and reduced together: wrap units of ZeRO-3, gradient buckets of the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Scenario


class Unit(NamedTuple):
    """Parts whose parameters are gathered, or whose gradients are reduced, in one collective."""

    name: str
    parts: tuple[tuple[Part, int], ...]
    elements: float
    """Parameters a tensor rank."""

    @property
    def is_block(self) -> bool:
        """A transformer block, in contrast to embedding and head."""
        return self.parts[0][1] >= 0


def elements(scenario: Scenario, parts: Iterable[tuple[Part, int]]) -> float:
    """Parameters that one tensor rank holds of some parts."""
    return sum(scenario.part_parameters(part, layer) for part, layer in parts)


def wrap_units(scenario: Scenario, stage: int) -> tuple[Unit, ...]:
    """FSDP wrap units of a stage in forward order: embedding, each block, head."""
    found: dict[str, list[tuple[Part, int]]] = {}
    for part, layer in scenario.parts(stage):
        found.setdefault(part.value if layer < 0 else f"block {layer}", []).append((part, layer))
    return tuple(Unit(name, tuple(parts), elements(scenario, parts)) for name, parts in found.items())


def buckets(scenario: Scenario, stage: int) -> tuple[Unit, ...]:
    """Gradient buckets of a stage in the order in which backward fills them; a bucket closes once it is full."""
    size = scenario.stack.bucket_bytes / scenario.stack.reduce_bytes
    filled: list[list[tuple[Part, int]]] = [[]]
    for part in reversed(scenario.parts(stage)):
        if filled[-1] and elements(scenario, filled[-1]) >= size:
            filled.append([])
        filled[-1].append(part)
    return tuple(Unit(f"bucket {i}", tuple(parts), elements(scenario, parts)) for i, parts in enumerate(filled))
