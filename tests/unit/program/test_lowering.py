"""Lowered lists by worked example: which tasks there are, in which order, waiting for what."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from simtrain.program.lowered import Lowered, Part, PieceKind, Stream, Task
from simtrain.program.lowering import lower, pipeline_program
from simtrain.scenario.scenario import Recompute, Scenario, Zero
from tests.factories import TORCH, scenario

K = PieceKind


def tasks_of(lowered: Lowered, rank: int = 0) -> tuple[Task, ...]:
    return lowered.lists[lowered.ranks[rank].tasks].tasks


def names(lowered: Lowered, rank: int = 0, stream: Stream | None = None) -> list[str]:
    streams = lowered.lists[lowered.ranks[rank].tasks].streams
    chosen = [task for task in tasks_of(lowered, rank) if stream in (None, streams[task.stream])]
    return [lowered.works[task.work].name for task in chosen]


def count(lowered: Lowered, kind: PieceKind, part: Part) -> int:
    pieces = [piece for task in tasks_of(lowered) for piece in lowered.works[task.work].pieces]
    return sum((piece.kind, piece.part) == (kind, part) for piece in pieces)


def waits(lowered: Lowered, name: str, nth: int = 0) -> list[str]:
    """Names of what the nth task of a name on rank 0 waits for, besides the order of its stream."""
    tasks = tasks_of(lowered)
    task = [task for task in tasks if lowered.works[task.work].name == name][nth]
    return [lowered.works[tasks[dep].work].name for dep in task.deps]


def held(made: Scenario) -> float:
    return sum(made.part_parameters(part, layer) for part, layer in made.parts(0))


def test_one_device_accumulates_and_updates_once() -> None:
    lowered = lower(scenario(microbatches=3))
    assert names(lowered) == ["F", "B"] * 3 + ["optimizer"]
    assert [task.microbatch for task in lowered.lists[0].tasks] == [0, 0, 1, 1, 2, 2, -1]
    assert not lowered.groups


def test_a_block_has_megatrons_two_all_reduces_forward_and_two_backward() -> None:
    lowered = lower(scenario(tp=2, layers=3, microbatches=1))
    # Shoeybi 2019, Fig. 4: g behind attention and MLP, f in their backward; the head has its loss reduction besides
    assert count(lowered, K.ALL_REDUCE, Part.ATTENTION) == 2 * 3
    assert count(lowered, K.ALL_REDUCE, Part.MLP) == 2 * 3
    assert count(lowered, K.ALL_REDUCE, Part.EMBEDDING) == 1
    assert count(lowered, K.ALL_REDUCE, Part.HEAD) == 2


def test_sequence_parallelism_trades_all_reduce_for_gather_and_scatter() -> None:
    lowered = lower(scenario(tp=2, layers=3, microbatches=1, sequence_parallel=True))
    for part in (Part.ATTENTION, Part.MLP):
        assert count(lowered, K.ALL_REDUCE, part) == 0
        assert count(lowered, K.ALL_GATHER, part) == count(lowered, K.REDUCE_SCATTER, part) == 2 * 3


@pytest.mark.parametrize(
    ("mode", "layers", "expected"),
    [(Recompute.NONE, 0, 0), (Recompute.FULL, 0, 6), (Recompute.BLOCKS, 2, 2), (Recompute.EVERY, 2, 6)],
)
def test_recomputation_repeats_blocks(mode: Recompute, layers: int, expected: int) -> None:
    lowered = lower(scenario(layers=6, microbatches=1, recompute=mode, recompute_layers=layers))
    assert count(lowered, K.RECOMPUTE, Part.ATTENTION) == count(lowered, K.RECOMPUTE, Part.MLP) == expected


def test_selective_recomputation_repeats_the_core_alone() -> None:
    lowered = lower(scenario(layers=6, microbatches=1, recompute=Recompute.SELECTIVE))
    assert count(lowered, K.RECOMPUTE, Part.CORE) == 6
    assert count(lowered, K.RECOMPUTE, Part.MLP) == 0


def test_checkpoint_every_two_recomputes_a_run_before_its_backward() -> None:
    lowered = lower(scenario(layers=4, microbatches=1, recompute=Recompute.EVERY, recompute_layers=2))
    backward = next(work for work in lowered.works if work.name == "B")
    order = [(piece.kind, piece.layer) for piece in backward.pieces if piece.part is Part.MLP]
    again, back = K.RECOMPUTE, K.BACKWARD
    assert order == [(again, 2), (again, 3), (back, 3), (back, 2), (again, 0), (again, 1), (back, 1), (back, 0)]


def test_messages_pair_up_and_block_where_the_stack_blocks() -> None:
    blocking = lower(scenario(pp=2, microbatches=2))
    assert names(blocking, 0, Stream.SEND) == ["send activation"] * 2
    assert names(blocking, 1, Stream.RECV) == ["recv activation"] * 2
    assert waits(blocking, "F", 1) == ["send activation"]
    assert waits(lower(scenario(pp=2, microbatches=2, overlap_p2p=True)), "F", 1) == []


def test_each_direction_of_a_boundary_is_a_channel_of_its_own() -> None:
    lowered = lower(scenario(pp=2, microbatches=2))
    assert [group.parties for group in lowered.groups if group.axis == "pp"] == [(0, 1), (0, 1)]


def test_gradients_reduce_in_buckets_from_the_back() -> None:
    lowered = lower(scenario(dp=4, overlap_grad_reduce=True, bucket_bytes=30e6, reduce_bytes=2.0, microbatches=2))
    reductions = names(lowered, 0, Stream.REDUCE)
    assert reductions == [f"all_reduce bucket {i}" for i in range(len(reductions))]
    assert len(reductions) > 3
    pieces = [piece for work in lowered.works for piece in work.pieces]
    assert sum(piece.elements for piece in pieces if piece.part is Part.GRADIENT) == held(scenario())
    assert waits(lowered, "all_reduce bucket 0") == ["head B"]
    assert names(lowered).count("B") == 1, "the first microbatch stays whole, the second is cut for the buckets"


@pytest.mark.parametrize("sync", [False, True])
def test_without_no_sync_every_microbatch_reduces(sync: bool) -> None:
    lowered = lower(scenario(dp=4, microbatches=3, sync_every_microbatch=sync))
    assert len(names(lowered, 0, Stream.REDUCE)) == (3 if sync else 1)


def test_zero1_scatters_gradients_and_gathers_weights_after_the_step() -> None:
    lowered = lower(scenario(dp=4, zero=Zero.OPTIMIZER))
    assert names(lowered)[-4:] == ["reduce_scatter gradients", "all_reduce norm", "optimizer", "all_gather weights"]
    step = next(work for work in lowered.works if work.name == "optimizer").pieces[0]
    assert step.elements == held(scenario()) / 4


def test_zero1_can_gather_ahead_of_the_first_forward() -> None:
    lowered = lower(scenario(stack=TORCH, dp=4, zero=Zero.OPTIMIZER, layers=2))
    gathers = names(lowered, 0, Stream.GATHER)
    assert gathers == [f"all_gather {unit}" for unit in ("embedding", "block 0", "block 1", "head")]
    assert waits(lowered, "all_gather head") == []


def fsdp(**changes: Any) -> Lowered:
    return lower(scenario(stack=TORCH, dp=8, zero=Zero.PARAMETERS, layers=4, **changes))


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 6 + 4), (False, 6)])
def test_zero3_gathers_in_forward_and_again_in_backward(reshard: bool, gathers: int) -> None:
    lowered = fsdp(microbatches=2, reshard_after_forward=reshard)
    assert len(names(lowered, 0, Stream.GATHER)) == 2 * gathers
    assert Counter(names(lowered, 0, Stream.REDUCE))["reduce_scatter block 0"] == 1


def test_zero3_prefetch_bounds_how_far_gathers_run_ahead() -> None:
    assert waits(fsdp(microbatches=1, prefetch=1), "all_gather block 2") == ["block 0 F"]
    assert waits(fsdp(microbatches=1, overlap=False), "all_gather block 2") == ["block 1 F"]


def test_tied_embeddings_reduce_between_first_and_last_stage() -> None:
    tied = lower(scenario(pp=3, microbatches=3, layers=6))
    assert ["all_reduce tied embedding" in names(tied, rank) for rank in range(3)] == [True, False, True]
    untied = lower(scenario(pp=3, microbatches=3, layers=6, tied_embeddings=False))
    assert not any("all_reduce tied embedding" in names(untied, rank) for rank in range(3))


def test_merging_changes_the_number_of_tasks_and_nothing_else() -> None:
    made = scenario(pp=2, tp=2, microbatches=4)
    merged, cut = lower(made), lower(made, merge=False)
    assert cut.task_count > 5 * merged.task_count
    for rank in range(2):
        computed = [
            [piece for task in tasks_of(low, rank) if not task.stream for piece in low.works[task.work].pieces]
            for low in (merged, cut)
        ]
        assert computed[0] == computed[1]


def test_folding_keeps_the_world() -> None:
    made = scenario(pp=2, tp=2, dp=4, microbatches=4)
    folded, whole = lower(made), lower(made, fold=False)
    assert len(folded.ranks) == 2
    assert sum(rank.multiplicity for rank in folded.ranks) == len(whole.ranks) == 16
    assert len(whole.lists) == 2


def test_program_follows_the_schedule() -> None:
    grid = [" ".join(map(str, actions)) for actions in pipeline_program(scenario(pp=2, microbatches=3))]
    assert grid == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
