"""Adapters, frozen parts, optimizer rows: bytes, FLOPs and counts against the papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simtrain.cost.flops import model_flops, tuned_flops
from simtrain.cost.memory import activations as act
from simtrain.cost.memory import inputs, piece_memory, resting, states
from simtrain.cost.newton_schulz import block, iteration
from simtrain.cost.ops import MatMul
from simtrain.cost.pricing import Pricer, price_piece
from simtrain.program.demand import Memory, TimeKind
from simtrain.program.lowered import Piece, PieceKind
from simtrain.scenario.files import load
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import Family, Model, Part
from simtrain.scenario.scenario import Attention, Optimizer, Scenario, Zero
from simtrain.scenario.tables import load_tables, shipped
from simtrain.scenario.tuning import BaseFormat, Fp8, Fp8Kernels, Fp8Recipe, Lora, Trainable
from simtrain.simulate import simulate
from tests.factories import GPT, TORCH, scenario

LLAMA2_7B = Model("llama2-7b", Family.LLAMA, 32, 4096, 32, 32, 128, 11008, True, 32000, False, 0, False, True, False)
LLAMA3_8B = replace(LLAMA2_7B, name="llama3-8b", kv_heads=8, ffn_hidden=14336, vocab=128256)
GPT3 = replace(GPT, layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn_hidden=49152)
LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
B, F = PieceKind.BACKWARD, PieceKind.FORWARD


def adapted(model: Model, rank: int, targets: tuple[str, ...], base: BaseFormat = BaseFormat.BF16) -> Scenario:
    trainable = Trainable(lora=Lora(rank, 2.0 * rank, targets, base))
    return scenario(model=model, stack=replace(TORCH, low_precision=True), trainable=trainable)


@pytest.mark.parametrize(
    ("model", "rank", "targets", "count"),
    [
        (GPT3, 1, ("q", "v"), 4_718_592),  # Hu 2021, Table 4: 4.7 M
        (GPT3, 8, ("q", "v"), 37_748_736),  # and 37.7 M
        (GPT3, 4, ("q", "v"), 18_874_368),  # section 7.1: the 18 M budget
        (LLAMA2_7B, 8, ("q", "v"), 4_194_304),  # what PEFT prints for its default targets
        (LLAMA3_8B, 8, ("q", "v"), 3_407_872),
        (LLAMA2_7B, 64, LINEAR, 159_907_840),  # QLoRA's 7B: every linear layer
    ],
)
def test_trainable_counts(model: Model, rank: int, targets: tuple[str, ...], count: int) -> None:
    made = adapted(model, rank, targets)
    assert states.trained_parameters(made, 0) == count
    split = replace(made, parallelism=replace(made.parallelism, layout=replace(made.parallelism.layout, tp=2)))
    assert count / 2 < states.trained_parameters(split, 0) < count  # one factor of each adapter is not split


def test_four_bit_weights_take_four_bits_and_their_scales() -> None:
    """Dettmers 2023, section 3: 0.5 bit of scale a weight, 0.127 after the second quantisation."""
    assert 8 * states.BASE_BYTES[BaseFormat.NF4] == 4.5
    assert 8 * states.BASE_BYTES[BaseFormat.NF4_DOUBLE] == pytest.approx(4.127, abs=5e-4)
    held = resting(adapted(LLAMA2_7B, 8, ("q", "v"), BaseFormat.NF4_DOUBLE), 0)
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = LLAMA2_7B.parameters() - linear
    padded = (LLAMA2_7B.padded_vocab(1) - 32000) * 2 * 4096
    assert held[Memory.PARAMETERS] == pytest.approx(linear * 4.127 / 8 + 2 * (rest + padded + 4_194_304), rel=1e-4)


def test_qlora_trains_65b_in_48_gigabytes() -> None:
    """Dettmers 2023, abstract: a 65B model on a single 48 GB GPU."""
    model = replace(LLAMA2_7B, layers=80, hidden=8192, heads=64, kv_heads=64, ffn_hidden=22016)
    made = load(shipped("scenarios/finetune/llama31-70b-qlora-a100.yaml"))
    lora = Lora(64, 16.0, LINEAR, BaseFormat.NF4_DOUBLE)
    training = replace(made.training, seq_len=512, trainable=Trainable(lora=lora), global_batch=1)
    result = simulate(replace(made, model=model, training=training))
    assert 34e9 < result.summary["memory"]["by_category"]["parameters"] < 38e9
    assert result.summary["memory"]["peak_bytes"] < 48e9
    full = replace(training, trainable=Trainable())
    assert simulate(replace(made, model=model, training=full)).summary["memory"]["peak_bytes"] > 500e9


def test_frozen_weights_have_no_gradient_no_state_and_no_weight_products() -> None:
    frozen = scenario(model=LLAMA3_8B, attention=Attention.FLASH2, trainable=Trainable(lora=Lora(8, 16.0, ("q", "v"))))
    whole = scenario(model=LLAMA3_8B, attention=Attention.FLASH2)
    piece = Piece(B, Part.MLP, 3)
    assert price_piece(frozen, piece).flops == price_piece(frozen, piece._replace(kind=F)).flops
    assert price_piece(whole, piece).flops == 2 * price_piece(frozen, piece).flops
    held = resting(frozen, 0)
    assert held[Memory.GRADIENTS] == 2 * 3_407_872
    assert held[Memory.OPTIMIZER] == 12 * 3_407_872
    assert model_flops(frozen) == pytest.approx(2 / 3 * model_flops(whole), rel=0.05)


def test_adapters_add_six_flops_a_parameter_and_token() -> None:
    one, none = (adapted(LLAMA3_8B, 8, targets) for targets in (("q", "v"), ()))
    added = sum(
        price_piece(one, Piece(kind, Part.ATTENTION, 0)).flops - price_piece(none, Piece(kind, Part.ATTENTION, 0)).flops
        for kind in (F, B)
    )
    assert added == 6 * 2048 * one.adapter_parameters(Part.ATTENTION, 0)


def test_four_bit_weights_are_expanded_for_every_product() -> None:
    plain, packed = (adapted(LLAMA3_8B, 8, ("q",), base) for base in (BaseFormat.BF16, BaseFormat.NF4))
    for kind in (F, B):
        piece = Piece(kind, Part.MLP, 0)
        more = price_piece(packed, piece).hbm_bytes - price_piece(plain, piece).hbm_bytes
        assert more == pytest.approx(3 * 4096 * 14336 * (0.5625 + 2))
        assert price_piece(packed, piece).duration > price_piece(plain, piece).duration


def test_inputs_of_frozen_layers_are_not_saved() -> None:
    made = adapted(LLAMA3_8B, 8, ("q", "v"))
    z = act.sizes(made)
    low_rank = 2 * 2 * 2048 * 8
    assert inputs.change(made, z, Part.ATTENTION, 0) == low_rank  # q and v read the norm's output, o's is attention's
    assert inputs.change(made, z, Part.MLP, 0) == -2 * 2048 * (4096 + 14336)
    assert inputs.change(made, z, Part.HEAD, -1) == -2 * 2048 * 4096
    assert inputs.change(scenario(model=LLAMA3_8B), z, Part.MLP, 0) == 0


def test_no_gradient_passes_below_the_first_trained_part() -> None:
    made = scenario(trainable=Trainable(frozen=("embedding", "head"), frozen_blocks=3))
    assert not made.has_backward(Part.MLP, 2)
    assert made.has_backward(Part.ATTENTION, 3)
    assert made.has_backward(Part.HEAD, -1)
    assert dict(piece_memory(made, Piece(F, Part.MLP, 2))[0]).get(Memory.ACTIVATIONS, 0) == 0
    works = simulate(made).spans.lowered.works
    back = {piece.layer for work in works for piece in work.pieces if piece.kind is B}
    assert back == {-1, 3, 4, 5, 6, 7}


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("adamw", 8),
        ("adamw-unfused", 8),
        ("adamw-foreach", 8),
        ("adamw-8bit", 2),
        ("sgd", 0),
        ("sgd-momentum", 4),
        ("lion", 4),
        ("lamb", 8),
        ("adafactor", 0.01),
    ],
)
def test_state_bytes_of_the_rows(name: str, state: float) -> None:
    """Moments of 4 bytes (8-bit ones of 1) and the master copy; all 16 bit halves the moments and drops the copy."""
    row = load_tables().optimizers[name]
    part = (Part.MLP, 0)
    count = scenario().part_parameters(*part)
    assert states.state_bytes(scenario(optimizer=row), *part) == count * (state + 4)
    assert states.state_bytes(scenario(optimizer=row, stack=TORCH), *part) == count * state
    narrow = scenario(optimizer=row, stack=replace(TORCH, low_precision=True))
    assert states.state_bytes(narrow, *part) == count * (state if name == "adamw-8bit" else state / 2)


def test_muon_keeps_one_moment_of_matrices_and_two_of_the_rest() -> None:
    row = load_tables().optimizers["muon"]
    made = scenario(optimizer=row, stack=TORCH)
    matrices, all_ = 8 * 1024**2, made.part_parameters(Part.MLP, 0)
    assert states.state_bytes(made, Part.MLP, 0) == 4 * matrices + 8 * (all_ - matrices)
    assert states.state_bytes(made, Part.EMBEDDING, -1) == 8 * made.part_parameters(Part.EMBEDDING, -1)


def test_newton_schulz_flops() -> None:
    """Jordan 2024: an iteration on [n, m] takes 4 n^2 m + 2 n^3, at most 6 n^2 m, whichever side is given first."""
    n, m = 1024, 4096
    for rows, columns in ((n, m), (m, n)):
        flops = sum(op.flops for op in iteration(rows, columns, Precision.BF16))
        assert flops == 4 * n**2 * m + 2 * n**3
    whole = sum(op.flops for op in block(GPT, 5, Precision.BF16))
    assert whole == 5 * (4 * 6 * n**3 + 2 * (4 * n**2 * m + 2 * n**3))


def test_muon_step_costs_its_products() -> None:
    muon, adam = (scenario(optimizer=load_tables().optimizers[name]) for name in ("muon", "adamw"))
    count = float(muon.model.parameters())
    piece = Piece(PieceKind.OPTIMIZER, Part.PARAMETER, elements=count)
    orthogonal = price_piece(muon, piece)
    assert orthogonal.flops == pytest.approx(8 * sum(op.flops for op in block(GPT, 5, Precision.BF16)))
    assert price_piece(muon, piece._replace(elements=count / 4)).flops == pytest.approx(orthogonal.flops / 4)
    assert orthogonal.duration > price_piece(adam, piece).duration
    assert price_piece(adam, piece).flops == 0


def test_the_slower_forms_of_adam_cost_passes_launches_and_lists() -> None:
    rows = load_tables().optimizers
    piece = Piece(PieceKind.OPTIMIZER, Part.PARAMETER, elements=1e8)
    fused, foreach, loop = (
        scenario(optimizer=rows[name], host_seconds_per_op=7e-6) for name in ("adamw", "adamw-foreach", "adamw-unfused")
    )
    seconds = [price_piece(one, piece).duration for one in (fused, foreach, loop)]
    assert seconds == sorted(seconds)
    lists = dict(piece_memory(foreach, piece)[2])
    assert lists[Memory.WORKSPACE] == 4e8  # torch.optim: about the size of the parameters more
    assert Memory.WORKSPACE not in dict(piece_memory(fused, piece)[2])


def test_sixteen_bit_states_halve_the_traffic_of_the_step() -> None:
    row = Optimizer("adam", 8.0, 4.0, 34.0, 0.0)
    piece = Piece(PieceKind.OPTIMIZER, Part.PARAMETER, elements=1e9)
    wide, narrow = (scenario(optimizer=row, stack=replace(TORCH, low_precision=flag)) for flag in (False, True))
    clip = 12e9
    assert price_piece(wide, piece).hbm_bytes - clip == 28e9
    assert price_piece(narrow, piece).hbm_bytes - clip == 14e9


def test_optimizer_in_backward_holds_one_unit_of_gradients() -> None:
    plain = scenario(stack=TORCH, microbatches=1)
    early = replace(plain, training=replace(plain.training, optimizer_in_backward=True))
    behind, within = simulate(plain), simulate(early)
    unit = 4 * max(early.part_parameters(Part.EMBEDDING, -1), early.part_parameters(Part.MLP, 0) * 1.5)
    assert within.memory.curves[0][Memory.GRADIENTS].max() <= 1.01 * unit
    assert behind.memory.curves[0][Memory.GRADIENTS].max() == 4 * states.held_parameters(plain, 0)
    steps = _spread(within, PieceKind.OPTIMIZER)
    assert sum(steps) == states.held_parameters(early, 0)
    assert len(steps) == 10  # embedding, eight blocks, head
    assert within.summary["time"]["by_kind"][TimeKind.OPTIMIZER] > 0


def _spread(result: object, kind: PieceKind) -> list[float]:
    lowered = result.spans.lowered  # type: ignore[attr-defined]
    works = [lowered.works[task.work] for task in lowered.lists[0].tasks]
    return [piece.elements for work in works for piece in work.pieces if piece.kind is kind]


def test_sharded_units_step_as_their_reductions_end() -> None:
    made = scenario(stack=TORCH, microbatches=1, dp=4, zero=Zero.PARAMETERS, optimizer_in_backward=True)
    result = simulate(made)
    assert sum(_spread(result, PieceKind.OPTIMIZER)) == pytest.approx(states.held_parameters(made, 0) / 4)
    whole = 2 * states.held_parameters(made, 0)  # in 16 bit before any is reduced; the embedding is a third of it
    assert result.memory.curves[0][Memory.GRADIENTS].max() < 0.6 * whole


MIXTURE = {"experts": 8, "experts_per_token": 2, "expert_ffn_hidden": 512, "experts_shared": 1, "dense_layers": 1}
MIXTURE |= {"gated_mlp": True, "bias": False, "tied_embeddings": False, "vocab": 51200, "dropout": False}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}


@pytest.mark.parametrize("latent", [{}, LATENT, LATENT | {"q_lora_rank": 0}])
def test_linear_layers_of_mixtures_and_of_latent_attention(latent: dict[str, int]) -> None:
    """All parameters of a block but norms and router are its linear layers'; their FLOPs count one by one as well."""
    made = scenario(**MIXTURE, **latent, rms_norm=True, max_positions=0, dp=8, ep=4)
    model, norms = made.model, 1024 + sum(latent.get(key, 0) for key in ("kv_lora_rank", "q_lora_rank"))
    counts = {part: made.part_parameters(part, 3) for part in (Part.ATTENTION, Part.ROUTER, Part.EXPERTS)}
    assert states.linear_elements(made, Part.ATTENTION) == counts[Part.ATTENTION] - norms
    assert states.linear_elements(made, Part.ROUTER) == counts[Part.ROUTER] - 1024 - 8 * 1024
    assert states.linear_elements(made, Part.EXPERTS) == counts[Part.EXPERTS] == 2 * 3 * 1024 * 512
    assert made.tokens * tuned_flops(made) == pytest.approx(model_flops(made))
    assert model.is_moe(3)


def test_adapters_on_every_expert() -> None:
    """r (in + out) a linear layer of each of a rank's experts; their products are grouped as the experts' are."""
    plain = scenario(**MIXTURE, dp=8, ep=4)
    made = replace(plain, training=replace(plain.training, trainable=Trainable(lora=Lora(8, 16.0, ("up",)))))
    assert made.trainable_parameters(Part.EXPERTS, 3) == 2 * 8 * (1024 + 512)
    assert made.trainable_parameters(Part.ROUTER, 3) == 8 * (1024 + 512)
    forward = Piece(F, Part.EXPERTS, 3)
    added = price_piece(made, forward).flops - price_piece(plain, forward).flops
    assert added == pytest.approx(2 * 2048 * 2 * 8 * (1024 + 512))  # two experts a token


def test_fp8_reaches_the_experts() -> None:
    """Grouped products run in fp8 (DeepSeek-V3, 3.3.1), their saved inputs are a byte each; not the router's."""
    plain = scenario(**MIXTURE, dp=8, ep=4)
    accelerator = replace(plain.cluster.accelerator, matrix_peak={Precision.BF16: 312e12, Precision.FP8: 624e12})
    made = replace(
        plain,
        training=replace(plain.training, precision=Precision.FP8, fp8=Fp8(Fp8Recipe.DELAYED)),
        stack=replace(plain.stack, fp8=Fp8Kernels.TRANSFORMER_ENGINE),
        cluster=replace(plain.cluster, accelerator=accelerator),
    )
    z = act.sizes(made)
    assert inputs.change(made, z, Part.EXPERTS, 3) == -z.expert_rows * (1024 + 512)
    assert inputs.change(made, z, Part.ROUTER, 3) == z.tokens * 1024 - z.tokens * 512  # beside the router's own copy
    ops = [op for op in Pricer(made).ops(Piece(F, Part.EXPERTS, 3)) if isinstance(op, MatMul)]
    assert {op.precision for op in ops} == {Precision.FP8}
    assert {op.batch for op in ops} == {2}


def test_newton_schulz_of_experts_is_one_batch() -> None:
    model = scenario(**MIXTURE).model
    found = [op for op in block(model, 5, Precision.BF16, moe=True) if isinstance(op, MatMul)]
    assert sum(op.batch for op in found if op.batch > 1) == 3 * 3 * 5 * 8
