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
EXPERT_AXES = ("etp", "ep", "edp")
"""The same ranks of one pipeline stage, in the same order, divided for the experts (innermost first), as Megatron core
does (``RankGenerator`` with order tp-cp-ep-dp-pp; Liu et al. 2025, "MoE Parallel Folding", arXiv 2504.14960): expert
parallelism is carved out of tp, cp and dp, not an axis of its own."""


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

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

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
        """Size of one axis, or of one of ``EXPERT_AXES``."""
        return {"etp": self.expert_tensor, "edp": self.expert_data}.get(axis) or int(getattr(self, axis))

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on ``axis``."""
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
