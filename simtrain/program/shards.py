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
    axis: str = "dp"
    """Process group that gathers or reduces it."""
    trained: float = 0.0
    """Those of its parameters that get a gradient."""

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


def unit_of(scenario: Scenario, name: str, parts: Iterable[tuple[Part, int]], axis: str) -> Unit:
    """A unit of some parts, all of which have their copies along ``axis``."""
    parts = tuple(parts)
    return Unit(name, parts, elements(scenario, parts), axis, trained_elements(scenario, parts))


def wrap_units(scenario: Scenario, stage: int) -> tuple[Unit, ...]:
    """FSDP wrap units of a stage in forward order: embedding, each block, head.

    Experts that are spread over ranks are units of their own, sharded over the ranks that hold the same ones.
    """
    found: dict[tuple[str, str], list[tuple[Part, int]]] = {}
    for part, layer in scenario.parts(stage):
        axis = scenario.gradient_axis(part)
        name = part.value if layer < 0 else f"block {layer}"
        found.setdefault((f"experts {layer}" if axis == "edp" else name, axis), []).append((part, layer))
    return tuple(unit_of(scenario, name, parts, axis) for (name, axis), parts in found.items())


def buckets(scenario: Scenario, stage: int) -> tuple[Unit, ...]:
    """Gradient buckets of a stage in the order in which backward fills them; a bucket closes once it is full.

    Experts that are spread over ranks fill buckets of their own (Megatron's ``expert_parallel_buffers``).
    """
    size = scenario.stack.bucket_bytes / scenario.stack.reduce_bytes
    filled: list[tuple[str, list[tuple[Part, int]]]] = []
    open_: dict[str, list[tuple[Part, int]]] = {}
    for part in reversed(scenario.parts(stage)):
        axis = scenario.gradient_axis(part[0])
        if not scenario.trainable_parameters(*part):
            continue
        if axis not in open_ or trained_elements(scenario, open_[axis]) >= size:
            open_[axis] = []
            filled.append((axis, open_[axis]))
        open_[axis].append(part)
    return tuple(unit_of(scenario, f"bucket {i}", parts, axis) for i, (axis, parts) in enumerate(filled))


def by_axis(scenario: Scenario, name: str, parts: Iterable[tuple[Part, int]]) -> tuple[Unit, ...]:
    """One unit for each process group that holds copies of some of the parts."""
    found: dict[str, list[tuple[Part, int]]] = {}
    for part, layer in parts:
        found.setdefault(scenario.gradient_axis(part), []).append((part, layer))
    return tuple(unit_of(scenario, name, held, axis) for axis, held in found.items())


def split(scenario: Scenario, axis: str) -> int:
    """Ranks that divide the update of what they hold copies of among them (ZeRO)."""
    return scenario.copies(axis) if scenario.parallelism.zero else 1
