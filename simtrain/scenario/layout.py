"""Rank <-> coordinate: how the ranks of a job form process groups.

The default order is Megatron's: tensor innermost, then context, data, pipeline outermost, so that consecutive ranks
share a machine and the chattiest group stays on the fastest links (Narayanan et al., SC21, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

AXES = ("tp", "cp", "dp", "pp")
"""Mesh axes from innermost to outermost."""
EXPERT_AXES = ("etp", "ep", "edp_shard", "edp_replica")
"""The same ranks of one pipeline stage, in the same order, divided for the experts (innermost first), as Megatron core
does (``RankGenerator`` with order tp-cp-ep-dp-pp; Liu et al. 2025, "MoE Parallel Folding", arXiv 2504.14960): expert
parallelism is carved out of tp, cp and dp, not an axis of its own. Those that hold the same experts fall into shards
and replicas of the shards."""
DP_PARTS = ("near", "far", "replica")
"""What dp falls into, innermost first: shards that sit close, the rest of the shards, replicas of the shards."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism and their order."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    """Ranks over which the experts of a layer are spread; they belong to tp, cp and dp otherwise."""
    etp: int = 0
    """Ranks that share each expert's matrices; 0 = tp, and nothing to say where there are no experts."""
    order: tuple[str, ...] = AXES
    """Innermost first; a permutation of ``AXES``."""
    shard: int = 0
    """Data-parallel ranks that share one copy of the sharded states; 0 = all of them. Neighbours on dp shard."""
    near: int = 0
    """Of those, the neighbours that share the copy which stays after a forward; 0 = all of them."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def mesh(self) -> tuple[str, ...]:
        """Mesh axes with dp split in three, innermost first: near shards, far shards, replicas of the shards."""
        return tuple(part for axis in self.order for part in (DP_PARTS if axis == "dp" else (axis,)))

    @property
    def secondary(self) -> int:
        """Data-parallel ranks that share the copy which stays after a forward; 0 where all of a shard group do."""
        return self.near if self.degree("far") > 1 else 0

    @property
    def replica(self) -> int:
        """Groups of ranks that each hold a whole copy of the sharded states."""
        return self.dp // (self.shard or self.dp)

    @property
    def expert_tensor(self) -> int:
        """Degree of expert tensor parallelism."""
        return self.etp or self.tp

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts: tp cp dp / (etp ep) (Megatron core ``parallel_state``, expert groups)."""
        return self.tp * self.cp * self.dp // (self.expert_tensor * self.ep)

    @property
    def has_expert_groups(self) -> bool:
        """Whether tokens travel to experts: over ep, or over the ranks that share an expert."""
        return self.ep > 1 or self.etp > 1 or self.experts_apart

    @property
    def experts_apart(self) -> bool:
        """Whether the copies of an expert lie on other ranks than the copies of all else."""
        return self.ep > 1 or self.expert_tensor != self.tp

    def degree(self, axis: str) -> int:
        """Size of one axis, of a part of dp, or of one of ``EXPERT_AXES``."""
        shard = self.shard or self.dp
        near = self.near or shard
        match axis:
            case "near":
                return near
            case "far":
                return shard // near
            case "replica" | "edp_replica":
                return self.replica
            case "etp":
                return self.expert_tensor
            case "edp_shard":
                return self.expert_data // self.replica
            case _:
                return int(getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on ``axis``."""
        if axis in DP_PARTS:
            inner = prod(self.degree(part) for part in DP_PARTS[: DP_PARTS.index(axis)])
            return self.stride("dp") * inner
        order = EXPERT_AXES if axis in EXPERT_AXES else self.order  # of the ranks of one stage
        return prod(self.degree(inner) for inner in order[: order.index(axis)])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Mesh coordinate of a rank."""
        return {axis: rank // self.stride(axis) % self.degree(axis) for axis in self.order}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Rank at a mesh coordinate; axes left out count as 0."""
        return sum(self.stride(axis) * at for axis, at in coordinate.items())

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Ranks of the process group along ``axis`` that contains ``rank``, in axis order."""
        stride, size = self.stride(axis), self.degree(axis)
        base = rank - rank // stride % size * stride
        return tuple(range(base, base + stride * size, stride))
