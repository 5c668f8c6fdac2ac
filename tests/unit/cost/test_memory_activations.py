"""Korthikanti 2022 (arXiv 2205.05198) to the byte, and the general rule where the paper's assumptions do not hold."""

from __future__ import annotations

import pytest

from simtrain.cost.memory import activations as act
from simtrain.cost.memory import piece_memory
from simtrain.program.actions import ActionKind
from simtrain.program.demand import Memory
from simtrain.program.lowered import Piece, PieceKind
from simtrain.program.schedules import build
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Attention, Loss, Recompute, Scenario, Zero
from tests.factories import TORCH, scenario

K = PieceKind
S, V = 2048, 51200

KORTHIKANTI = {
    "22B": {"heads": 64, "hidden": 6144, "layers": 48, "pp": 1, "micro_batch": 4},
    "175B": {"heads": 96, "hidden": 12288, "layers": 96, "pp": 8, "virtual_stages": 3, "micro_batch": 1},
    "530B": {"heads": 128, "hidden": 20480, "layers": 105, "pp": 35, "virtual_stages": 3, "micro_batch": 1},
    "1T": {"heads": 160, "hidden": 25600, "layers": 128, "pp": 64, "micro_batch": 1},
}
"""Table 3: all with tensor-parallel size 8, sequence 2048, vocabulary 51,200."""


def published(name: str, **changes: object) -> Scenario:
    row = KORTHIKANTI[name]
    heads, hidden = row["heads"], row["hidden"]
    shape = {"kv_heads": heads, "head_dim": hidden // heads, "ffn_hidden": 4 * hidden}
    return scenario(**{"tp": 8, "seq_len": S, "vocab": V, **shape, **row, **changes})


def kept(case: Scenario, kind: PieceKind, part: Part, layer: int = 0) -> float:
    return sum(count for _, count in piece_memory(case, Piece(kind, part, layer))[0])


def block(case: Scenario) -> float:
    return kept(case, K.FORWARD, Part.ATTENTION) + kept(case, K.FORWARD, Part.MLP)


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_korthikanti_block(name: str) -> None:
    row = KORTHIKANTI[name]
    b, h, a, t = row["micro_batch"], row["hidden"], row["heads"], 8
    sbh, scores = S * b * h, 5 * a * S * S * b
    assert block(published(name, tp=1)) == 34 * sbh + scores  # eq. 1
    assert block(published(name)) == 10 * sbh + (24 * sbh + scores) / t  # eq. 2
    assert block(published(name, sequence_parallel=True)) == (34 * sbh + scores) / t  # eq. 4
    selective = {"recompute": Recompute.SELECTIVE}
    assert block(published(name, sequence_parallel=True, **selective)) == 34 * sbh / t  # eq. 6, a layer
    assert block(published(name, **selective)) == 10 * sbh + 24 * sbh / t  # Table 2, tensor parallel + selective
    full = {"recompute": Recompute.FULL}
    assert block(published(name, **full)) == 2 * sbh  # Table 2, full
    assert block(published(name, sequence_parallel=True, **full)) == 2 * sbh / t


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_korthikanti_parts_and_ends(name: str) -> None:
    row = KORTHIKANTI[name]
    b, h, a, t = row["micro_batch"], row["hidden"], row["heads"], 8
    sbh = S * b * h
    alone = act.sizes(published(name, tp=1))
    assert act.attention(alone) - act.norm(alone) == 11 * sbh + 5 * a * S * S * b
    assert act.mlp(alone) - act.norm(alone) == 19 * sbh
    case = published(name, sequence_parallel=True)
    assert kept(case, K.FORWARD, Part.EMBEDDING, -1) == sbh / t  # section 4.3: dropout mask
    assert kept(case, K.FORWARD, Part.HEAD, -1) == 4 * sbh / t * (1 + V / h)  # section 4.3


@pytest.mark.parametrize(("name", "share"), [("175B", 0.70), ("530B", 0.65)])
def test_selective_saves_what_section_5_says(name: str, share: float) -> None:
    """5 a s / h is 80 and 64, so selective recomputation drops 70 % and 65 % of the activations."""
    sequence, selective = {"sequence_parallel": True}, {"recompute": Recompute.SELECTIVE}
    saved = 1 - block(published(name, **sequence, **selective)) / block(published(name, **sequence))
    assert saved == pytest.approx(share, abs=0.005)


def test_both_techniques_cut_gpt3_fivefold() -> None:
    """Section 6.1, Figure 7: sequence parallelism and selective recomputation together leave under 20 %."""
    both = block(published("175B", sequence_parallel=True, recompute=Recompute.SELECTIVE))
    assert both / block(published("175B")) < 0.2


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_first_stage_of_a_pipeline(name: str) -> None:
    """Section 4.2.3: the first stage holds L layers' worth under 1F1B, times 1 + (p-1)/(pv) interleaved; eq. 5."""
    row = KORTHIKANTI[name]
    p, v, t = row["pp"], row.get("virtual_stages", 1), 8
    case = published(name, sequence_parallel=True)
    schedule = "1f1b" if v == 1 else "interleaved"
    flying = highest = 0
    for action in build(schedule, p, 2 * p, v)[0]:
        flying += 1 if action.kind is ActionKind.FORWARD else -1
        highest = max(highest, flying)
    layers = highest * row["layers"] / (p * v)
    sbh = S * row["micro_batch"] * row["hidden"]
    worth = row["layers"] * (1 + (p - 1) / (p * v) if v > 1 else 1)
    total = worth * (34 * sbh + 5 * row["heads"] * S * S * row["micro_batch"]) / t
    assert layers * block(case) == pytest.approx(total, rel=1e-12)


def test_full_recompute_restores_what_it_dropped() -> None:
    """Workspace and checkpoint together are the block without recomputation; a checkpoint counts once."""
    plain, full = scenario(), scenario(recompute=Recompute.FULL)
    restored = sum(kept(full, K.RECOMPUTE, part) for part in (Part.ATTENTION, Part.MLP))
    assert restored + block(full) == block(plain)
    every = scenario(recompute=Recompute.EVERY, recompute_layers=4)
    assert [kept(every, K.FORWARD, Part.ATTENTION, layer) > 0 for layer in range(8)] == [True, False, False, False] * 2
    some = scenario(recompute=Recompute.BLOCKS, recompute_layers=3)
    inputs = [kept(some, K.FORWARD, Part.ATTENTION, layer) for layer in range(8)]
    assert inputs == [act.boundary(act.sizes(some))] * 3 + [kept(plain, K.FORWARD, Part.ATTENTION)] * 5


def test_fused_attention_has_no_square_term() -> None:
    """Flash attention keeps one fp32 log-sum-exp a row (Dao 2022), so a block grows linearly with the sequence."""
    flash = {"attention": Attention.FLASH2}
    z = act.sizes(scenario(**flash))
    assert act.core(z) == 4 * 16 * S
    assert block(scenario(**flash, seq_len=2 * S)) == 2 * block(scenario(**flash))
    assert block(scenario(seq_len=2 * S)) > 2 * block(scenario())


def test_grouped_heads_gated_mlp_and_rms_norm() -> None:
    """Llama-3 8B a block, bf16, fused: 2 norms x (2 + 2) h, Q and output 2 h each, K and V 2 h / 4 each, 3 x 2 ffn."""
    llama = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 14336, "gated_mlp": True}
    bare = {**llama, "dropout": False, "bias": False, "rms_norm": True, "attention": Attention.FLASH2, "seq_len": S}
    token = 8 * 4096 + 4 * 4096 + 2 * 2 * 1024 + 6 * 14336 + 4 * 32
    assert block(scenario(**bare)) == S * token
    # written out: each norm saves fp32 input and normalised value (6 h, not 2 h), the activated gate is saved as well
    eager = scenario(**bare, fused_norm=False, fused_elementwise=False)
    assert block(eager) == S * (token + 2 * 4 * 4096 + 2 * 14336)
    # eight ranks share eight KV heads, sixteen hold one each all the same
    kv = [act.sizes(scenario(**bare, tp=tp)).key for tp in (1, 8, 16)]
    assert kv == [1024, 128, 128]


def test_softmax_variants() -> None:
    """Bytes a score: fused 2+1+2; without dropout the softmax output is the operand: 2; unfused fp32: 4+1+2, 4+2."""
    cases = [{}, {"dropout": False}, {"fused_softmax": False}, {"fused_softmax": False, "dropout": False}]
    scores = 16 * S * S
    assert [act.core(act.sizes(scenario(**case))) / scores for case in cases] == [5, 2, 7, 6]
    full = {"precision": Precision.FP32}
    assert [act.core(act.sizes(scenario(**full, dropout=drop))) / scores for drop in (True, False)] == [9, 4]


def test_full_precision_doubles_all_but_masks_and_statistics() -> None:
    half = block(scenario(attention=Attention.FLASH2))
    single = block(scenario(attention=Attention.FLASH2, precision=Precision.TF32))
    masks, statistics = 2 * S * 1024, 4 * 16 * S
    assert single - masks - statistics == 2 * (half - masks - statistics)


def test_losses() -> None:
    """Bytes a logit: kept, beside it in forward, beside it in backward."""
    cells = S * V

    def bytes_a_logit(**changes: object) -> tuple[float, float, float]:
        z = act.sizes(scenario(**changes))
        return (
            act.logits(z) / cells,
            act.logits_transient(z, backward=False) / cells,
            act.logits_transient(z, backward=True) / cells,
        )

    assert bytes_a_logit() == (4, 2, 2)  # Megatron, in place
    assert bytes_a_logit(precision=Precision.FP32) == (4, 0, 0)
    assert bytes_a_logit(stack=TORCH) == (4, 6, 8)  # log-softmax and its two gradients, all fp32
    assert bytes_a_logit(stack=TORCH, compiled=True) == (4, 6, 8)  # blocks compiled, not loss
    assert bytes_a_logit(stack=TORCH, loss=Loss.COMPILED) == (2, 0, 2)
    assert bytes_a_logit(stack=TORCH, loss=Loss.COMPILED, fp32_logits=True) == (4, 0, 4)
    assert bytes_a_logit(stack=TORCH, loss=Loss.CHUNKED) == (2, 0, (2 + 4) / 8)  # torchtune: eight chunks


def test_autocast_keeps_fp32_norm_inputs_and_cast_weights() -> None:
    """torch autocast without FSDP: 4-byte residual stream (two norm inputs a block), 2-byte copies of used weights."""
    mixed = scenario(stack=TORCH, dropout=False)
    pure = scenario(stack=TORCH, dropout=False, dp=8, zero=Zero.PARAMETERS)
    weights = sum(mixed.part_parameters(part, 0) for part in (Part.ATTENTION, Part.MLP))
    assert block(mixed) - block(pure) == 2 * 2 * S * 1024 + 2 * weights


def test_activations_are_divided_over_context_ranks() -> None:
    for changes in ({}, {"attention": Attention.FLASH2}):
        assert block(scenario(**changes, cp=4)) == block(scenario(**changes)) / 4


def test_backward_transient_is_gradients_of_activations() -> None:
    """MLP: gradients of output (2 h), of down input and GeLU input (8 h each): 18 s b h bytes."""
    transient = dict(piece_memory(scenario(), Piece(K.BACKWARD, Part.MLP, 0))[2])
    assert transient == {Memory.WORKSPACE: 18 * S * 1024}


def test_operator_level_checkpointing_keeps_attention_and_every_other_product() -> None:
    """torchtitan's "op" policy on Llama-3 8B: block input, q, v, attention (with its fp32 statistics), gate, down."""
    llama = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 14336, "gated_mlp": True}
    bare = {**llama, "dropout": False, "bias": False, "rms_norm": True, "attention": Attention.FLASH2, "seq_len": S}
    op = scenario(**bare, recompute=Recompute.SELECTIVE, selective_ops=True)
    token = 2 * 4096 + 2 * 4096 + 2 * 1024 + 2 * 4096 + 4 * 32 + 2 * 14336 + 2 * 4096
    assert block(op) == S * token
    restored = sum(kept(op, K.RECOMPUTE, part) for part in (Part.ATTENTION, Part.MLP))
    plain = scenario(**bare)
    assert block(op) < block(plain) <= block(op) + restored


def test_repeated_keys_and_values_are_kept_at_full_width() -> None:
    grouped = {"heads": 16, "kv_heads": 4, "head_dim": 64, "attention": Attention.FLASH2}
    extra = block(scenario(**grouped, repeats_kv=True)) - block(scenario(**grouped))
    assert extra == 2 * 2 * S * (16 - 4) * 64
