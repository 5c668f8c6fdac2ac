from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simtrain.errors import InputError
from simtrain.scenario import files, presets
from simtrain.scenario.model import Model

LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "rope_scaling": None,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "n_positions": 1024,
    "vocab_size": 50257,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
T5 = {
    "model_type": "t5",
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "vocab_size": 32128,
}
MISTRAL = LLAMA3 | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "vocab_size": 152064,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "tie_word_embeddings": False,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
GEMMA = {
    "model_type": "gemma",
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "vocab_size": 256000,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "intermediate_size": 24576,
}


MIXTRAL = LLAMA3 | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "sliding_window": None,
    "use_sliding_window": False,
}
SCOUT = {
    "model_type": "llama4",
    "vision_config": {"hidden_size": 1408},
    "text_config": {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 1,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "vocab_size": 202048,
    },
}


def load(tmp_path: Path, config: Any, extra: str = "") -> Model:
    folder = tmp_path / "some-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config, indent=1))
    text = f"""\
cluster: {{machine: DGX-H100, nodes: 1}}
model: {{config: some-model/config.json{extra}}}
training: {{micro_batch: 1, seq_len: 512}}
"""
    (tmp_path / "s.yaml").write_text(text)
    return files.load(tmp_path / "s.yaml").model


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA3, "llama3-8b"),
        (GPT2, "gpt2-small"),
        (BERT, "bert-base"),
        (T5, "t5-small"),
        (MISTRAL, "mistral-7b"),
        (MIXTRAL, "mixtral-8x7b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (SCOUT, "llama4-scout"),
    ],
)
def test_a_configuration_counts_like_its_preset(tmp_path: Path, config: dict[str, Any], preset: str) -> None:
    model = load(tmp_path, config)
    row = presets.presets()[preset]
    assert model.parameters() == pytest.approx(row.parameters, rel=2e-3)
    assert (model.name, model.max_positions) == ("some-model", row.sizes.get("max_positions", 0))


@pytest.mark.parametrize(("config", "total"), [(QWEN2, 7_615_616_512), (GEMMA, 8_537_680_896)])
def test_totals_of_released_checkpoints(tmp_path: Path, config: dict[str, Any], total: int) -> None:
    """Qwen/Qwen2-7B has query, key and value biases; google/gemma-7b ties embeddings and has wide heads."""
    assert load(tmp_path, config).parameters() == total


def test_what_mixtures_of_experts_say_in_words_of_their_own(tmp_path: Path) -> None:
    model = load(tmp_path, DEEPSEEK_V3)
    assert (model.dense_layers, model.experts_shared, model.route_machines, model.kv_lora_rank) == (3, 1, 4, 512)
    assert [model.is_moe(layer) for layer in (0, 2, 3, 60)] == [False, False, True, True]
    assert load(tmp_path, DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1}).route_machines == 0
    scout = load(tmp_path, SCOUT)
    assert (scout.ffn_hidden, scout.expert_ffn_hidden, scout.experts_shared) == (16384, 8192, 1)
    text = SCOUT["text_config"] | {"interleave_moe_layer_step": 2}  # type: ignore[operator]
    maverick = load(tmp_path, SCOUT | {"text_config": text})
    assert [maverick.is_moe(layer) for layer in range(4)] == [False, True, False, True]
    qwen = load(tmp_path, QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 1536})
    assert (qwen.experts_shared, qwen.expert_ffn_hidden) == (2, 768)
    assert load(tmp_path, MIXTRAL).expert_ffn_hidden == 14336


def test_a_window_that_is_off_is_none(tmp_path: Path) -> None:
    assert load(tmp_path, QWEN2).sliding_window == 0
    assert load(tmp_path, MISTRAL).sliding_window == 4096


def test_sizes_beside_the_configuration_win(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA3, ", layers: 2").layers == 2


def test_the_resolved_file_needs_no_configuration(tmp_path: Path) -> None:
    model = load(tmp_path, LLAMA3)
    scenario = files.load(tmp_path / "s.yaml")
    (tmp_path / "some-model" / "config.json").unlink()
    assert files.from_mapping(scenario.document).model == model


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "config.json:1:2: not valid JSON: Expecting property name"),
        ("[1]", "config.json:1:1: must hold a JSON object"),
        ("[" * 100_000, "config.json:1:1: not valid JSON: nested too deeply"),
        ({"model_type": "lama"}, "model_type: 'lama' is not a known architecture (did you mean 'llama'?)"),
        ({}, "model_type: 'None' is not a known architecture"),
        ({"model_type": "llama"}, "model.layers: missing"),
        ({"model_type": [1]}, "model_type: '[1]' is not a known architecture"),
        (LLAMA3 | {"num_hidden_layers": "32"}, "layers: must be a whole number, not '32'"),
        (LLAMA3 | {"num_hidden_layers": -1}, "layers: must be at least 1, not -1"),
        (LLAMA3 | {"model_type": "mixtral"}, "model.experts: missing: the family moe needs the number of experts"),
    ],
)
def test_bad_configurations(tmp_path: Path, config: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, config)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/s.yaml:2:")


def test_a_missing_configuration_and_two_sources(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("cluster: {machine: DGX-H100, nodes: 1}\nmodel: {config: no/config.json}\n")
    with pytest.raises(InputError, match=r"model\.config: .*config\.json: cannot be read: No such file"):
        files.load(tmp_path / "x.yaml")
    with pytest.raises(InputError, match="give a preset or a config, not both"):
        load(tmp_path, LLAMA3, ", preset: gpt2")
