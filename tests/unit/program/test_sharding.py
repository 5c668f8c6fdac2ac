"""What is gathered, reduced and freed when: counts of torch 2.13 with 4 blocks and a root, and hybrid sharding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from simtrain.cost.pricing import Pricer
from simtrain.program.demand import Memory, TimeKind
from simtrain.program.lowered import Lowered, Piece, PieceKind, Stream
from simtrain.program.lowering import lower
from simtrain.scenario.hardware import Machine
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Recompute, Scenario, Zero
from simtrain.scenario.tuning import Lora, Offload, Place, Trainable
from simtrain.simulate import simulate
from tests.factories import GPT, TORCH, scenario

K = PieceKind
HOST = Machine("host", "A100-SXM4-80GB", 8, "NVLink3", "InfiniBand-HDR", 8, 64, 1e12)


def fsdp(**changes: Any) -> Any:
    """Four blocks and a root."""
    settings: dict[str, Any] = {"dp": 8, "layers": 4, "wrap_ends": False, "microbatches": 1}
    return scenario(stack=TORCH, zero=Zero.PARAMETERS, **(settings | changes))


def calls(lowered: Lowered, part: Part | None = None) -> Counter[tuple[str, PieceKind]]:
    """Collective calls of the first rank by axis and kind."""
    tasks = lowered.lists[lowered.ranks[0].tasks].tasks
    pieces = [piece for task in tasks for piece in lowered.works[task.work].pieces]
    found: Counter[tuple[str, PieceKind]] = Counter()
    for piece in pieces:
        if piece.axis and (piece.part in (Part.PARAMETER, Part.GRADIENT) if part is None else piece.part is part):
            found[piece.axis, piece.kind] += piece.calls
    return found


def names(lowered: Lowered, stream: Stream) -> list[str]:
    tasks = lowered.lists[lowered.ranks[0].tasks]
    return [lowered.works[task.work].name for task in tasks.tasks if tasks.streams[task.stream] is stream]


@pytest.mark.parametrize(
    ("changes", "first", "later"),
    [
        ({}, 5 + 4, 5 + 4),
        ({"reshard_root": True}, 5 + 5, 5 + 5),
        ({"reshard_after_forward": False}, 5, 5),
        ({"reshard_after_backward": False, "reshard_root": True}, 10, 5),
        ({"wrap_ends": True}, 6 + 4, 6 + 4),
        ({"wrap_blocks": 2}, 3 + 2, 3 + 2),
    ],
    ids=["root kept", "root reshards", "kept after forward", "kept after backward", "ends wrapped", "two a unit"],
)
def test_gathers_of_fsdp2(changes: dict[str, Any], first: int, later: int) -> None:
    """torch 2.13, counted with a logger of dispatched collectives; four microbatches without synchronisation."""
    assert calls(lower(fsdp(**changes)))["dp", K.ALL_GATHER] == first
    four = calls(lower(fsdp(microbatches=4, **changes)))
    assert four["dp", K.ALL_GATHER] == first + 3 * later
    units = {"wrap_ends": 6, "wrap_blocks": 3}.get(next(iter(changes), ""), 5)
    assert four["dp", K.REDUCE_SCATTER] == units, "on the last microbatch alone"


def test_hybrid_sharding_scatters_in_the_group_then_reduces_the_shard_between_groups() -> None:
    lowered = lower(fsdp(dp=16, shard=4))
    found = calls(lowered)
    assert found == {("shard", K.ALL_GATHER): 9, ("shard", K.REDUCE_SCATTER): 5, ("replica", K.ALL_REDUCE): 5}
    scatters, reduces = names(lowered, Stream.REDUCE)[:5], names(lowered, Stream.REPLICA)
    units = ["block 3", "block 2", "block 1", "block 0", "root"]
    assert scatters == [f"reduce_scatter {unit}" for unit in units]
    assert reduces == [f"all_reduce {unit}" for unit in units]
    elements = {work.name: work.pieces[0].elements for work in lowered.works if work.pieces[0].part is Part.GRADIENT}
    assert elements["all_reduce block 0"] == elements["reduce_scatter block 0"] / 4
    spans = {group.axis: (group.size, group.machines) for group in lowered.groups}
    assert (spans["shard"], spans["replica"]) == ((4, 1), (4, 2))


def test_mics_reduces_between_groups_once_a_step() -> None:
    changes = {"dp": 16, "shard": 4, "microbatches": 3, "sync_every_microbatch": True}
    assert calls(lower(fsdp(**changes)))["replica", K.ALL_REDUCE] == 15
    once = calls(lower(fsdp(replica_sync_every_microbatch=False, **changes)))
    assert (once["shard", K.REDUCE_SCATTER], once["replica", K.ALL_REDUCE]) == (15, 5)


@pytest.mark.parametrize("zero", [Zero.OPTIMIZER, Zero.GRADIENTS])
def test_distributed_optimizer_instances(zero: Zero) -> None:
    """Megatron: an instance shards the optimizer; gradients are scattered in it and all-reduced between instances."""
    made = scenario(dp=8, shard=2, zero=zero, layers=4, microbatches=1)
    found = calls(lower(made))
    assert found == {("shard", K.ALL_GATHER): 1, ("shard", K.REDUCE_SCATTER): 1, ("replica", K.ALL_REDUCE): 1}
    step = next(work for work in lower(made).works if work.name == "optimizer").pieces[0]
    whole = next(work for work in lower(scenario(layers=4)).works if work.name == "optimizer").pieces[0]
    assert step.elements == whole.elements / 2
    held = (
        simulate(made).memory.peak(0)[1],
        simulate(scenario(dp=8, zero=zero, layers=4, microbatches=1)).memory.peak(0)[1],
    )
    assert held[0] > held[1], "states of 2 ranks, not of 8"


def test_a_secondary_copy_serves_the_backward_from_nearby_and_takes_its_share_of_memory() -> None:
    """FSDP2's integer ``reshard_after_forward``, ZeRO++'s hpZ."""
    near, plain = fsdp(dp=16, near=8, shard=16), fsdp(dp=16)
    assert calls(lower(near)) == {
        ("dp", K.ALL_GATHER): 5,
        ("secondary", K.ALL_GATHER): 4,
        ("dp", K.REDUCE_SCATTER): 5,
    }
    groups = {group.axis: (group.size, group.machines) for group in lower(near).groups}
    assert (groups["dp"], groups["secondary"]) == ((16, 2), (8, 1))
    block = sum(near.part_parameters(part, 0) for part in (Part.ATTENTION, Part.MLP))
    ends = sum(near.part_parameters(part, -1) for part in (Part.EMBEDDING, Part.HEAD))
    peaks = [max(simulate(made).memory.curves[0][Memory.GATHERED]) for made in (plain, near)]
    assert peaks[0] == pytest.approx(2 * (ends + 2 * block)), "the root, a block and the next, prefetched"
    assert peaks[1] > peaks[0]
    assert peaks[1] <= 2 * (ends + 2 * block + 4 * block / 8)


def test_zero_plus_plus_sends_a_quarter_between_machines() -> None:
    """ZeRO++: 3 M bytes between machines become 0.75 M (Wang et al. 2023): 0.5 forward, 0 backward, 0.25 gradients."""
    from simtrain.scenario.scenario import WireType

    def between(made: Any) -> float:
        table = simulate(made).summary["communication"]
        return sum(row["bytes"] for row in table if row["machines"] > 1)

    shape: dict[str, Any] = {"dp": 16, "layers": 4, "reshard_root": True, "reduce_bytes": 2.0}
    plain = fsdp(**shape)
    better = fsdp(**shape, near=8, shard=16, gather_dtype=WireType.INT8, reduce_dtype=WireType.INT4)
    assert between(better) / between(plain) == pytest.approx(0.25, rel=1e-6)


def test_sequence_parallel_collectives_with_embedding_and_head() -> None:
    """Megatron's recipe: 18 and 18 for 4 blocks. torch's plan gathers twice more and scatters once more (20 and 19)."""
    found = calls(lower(scenario(tp=2, layers=4, microbatches=1, sequence_parallel=True)), Part.ATTENTION)
    whole = Counter(found)
    for part in (Part.MLP, Part.EMBEDDING, Part.HEAD):
        whole += calls(lower(scenario(tp=2, layers=4, microbatches=1, sequence_parallel=True)), part)
    assert (whole["tp", K.ALL_GATHER], whole["tp", K.REDUCE_SCATTER]) == (18, 18)


def test_modules_gather_their_weights_three_times_with_recomputation() -> None:
    """DeepSpeed 2021: forward, recomputation, backward; the last product of a block stays for its backward."""
    made = scenario(
        dp=8, layers=4, microbatches=1, zero=Zero.PARAMETERS, gather_by_module=True, recompute=Recompute.FULL
    )
    found = calls(lower(made))
    assert found["dp", K.ALL_GATHER] == 4 * (4 + 4 + 3) + 2, "four matrices a block, embedding and head"
    assert found["dp", K.REDUCE_SCATTER] == 4 * 4 + 2
    assert simulate(made).memory.curves[0][Memory.GATHERED][-1] == 0.0


def test_collectives_over_lists_hold_up_the_host() -> None:
    made = fsdp(gather_by_module=True, list_collective_ops=2.0, host_seconds_per_op=1e-5)
    result = simulate(made)
    works = result.spans.lowered.works
    times = Counter(task.work for task in result.spans.lowered.lists[0].tasks)
    priced = enumerate(zip(works, result.spans.demands, strict=True))
    spent = sum(times[i] * demand.duration for i, (work, demand) in priced if work.pieces[0].kind is K.DISPATCH)
    assert spent == pytest.approx(sum(calls(lower(made)).values()) * 8 * 2 * 1e-5)


def test_both_copies_of_dualpipe_gather_each_stage_once_and_share_their_gradient_shards() -> None:
    """FSDP2 with hybrid sharding: the mirror reduces what the shard and the replica groups have left of a gradient."""
    changes = {"reshard_after_forward": False, "reshard_after_backward": False, "wrap_ends": True}
    made = fsdp(shard=4, pp=2, schedule="dualpipe", microbatches=4, **changes)
    lowered = lower(made)
    assert any(work.beside for work in lowered.works)
    assert calls(lowered) == {
        ("shard", K.ALL_GATHER): 6,
        ("shard", K.REDUCE_SCATTER): 6,
        ("replica", K.ALL_REDUCE): 6,
        ("mirror", K.ALL_REDUCE): 1,
    }
    mirrored = next(piece for work in lowered.works for piece in work.pieces if piece.axis == "mirror")
    whole = sum(made.part_parameters(part, layer) for stage in (0, 1) for part, layer in made.parts(stage))
    assert mirrored.elements == pytest.approx(whole / 4)
    gathered = simulate(made).memory.curves[0][Memory.GATHERED]
    assert (gathered.max(), gathered[-1]) == (pytest.approx(2 * whole), pytest.approx(0.0))


def test_a_pair_gathers_again_what_its_halves_freed() -> None:
    """Pairs with resharding: four microbatches, two passes, two blocks each."""
    rows = ("0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0F3;0B1)OVERLAP_F_B,0B2,0B3", "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3")
    made = fsdp(pp=2, schedule="grid", grid=rows, microbatches=4)
    assert calls(lower(made))["dp", K.ALL_GATHER] == 4 * 2 * 2 + 4, "and the embedding, which each backward frees"
    assert simulate(made).memory.curves[0][Memory.GATHERED][-1] == pytest.approx(0.0)


def test_experts_shard_inside_a_shard_group() -> None:
    """8 data ranks in two replicas: expert states over 8 / 2 / 2 ranks (torchtitan, HSDP with EP)."""
    changes = {"model": replace(GPT, tied_embeddings=False), "experts": 4, "experts_per_token": 2, "ffn_hidden": 1024}
    made = fsdp(ep=2, etp=1, shard=4, expert_ffn_hidden=1024, **changes)
    assert (made.shards(), made.shards("edp")) == (4, 2)
    found = calls(lower(made))
    assert {key: found[key] for key in found if key[0].startswith("edp")} == {
        ("edp_shard", K.ALL_GATHER): 4 + 4,
        ("edp_shard", K.REDUCE_SCATTER): 4,
        ("edp_replica", K.ALL_REDUCE): 4,
    }
    alone = calls(lower(fsdp(ep=4, etp=1, shard=4, expert_ffn_hidden=1024, **changes)))
    assert {key: alone[key] for key in alone if key[0].startswith("edp")} == {("edp_replica", K.ALL_REDUCE): 4}


def test_dualpipe_hides_the_journeys_of_tokens() -> None:
    """DeepSeek-V3, section 3.2.1: the all-to-all of one direction runs under the compute of the other."""
    mixture = {"experts": 8, "experts_per_token": 2, "expert_ffn_hidden": 4096, "ffn_hidden": 4096, "seq_len": 4096}
    made = scenario(
        pp=4,
        dp=2,
        ep=2,
        etp=1,
        schedule="dualpipe",
        microbatches=16,
        tied_embeddings=False,
        nics_per_machine=1,
        **mixture,
    )
    lowered, demands = lower(made), simulate(made).spans.demands
    pairs = [at for at, work in enumerate(lowered.works) if work.beside]
    assert pairs
    for at in pairs:
        work = lowered.works[at]
        apart = sum(dict(price_pieces(made, run)).get(TimeKind.EP, 0.0) for run in (work.pieces, work.beside))
        assert 0.0 < dict(demands[at].split)[TimeKind.EP] < 0.25 * apart


def price_pieces(made: Scenario, run: tuple[Piece, ...]) -> tuple[tuple[TimeKind, float], ...]:
    """Seconds by kind of a pass that runs alone."""
    return Pricer(made).price(run).split


def test_hybrid_sharding_reduces_adapters_alone_and_hands_them_to_the_host() -> None:
    """The shard of the adapters' gradients leaves once it is reduced between the groups; frozen weights send none."""
    lora = Trainable(lora=Lora(8, 16.0, ("q", "v")))
    made = fsdp(dp=8, shard=4, trainable=lora, offload=Offload(Place.CPU), cp=1)
    made = replace(made, cluster=replace(made.cluster, host=HOST))
    trained = sum(made.trainable_parameters(*part) for part in made.parts(0))
    lowered = lower(made)
    tasks = lowered.lists[lowered.ranks[0].tasks].tasks
    pieces = [lowered.works[task.work].pieces[0] for task in tasks]
    count: Counter[tuple[str, PieceKind]] = Counter()
    for piece in pieces:
        if piece.part is Part.GRADIENT:
            count[piece.axis, piece.kind] += piece.elements
    assert count == {
        ("shard", K.REDUCE_SCATTER): trained,
        ("replica", K.ALL_REDUCE): trained / 4,
        ("dp", K.TO_HOST): trained / 4,
    }
    for task, piece in zip(tasks, pieces, strict=True):
        if piece.kind is K.TO_HOST:
            assert [pieces[dep].axis for dep in task.deps] == ["replica"]
    assert sum(piece.elements for piece in pieces if piece.kind is K.HOST_OPTIMIZER) == trained / 4


def test_frozen_blocks_are_freed_behind_their_forward() -> None:
    """Nothing before the third block is trained, so the first two and the embedding have no backward to wait for."""
    made = fsdp(
        reshard_after_forward=False, wrap_ends=True, trainable=Trainable(frozen=("embedding",), frozen_blocks=2)
    )
    tasks = lower(made).lists[0].tasks
    works = lower(made).works
    freed = [
        (piece.layer, piece.kind, piece.releases)
        for task in tasks
        for piece in works[task.work].pieces
        if piece.releases and piece.layer < 2 and piece.part is not Part.HEAD
    ]
    assert [(layer, kind) for layer, kind, _ in freed] == [(-1, K.FORWARD), (0, K.FORWARD), (1, K.FORWARD)]
