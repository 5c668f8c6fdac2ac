from __future__ import annotations

import numpy as np
import pytest

from simtrain.program.lowered import Group
from simtrain.program.placement import Placement, place
from simtrain.scenario.layout import Layout
from tests.unit.program.clusters import cluster


def lie(placement: Placement, axis: str, index: int = 0) -> tuple[int, int, int, tuple[tuple[int, float], ...]]:
    """Size, machines, members on a machine, and loads of a class's group."""
    group = placement.groups[placement.group(axis, index)]
    return group.size, group.machines, group.members_per_machine, group.loads


def both(*loads: tuple[int, float]) -> tuple[tuple[int, float], ...]:
    """Loads of machine classes, outward and inward."""
    return tuple((2 * machine + way, load) for machine, load in loads for way in (0, 1))


def test_gpt3_on_1024_devices_by_hand() -> None:
    # machine = one tensor group; a data group has a rank on 16 machines, and its 8 tensor siblings share each of them
    placement = place(Layout(tp=8, dp=16, pp=8), cluster(1024, 8))
    assert [rank.multiplicity for rank in placement.ranks] == [128] * 8
    assert placement.machine_counts == (16,) * 8
    assert lie(placement, "tp", 3) == (8, 1, 8, ())
    assert lie(placement, "dp", 3) == (16, 16, 1, both((3, 8.0)))
    assert lie(placement, "cp", 3) == (1, 1, 1, ())
    assert lie(placement, "model") == (64, 8, 8, both(*((q, 1.0) for q in range(8))))
    assert lie(placement, "embedding") == (2, 2, 1, both((0, 8.0), (7, 8.0)))
    assert placement.group("embedding", 3) == -1
    assert placement.groups[placement.channel(2, 3)] == Group("pp", (2, 3), 2, 2, 1, ((4, 8.0), (7, 8.0)))
    assert placement.channel(2, 3) != placement.channel(3, 2)
    assert placement.resources[7] == "NICs of machine 48 in (and 15 alike)"


def test_sixteen_times_the_devices_are_the_same_classes() -> None:
    small = place(Layout(tp=8, dp=16, pp=8), cluster(1024, 8))
    large = place(Layout(tp=8, dp=256, pp=8), cluster(16384, 8))
    assert len(large.ranks) == len(small.ranks)
    assert len(large.groups) == len(small.groups)
    assert large.ranks[0].multiplicity == 2048


def test_uneven_tensor_groups_by_hand() -> None:
    # 4 groups of 6 on 3 machines of 8, |000000 11|1111 2222|22 333333|: a mirror image of itself, rank r <-> 23 - r.
    # Data groups {i, i + 6, i + 12, i + 18} have two ranks on the first (i = 0, 1), middle or last machine.
    placement = place(Layout(tp=6, dp=4), cluster(24, 8))
    assert placement.machine_counts == (2, 1)
    assert [placement.members(i).tolist() for i in range(len(placement.ranks))] == [
        [r, r + 1, 22 - r, 23 - r] for r in (0, 2, 4, 6, 8, 10)
    ]
    assert lie(placement, "tp", 0) == (6, 1, 6, ())
    assert lie(placement, "tp", 3) == (6, 2, 4, both((0, 1.0), (1, 2.0)))
    assert placement.groups[placement.group("tp", 3)].parties == (3, 4, 5)
    assert lie(placement, "dp", 0) == (4, 3, 2, both((0, 4.0), (1, 4.0)))
    assert lie(placement, "dp", 1) == (4, 3, 2, both((0, 2.0), (1, 2.0)))


def test_context_parallel_ranks_reduce_gradients_too() -> None:
    placement = place(Layout(tp=2, cp=2, dp=4), cluster(16, 8))
    assert lie(placement, "cp") == (2, 1, 2, ())
    assert lie(placement, "dp") == (8, 2, 4, both((0, 2.0)))


def test_pipeline_inside_a_machine_loads_no_nic() -> None:
    placement = place(Layout(tp=2, pp=4, dp=4, order=("tp", "pp", "cp", "dp")), cluster(32, 8))
    assert placement.groups[placement.channel(0, 1)].loads == ()
    assert lie(placement, "dp", 2) == (4, 4, 1, both((0, 2.0)))
    assert placement.machine_counts == (4,)


def test_last_machine_part_filled() -> None:
    placement = place(Layout(dp=10), cluster(10, 8))
    assert placement.machine_counts == (1, 1)
    assert [rank.multiplicity for rank in placement.ranks] == [8, 2]
    assert lie(placement, "dp") == (10, 2, 8, both((0, 1.0), (1, 1.0)))


def test_unfolded_keeps_everything_apart() -> None:
    placement = place(Layout(tp=2, dp=4, pp=2), cluster(16, 4), fold=False)
    assert [rank.rank for rank in placement.ranks] == list(range(16))
    assert placement.resources == tuple(f"NICs of machine {m} {way}" for m in range(4) for way in ("out", "in"))
    assert placement.groups[placement.group("dp", 1)].parties == (1, 3, 5, 7)
    assert placement.groups[placement.group("dp", 1)].loads == both((0, 1.0), (1, 1.0))
    assert placement.groups[placement.channel(1, 1)].parties == (1, 9)


def test_slowdown_of_ranks_in_lockstep() -> None:
    layout = Layout(tp=2, dp=4, pp=2)
    draws = 1 + np.arange(16) / 100
    folded = place(layout, cluster(16, 4), slowdowns=draws)
    assert [(rank.rank, rank.slowdown) for rank in folded.ranks] == [(2 * k, draws[2 * k + 1]) for k in range(8)]
    unfolded = place(layout, cluster(16, 4), slowdowns=draws, fold=False)
    assert [rank.slowdown for rank in unfolded.ranks] == draws.tolist()
    no_pipeline = place(Layout(tp=2, dp=8), cluster(16, 4), slowdowns=draws)
    assert [(rank.multiplicity, rank.slowdown) for rank in no_pipeline.ranks] == [(16, draws.max())]


def test_slow_stage_does_not_unfold_its_replicas() -> None:
    placement = place(Layout(dp=4, pp=2), cluster(8, 4), slowdowns=[1.0] * 4 + [1.5] * 4)
    assert [(rank.multiplicity, rank.slowdown) for rank in placement.ranks] == [(4, 1.0), (4, 1.5)]


def test_channels_other_than_ring_neighbours() -> None:
    placement = place(Layout(pp=4), cluster(4, 4), channels=[(0, 2)])
    assert placement.groups[placement.channel(0, 2)].parties == (0, 2)
    with pytest.raises(KeyError):
        placement.channel(0, 1)


def test_expert_groups_by_hand() -> None:
    # a stage is 16 consecutive ranks on two machines; experts over 8 of them fill one machine, copies meet across
    placement = place(Layout(tp=2, dp=8, pp=2, ep=8, etp=1), cluster(32, 8))
    assert [rank.multiplicity for rank in placement.ranks] == [16, 16]
    assert lie(placement, "ep") == (8, 1, 8, ())
    assert lie(placement, "edp") == (2, 2, 1, both((0, 8.0)))
    assert lie(placement, "etp") == (1, 1, 1, ())
    wide = place(Layout(tp=2, dp=8, pp=2, ep=8, etp=2), cluster(32, 8))
    assert lie(wide, "etp") == (2, 1, 2, ())
    assert lie(wide, "ep", 1) == (8, 2, 4, both((1, 2.0)))
    assert lie(wide, "edp") == (1, 1, 1, ())


@pytest.mark.parametrize("order", [("tp", "cp", "dp", "pp"), ("tp", "pp", "dp", "cp"), ("pp", "dp", "tp", "cp")])
@pytest.mark.parametrize("per_machine", [2, 4, 3, 8])
def test_expert_groups_folded_are_those_of_every_rank(order: tuple[str, ...], per_machine: int) -> None:
    layout = Layout(tp=2, dp=4, pp=2, ep=4, etp=1, order=order)
    folded = place(layout, cluster(16, per_machine))
    whole = place(layout, cluster(16, per_machine), fold=False)
    for axis in ("etp", "ep", "edp"):
        for rank in range(16):
            assert lie(folded, axis, folded.class_of(rank))[:3] == lie(whole, axis, rank)[:3]
    # the ranks of a stage in mesh order, cut into ep x edp
    stage = [rank for rank in range(16) if layout.coordinate(rank)["pp"] == 0]
    parties = {whole.groups[whole.group("ep", rank)].parties for rank in stage}
    assert parties == {tuple(stage[:4]), tuple(stage[4:])}
