"""Bytes a parameter: 16, 18, 20; FSDP's fp32 shards; ZeRO's shares; optimizer rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simtrain.cost.memory import held_parameters, piece_memory, resting, verdict
from simtrain.program.demand import Memory
from simtrain.program.lowered import Piece, PieceKind
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Optimizer, Scenario, Zero
from tests.factories import ADAM, TORCH, scenario

STATES = (Memory.PARAMETERS, Memory.GRADIENTS, Memory.OPTIMIZER)


def per_parameter(case: Scenario) -> tuple[float, ...]:
    """Bytes of parameters, gradients and optimizer, each divided by the number of parameters."""
    held = resting(case, 0)
    return tuple(round(held[category] / held_parameters(case, 0), 9) for category in STATES)


def test_bytes_a_parameter() -> None:
    assert per_parameter(scenario()) == (2, 2, 12)  # 16: Rajbhandari 2020, section 3.1
    assert per_parameter(scenario(grad_bytes=4.0)) == (2, 4, 12)  # 18: fp32 accumulation
    step = dict(piece_memory(scenario(), Piece(PieceKind.OPTIMIZER, Part.PARAMETER, elements=1.0))[2])
    assert step == {Memory.GRADIENTS: 4}  # 20 while the step holds the fp32 copy of 2-byte gradients
    assert piece_memory(scenario(grad_bytes=4.0), Piece(PieceKind.OPTIMIZER, Part.PARAMETER, elements=1.0))[2] == ()
    for precision in (Precision.FP32, Precision.TF32):
        assert per_parameter(scenario(precision=precision)) == (4, 4, 8)


def test_fsdp_holds_fp32_shards() -> None:
    case = scenario(stack=TORCH, dp=8, zero=Zero.PARAMETERS, sync_every_microbatch=True)
    assert per_parameter(case) == (4 / 8, 4 / 8, 8 / 8)
    gather = piece_memory(case, Piece(PieceKind.ALL_GATHER, Part.PARAMETER, axis="dp", elements=100.0))
    assert gather == (((Memory.GATHERED, 200.0),), (), ())
    single = scenario(stack=TORCH, dp=8, zero=Zero.PARAMETERS, precision=Precision.FP32)
    assert piece_memory(single, Piece(PieceKind.ALL_GATHER, Part.PARAMETER, elements=1.0))[0][0][1] == 4


@pytest.mark.parametrize(
    ("zero", "gigabytes"), [(Zero.NONE, 120), (Zero.OPTIMIZER, 31.4), (Zero.GRADIENTS, 16.6), (Zero.PARAMETERS, 1.88)]
)
def test_rajbhandari_figure_1(zero: Zero, gigabytes: float) -> None:
    """ZeRO, Figure 1 and Table 1: 7.5B parameters on 64 ranks."""
    case = scenario(dp=64, zero=zero, sync_every_microbatch=True)
    held = resting(case, 0)
    states = sum(held[category] for category in STATES)
    assert 7.5 * states / held_parameters(case, 0) == pytest.approx(gigabytes, rel=0.005)


def test_states_are_sharded_over_all_replicas() -> None:
    """Context ranks hold the same parameters, so they share the shards (Megatron's dp-cp group)."""
    alike = (scenario(dp=8, cp=1, zero=Zero.OPTIMIZER), scenario(dp=2, cp=4, zero=Zero.OPTIMIZER))
    assert len({per_parameter(case) for case in alike}) == 1


def test_accumulation_without_sync_keeps_unsharded_gradients() -> None:
    """ZeRO-2 with no-sync: the whole gradient stays between microbatches, and the shard beside it."""
    sharded = scenario(dp=8, zero=Zero.GRADIENTS, sync_every_microbatch=True)
    whole = scenario(dp=8, zero=Zero.GRADIENTS)
    assert per_parameter(sharded)[1] == 2 / 8
    assert per_parameter(whole)[1] == 2 + 2 / 8
    assert per_parameter(scenario(dp=8, zero=Zero.GRADIENTS, microbatches=1))[1] == 2 / 8


def test_gradients_set_to_none_appear_in_backward() -> None:
    """PyTorch with one microbatch: none at rest; DDP allocates them in backward, the optimizer's step ends them."""
    case = scenario(stack=TORCH, microbatches=1, dp=4)
    assert per_parameter(case)[1] == 0
    keeps, _, _ = piece_memory(case, Piece(PieceKind.BACKWARD, Part.MLP, 0))
    assert dict(keeps)[Memory.GRADIENTS] == 4 * case.part_parameters(Part.MLP, 0)
    assert per_parameter(scenario(stack=TORCH, microbatches=2, dp=4))[1] == 4


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (ADAM, 12),
        (Optimizer("sgd", 0.0, 4.0, 16.0, 0.0), 4),
        (Optimizer("adam-8bit", 2.0, 4.0, 18.0, 0.0), 6),
        (Optimizer("lion", 4.0, 4.0, 22.0, 0.0), 8),
        (Optimizer("adam-bf16", 4.0, 0.0, 14.0, 0.0), 4),
    ],
)
def test_optimizer_rows(optimizer: Optimizer, state: float) -> None:
    assert per_parameter(scenario(optimizer=optimizer))[2] == state
    assert per_parameter(scenario(optimizer=optimizer, precision=Precision.FP32))[2] == optimizer.state_bytes


def test_tied_embedding_lives_on_first_and_last_rank() -> None:
    tied, free = scenario(pp=4), scenario(pp=4, tied_embeddings=False)
    assert [held_parameters(tied, rank) for rank in range(4)] == [held_parameters(free, rank) for rank in range(4)]
    table = 51200 * 1024
    alone = scenario()
    assert held_parameters(scenario(tied_embeddings=False), 0) - held_parameters(alone, 0) == table
    assert sum(held_parameters(tied, rank) for rank in range(4)) - held_parameters(alone, 0) == table


def test_interleaved_rank_holds_all_its_stages() -> None:
    spread = scenario(pp=2, virtual_stages=2, stage_layers=(1, 2, 2, 3))
    plain = scenario(pp=2, stage_layers=(3, 5))
    assert [held_parameters(spread, rank) for rank in (0, 1)] == [held_parameters(plain, rank) for rank in (0, 1)]


def test_bucket_is_held_where_gradients_are_cast_for_the_wire() -> None:
    cast = {"grad_bytes": 4.0, "reduce_bytes": 2.0}
    assert resting(scenario(dp=4, **cast), 0)[Memory.BUFFERS] == 40e6
    assert resting(scenario(dp=1, **cast), 0)[Memory.BUFFERS] == 0
    assert resting(scenario(dp=4), 0)[Memory.BUFFERS] == 0  # in place
    assert resting(scenario(dp=4, zero=Zero.GRADIENTS), 0)[Memory.BUFFERS] == 40e6  # scattered from a bucket
    small = scenario(dp=4, **cast, bucket_bytes=1e12)
    assert resting(small, 0)[Memory.BUFFERS] == 2 * held_parameters(small, 0)


def test_verdict_leaves_room_for_reserve_and_runtime() -> None:
    peak = {Memory.ACTIVATIONS: 60.0, Memory.PARAMETERS: 10.0, Memory.RUNTIME: 5.0, Memory.LOGITS: 0.0}
    found = verdict(peak, capacity=92.5, reserve_fraction=0.25)
    assert found.by_category[Memory.RESERVE] == 17.5  # a quarter of what the allocator gave, not of the runtime
    assert Memory.LOGITS not in found.by_category
    assert (found.needed, found.margin, found.fits) == (92.5, 0, True)
    too_much = verdict(peak, capacity=92.0, reserve_fraction=0.25)
    assert (too_much.margin, too_much.fits) == (-0.5, False)


def test_runtime_is_the_stacks() -> None:
    case = scenario()
    assert resting(replace(case, stack=replace(case.stack, runtime_bytes=2e9)), 0)[Memory.RUNTIME] == 2e9


def test_communicators_of_the_groups_of_a_rank() -> None:
    """NVIDIA/nccl issue 964: 544 MiB a pair, 688 MiB a larger group; one group of all ranks beside the smaller ones."""
    pair, group = 544 * 2**20, 688 * 2**20
    assert resting(scenario(), 0)[Memory.RUNTIME] == 0
    assert resting(scenario(dp=8), 0)[Memory.RUNTIME] == group  # the data-parallel group is all ranks
    assert resting(scenario(dp=4, tp=2), 0)[Memory.RUNTIME] == 2 * group + pair
    case = scenario(dp=4, tp=2, pp=4)  # all, tp, dp, pp, embedding (tied), model
    assert resting(case, 0)[Memory.RUNTIME] == 4 * group + 2 * pair


def test_gradients_by_precision() -> None:
    """DeepSpeed: fp16 gradients reduce as they are; bf16 ones are added to fp32 and stay beside it."""
    deepspeed = {"grad_bytes": 4.0, "fp16_grad_bytes": 2.0, "grad_copy_bytes": 2.0}
    stack = scenario(**deepspeed).stack
    assert per_parameter(scenario(stack=stack.at(Precision.BF16)))[1] == 6
    assert per_parameter(scenario(stack=stack.at(Precision.FP16), precision=Precision.FP16))[1] == 2


def test_held_bucket() -> None:
    held = scenario(dp=4, zero=Zero.OPTIMIZER, keeps_buckets=True)
    assert resting(held, 0)[Memory.BUFFERS] == 40e6
    assert resting(scenario(dp=4, keeps_buckets=True), 0)[Memory.BUFFERS] == 0  # no ZeRO, no bucket of its own
