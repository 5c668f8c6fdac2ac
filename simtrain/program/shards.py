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
    trained: float = 0.0
    """Those of them that get a gradient."""

    @property
    def is_block(self) -> bool:
        """A transformer block, in contrast to embedding and head."""
        return self.parts[0][1] >= 0


def elements(scenario: Scenario, parts: Iterable[tuple[Part, int]]) -> float:
    """Parameters that one tensor rank holds of some parts."""
    return sum(scenario.part_parameters(one, layer) + scenario.adapter_parameters(one, layer) for one, layer in parts)


def trained_elements(scenario: Scenario, parts: Iterable[tuple[Part, int]]) -> float:
    """Parameters of some parts, a tensor rank, that get a gradient."""
    return sum(scenario.trainable_parameters(part, layer) for part, layer in parts)


def unit_of(scenario: Scenario, name: str, parts: Iterable[tuple[Part, int]]) -> Unit:
    """A unit of some parts."""
    parts = tuple(parts)
    return Unit(name, parts, elements(scenario, parts), trained_elements(scenario, parts))


def wrap_units(scenario: Scenario, stage: int) -> tuple[Unit, ...]:
    """FSDP wrap units of a stage in forward order: embedding, each block, head."""
    found: dict[str, list[tuple[Part, int]]] = {}
    for part, layer in scenario.parts(stage):
        found.setdefault(part.value if layer < 0 else f"block {layer}", []).append((part, layer))
    return tuple(unit_of(scenario, name, parts) for name, parts in found.items())


def buckets(scenario: Scenario, stage: int) -> tuple[Unit, ...]:
    """Gradient buckets of a stage in the order in which backward fills them; a bucket closes once it is full."""
    size = scenario.stack.bucket_bytes / scenario.stack.reduce_bytes
    filled: list[list[tuple[Part, int]]] = [[]]
    for part in reversed(scenario.parts(stage)):
        if not scenario.trainable_parameters(*part):
            continue
        if filled[-1] and trained_elements(scenario, filled[-1]) >= size:
            filled.append([])
        filled[-1].append(part)
    return tuple(unit_of(scenario, f"bucket {i}", parts) for i, parts in enumerate(filled) if parts)
