"""Experts: the worked examples of papers, closed forms of all-to-all, and conservation of FLOPs and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simtrain.cost import experts
from simtrain.cost.collectives import all_to_all
from simtrain.cost.compute import Constants, gemm_seconds
from simtrain.cost.flops import block_flops, latent_matrices, model_flops
from simtrain.cost.layers import Pass, Shapes, ops
from simtrain.cost.memory import activations as act
from simtrain.cost.memory import held_parameters, resting
from simtrain.cost.ops import FusedAttention, MatMul
from simtrain.cost.pricing import price_piece
from simtrain.program.demand import Memory, TimeKind
from simtrain.program.lowered import Piece, PieceKind, Span
from simtrain.program.recipe import Recipe
from simtrain.scenario.files import load
from simtrain.scenario.hardware import Cluster, Link
from simtrain.scenario.model import BlockKind, Part
from simtrain.scenario.scenario import Dispatch, Scenario, Zero
from simtrain.scenario.tables import load_tables, shipped
from simtrain.simulate import simulate
from tests.factories import A100, scenario
from tests.unit.cost.test_flops import executed

PLAIN = Link("plain", 100e9, 0.5, 1e-6, base_latency=5e-6)
NIC = Link("nic", 10e9, 1.0, 4e-6)
CLUSTER = Cluster(A100, 64, 8, PLAIN, NIC, 8)
MIXTURE: dict[str, Any] = {
    "experts": 16,
    "experts_per_token": 2,
    "expert_ffn_hidden": 1536,
    "gated_mlp": True,
    "bias": False,
    "dropout": False,
}
LATENT = {"kv_lora_rank": 256, "q_lora_rank": 384, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}


def mixture(**changes: Any) -> Scenario:
    return scenario(**MIXTURE | {"sequence_parallel": changes.get("tp", 1) > 1} | changes)


def test_all_to_all_inside_is_one_burst_of_all_but_the_own_share() -> None:
    cost = all_to_all(8e9, Span(8, 1, 8), CLUSTER)
    assert cost.seconds == pytest.approx(5e-6 + 1e-6 + 7e9 / 50e9)
    assert cost.wire_bytes == 7e9
    assert cost.network_share == 0.0


def test_all_to_all_across_ends_with_the_slower_level() -> None:
    # 16 ranks on 2 machines: half of the payload crosses, each rank through a NIC of its own
    cost = all_to_all(16e9, Span(16, 2, 8), CLUSTER)
    assert cost.seconds == pytest.approx(4e-6 + 8e9 / 10e9)
    assert cost.wire_bytes == 15e9
    assert cost.network_share == 1.0
    fast = replace(CLUSTER, scale_out=replace(NIC, bandwidth=1000e9))
    assert all_to_all(16e9, Span(16, 2, 8), fast).seconds == pytest.approx(1e-6 + 7e9 / 50e9)
    assert all_to_all(16e9, Span(16, 2, 8), fast).network_share < 0.1
    assert all_to_all(1e9, Span(1, 1, 1), CLUSTER).seconds == 0.0


def test_tokens_that_travel_once_a_machine_load_the_nics_less() -> None:
    cost = all_to_all(16e9, Span(16, 2, 8), CLUSTER, between=2e9)
    assert cost.seconds == pytest.approx(max(4e-6 + 2e9 / 10e9, 1e-6 + 14e9 / 50e9))
    assert cost.wire_bytes == 16e9


def test_all_to_all_as_measured() -> None:
    """Rate of rows a rank sends: AWS p5en, 2 machines, 1 GiB: 91 GB/s (nccl-tests). DeepEP README, EP 8 x 2 on CX7:
    90 GB/s of logical bandwidth, so half of it on the wire.
    """
    machine = load_tables([]).networks["ib_ndr"]
    cluster = replace(CLUSTER, scale_up=load_tables([]).networks["nvswitch_gen3"], scale_out=machine)
    size = 2.0**30
    assert size / all_to_all(size, Span(16, 2, 8), cluster).seconds == pytest.approx(91e9, rel=0.15)
    tokens = 8192 * 7168 * 1.0
    cost = all_to_all(8 * tokens, Span(16, 2, 8), cluster, between=tokens / 2 * 2)
    assert 2 * tokens / cost.seconds == pytest.approx(90e9, rel=0.2)


def test_machines_of_a_token() -> None:
    """Two machines, two experts: both on one with probability 1/2, so 1.5; DeepSeek-V3: at most 4 (section 2.1.2)."""
    assert experts.machines_of_a_token(2, 2, 0) == 1.5
    assert experts.machines_of_a_token(8, 8, 4) == 4.0
    assert experts.machines_of_a_token(8, 1, 0) == pytest.approx(1.0)


def test_rows_add_up_over_the_ranks() -> None:
    """Every token meets its k experts once, however they are spread."""
    for tp, dp, ep, etp in [(1, 8, 8, 1), (2, 4, 8, 1), (2, 4, 2, 2), (4, 2, 1, 4), (1, 8, 4, 1)]:
        made = mixture(tp=tp, dp=dp, ep=ep, etp=etp)
        local, rows = experts.expert_rows(made)
        assert local * rows * 8 / etp == 2048 * dp * 2
        assert local == 16 // ep


def test_dispatch_bytes() -> None:
    made = mixture(dp=8, ep=8)
    sent = experts.payload(made, Piece(PieceKind.ALL_TO_ALL, Part.EXPERTS, axis="ep"), 2.0)
    assert sent == 2048 * 2 * 1024 * 2  # tokens x k x hidden x bytes
    gathered = experts.payload(made, Piece(PieceKind.ALL_GATHER, Part.EXPERTS, axis="ep"), 2.0)
    assert gathered == 8 * 2048 * 1024 * 2  # every token of the group on every rank
    shared = mixture(tp=2, dp=4, ep=4, etp=2)
    assert experts.payload(shared, Piece(PieceKind.ALL_GATHER, Part.EXPERTS, axis="etp"), 2.0) == sent


def test_journeys_of_a_block() -> None:
    """Megatron core's dispatchers: over ep, gather over etp, experts, scatter over etp, over ep."""
    ep, etp = Span(4, 1, 4), Span(2, 1, 2)
    made = mixture(tp=2, dp=4, ep=4, etp=2)
    pieces = [
        p
        for p in Recipe(made, Span(2, 1, 2), expert=ep, expert_tensor=etp).forward(0)
        if p.layer == 3 and p.part is Part.EXPERTS
    ]
    K = PieceKind
    assert [p.kind for p in pieces] == [K.ALL_TO_ALL, K.ALL_GATHER, K.FORWARD, K.REDUCE_SCATTER, K.ALL_TO_ALL]
    gathers = replace(made, parallelism=replace(made.parallelism, dispatch=Dispatch.ALLGATHER))
    pieces = [
        p for p in Recipe(gathers, Span(2, 1, 2), expert=ep).backward(0) if p.layer == 3 and p.part is Part.EXPERTS
    ]
    assert [p.kind for p in pieces] == [K.ALL_GATHER, K.BACKWARD, K.REDUCE_SCATTER]
    demand = price_piece(made, Piece(K.ALL_TO_ALL, Part.EXPERTS, 3, axis="ep", span=ep))
    assert dict(demand.split).keys() == {TimeKind.EP}


@pytest.mark.parametrize("latent", [{}, LATENT])
@pytest.mark.parametrize("layout", [{"dp": 8, "ep": 8}, {"tp": 2, "dp": 4, "ep": 2, "etp": 2}, {"tp": 2, "dp": 2}])
def test_the_hardware_runs_the_active_flops(layout: dict[str, int], latent: dict[str, int]) -> None:
    made = mixture(**layout, **latent, experts_shared=1, dense_layers=1, moe_every=2)
    assert executed(made) == pytest.approx(model_flops(made), rel=1e-12)
    skewed = replace(made, training=replace(made.training, imbalance=1.5))
    assert executed(skewed) == pytest.approx(model_flops(made), rel=1e-3)  # longer on one rank, not more in all


def test_padding_to_capacity_is_executed() -> None:
    made = mixture(dp=8, ep=8)
    padded = replace(made, training=replace(made.training, capacity_factor=1.25))
    routed = 3 * made.tokens * 8 * 2 * 3 * 2.0 * 1024 * 1536
    assert executed(padded) - model_flops(made) == pytest.approx(0.25 * routed, rel=1e-9)


def test_active_flops_of_deepseek_v3() -> None:
    """Forward products of a token are twice the active parameters, less norms and input embedding, plus scores."""
    model = load(shipped("scenarios/moe/deepseek-v3-2048xh800.yaml")).model
    matrices = sum(block_flops(model, layer, 0) for layer in range(61)) / 2 + model.hidden * model.vocab
    assert matrices == pytest.approx(model.active_parameters() - model.hidden * model.vocab, rel=1e-4)
    # DeepSeek-V2, section 2.1: q 7168 x 1536 and 1536 x 128 x 192, kv 7168 x 576 and 512 x 128 x 256, o 16384 x 7168
    assert latent_matrices(model) == 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 16384 * 7168


def test_tiles_of_all_experts_share_waves() -> None:
    """Few rows an expert: a tile is mostly empty, and 32 small products take the waves of one tall one or more."""
    constants = Constants.of(A100)
    few = gemm_seconds((32, 32, 1024, 1024), 312e12, 108, constants)
    tall = gemm_seconds((1, 32 * 32, 1024, 1024), 312e12, 108, constants)
    one = gemm_seconds((1, 32, 1024, 1024), 312e12, 108, constants)
    assert tall < few < 32 * one


def test_efficiency_rises_with_the_rows_of_an_expert() -> None:
    def rate(experts_: int) -> float:
        made = mixture(experts=experts_, micro_batch=1)
        demand = price_piece(made, Piece(PieceKind.FORWARD, Part.EXPERTS, 0))
        return demand.flops / demand.duration

    rates = [rate(number) for number in (8, 32, 128)]
    assert rates == sorted(rates, reverse=True)


def test_the_most_loaded_rank_sets_the_pace() -> None:
    made = mixture(dp=8, ep=8)
    piece = Piece(PieceKind.FORWARD, Part.EXPERTS, 0)
    even = price_piece(made, piece)
    skewed = price_piece(replace(made, training=replace(made.training, imbalance=2.0)), piece)
    assert 1.5 < skewed.duration / even.duration < 2.1
    assert skewed.flops == pytest.approx(even.flops)
    capped = replace(made, training=replace(made.training, imbalance=2.0, capacity_factor=1.0))
    assert price_piece(capped, piece).duration == even.duration


def test_drawn_imbalance() -> None:
    even = mixture(dp=8, ep=8)
    drawn = [
        experts.imbalance(replace(even, seed=seed, training=replace(even.training, imbalance_sigma=sigma)))
        for seed, sigma in [(0, 0.1), (0, 0.5), (1, 0.5)]
    ]
    assert 1.0 < drawn[0] < drawn[1] != drawn[2]
    assert experts.imbalance(even) == 1.0
    # z of the largest of n draws: with one expert a rank and sigma -> 0, 1 + sigma x 1.424 for n = 8 (order statistics)
    mean = experts.drawn_imbalance(experts=8, ep=8, sigma=0.01, layers=20_000, seed=0)
    assert mean == pytest.approx(1 + 0.01 * 1.4236, abs=2e-4)


def test_latent_attention_scores_over_one_width_and_sums_over_another() -> None:
    made = mixture(attention="flash2", **LATENT)
    found = ops(Shapes.of(made), Pass.FORWARD, Part.ATTENTION, BlockKind.DECODER)
    (core,) = (op for op in found if isinstance(op, FusedAttention))
    assert core.flops == 2 * 16 * 2048 * 2048 * (96 + 64)
    widths = {op.n for op in found if isinstance(op, MatMul)}
    assert widths == {384, 16 * 96, 256 + 32, 16 * (64 + 64), 1024}


def test_the_summary_says_how_experts_are_spread() -> None:
    found = simulate(load(shipped("scenarios/moe/qwen3-30b-a3b-16xh100.yaml"))).summary["experts"]
    assert found["active_parameters"] == pytest.approx(3.3e9, rel=0.02)
    assert (found["ep"], found["copies"], found["experts_per_rank"]) == (8, 1, 16)
    assert 1.0 < found["imbalance"] < 1.5
    assert found["rows_per_expert"] == pytest.approx(4096 * 8 / 16 * found["imbalance"], abs=1)


def test_experts_are_held_and_sharded_over_their_own_copies() -> None:
    """Optimizer bytes: dense parameters over dp x cp, experts over tp x cp x dp / (etp x ep) (Megatron core)."""
    made = mixture(tp=2, dp=8, ep=4, etp=1, zero=Zero.OPTIMIZER)
    dense, routed = (held_parameters(made, 0, axis) for axis in ("dp", "edp"))
    assert routed == 8 * 16 / 4 * 3 * 1024 * 1536
    assert made.copies("edp") == 4
    state = resting(made, 0)
    assert state[Memory.OPTIMIZER] == pytest.approx(12 * (dense / 8 + routed / 4))
    assert state[Memory.PARAMETERS] == 2 * (dense + routed)


def test_activations_of_experts_by_hand() -> None:
    """Bytes a token with k = 2: rows in and out (2 h each), gate, up and product, all 2 bytes; the norm's input and the
    router's cost once, logits and scores in fp32.
    """
    z = act.sizes(mixture(dp=8, ep=8, attention="flash2"))
    assert act.routed_experts(z) == 2048 * 2 * 2 * (1024 + 3 * 1536 + 1024)
    assert act.router(z) == 2048 * (2 * 2 * 1024 + 16 * 9 + 2 * 12)
    padded = act.sizes(mixture(dp=8, ep=8, capacity_factor=2.0, attention="flash2"))
    assert act.routed_experts(padded) == 2048 * 2 * 2 * (2 * (1024 + 3 * 1536) + 1024)
