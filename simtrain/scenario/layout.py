"""Rank <-> coordinate: how the ranks of a job form process groups.

The default order is Megatron's: tensor innermost, then context, data, pipeline outermost, so that consecutive ranks
share a machine and the chattiest group stays on the fastest links (Narayanan et al., SC21, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

AXES = ("tp", "cp", "dp", "pp")
"""Mesh axes from innermost to outermost. Expert parallelism is carved out of dp (and cp), not an axis of its own."""

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

    def degree(self, axis: str) -> int:
        """Size of one axis, or of a part of dp."""
        if axis not in DP_PARTS:
            return int(getattr(self, axis))
        shard = self.shard or self.dp
        near = self.near or shard
        return {"near": near, "far": shard // near, "replica": self.dp // shard}[axis]

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on ``axis``."""
        if axis in DP_PARTS:
            inner = prod(self.degree(part) for part in DP_PARTS[: DP_PARTS.index(axis)])
            return self.stride("dp") * inner
        return prod(self.degree(inner) for inner in self.order[: self.order.index(axis)])

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
