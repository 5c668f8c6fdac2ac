from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simtrain.errors import InputError
from simtrain.scenario import files, presets
from simtrain.scenario.model import Family, Model, Part
from simtrain.scenario.models import base, model
from simtrain.scenario.problems import Problems
from simtrain.scenario.schema import ModelSpec

PARTS = (Part.ATTENTION, Part.CROSS_ATTENTION)


def preset(name: str) -> Model:
    spec, problems = ModelSpec(preset=name), Problems([])
    sizes, length = base(spec, problems)
    found, _ = model(spec, sizes, length, problems)
    assert found is not None
    return found


@pytest.mark.parametrize("name", sorted(presets.presets()))
def test_parameters_as_published(name: str) -> None:
    """Within 0.5 %, or within the last digit that the source prints (1.7 B says 1.65 to 1.75 B)."""
    row = presets.presets()[name]
    assert abs(preset(name).parameters() - row.parameters) <= max(0.005 * row.parameters, row.last_digit / 2)
    assert row.last_digit <= 0.1 * row.parameters, "a total of one digit checks nothing"


@pytest.mark.parametrize("name", sorted(name for name, row in presets.presets().items() if row.active))
def test_active_parameters_as_published(name: str) -> None:
    """To the last printed digit, cut or rounded; some makers leave the input embedding out (a look-up, no product)."""
    model, active = preset(name), presets.presets()[name].active
    assert active is not None
    published, digit = active
    embedding = model.vocab * model.hidden
    errors = [abs(found - published) for found in (model.active_parameters(), model.active_parameters() - embedding)]
    assert min(errors) <= max(0.005 * published, digit)


def test_the_named_presets_are_there() -> None:
    wanted = [
        "gpt2-small",
        "gpt2-medium",
        "gpt2-large",
        "gpt2-xl",
        "gpt3-125m",
        "gpt3-1.3b",
        "gpt3-175b",
        "megatron-1.7b",
        "megatron-22b",
        "megatron-1008b",
        "llama1-7b",
        "llama1-65b",
        "llama2-7b",
        "llama2-70b",
        "llama3-8b",
        "llama3-70b",
        "llama3.1-405b",
        "mistral-7b",
        "bert-base",
        "bert-large",
        "t5-small",
        "t5-base",
        "t5-large",
        "t5-3b",
        "t5-11b",
        "mixtral-8x7b",
        "mixtral-8x22b",
        "deepseek-v2",
        "deepseek-v2-lite",
        "deepseek-v3",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "llama4-scout",
        "llama4-maverick",
    ]
    assert set(wanted) <= set(presets.presets())


def whole(one: Model, tp: int) -> float:
    """Parameters of all parts on one tensor rank."""
    parts = ((part, layer) for layer in range(one.layers) for part in (*PARTS, *one.mlp_parts(layer)))
    blocks = sum(one.part_parameters(part, layer, tp) for part, layer in parts)
    return blocks + one.part_parameters(Part.EMBEDDING, -1, tp) + one.part_parameters(Part.HEAD, -1, tp)


@pytest.mark.parametrize("name", ["gpt2-small", "llama2-70b", "bert-base", "t5-small", "mixtral-8x7b", "deepseek-v3"])
def test_the_parts_add_up_to_the_model(name: str) -> None:
    assert whole(replace(preset(name), vocab_multiple=1), 1) == preset(name).parameters()


@pytest.mark.parametrize(
    ("name", "replicated"),
    [
        ("gpt2-small", 1024 * 768 + 12 * (2 * 768 + 2 * 2 * 768) + 2 * 768),
        ("llama2-70b", 80 * 2 * 8192 + 8192),
        ("t5-small", (6 * 2 + 6 * 3 + 2) * 512),
    ],
)
def test_tensor_ranks_share_matrices_and_repeat_the_rest(name: str, replicated: int) -> None:
    """Each of four ranks repeats positions, norms and the biases of row-parallel layers, and a quarter of all else."""
    one = replace(preset(name), vocab_multiple=1, vocab=32000)
    assert 4 * whole(one, 4) == one.parameters() + 3 * replicated


def test_one_gpt_block_by_hand() -> None:
    """h 4, 2 heads, ffn 16: attention 3x16+12 + 16+4 + norm 8; MLP 64+16 + 64+4 + norm 8; halves on two ranks."""
    one = replace(preset("gpt2-small"), hidden=4, heads=2, kv_heads=2, head_dim=2, ffn_hidden=16)
    assert one.part_parameters(Part.ATTENTION, 0, 1) == 60 + 20 + 8
    assert one.part_parameters(Part.MLP, 0, 1) == 80 + 68 + 8
    assert one.part_parameters(Part.ATTENTION, 0, 2) == 30 + 8 + 4 + 8
    assert one.part_parameters(Part.MLP, 0, 2) == 40 + 32 + 4 + 8
    assert one.part_parameters(Part.CROSS_ATTENTION, 0, 1) == 0


def test_key_value_heads_are_repeated_where_they_do_not_suffice() -> None:
    one = preset("llama2-70b")
    eight, sixteen = (one.part_parameters(Part.ATTENTION, 0, tp) for tp in (8, 16))
    key = 2 * one.hidden * one.head_dim
    assert eight - sixteen == pytest.approx(2 * one.hidden * one.hidden / 16)
    assert sixteen == 2 * one.hidden * one.hidden / 16 + key + one.hidden


def test_tied_head_holds_its_norm_alone() -> None:
    one = preset("gpt2-small")
    assert one.part_parameters(Part.HEAD, -1, 1) == 2 * one.hidden
    untied = replace(one, tied_embeddings=False)
    assert untied.part_parameters(Part.HEAD, -1, 1) == 2 * one.hidden + one.padded_vocab(1) * one.hidden
    assert untied.parameters() - one.parameters() == one.vocab * one.hidden


def test_vocabulary_is_padded_as_frameworks_do() -> None:
    one = preset("gpt3-175b")
    assert (one.padded_vocab(1), one.padded_vocab(8)) == (50304, 51200)
    assert one.part_parameters(Part.EMBEDDING, -1, 8) == 51200 / 8 * one.hidden + 2048 * one.hidden


def test_t5_keeps_relative_positions_in_two_blocks_and_a_norm_behind_the_encoder() -> None:
    one = preset("t5-small")
    bias = [one.part_parameters(Part.ATTENTION, layer, 1) for layer in range(12)]
    assert [layer for layer in range(12) if bias[layer] > min(bias)] == [0, 6]
    assert max(bias) - min(bias) == 32 * 8
    mlp = [one.part_parameters(Part.MLP, layer, 1) for layer in range(12)]
    assert [layer for layer in range(12) if mlp[layer] > min(mlp)] == [5]
    assert [one.part_parameters(Part.CROSS_ATTENTION, layer, 1) > 0 for layer in (0, 5, 6, 11)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("part", [Part.CORE, Part.BOUNDARY, Part.GRADIENT, Part.PARAMETER, Part.NORM])
def test_other_parts_hold_nothing(part: Part) -> None:
    with pytest.raises(ValueError, match="holds no parameters"):
        preset("gpt2-small").part_parameters(part, 0, 1)


def inline(**sizes: object) -> Model:
    return files.from_mapping(
        {"cluster": {"machine": "DGX-A100", "nodes": 1}, "model": sizes, "training": {"micro_batch": 1, "seq_len": 512}}
    ).model


def test_family_defaults() -> None:
    common = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1000}
    llama, bert, t5 = (inline(family=family, **common) for family in ("llama", "bert", "t5"))
    assert (llama.ffn_hidden, llama.gated_mlp, llama.tied_embeddings, llama.max_positions) == (1536, True, False, 0)
    assert (bert.encoder_layers, bert.token_types, bert.max_positions, bert.bias) == (4, 2, 512, True)
    assert (t5.encoder_layers, t5.rms_norm, t5.max_positions, t5.family) == (2, True, 0, Family.T5)


def test_llama_feed_forward_rule_gives_the_published_size() -> None:
    assert inline(family="llama", layers=1, hidden=4096, heads=32, vocab=32000).ffn_hidden == 11008


def test_a_bad_preset_row_names_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("presets:\n  x: {family: gpt, layers: 1, parameters: many, seq_len: 1, source: us}\n")
    with pytest.raises(InputError, match=r"own\.yaml:2:3: x: bad preset row: not a number of parameters: 'many'"):
        presets.read_presets(path)
