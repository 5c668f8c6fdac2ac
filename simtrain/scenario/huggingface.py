"""Hugging Face ``config.json`` -> sizes of a model, by plain reading of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simtrain.errors import InputError, Problem, did_you_mean
from simtrain.scenario.yamltext import read_text

ALIASES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "d_kv"),
    "ffn_hidden": ("intermediate_size", "n_inner", "d_ff"),
    "vocab": ("vocab_size",),
    "tied_embeddings": ("tie_word_embeddings",),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "token_types": ("type_vocab_size",),
    "sliding_window": ("sliding_window",),
    "qkv_bias": ("attention_bias",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "experts_shared": ("n_shared_experts",),
    "expert_ffn_hidden": ("moe_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "moe_every": ("interleave_moe_layer_step", "decoder_sparse_step"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "route_machines": ("topk_group",),
}
"""Our key -> theirs, in order of preference."""
_ROTARY = {"max_positions": 0}
MODEL_TYPES: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt"},
    "gpt_neox": {"family": "gpt", **_ROTARY},
    "llama": {"family": "llama", **_ROTARY},
    "mistral": {"family": "llama", **_ROTARY},
    "qwen2": {"family": "llama", "qkv_bias": True, **_ROTARY},
    "gemma": {"family": "llama", "tied_embeddings": True, **_ROTARY},
    "bert": {"family": "bert"},
    "t5": {"family": "t5", **_ROTARY},
    "mixtral": {"family": "moe", **_ROTARY},
    "qwen2_moe": {"family": "moe", **_ROTARY},
    "qwen3_moe": {"family": "moe", **_ROTARY},
    "deepseek_v2": {"family": "moe", **_ROTARY},
    "deepseek_v3": {"family": "moe", **_ROTARY},
    "llama4": {"family": "moe", **_ROTARY},
    "llama4_text": {"family": "moe", **_ROTARY},
}
"""``model_type`` -> keys that the type implies; what the file says itself wins, except for positions."""


def read_config(path: Path) -> dict[str, Any]:
    """Sizes in the words of ``ModelSpec``.

    Raises
    ------
    InputError
        Not readable, not JSON, not an object, or a ``model_type`` that is not known.
    """
    text, file = read_text(path), str(path)
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError([Problem(file, error.lineno, error.colno, message=f"not valid JSON: {error.msg}")]) from None
    except (RecursionError, ValueError):
        message = "not valid JSON: nested too deeply or a number too long"
        raise InputError([Problem(file, 1, 1, message=message)]) from None
    if not isinstance(config, dict):
        raise InputError([Problem(file, 1, 1, message="must hold a JSON object")])
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        hint = did_you_mean(str(kind)[:100], MODEL_TYPES)
        message = f"{str(kind)[:100]!r} is not a known architecture{hint}; known: {', '.join(MODEL_TYPES)}"
        raise InputError([Problem(file, 1, 1, "model_type", message)])
    return _sizes(config, MODEL_TYPES[kind])


def _mixture(config: dict[str, Any], sizes: dict[str, Any]) -> None:
    """What the types of mixtures of experts say in words of their own."""
    shared, width = config.get("shared_expert_intermediate_size"), config.get("moe_intermediate_size")
    if isinstance(shared, int) and isinstance(width, int) and width > 0:  # qwen2_moe: one wide shared expert
        sizes["experts_shared"] = shared // width
    if str(config.get("model_type")).startswith("llama4"):  # the width of an expert, and that of a dense MLP
        sizes |= {"experts_shared": 1, "expert_ffn_hidden": sizes.get("ffn_hidden")}
        sizes["ffn_hidden"] = config.get("intermediate_size_mlp") or sizes["ffn_hidden"]
    groups, chosen = config.get("n_group"), config.get("topk_group")
    if not (isinstance(groups, int) and isinstance(chosen, int) and chosen < groups):  # all groups: no limit
        sizes.pop("route_machines", None)


def _sizes(config: dict[str, Any], implied: dict[str, Any]) -> dict[str, Any]:
    if isinstance(config.get("text_config"), dict):  # a model of several senses: its language part
        config = {"model_type": config.get("model_type")} | config["text_config"]
    sizes = dict(implied)
    for key, names in ALIASES.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None and not (key == "max_positions" and "max_positions" in implied):
            sizes[key] = value
    if config.get("use_sliding_window") is False:
        sizes.pop("sliding_window", None)
    if implied["family"] == "moe":
        _mixture(config, sizes)
    if implied["family"] == "bert":
        sizes["tied_embeddings"] = True
    if implied["family"] == "t5":
        decoder = config.get("num_decoder_layers") or sizes.get("layers")
        if isinstance(sizes.get("layers"), int) and isinstance(decoder, int):
            sizes |= {"encoder_layers": sizes["layers"], "layers": sizes["layers"] + decoder}
        sizes["gated_mlp"] = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    return sizes
