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
    """Process group that holds copies of it (``Scenario.gradient_axis``)."""
    trained: float = 0.0
    """Those of its parameters that get a gradient."""
    calls: int = 1
    """Collectives that it takes."""

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
    """What ZeRO-3 gathers and reduces together in a stage, in forward order.

    FSDP: embedding, every ``wrap_blocks`` blocks, head, or the two ends as one root unit. Where the stack gathers by
    module: the weight matrices of each sub-layer, one call each. Experts that are spread over ranks are units of their
    own, sharded over the ranks that hold the same ones.
    """
    parallelism, by_module = scenario.parallelism, scenario.stack.gather_by_module
    first = scenario.stage_range(stage).start
    found: dict[tuple[str, str], list[tuple[Part, int]]] = {}
    for part, layer in scenario.parts(stage):
        axis = scenario.gradient_axis(part)
        if layer < 0:
            name = part.value if parallelism.wrap_ends else "root"
        elif axis == "edp":
            name = f"experts {layer}"
        elif by_module:
            name = f"block {layer} {part.value}"
        else:
            at = layer - (layer - first) % parallelism.wrap_blocks
            name = f"block {at}" if parallelism.wrap_blocks == 1 else f"blocks from {at}"
        found.setdefault((name, axis), []).append((part, layer))
    return tuple(
        unit_of(scenario, name, parts, axis)._replace(calls=_matrices(scenario, parts) if by_module else 1)
        for (name, axis), parts in found.items()
    )


def _matrices(scenario: Scenario, parts: Iterable[tuple[Part, int]]) -> int:
    """Weight matrices of some parts: QKV and projection, up (gate included) and down, embedding, untied head."""
    tied = scenario.model.tied_embeddings and not scenario.has_tied_copy
    return sum(2 if layer >= 0 else int(part is not Part.HEAD or not tied) for part, layer in parts) or 1


def kept_after_recompute(scenario: Scenario, unit: Unit) -> float:
    """Parameters of a unit gathered by module that recomputation leaves gathered: its last product, whose backward
    follows at once (DeepSpeed ``max_reuse_distance``, 1e9 elements).
    """
    last = any(part is Part.MLP for part, _ in unit.parts)
    return scenario.model.hidden * scenario.model.ffn_hidden / scenario.parallelism.layout.tp if last else 0.0


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
    return scenario.shards(axis) if scenario.parallelism.zero else 1


def copies_axis(axis: str) -> str:
    """The group that holds copies (``Scenario.gradient_axis``) of what a group inside it gathers or reduces."""
    return "edp" if axis.startswith("edp") else "dp"
