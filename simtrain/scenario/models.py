"""``model:`` of a scenario file -> ``Model``: preset or configuration, sizes on top, family defaults below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from simtrain.errors import InputError
from simtrain.scenario.huggingface import read_config
from simtrain.scenario.model import Family, Model
from simtrain.scenario.presets import presets
from simtrain.scenario.problems import Problems, choices_text, message
from simtrain.scenario.schema import ModelSpec

_STYLE: dict[str, dict[str, Any]] = {
    "gpt": {"gated_mlp": False, "tied_embeddings": True, "bias": True, "rms_norm": False, "dropout": True},
    "llama": {"gated_mlp": True, "tied_embeddings": False, "bias": False, "rms_norm": True, "dropout": False},
    "bert": {"gated_mlp": False, "tied_embeddings": True, "bias": True, "rms_norm": False, "dropout": True},
    "t5": {"gated_mlp": False, "tied_embeddings": True, "bias": False, "rms_norm": True, "dropout": True},
    "moe": {"gated_mlp": True, "tied_embeddings": False, "bias": False, "rms_norm": True, "dropout": False},
}
"""Family -> what its published implementations do (Radford 2019, Touvron 2023, Devlin 2019, Raffel 2020,
Jiang 2024)."""
_REQUIRED = ("family", "layers", "hidden", "heads", "vocab")
_SIZES = tuple(key for key in ModelSpec.model_fields if key not in ("preset", "config", "op_table"))
"""Keys of a fully written ``model:`` section, the fields of ``Model``."""


def base(spec: ModelSpec, problems: Problems) -> tuple[dict[str, Any], int | None]:
    """Sizes that a preset or a configuration gives, and the sequence length of its pre-training if known."""
    if spec.preset is not None and spec.config is not None:
        problems.add("model.config", "give a preset or a config, not both")
    elif spec.preset is not None:
        row = presets().get(spec.preset)
        if row is None:
            problems.add("model.preset", f"unknown preset {spec.preset!r}{choices_text(spec.preset, presets())}")
        else:
            changed = any(getattr(spec, key) not in (None, row.sizes.get(key)) for key in _SIZES if key != "name")
            return {"name": f"{row.name} (changed)" if changed else row.name, **row.sizes}, row.seq_len
    elif spec.config is not None:
        return _from_config(Path(spec.config), problems), None
    return {}, None


def _from_config(path: Path, problems: Problems) -> dict[str, Any]:
    try:
        sizes = {"name": path.parent.name or "config", **read_config(path)}
        ModelSpec.model_validate(sizes)
    except InputError as error:
        problems.add("model.config", "; ".join(map(str, error.problems)))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {message(item)}" for item in error.errors())
        problems.add("model.config", f"{path}: {wrong}")
    else:
        return sizes
    return {}


def model(
    spec: ModelSpec, given: dict[str, Any], seq_len: int | None, problems: Problems
) -> tuple[Model | None, list[str]]:
    """The model, and the keys of it that a default of its family filled (none for presets and configurations).

    ``given`` is what ``base`` returned. ``None`` where a problem stands in the way; the problem is noted.
    """
    sizes: dict[str, Any] = given | {k: v for k in _SIZES if (v := getattr(spec, k)) is not None}
    if not problems.sound("model.preset", "model.config"):
        return None, []
    missing = [key for key in _REQUIRED if key not in sizes]
    if missing:
        if not sizes:
            problems.add("model", "missing: name a preset, a config, or give " + ", ".join(_REQUIRED))
        for key in missing if sizes else ():
            choice = " (gpt, llama, bert, t5 or moe)" if key == "family" else ""
            problems.add(f"model.{key}", f"missing: a model without preset or config needs {key}{choice}")
        return None, []
    full = _style(sizes, seq_len)
    _consistent(full, problems)
    if any(key.startswith("model.") for key in problems.broken):
        return None, []
    defaults = [] if given else [key for key in full if key not in sizes]
    full["family"] = Family(full["family"])
    return Model(**full), defaults


def _style(sizes: dict[str, Any], seq_len: int | None) -> dict[str, Any]:
    """All fields of ``Model``: the sizes, and family defaults for the rest."""
    family, hidden, heads, layers = sizes["family"], sizes["hidden"], sizes["heads"], sizes["layers"]
    full = (
        dict.fromkeys(_SIZES, 0)
        | {"name": "custom", "qkv_bias": False, "vocab_multiple": 128, "moe_every": 1}
        | _STYLE[family]
    )
    full |= {"kv_heads": heads, "head_dim": max(1, hidden // heads)}
    full["max_positions"] = {"gpt": seq_len or 0, "bert": 512}.get(family, 0)
    full["token_types"] = 2 if family == "bert" else 0
    full["encoder_layers"] = {"bert": layers, "t5": layers // 2}.get(family, 0)
    full |= sizes
    if "ffn_hidden" not in sizes:
        # Llama keeps the parameters of a gated MLP at those of 4 x hidden: 2/3 of it, rounded up to 256 (Touvron 2023).
        full["ffn_hidden"] = (
            sizes.get("expert_ffn_hidden") or -(-8 * hidden // 3 // 256) * 256 if full["gated_mlp"] else 4 * hidden
        )
    if full["experts"]:
        full["experts_per_token"] = full["experts_per_token"] or 1
        full["expert_ffn_hidden"] = full["expert_ffn_hidden"] or full["ffn_hidden"]
    return full


def _consistent(full: dict[str, Any], problems: Problems) -> None:
    hidden, heads, kv_heads = full["hidden"], full["heads"], full["kv_heads"]
    layers, encoder, family = full["layers"], full["encoder_layers"], full["family"]
    if hidden % heads and full["head_dim"] == max(1, hidden // heads):
        problems.add("model.heads", f"{heads} heads cannot divide hidden {hidden}; say head_dim if they need not")
    if kv_heads > heads or heads % kv_heads:
        problems.add("model.kv_heads", f"{kv_heads} key-value heads cannot be shared evenly by {heads} heads")
    if family == "bert" and encoder != layers:
        problems.add("model.encoder_layers", f"all {layers} blocks of a bert are encoder blocks, not {encoder}")
    if family == "t5" and not 1 <= encoder < layers:
        problems.add("model.encoder_layers", f"must be 1 to {layers - 1} of the {layers} blocks, not {encoder}")
    if family in ("gpt", "llama", "moe") and encoder:
        problems.add("model.encoder_layers", f"a {family} has no encoder blocks; families with them: bert, t5")
    _experts_consistent(full, problems)
    latent = {key: full[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    if full["kv_lora_rank"]:
        for key in (key for key, size in latent.items() if not size):
            problems.add(f"model.{key}", "missing: multi-head latent attention (kv_lora_rank) needs it")
        if kv_heads != heads:
            problems.add("model.kv_heads", f"latent attention has a key for each of its {heads} heads, not {kv_heads}")
    elif any(latent.values()) or full["q_lora_rank"]:
        problems.add("model.kv_lora_rank", "missing: the other sizes of latent attention say nothing without it")


def _experts_consistent(full: dict[str, Any], problems: Problems) -> None:
    experts, chosen, layers = full["experts"], full["experts_per_token"], full["layers"]
    if not experts:
        for key in ("experts_per_token", "experts_shared", "expert_ffn_hidden", "dense_layers", "route_machines"):
            if full[key]:
                problems.add(f"model.{key}", "says nothing in a model without experts (set model.experts)")
        if full["family"] == "moe":
            problems.add("model.experts", "missing: the family moe needs the number of experts")
        return
    if full["family"] not in ("moe", "gpt", "llama"):
        problems.add("model.experts", f"a {full['family']} has no experts; families with them: moe, llama, gpt")
    if full["bias"]:
        problems.add("model.bias", "experts have no biases here; set bias: false")
    if chosen > experts:
        problems.add("model.experts_per_token", f"{chosen} of {experts} experts cannot be chosen")
    every = full["moe_every"]
    if not any((layer + 1) % every == 0 for layer in range(full["dense_layers"], layers)):
        problems.add(
            "model.dense_layers",
            f"no block of {layers} is left for the experts (dense_layers {full['dense_layers']}, moe_every {every})",
        )
