from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simtrain.cost.layers import Pass, Shapes, ops
from simtrain.cost.ops import FusedAttention, MatMul, Sweep
from simtrain.cost.pricing import Pricer, price, price_piece
from simtrain.program.demand import TimeKind
from simtrain.program.lowered import Piece, PieceKind, Span
from simtrain.program.lowering import lower
from simtrain.program.recipe import Recipe
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import BlockKind, Family, Part
from simtrain.scenario.scenario import Attention, Scenario, Zero
from tests.factories import GPT, MEGATRON, TORCH, scenario

INSIDE = Span(8, 1, 8)
F, B, R = PieceKind.FORWARD, PieceKind.BACKWARD, PieceKind.RECOMPUTE


def seconds(held: Scenario, *pieces: Piece) -> float:
    return Pricer(held).price(pieces).duration


def products(held: Scenario, which: Pass, part: Part) -> list[tuple[int, int, int, int]]:
    found = ops(Shapes.of(held), which, part, BlockKind.DECODER)
    return [(op.batch, op.m, op.n, op.k) for op in found if isinstance(op, MatMul)]


def test_the_products_of_a_layer_have_their_own_shapes() -> None:
    held = scenario(tp=2, micro_batch=4)
    tokens, h = 4 * 2048, 1024
    assert products(held, Pass.FORWARD, Part.MLP) == [(1, tokens, 2048, h), (1, tokens, h, 2048)]
    assert products(held, Pass.INPUT_GRAD, Part.MLP) == [(1, tokens, h, 2048), (1, tokens, 2048, h)]
    assert products(held, Pass.WEIGHT_GRAD, Part.MLP) == [(1, 2048, h, tokens), (1, h, 2048, tokens)]
    core = products(held, Pass.FORWARD, Part.CORE)
    assert core == [(4 * 8, 2048, 2048, 64), (4 * 8, 2048, 64, 2048)]
    assert len(products(held, Pass.INPUT_GRAD, Part.CORE)) == 4


def test_layer_flops_equal_narayanan() -> None:
    """SC21, appendix: forward of a layer is 24 b s h^2 (1 + s / 6h), the logits 2 b s h V."""
    held = scenario(micro_batch=2)
    pieces = [Piece(F, Part.ATTENTION, 0), Piece(F, Part.MLP, 0)]
    b, s, h = 2, 2048, 1024
    assert Pricer(held).price(pieces).flops == pytest.approx(24 * b * s * h**2 * (1 + s / (6 * h)))
    assert price_piece(held, Piece(F, Part.HEAD)).flops == pytest.approx(2 * b * s * h * 51200)
    assert price_piece(held, Piece(B, Part.MLP, 0)).flops == 2 * price_piece(held, Piece(F, Part.MLP, 0)).flops


def test_unfused_core_moves_its_scores() -> None:
    """fp16 scores with dropout: write 2, softmax read half of 2 and write 2, dropout 2 + 2 + 1, read 2."""
    held = scenario(stack=replace(MEGATRON, fused_softmax=True))
    found = ops(Shapes.of(held), Pass.FORWARD, Part.CORE, BlockKind.DECODER)
    scores = 16 * 2048.0**2
    assert sum(op.hbm_bytes for op in found if isinstance(op, Sweep) and op.scores) == scores * (3 + 5)
    assert sum(op.hbm_bytes for op in found if isinstance(op, MatMul)) == scores * 4 + 4 * 16 * 2048 * 64 * 2


def test_flash_attention_never_writes_scores_and_counts_by_convention() -> None:
    held = scenario(attention=Attention.FLASH2)
    (forward,) = ops(Shapes.of(held), Pass.FORWARD, Part.CORE, BlockKind.DECODER)
    assert isinstance(forward, FusedAttention)
    assert forward.hbm_bytes < 16 * 2048.0**2
    assert forward.flops == 4 * 2048.0**2 * 1024 == 2 * forward.executed_flops


def test_forward_and_input_and_weight_gradient_make_a_backward() -> None:
    held = scenario()
    for part in (Part.ATTENTION, Part.MLP, Part.HEAD):
        halves = [price_piece(held, Piece(kind, part, 0)) for kind in (PieceKind.INPUT_GRAD, PieceKind.WEIGHT_GRAD)]
        whole = price_piece(held, Piece(B, part, 0))
        assert sum(half.duration for half in halves) == pytest.approx(whole.duration)


def test_recomputation_is_a_forward_by_another_name() -> None:
    held = scenario()
    forward, again = (price_piece(held, Piece(kind, Part.MLP, 0)) for kind in (F, R))
    assert forward.split == ((TimeKind.COMPUTE, forward.duration),)
    assert again.split == ((TimeKind.RECOMPUTE, forward.duration),)


def test_a_unit_is_never_shorter_than_its_launches() -> None:
    held = scenario(seq_len=16, host_seconds_per_op=1e-3)
    demand = price_piece(held, Piece(F, Part.MLP, 0))
    assert demand.duration == pytest.approx(5e-3)  # norm, two products, activation, residual
    assert dict(demand.split)[TimeKind.HOST] > 0.9 * demand.duration


def test_fusion_is_never_slower() -> None:
    plain = replace(MEGATRON, fused_softmax=False, fused_elementwise=False, fused_norm=False, fused_linear_bias=False)
    for model in (GPT, replace(GPT, family=Family.LLAMA, gated_mlp=True, rms_norm=True, bias=False, max_positions=0)):
        for part in (Part.ATTENTION, Part.MLP, Part.HEAD):
            for kind in (F, B):
                piece = Piece(kind, part, 0)
                fused, unfused = (seconds(scenario(model=model, stack=stack), piece) for stack in (MEGATRON, plain))
                compiled = seconds(scenario(model=model, stack=replace(MEGATRON, compiled=True)), piece)
                assert compiled <= fused <= unfused


def test_accumulating_in_the_epilogue_saves_a_pass() -> None:
    piece = Piece(B, Part.MLP, 0)
    inside, behind = (
        seconds(scenario(fused_grad_accumulation=fused, grad_buffer=True, grad_bytes=4.0), piece)
        for fused in (True, False)
    )
    bare = seconds(scenario(microbatches=1, grad_bytes=4.0), piece)
    assert bare < inside < behind


def test_sequence_parallelism_splits_norm_and_residual() -> None:
    split, whole = (scenario(tp=8, sequence_parallel=flag) for flag in (True, False))
    assert seconds(split, Piece(F, Part.MLP, 0)) < seconds(whole, Piece(F, Part.MLP, 0))
    assert price_piece(split, Piece(F, Part.MLP, 0)).flops == price_piece(whole, Piece(F, Part.MLP, 0)).flops
    gathering = dict(price_piece(split, Piece(B, Part.MLP, 0)).split)
    serial = dict(
        price_piece(replace(split, parallelism=replace(split.parallelism, overlap=False)), Piece(B, Part.MLP, 0)).split
    )
    assert 0 < gathering[TimeKind.TP] < serial[TimeKind.TP]


def test_backward_reduction_hides_behind_the_weight_gradient() -> None:
    piece = Piece(PieceKind.ALL_REDUCE, Part.MLP, 0, axis="tp", span=INSIDE, backward=True)
    wide: dict[str, Any] = {"tp": 8, "hidden": 8192, "ffn_hidden": 32768, "heads": 64, "head_dim": 128, "kv_heads": 64}
    exposed, hidden = (price_piece(scenario(overlap_tp_backward=flag, **wide), piece) for flag in (False, True))
    assert 0 < hidden.duration < 0.5 * exposed.duration
    assert hidden.wire_bytes == exposed.wire_bytes == pytest.approx(2 * 7 / 8 * 2048 * 8192 * 2)
    forward = price_piece(scenario(overlap_tp_backward=True, **wide), piece._replace(backward=False))
    assert forward.duration == exposed.duration


def test_the_loss_reduces_three_small_tensors() -> None:
    held = scenario(tp=8)
    small = price_piece(held, Piece(PieceKind.ALL_REDUCE, Part.HEAD, axis="tp", span=INSIDE))
    assert small.wire_bytes == pytest.approx(3 * 2 * 7 / 8 * 2048 * 4)


@pytest.mark.parametrize("split", [False, True])
def test_a_scattered_message_carries_its_share_and_is_gathered(split: bool) -> None:
    held = scenario(tp=8, pp=2, scatter_gather_p2p=split)
    send, receive = (
        price_piece(held, Piece(kind, Part.BOUNDARY, 4, axis="pp", span=Span(2, 2, 1)))
        for kind in (PieceKind.SEND, PieceKind.RECV)
    )
    assert send.wire_bytes == 2048 * 1024 * 2 / (8 if split else 1)
    assert receive.duration == send.duration
    assert send.network_share == pytest.approx(1 / 8)


def test_gradients_and_parameters_travel_in_their_own_formats() -> None:
    held = scenario(stack=TORCH, dp=8, zero=Zero.PARAMETERS)
    kinds = {(PieceKind.ALL_GATHER, Part.PARAMETER): 2.0, (PieceKind.REDUCE_SCATTER, Part.GRADIENT): 4.0}
    for (kind, part), width in kinds.items():
        demand = price_piece(held, Piece(kind, part, 0, axis="dp", elements=1e9, span=INSIDE))
        assert demand.wire_bytes == pytest.approx(7 / 8 * 1e9 * width)
        assert demand.hbm_bytes > demand.wire_bytes * 2


def test_optimizer_bytes() -> None:
    """30 B of the row; gradient copied to fp32 6, norm 4, clipping 8, and for fp16 8 of unscaling."""
    step = Piece(PieceKind.OPTIMIZER, Part.PARAMETER, elements=1e9)
    bf16, fp16 = (price_piece(scenario(precision=p), step) for p in (Precision.BF16, Precision.FP16))
    assert (bf16.hbm_bytes, fp16.hbm_bytes) == (48e9, 56e9)
    assert price_piece(scenario(stack=TORCH), step).hbm_bytes == 36e9  # no low-precision copy, no copy of the gradient
    assert bf16.split[0][0] is TimeKind.OPTIMIZER


def test_merged_works_cost_the_sum_of_their_pieces() -> None:
    held = scenario(tp=8, pp=2, dp=2, sequence_parallel=True)
    lowered = lower(held)
    for work, demand in zip(lowered.works, price(lowered, held), strict=True):
        parts = [price_piece(held, piece) for piece in work.pieces]
        assert demand.duration == pytest.approx(sum(part.duration for part in parts), rel=1e-12)
        assert demand.duration == pytest.approx(sum(span for _, span in demand.split), rel=1e-12)
        assert demand.flops == sum(part.flops for part in parts)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pair_hides_the_communication_of_each_under_the_compute_of_the_other(overlap: bool) -> None:
    """Compute adds up; a collective costs the compute beside it the compute units that it holds."""
    held = scenario(tp=2, overlap=overlap)
    reduce = Piece(PieceKind.ALL_REDUCE, Part.MLP, 0, axis="tp", span=Span(2, 1, 2))
    forward, backward = (Piece(F, Part.MLP, 0), reduce), (Piece(B, Part.MLP, 1), reduce._replace(backward=True))
    pricer = Pricer(held)
    apart = [dict(pricer.price(pieces).split) for pieces in (forward, backward)]
    woven = pricer.price(forward, backward)
    split, holds = dict(woven.split), pricer.price((reduce,)).sm_share
    assert all(one[TimeKind.TP] < two[TimeKind.COMPUTE] for one, two in (apart, apart[::-1]))
    assert split[TimeKind.COMPUTE] == pytest.approx(sum(one[TimeKind.COMPUTE] for one in apart))
    both = sum(one[TimeKind.TP] for one in apart)
    assert split[TimeKind.TP] == pytest.approx(both * holds / (1 - holds) if overlap else both)
    assert woven.duration == pytest.approx(sum(split.values()))
    assert woven.wire_bytes == 2 * pricer.price((reduce,)).wire_bytes


def test_of_a_pair_what_is_longer_than_the_compute_beside_it_is_exposed() -> None:
    held = scenario(tp=2)
    reduce = Piece(PieceKind.ALL_REDUCE, Part.MLP, 0, axis="tp", span=Span(2, 1, 2))
    pricer = Pricer(held)
    one = pricer.price((reduce,))
    compute = pricer.price((Piece(B, Part.MLP, 1),)).duration
    many = 3 + int(compute / one.duration)
    woven = dict(pricer.price((reduce,) * many, (Piece(B, Part.MLP, 1),)).split)
    slowed = compute * one.sm_share / (1 - one.sm_share)
    assert woven[TimeKind.TP] == pytest.approx(many * one.duration - compute + slowed)


def test_a_split_backward_has_no_weight_gradient_beside_its_reduction() -> None:
    held = scenario(tp=8, overlap_tp_backward=True)
    whole, split = (Recipe(held, INSIDE).backward(0, kind) for kind in (B, PieceKind.INPUT_GRAD))
    exposed = [
        sum(seconds for piece in pieces for kind, seconds in price_piece(held, piece).split if kind is TimeKind.TP)
        for pieces in (whole, split)
    ]
    assert exposed[0] < exposed[1]
    plain = scenario(tp=8)
    assert exposed[1] == pytest.approx(
        sum(s for piece in split for kind, s in price_piece(plain, piece).split if kind is TimeKind.TP)
    )
