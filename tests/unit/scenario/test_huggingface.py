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
    [(LLAMA3, "llama3-8b"), (GPT2, "gpt2-small"), (BERT, "bert-base"), (T5, "t5-small"), (MISTRAL, "mistral-7b")],
)
def test_a_configuration_counts_like_its_preset(tmp_path: Path, config: dict[str, Any], preset: str) -> None:
    model = load(tmp_path, config)
    row = presets.presets()[preset]
    assert model.parameters() == pytest.approx(row.parameters, rel=1e-3)
    assert (model.name, model.max_positions) == ("some-model", row.sizes.get("max_positions", 0))


@pytest.mark.parametrize(("config", "total"), [(QWEN2, 7_615_616_512), (GEMMA, 8_537_680_896)])
def test_totals_of_released_checkpoints(tmp_path: Path, config: dict[str, Any], total: int) -> None:
    """Qwen/Qwen2-7B has query, key and value biases; google/gemma-7b ties embeddings and has wide heads."""
    assert load(tmp_path, config).parameters() == total


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
        (LLAMA3 | {"model_type": "mixtral", "num_local_experts": 8}, "not modelled yet: mixture of experts"),
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
