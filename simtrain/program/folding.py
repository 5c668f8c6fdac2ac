"""Which ranks are alike: colour refinement over program, placement and process groups.

Two ranks may share a colour only if they run the same program at the same speed, sit on machines of the same colour,
and belong to groups of the same colour; machines and groups are coloured by what they contain. The coarsest such
colouring (an equitable partition) is what simulating one representative of each class needs to be exact.

Colours are 64-bit hashes and multisets are hashed by sums, so a step costs a few passes over the ranks; two different
classes would have to collide in 64 bits to be merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from simtrain.scenario.layout import AXES, DP_PARTS, EXPERT_AXES, Layout

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Hashes = NDArray[np.uint64]

GROUP_AXES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": (*DP_PARTS, "cp"),
    "model": ("tp", "cp", "pp"),
}
"""Process group -> mesh axes that it spans: gradients are reduced over dp and cp, their norm over one whole replica."""

SHARD_AXES: Mapping[str, tuple[str, ...]] = {
    "shard": ("near", "far", "cp"),
    "secondary": ("near", "cp"),
    "replica": ("replica",),
}
"""Groups of hybrid sharding: states are spread over a shard group and alike in the ranks of a replica group; a
secondary group holds the copy that stays after a forward."""
EXPERT_GROUPS: Mapping[str, tuple[str, ...]] = {"etp": ("etp",), "ep": ("ep",), "edp": ("edp_shard", "edp_replica")}
EXPERT_SHARDS: Mapping[str, tuple[str, ...]] = {"edp_shard": ("edp_shard",), "edp_replica": ("edp_replica",)}

LANE = ("pp",)
"""Ranks that differ in pp alone: all that pass messages to one another, or share an embedding."""


def group_axes(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Kinds of process groups that a layout has, with the mesh axes that they span."""
    hybrid = layout.degree("replica") > 1 or layout.degree("far") > 1
    found = {**GROUP_AXES, **(SHARD_AXES if hybrid else {})}
    if layout.has_expert_groups:
        found |= {**EXPERT_GROUPS, **(EXPERT_SHARDS if hybrid else {})}
    return found


def over(values: NDArray[np.generic], layout: Layout, axes: Sequence[str], how: np.ufunc) -> NDArray[np.generic]:
    """Reduce values[rank] with ``how`` over each rank's group along ``axes``; the result is indexed by rank too."""
    if axes[0] in EXPERT_AXES:
        return _over_experts(values, layout, axes, how)
    mesh = values.reshape([layout.degree(axis) for axis in reversed(layout.mesh)])
    dims = tuple(len(layout.mesh) - 1 - layout.mesh.index(axis) for axis in axes)
    return np.broadcast_to(how.reduce(mesh, axis=dims, keepdims=True), mesh.shape).reshape(-1)


def _over_experts(
    values: NDArray[np.generic], layout: Layout, axes: Sequence[str], how: np.ufunc
) -> NDArray[np.generic]:
    """``over`` along some of ``EXPERT_AXES``: the ranks of a stage in mesh order, divided anew."""
    outward = [layout.degree(name) for name in reversed(layout.order)]
    pipeline = len(AXES) - 1 - layout.order.index("pp")
    staged = np.moveaxis(values.reshape(outward), pipeline, 0)
    mesh = staged.reshape(layout.pp, *(layout.degree(axis) for axis in reversed(EXPERT_AXES)))
    dims = tuple(len(EXPERT_AXES) - EXPERT_AXES.index(axis) for axis in axes)
    spread = np.broadcast_to(how.reduce(mesh, axis=dims, keepdims=True), mesh.shape)
    return np.moveaxis(spread.reshape(staged.shape), 0, pipeline).reshape(-1)


def base_rank(layout: Layout, axes: Sequence[str]) -> Ints:
    """Smallest rank of each rank's group along ``axes``: names the group."""
    ranks = np.arange(layout.world)
    if axes[0] in EXPERT_AXES:
        return over(ranks, layout, axes, np.minimum).astype(np.int64)
    return ranks - sum(ranks // layout.stride(axis) % layout.degree(axis) * layout.stride(axis) for axis in axes)


def lockstep(layout: Layout, slowdowns: Floats) -> Floats:
    """Slowdown by rank of the slowest one it marches with.

    Tensor, context and expert ranks meet in every layer; data ranks only once their gradients do, which sets the pace
    of the step if there is no pipeline to bring them out of step earlier. What an expert rank does behind its last
    meeting in a pass it does at its own pace, so for these the answer is an upper bound (a percent or two of jitter).
    """
    axes = ("tp", "cp") if layout.pp > 1 else ("tp", "cp", *DP_PARTS)
    pace = over(slowdowns, layout, axes, np.maximum)
    while layout.has_expert_groups:
        before = pace
        for group in (("etp",), ("ep",), axes):
            pace = over(pace, layout, group, np.maximum)
        if (before == pace).all():
            break
    return pace.astype(np.float64)


def number(colours: NDArray[np.generic]) -> Ints:
    """Colours as 0, 1, ... in order of first appearance."""
    _, first, inverse = np.unique(colours, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), np.int64)
    numbers[np.argsort(first)] = np.arange(len(first))
    return numbers[inverse]


def refine(layout: Layout, devices_per_machine: int, slowdowns: Floats) -> Ints:
    """Coarsest folding that keeps the simulation exact.

    Parameters
    ----------
    layout
        Mesh of ranks; rank r sits on machine ``r // devices_per_machine``.
    devices_per_machine
        Ranks a machine.
    slowdowns
        Factor on compute durations, by global rank.

    Returns
    -------
    Ints
        Class of each global rank, numbered by smallest member.
    """
    machine = np.arange(layout.world) // devices_per_machine
    starts = np.arange(0, layout.world, devices_per_machine)
    families = (*group_axes(layout).values(), LANE)
    colours = _initial(layout, machine, slowdowns)
    classes, steps = len(np.unique(colours)), 1
    while True:
        for _ in range(steps):
            inside = _mix(colours)
            colours = _join(inside, np.add.reduceat(inside, starts)[machine])
            for axes in families:
                colours = _join(colours, over(inside, layout, axes, np.add))
        before, classes = classes, len(np.unique(colours))
        if classes in (before, layout.world):  # refinement never merges: the same number twice is the same partition
            return number(colours)
        steps *= 2  # counting costs more than refining


def _initial(layout: Layout, machine: Ints, slowdowns: Floats) -> Hashes:
    """Colours by pp coordinate, slowdown, and which members of its own groups share the rank's machine."""
    stage = _mix((np.arange(layout.world) // layout.stride("pp") % layout.pp).astype(np.uint64))
    colours = _join(stage, slowdowns.astype(np.float64).view(np.uint64))
    for axes in (*group_axes(layout).values(), LANE):
        _, party = np.unique(base_rank(layout, axes) * (machine[-1] + 1) + machine, return_inverse=True)
        together = np.zeros(party.max() + 1, np.uint64)
        np.add.at(together, party, stage)
        colours = _join(colours, together[party])
    return colours


def _mix(values: Hashes) -> Hashes:
    """Finalizer of splitmix64 (Steele et al., OOPSLA 2014): a bijection that scatters its input bits."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _join(left: Hashes, right: NDArray[np.generic]) -> Hashes:
    """Hash of an ordered pair."""
    return _mix(_mix(left) * np.uint64(3) + right.astype(np.uint64))
