"""Folding is exact: every real rank, group and machine looks like the class that stands for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import permutations
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simtrain.program.folding import refine
from simtrain.program.placement import IN, OUT, Placement, _extents, _place_any, place
from simtrain.scenario.layout import AXES, Layout
from tests.unit.program.clusters import cluster

FAMILIES = {"tp": {"tp"}, "cp": {"cp"}, "dp": {"near", "far", "replica", "cp"}, "model": {"tp", "cp", "pp"}}
HYBRID = {"shard": {"near", "far", "cp"}, "secondary": {"near", "cp"}, "replica": {"replica"}}
PARTS = ("tp", "cp", "near", "far", "replica", "pp")
EXPERTS = {"etp": {"etp"}, "ep": {"ep"}, "edp": {"edp_shard", "edp_replica"}}
EXPERT_SHARDS = {"edp_shard": {"edp_shard"}, "edp_replica": {"edp_replica"}}


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout of at most 256 ranks in any order, and a number of devices a machine, aligned or not."""
    degree = st.sampled_from((1, 1, 2, 3, 4, 6))
    tp, cp, dp, pp = draw(degree), draw(st.sampled_from((1, 1, 2, 3))), draw(degree), draw(st.sampled_from((1, 2, 4)))
    order = draw(st.sampled_from(list(permutations(AXES))))
    shard = draw(st.sampled_from([d for d in range(1, dp + 1) if dp % d == 0]))
    near = draw(st.sampled_from([d for d in range(1, shard + 1) if shard % d == 0]))
    within = tp * cp * shard
    etp = draw(st.sampled_from([d for d in (1, 2, 3) if within % d == 0]))
    ep = draw(st.sampled_from([d for d in (1, 2, 3, 4, 6) if within // etp % d == 0]))
    layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, order=order, shard=shard, near=near)
    return layout, draw(st.sampled_from((1, 2, 3, 4, 6, 8, 16)))


def real_groups(layout: Layout) -> dict[str, list[tuple[int, ...]]]:
    """All process groups, one by one, from coordinates alone; a channel is its own axis ``pp0>1``."""
    found: dict[str, dict[tuple[object, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in range(layout.world):
        at = layout.coordinate(rank)
        shard = layout.shard or layout.dp
        near = layout.near or shard
        at |= {"near": at["dp"] % near, "far": at["dp"] % shard // near, "replica": at["dp"] // shard}
        hybrid = HYBRID if near < layout.dp else {}
        for axis, spanned in {**FAMILIES, **hybrid}.items():
            found[axis][tuple(at[a] for a in PARTS if a not in spanned)].append(rank)
    hybrid = EXPERT_SHARDS if (layout.near or layout.shard or layout.dp) < layout.dp else {}
    for axis, spanned in {**EXPERTS, **hybrid}.items() if layout.has_expert_groups else ():
        for ranks in stages(layout):
            for rank, place_of in zip(ranks, expert_places(layout), strict=True):
                found[axis][ranks[0], *(at for part, at in place_of.items() if part not in spanned)].append(rank)
    groups = {axis: [tuple(ranks) for ranks in by_key.values()] for axis, by_key in found.items()}
    firsts = [rank for rank in range(layout.world) if layout.coordinate(rank)["pp"] == 0]
    pairs = {(a, (a + s) % layout.pp) for a in range(layout.pp) for s in (1, -1)} if layout.pp > 1 else set()
    for a, b in pairs:
        stride = layout.stride("pp")
        groups[f"pp{a}>{b}"] = [(first + a * stride, first + b * stride) for first in firsts]
    if layout.pp > 1:
        last = (layout.pp - 1) * layout.stride("pp")
        groups["embedding"] = [(first, first + last) for first in firsts]
    return groups


def stages(layout: Layout) -> list[list[int]]:
    """Ranks of each pipeline stage, ascending."""
    at = [layout.coordinate(rank)["pp"] for rank in range(layout.world)]
    return [[rank for rank in range(layout.world) if at[rank] == stage] for stage in range(layout.pp)]


def expert_places(layout: Layout) -> Iterator[dict[str, int]]:
    """The place of each rank of a stage among the experts: etp innermost, then ep, shards, replicas."""
    degrees = {"etp": layout.etp, "ep": layout.ep}
    for index in range(layout.tp * layout.cp * layout.dp):
        copy, place_of = index // (layout.etp * layout.ep), {}
        for axis, degree in degrees.items():
            index, place_of[axis] = divmod(index, degree)
        shards = layout.tp * layout.cp * layout.shard // (layout.etp * layout.ep)
        yield place_of | {"edp_shard": copy % shards, "edp_replica": copy // shards}


def class_of_group(placement: Placement, axis: str, ranks: tuple[int, ...]) -> set[int]:
    """What its members say the class of a real group is (one answer if they agree)."""
    if axis.startswith("pp"):
        return {placement.channel(placement.class_of(ranks[0]), int(axis.split(">")[1]))}
    return {placement.group(axis, placement.class_of(rank)) for rank in ranks}


def check(placement: Placement, layout: Layout, per_machine: int) -> None:
    machine = [rank // per_machine for rank in range(layout.world)]
    classes = [placement.class_of(rank) for rank in range(layout.world)]
    assert Counter(classes) == {i: rank.multiplicity for i, rank in enumerate(placement.ranks)}
    for i, rank in enumerate(placement.ranks):
        members = placement.members(i).tolist()
        assert members[0] == rank.rank
        assert len(members) == rank.multiplicity
        assert {layout.coordinate(member)["pp"] for member in members} == {dict(rank.coordinate)["pp"]}

    # (group class, machine, way) -> real groups of the class that cross there
    using: Counter[tuple[int, int, int]] = Counter()
    for axis, groups in real_groups(layout).items():
        for ranks in groups:
            (index,) = class_of_group(placement, axis, ranks)
            group = placement.groups[index]
            spread = Counter(machine[rank] for rank in ranks)
            assert group.parties == tuple(sorted({classes[rank] for rank in ranks}))
            assert (group.size, group.machines, group.members_per_machine) == (
                len(ranks),
                len(spread),
                max(spread.values()),
            )
            one_way = axis.startswith("pp")
            ways = (
                {machine[ranks[0]]: (OUT,), machine[ranks[-1]]: (IN,)} if one_way else dict.fromkeys(spread, (OUT, IN))
            )
            using.update((index, where, way) for where in spread if len(spread) > 1 for way in ways[where])

    # machines of one class hold the same ranks and carry the same loads, which are those of the group classes
    holds: dict[int, Counter[int]] = defaultdict(Counter)
    carries: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for where, of_class in zip(machine, classes, strict=True):
        holds[where][of_class] += 1
    for (index, where, way), count in using.items():
        carries[where][index, way] = count
    machines = Counter((frozenset(holds[where].items()), frozenset(carries[where].items())) for where in set(machine))
    assert sorted(machines.values()) == sorted(placement.machine_counts)
    stated: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    for index, group in enumerate(placement.groups):
        for port, load in group.loads:
            stated[port // 2][index, port % 2] = int(load)
    for pool, count in enumerate(placement.machine_counts):
        alike = sum(n for (_, carried), n in machines.items() if dict(carried) == stated[pool])
        assert alike >= count
    # conservation: what the classes load in all is what the real groups load in all
    counts = placement.machine_counts
    loaded = sum(load * counts[port // 2] for group in placement.groups for port, load in group.loads)
    assert loaded == sum(using.values())


@given(meshes())
def test_folded_stands_for_all(mesh: tuple[Layout, int]) -> None:
    layout, per_machine = mesh
    check(place(layout, cluster(layout.world, per_machine)), layout, per_machine)


@given(meshes())
def test_unfolded_is_the_real_thing(mesh: tuple[Layout, int]) -> None:
    layout, per_machine = mesh
    placement = place(layout, cluster(layout.world, per_machine), fold=False)
    check(placement, layout, per_machine)
    assert len(placement.ranks) == layout.world
    assert all(load == 1.0 for group in placement.groups for _, load in group.loads)


@given(meshes(), st.randoms())
def test_folding_with_slow_ranks(mesh: tuple[Layout, int], random: Random) -> None:
    layout, per_machine = mesh
    factors = np.array([random.choice((1.0, 1.0, 1.1, 1.5)) for _ in range(layout.world)])
    placement = place(layout, cluster(layout.world, per_machine), slowdowns=factors)
    check(placement, layout, per_machine)
    for index, rank in enumerate(placement.ranks):
        assert rank.slowdown == factors[placement.members(index)].max()


@given(meshes())
def test_closed_form_gives_the_classes_of_the_refinement(mesh: tuple[Layout, int]) -> None:
    layout, per_machine = mesh
    per_machine = min(per_machine, layout.world)
    if _extents(layout, per_machine) is None:
        return
    mirrors = range(layout.pp)[::-1] if layout.pp % 2 == 0 else ()
    fast = place(layout, cluster(layout.world, per_machine), mirrors=mirrors)
    ones = np.ones(layout.world)
    pairs = sorted({(src_pp, dst) for (src_pp, dst) in fast.channel_table})
    assert fast.classes is None
    classes = refine(layout, per_machine, ones)
    assert fast == _place_any(layout, per_machine, classes, np.ones(classes.max() + 1), pairs, mirrors)


@given(meshes())
def test_partner_is_the_other_end_of_the_channel(mesh: tuple[Layout, int]) -> None:
    layout, per_machine = mesh
    placement = place(layout, cluster(layout.world, per_machine))
    for (src, dst), index in placement.channel_table.items():
        assert placement.groups[index].parties == tuple(sorted((src, placement.partner(src, dst))))
