"""Where the ranks sit: classes of identical ranks and of identical process groups, and the NICs that they share.

Rank r runs on machine ``r // devices_per_machine``. The NICs of a machine are one resource, a pool of capacity 1; a
group that spans several machines loads the pool of each. NICs are full duplex: what leaves a machine and what enters it
are two resources; a collective loads both, a message one at each end. When folded, one class stands for many ranks,
groups or machines, and a load says how many real groups of the class use one real machine at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simtrain.program.folding import LANE, Floats, Ints, base_rank, group_axes, lockstep, number, over, refine
from simtrain.program.limits import bound_ranks
from simtrain.program.lowered import Group
from simtrain.scenario.hardware import Cluster
from simtrain.scenario.layout import EXPERT_AXES, Layout

OUT, IN = 0, 1


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that are simulated as one."""

    rank: int
    """Its smallest global rank, the representative."""
    multiplicity: int
    coordinate: tuple[tuple[str, int], ...]
    """Mesh coordinate of the representative."""
    slowdown: float = 1.0
    """Largest factor on compute durations among the members."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Answer of ``place``."""

    layout: Layout
    ranks: tuple[RankClass, ...]
    groups: tuple[Group, ...]
    resources: tuple[str, ...]
    """Two a class of machines: its NICs outward (even index), its NICs inward (odd)."""
    machine_counts: tuple[int, ...]
    """Real machines of each class."""
    group_table: Mapping[str, tuple[int, ...]]
    """axis -> index of the group, by rank class; -1 where the class has none (embedding, between first and last)."""
    channel_table: Mapping[tuple[int, int], int]
    """(rank class of the sender, pp rank of the receiver) -> index of the group."""
    classes: Ints | None = field(compare=False, repr=False)
    """Class of each global rank; None if that is its pp coordinate."""

    def group(self, axis: str, rank_index: int) -> int:
        """Index into ``groups`` of the class's group along ``axis`` (perhaps of size 1); -1 where it has none."""
        return self.group_table[axis][rank_index]

    def channel(self, src_index: int, dst_pp: int) -> int:
        """Index into ``groups`` of the one-way channel from a class to its partner on pp rank ``dst_pp``."""
        return self.channel_table[src_index, dst_pp]

    def partner(self, rank_index: int, pp: int) -> int:
        """Class of the rank on pp rank ``pp`` with the same other coordinates."""
        coordinate = dict(self.ranks[rank_index].coordinate)
        return self.class_of(self.layout.rank(coordinate | {"pp": pp}))

    def class_of(self, rank: int) -> int:
        """Class of a global rank."""
        return self.layout.coordinate(rank)["pp"] if self.classes is None else int(self.classes[rank])

    def members(self, rank_index: int) -> Ints:
        """Global ranks of a class, ascending."""
        classes = self.classes
        if classes is None:
            classes = np.arange(self.layout.world) // self.layout.stride("pp") % self.layout.pp
        return np.flatnonzero(classes == rank_index)


def place(
    layout: Layout,
    cluster: Cluster,
    *,
    fold: bool = True,
    slowdowns: ArrayLike | None = None,
    channels: Collection[tuple[int, int]] | None = None,
    mirrors: Sequence[int] = (),
) -> Placement:
    """Put the ranks on the machines and find the classes of identical ranks, groups and machines.

    Parameters
    ----------
    layout, cluster
        The mesh, and how many devices share a machine.
    fold
        False keeps every rank, group and machine apart.
    slowdowns
        Factor on compute durations by global rank, length ``layout.world``. Folding takes the largest one over ranks in
        lockstep: tp and cp always, dp too if there is no pipeline.
    channels
        Pairs (from, to) of pp ranks between which messages go; None = ring neighbours, both ways.
    mirrors
        By pp rank, the other one that holds the same stages; empty = there is none.

    Returns
    -------
    Placement
        Rank classes are numbered by smallest member; groups by axis (tp, cp, dp, model, those of hybrid sharding and of
        experts, embedding, mirror, pp), then by class.
    """
    per_machine = min(cluster.devices_per_machine, layout.world)
    if channels is None:
        channels = {(a, (a + step) % layout.pp) for a in range(layout.pp) for step in (1, -1) if layout.pp > 1}
    pairs = sorted(channels)
    factors = np.ones(1) if slowdowns is None else np.asarray(slowdowns, np.float64)
    if fold:
        if slowdowns is not None:
            factors = lockstep(layout, factors)
        extents, by_stage = _extents(layout, per_machine), _by_stage(layout, factors)
        if extents is not None and by_stage is not None:
            return _place_aligned(layout, extents, by_stage, pairs, mirrors)
    factors = np.broadcast_to(factors, layout.world)
    classes = refine(layout, per_machine, factors) if fold else np.arange(layout.world)
    bound_ranks(int(classes.max()) + 1)
    slowest = np.zeros(classes.max() + 1)
    np.maximum.at(slowest, classes, 1.0 if slowdowns is None else np.asarray(slowdowns, np.float64))
    return _place_any(layout, per_machine, classes, slowest, pairs, mirrors)


# ---- the mesh is aligned with the machines: closed form, O(pp) ----


def _extents(layout: Layout, per_machine: int) -> dict[str, int] | None:
    """Coordinates of each axis that one machine holds, if all machines are alike boxes of the mesh; else None."""
    extents, left, inner = {}, per_machine, 1
    for axis in layout.mesh:
        inner *= layout.degree(axis)
        if inner % per_machine and per_machine % inner:
            return None
        extents[axis] = min(layout.degree(axis), left)
        left //= extents[axis]
    return extents if _expert_extents(layout, extents) is not None else None


def _expert_extents(layout: Layout, extents: Mapping[str, int]) -> dict[str, int] | None:
    """The same of the expert axes: a machine holds consecutive ranks of a stage. None if they do not fill it evenly."""
    held = prod(extent for axis, extent in extents.items() if axis != "pp")
    found, left, inner = {}, held, 1
    for axis in EXPERT_AXES:
        degree = layout.degree(axis)
        inner *= degree
        if inner % held and held % inner:
            return None
        found[axis] = min(degree, left)
        left //= found[axis]
    return found


def _by_stage(layout: Layout, factors: Floats) -> list[float] | None:
    """Slowdown of each pp rank, if it depends on that alone; else None."""
    if len(factors) == 1:
        return [float(factors[0])] * layout.pp
    mesh = factors.reshape(-1, layout.pp, layout.stride("pp"))
    first = mesh[0, :, 0]
    return first.tolist() if (mesh == first[:, None]).all() else None


def _place_aligned(
    layout: Layout,
    extents: Mapping[str, int],
    by_stage: Sequence[float],
    pairs: Sequence[tuple[int, int]],
    mirrors: Sequence[int] = (),
) -> Placement:
    """One class a pp rank: permuting the coordinates of another axis, whole boxes or within one, changes nothing."""
    pp, per_box = layout.pp, extents["pp"]
    ranks = tuple(
        RankClass(
            q * layout.stride("pp"), layout.world // pp, _coordinate(layout, q * layout.stride("pp")), by_stage[q]
        )
        for q in range(pp)
    )
    boxes = layout.world // prod(extents.values())
    machine_counts = (boxes * per_box // pp,) * (pp // per_box)
    groups: list[Group] = []
    table: dict[str, tuple[int, ...]] = {}
    expert = _expert_extents(layout, extents) or {}
    held = prod(extent for a, extent in extents.items() if a != "pp")
    for axis, axes in group_axes(layout).items():
        size = prod(layout.degree(a) for a in axes)
        inside = prod((expert if a in EXPERT_AXES else extents)[a] for a in axes)
        load = float(held // (inside // (extents["pp"] if "pp" in axes else 1)))
        parties = [tuple(range(pp))] if "pp" in axes else [(q,) for q in range(pp)]
        first = len(groups)
        for party in parties:
            pools = sorted({q // per_box for q in party}) if inside < size else ()
            ports = tuple((2 * pool + way, load) for pool in pools for way in (OUT, IN))
            groups.append(Group(axis, party, size, size // inside, inside, ports))
        table[axis] = tuple(first + q % len(parties) for q in range(pp))
    load = float(prod(extent for a, extent in extents.items() if a != "pp"))

    def pair(axis: str, a: int, b: int) -> int:
        crosses = a // per_box != b // per_box
        ports = {2 * (a // per_box) + OUT, 2 * (b // per_box) + IN}
        if axis != "pp":
            ports |= {2 * (b // per_box) + OUT, 2 * (a // per_box) + IN}
        loads = tuple((port, load) for port in sorted(ports)) if crosses else ()
        groups.append(Group(axis, (min(a, b), max(a, b)), 2, 1 + crosses, 2 - crosses, loads))
        return len(groups) - 1

    shared = pair("embedding", 0, pp - 1) if pp > 1 else -1
    table["embedding"] = tuple(shared if q in (0, pp - 1) else -1 for q in range(pp))
    twins = {min(q, twin): pair("mirror", q, twin) for q, twin in enumerate(mirrors) if q < twin}
    table["mirror"] = tuple(twins[min(q, twin)] for q, twin in enumerate(mirrors)) or (-1,) * pp
    channel_table = {(a, b): pair("pp", a, b) for a, b in pairs}
    heads = [ranks[pool * per_box].rank // prod(extents.values()) for pool in range(pp // per_box)]
    resources = _resource_names(heads, machine_counts)
    return Placement(layout, ranks, tuple(groups), resources, machine_counts, table, channel_table, None)


def _coordinate(layout: Layout, rank: int) -> tuple[tuple[str, int], ...]:
    return tuple(layout.coordinate(rank).items())


def _resource_names(heads: Sequence[int], counts: Sequence[int]) -> tuple[str, ...]:
    return tuple(
        f"NICs of machine {head} {way}" + (f" (and {count - 1} alike)" if count > 1 else "")
        for head, count in zip(heads, counts, strict=True)
        for way in ("out", "in")
    )


# ---- any mesh on any machines ----


@dataclass(frozen=True, slots=True)
class _Site:
    """Who sits where, as arrays over ranks and machines."""

    classes: Ints
    """Class by rank."""
    machine: Ints
    """Machine by rank."""
    machine_class: Ints
    """Class by machine."""
    heads: Ints
    """Smallest machine of each class."""


@dataclass(frozen=True, slots=True)
class _Family:
    """All process groups of one kind. Group g's members are ``ranks[i]`` where ``groups[i] == g``."""

    axis: str
    groups: Ints
    ranks: Ints
    labels: Ints
    """By group: equal for groups of one class. The class of a fixed member will do, since it determines its group's."""


def _place_any(
    layout: Layout,
    per_machine: int,
    classes: Ints,
    slowest: Floats,
    pairs: Sequence[tuple[int, int]],
    mirrors: Sequence[int] = (),
) -> Placement:
    """``slowest`` is the slowdown by class."""
    _, first, counts = np.unique(classes, return_index=True, return_counts=True)
    ranks = tuple(
        RankClass(int(rank), int(count), _coordinate(layout, int(rank)), float(slowdown))
        for rank, count, slowdown in zip(first, counts, slowest, strict=True)
    )
    machine_class = number(np.minimum.reduceat(classes, np.arange(0, layout.world, per_machine)))
    _, heads, machine_counts = np.unique(machine_class, return_index=True, return_counts=True)
    site = _Site(classes, np.arange(layout.world) // per_machine, machine_class, heads)
    groups: list[Group] = []
    table: dict[str, tuple[int, ...]] = {}
    for axis, axes in group_axes(layout).items():
        base = base_rank(layout, axes)
        index = number(base)
        labels = over(classes, layout, axes, np.minimum)[base == np.arange(layout.world)].astype(np.int64)
        group_class = _classify(_Family(axis, index, np.arange(layout.world), labels), site, groups)
        table[axis] = tuple(group_class[index[first]].tolist())
    lanes = np.flatnonzero(base_rank(layout, LANE) == np.arange(layout.world))
    lane_of = number(base_rank(layout, LANE))
    stage = first // layout.stride("pp") % layout.pp

    def pair(axis: str, a: int, b: int) -> Ints:
        """Group of each rank class, as if it were member ``a``."""
        ends = [lanes + q * layout.stride("pp") for q in (a, b)]
        family = _Family(axis, np.tile(np.arange(len(lanes)), 2), np.concatenate(ends), classes[ends[0]])
        return _classify(family, site, groups)[lane_of[first]]

    table["embedding"] = (-1,) * len(ranks)
    if layout.pp > 1:
        ends = (stage == 0) | (stage == layout.pp - 1)
        table["embedding"] = tuple(np.where(ends, pair("embedding", 0, layout.pp - 1), -1).tolist())
    mirror = np.full(len(ranks), -1, np.int64)
    for a, b in enumerate(mirrors):
        if a < b:
            mirror = np.where((stage == a) | (stage == b), pair("mirror", a, b), mirror)
    table["mirror"] = tuple(mirror.tolist())
    channel_table = {}
    for a, b in pairs:
        members = pair("pp", a, b)
        channel_table.update({(int(src), b): int(members[src]) for src in np.flatnonzero(stage == a)})
    resources = _resource_names(heads.tolist(), machine_counts.tolist())
    counted = tuple(machine_counts.tolist())
    return Placement(layout, ranks, tuple(groups), resources, counted, table, channel_table, classes)


def _classify(family: _Family, site: _Site, groups: list[Group]) -> Ints:
    """Append the classes of a family's groups to ``groups``; return the index there of each real group."""
    _, sample, group_class = np.unique(family.labels, return_index=True, return_inverse=True)
    machines, classes = len(site.machine_class), int(site.classes.max()) + 1
    count = len(sample)
    # each machine that a real group touches, with how many members it has there
    touches, members = np.unique(family.groups * machines + site.machine[family.ranks], return_counts=True)
    group, machine = np.divmod(touches, machines)
    spans = np.bincount(group)
    largest = np.maximum.reduceat(members, np.cumsum(spans) - spans)
    sizes = np.bincount(family.groups)
    # loads, read off the first machine of each class: the partition is equitable, so the others say the same
    group, machine = group[spans[group] > 1], machine[spans[group] > 1]
    if family.axis == "pp":  # its first member sends
        way = np.where(machine == site.machine[family.ranks[group]], OUT, IN)
    else:
        group, machine, way = np.repeat(group, 2), np.repeat(machine, 2), np.tile([OUT, IN], len(machine))
    used, load = np.unique((group_class[group] * machines + machine) * 2 + way, return_counts=True)
    user, port = np.divmod(used, 2 * machines)
    head = site.heads[site.machine_class[port // 2]] == port // 2
    resource = 2 * site.machine_class[port // 2] + port % 2
    pools = _split(user[head], count, resource[head], load[head].astype(np.float64))
    sampled = np.isin(family.groups, sample)
    parties = np.unique(group_class[family.groups[sampled]] * classes + site.classes[family.ranks[sampled]])
    party = _split(parties // classes, count, parties % classes)
    offset = len(groups)
    for i, one in enumerate(sample):
        loads = tuple(zip(*pools[i], strict=True))
        numbers = (int(sizes[one]), int(spans[one]), int(largest[one]))
        groups.append(Group(family.axis, tuple(party[i][0]), *numbers, loads))
    return offset + group_class


def _split(keys: Ints, count: int, *columns: NDArray[Any]) -> list[list[list[Any]]]:
    """For each key 0 <= k < count the rows of the columns where ``keys`` (ascending) equals it, as lists."""
    ends = np.searchsorted(keys, np.arange(count + 1)).tolist()
    lists = [column.tolist() for column in columns]
    return [[values[start:stop] for values in lists] for start, stop in pairwise(ends)]
