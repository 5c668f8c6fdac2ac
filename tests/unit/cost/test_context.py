"""Bytes, hops and memory of context parallelism on Llama 3 8B, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simtrain.cost.attention import ring_step
from simtrain.cost.collectives import message
from simtrain.cost.compute import Constants, Device
from simtrain.cost.memory import piece_memory
from simtrain.cost.memory.context import transient
from simtrain.cost.pricing import price_piece
from simtrain.program.context import Exchange
from simtrain.program.demand import Memory, TimeKind
from simtrain.program.lowered import Piece, PieceKind, Span
from simtrain.program.recipe import Recipe
from simtrain.scenario.model import Family, Part
from simtrain.scenario.scenario import Attention, ContextKind, Dispatch, Recompute, Scenario
from simtrain.simulate import simulate
from tests.factories import A100, GPT, NVLINK, scenario

K = PieceKind
MIB = 2.0**20
LLAMA = replace(
    GPT, family=Family.LLAMA, layers=2, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn_hidden=14336,
    gated_mlp=True, tied_embeddings=False, max_positions=0, bias=False, rms_norm=True, dropout=False,
)  # fmt: skip
INSIDE = Span(8, 1, 8)


def made(kind: ContextKind = ContextKind.P2P, **changes: Any) -> Scenario:
    """128k tokens over eight ranks: 16,384 each; K and V are 16,384 x 2 x 8 x 128 elements, 64 MiB."""
    defaults: dict[str, Any] = {"seq_len": 131072, "cp": 8, "attention": Attention.FLASH2, "microbatches": 1}
    return scenario(model=LLAMA, cp_kind=kind, **defaults | changes)


def exchanged(held: Scenario, kind: PieceKind, span: Span = INSIDE) -> list[Piece]:
    return [piece for piece in Exchange(held, span).around(Piece(kind, Part.ATTENTION, 0)) if piece.axis]


def sent(held: Scenario, kind: PieceKind, span: Span = INSIDE) -> list[float]:
    return [price_piece(held, piece).wire_bytes for piece in exchanged(held, kind, span)]


def test_a_ring_sends_k_and_v_then_their_gradients_too() -> None:
    """Seven hops of 64 MiB forward; backward 64, six of 128, 64 MiB (Transformer Engine's loop)."""
    assert sent(made(), K.FORWARD) == [7 * 64 * MIB]
    assert sent(made(), K.BACKWARD) == sent(made(), K.INPUT_GRAD) == [14 * 64 * MIB]
    assert exchanged(made(), K.WEIGHT_GRAD) == []


def test_a_gather_sends_the_same_and_reduces_the_gradients() -> None:
    """7/8 of 512 MiB forward; backward again, and a reduce-scatter of as much (Llama 3, section 3.3.2)."""
    kind = ContextKind.ALL_GATHER
    assert sent(made(kind), K.FORWARD) == [448 * MIB]
    assert [piece.kind for piece in exchanged(made(kind), K.BACKWARD)] == [K.ALL_GATHER, K.REDUCE_SCATTER]
    assert sent(made(kind), K.BACKWARD) == [448 * MIB] * 2


def test_ulysses_sends_seven_eighths_of_q_k_v_and_o() -> None:
    """Q and O: 16,384 x 4,096 x 2 byte = 128 MiB. Jacobs 2023, section 3.2: 4 N h / P a layer without grouping."""
    kind = ContextKind.A2A
    assert sent(made(kind), K.FORWARD) == [7 / 8 * 192 * MIB, 7 / 8 * 128 * MIB]
    assert sent(made(kind), K.BACKWARD) == [7 / 8 * 128 * MIB, 7 / 8 * 192 * MIB]
    wide = made(kind, kv_heads=32)
    assert sum(sent(wide, K.FORWARD)) == pytest.approx(7 / 8 * 4 * 131072 * 4096 / 8 * 2)


def test_two_levels_ring_over_groups_of_heads() -> None:
    """Two ranks swap heads on a machine, four machines' groups form rings of 64 MiB a hop."""
    held = made(ContextKind.A2A_P2P, cp_inner=2)
    swap, ring, back = exchanged(held, K.FORWARD, Span(8, 4, 2))
    assert (swap.span, ring.span, back.span) == (Span(2, 1, 2), Span(4, 4, 1), Span(2, 1, 2))
    assert sent(held, K.FORWARD, Span(8, 4, 2)) == [96 * MIB, 3 * 64 * MIB, 64 * MIB]
    assert sent(held, K.BACKWARD, Span(8, 4, 2)) == [128 * MIB, 6 * 64 * MIB, 96 * MIB]
    assert price_piece(held, ring).network_share == pytest.approx(2 / 8)  # two rings leave each machine


def test_tensor_parallelism_divides_what_goes_round() -> None:
    assert sent(made(tp=4), K.FORWARD) == [7 * 16 * MIB]
    assert sent(made(tp=16), K.FORWARD) == [7 * 8 * MIB]  # one key-value head a rank at least


def test_latent_attention_sends_keys_wider_than_values() -> None:
    """DeepSeek-V3: 128 heads with keys of 192 and values of 128 (arXiv 2412.19437, section 4.2), 2,048 tokens a rank:
    a hop carries 2,048 x 128 x 320 x 2 byte = 160 MiB; all-to-all 96 MiB of Q beside it, and 64 MiB of output back.
    """
    widths = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    latent: dict[str, Any] = widths | {"heads": 128, "kv_heads": 128, "seq_len": 16384}
    assert sent(made(**latent), K.FORWARD) == [7 * 160 * MIB]
    pair = made(ContextKind.A2A_P2P, cp_inner=2, **latent)
    assert sent(pair, K.FORWARD) == [(160 + 96) / 2 * MIB, 3 * 160 * MIB, 64 / 2 * MIB]
    assert transient(made(**latent), K.FORWARD) == {Memory.BUFFERS: 8 * 160 * MIB, Memory.WORKSPACE: 8 * 64 * MIB}
    step = ring_step(made(**latent), e=2.0, backward=False, causal=True)
    assert step.executed_flops == 2 * 128 * (192 + 128) * 2048**2 / 2


def test_dispatch_of_tokens_says_nothing_to_an_exchange_of_heads() -> None:
    held = made(ContextKind.A2A, experts=8, experts_per_token=2)
    apart = replace(held, parallelism=replace(held.parallelism, dispatch=Dispatch.DEDUPLICATED))
    (there, _) = exchanged(held, K.FORWARD, Span(8, 2, 4))
    assert price_piece(held, there) == price_piece(apart, there)


def test_a_hop_costs_what_the_core_does_not_hide() -> None:
    (ring,) = exchanged(made(), K.FORWARD)
    assert price_piece(made(), ring).duration == 0.0
    alone = price_piece(made(overlap=False), ring)
    hop = message(64 * MIB, INSIDE, made().cluster).seconds
    assert alone.split == ((TimeKind.CP, pytest.approx(7 * hop)),)
    slow = made(scale_up=replace(NVLINK, bandwidth=1e9))
    device = Device(A100, Constants.of(A100), Attention.FLASH2)
    pairs = 16384**2 / 2
    rate = 0.65 * 312e12 * 8192 / (8192 + 256)  # the factory's constants: a step has 8,192 keys and no mask
    step = 4 * 32 * 128 * pairs / rate + device.constants.gemm_seconds
    exposed = 7 * (message(64 * MIB, INSIDE, slow.cluster).seconds - step)
    assert price_piece(slow, ring).duration == pytest.approx(exposed)


def test_short_sequences_expose_the_ring() -> None:
    """A step's compute falls with the square of the tokens, its message with the tokens, its latency not at all."""
    result = simulate(made(seq_len=2048, layers=4, scale_up=replace(NVLINK, latency=10e-6)))
    assert result.summary["time"]["by_kind"]["context_parallel"] > 0


def test_what_a_core_holds_while_it_runs() -> None:
    """K and V 64 MiB, partial outputs 128 MiB a rank; n = 8."""
    assert transient(made(ContextKind.ALL_GATHER), K.FORWARD) == {Memory.GATHERED: 512 * MIB}
    assert transient(made(ContextKind.ALL_GATHER), K.BACKWARD) == {Memory.GATHERED: 1024 * MIB}
    ring = {Memory.BUFFERS: 512 * MIB, Memory.WORKSPACE: 1024 * MIB}
    assert transient(made(), K.FORWARD) == transient(made(), K.RECOMPUTE) == ring
    assert transient(made(), K.BACKWARD) == {Memory.BUFFERS: 256 * MIB, Memory.WORKSPACE: 0.0}
    assert transient(made(ContextKind.A2A), K.FORWARD) == {Memory.BUFFERS: 192 * MIB}
    _, _, held = piece_memory(made(ContextKind.ALL_GATHER), Piece(K.FORWARD, Part.ATTENTION, 0))
    assert dict(held)[Memory.GATHERED] == 512 * MIB


def test_recomputation_exchanges_again() -> None:
    """Full recomputation runs the core once more; selective that of the core alone."""
    for recompute, times in ((Recompute.NONE, 1), (Recompute.SELECTIVE, 2), (Recompute.FULL, 2)):
        recipe = Recipe(made(recompute=recompute), Span(1, 1, 1), INSIDE)
        assert sum(piece.kind is K.RING for piece in recipe.backward(0)) == times * LLAMA.layers


def test_bytes_are_told_apart_where_a_ring_hides() -> None:
    """In one work with visible tensor-parallel collectives a hidden ring still reports what it sent."""
    held = made(tp=2, sequence_parallel=True)
    table = {row["axis"]: row for row in simulate(held).summary["communication"] if row["kind"] == "ring"}
    assert table["cp"]["bytes"] == pytest.approx(LLAMA.layers * 21 * 32 * MIB)
    assert table["cp"]["exposed_seconds"] == 0.0
