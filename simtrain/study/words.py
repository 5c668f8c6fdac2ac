"""What the wording of a published row stands for: tables from text to the names that a scenario file uses.

Patterns are regular expressions, tried in order on lower-case text; the first that is found decides.
"""

from __future__ import annotations

import re
from typing import Any

ACCELERATORS: tuple[tuple[str, str], ...] = (
    (r"h100.*96 ?gb", "H100-SXM-96GB"),
    (r"\ba100.*40", "A100-SXM4-40GB"),
    (r"\ba[18]00", "A100-SXM4-80GB"),
    (r"v100-sxm3", "V100-SXM3-32GB"),
    (r"v100.*16", "V100-SXM2-16GB"),
    (r"v100", "V100-SXM2-32GB"),
    (r"h100", "H100-SXM5-80GB"),
    (r"h800", "H800-SXM-80GB"),
    (r"h200", "H200-SXM-141GB"),
    (r"gb200", "GB200"),
    (r"\bb200|blackwell \(184", "B200-SXM-180GB"),
    (r"mi300x", "MI300X"),
    (r"mi250x", "MI250X"),
    (r"rtx ?-?4090", "RTX-4090"),
    (r"rtx ?-?3090", "RTX-3090"),
    (r"l40s", "L40S"),
    (r"\bt4\b", "T4"),
)
"""An A800 is an A100 with fewer NVLink lanes: its memory is the same. A bare V100 is the 32 GB SXM2 part."""

STACKS: tuple[tuple[str, str], ...] = (
    (r"torchtitan.*2025", "torchtitan-2025"),
    (r"torchtitan.*compile", "torchtitan-2024"),
    (r"torchtitan", "torchtitan-2024-eager"),
    (r"torchtune.*chunked|torchtune-3b-[4-9]|torchtune-3b-q?lora", "torchtune-2024-chunked"),
    (r"torchtune.*compile", "torchtune-2024-compiled"),
    (r"torchtune", "torchtune-2024"),
    (r"litgpt|lit-gpt", "litgpt-2023"),
    (r"llama-recipes|llama-cookbook|pytorch fsdp", "pytorch-fsdp-2023"),
    (r"transformers 2\.|transformers ddp|deeplearningexamples", "pytorch-eager-2020"),
    (r"llama-factory|xtuner|hf transformers \+|deepspeed \+ accelerate", "hf-deepspeed-2023"),
    (r"megatron-deepspeed|megatron \+ deepspeed|bigscience|zero-3 baseline", "deepspeed-2022"),
    (r"zero bubble|korthikanti", "megatron-lm-2022"),
    (r"sc21|vtrain|megatron-lm (2020|readme|project)|megatron-llama", "megatron-lm-2021"),
    (r"internevo", "internevo-2024"),
    (r"llm-foundry|mosaicml", "llm-foundry-2023"),
    (r"maxtext|tpu-recipes", "maxtext-2024"),
    (r"megatron|nemo|simumax|kwai|dgx cloud|primus", "megatron-core-2024"),
)
"""Looked up in framework, sharding, id, title and notes of a row, never finer than framework, version and compiler."""

OPTIMIZERS: tuple[tuple[str, Any], ...] = (
    (r"low-precision optimizer and optimizer-in-backward", {"name": "adamw-8bit", "in_backward": True}),
    (r"in backward.*8-bit|8-bit.*in backward", {"name": "adamw-8bit", "in_backward": True}),
    (r"in backward|freed per layer", {"name": "adamw", "in_backward": True}),
    (r"8-bit", "adamw-8bit"),
    (r"lion", "lion"),
    (r"muon", "muon"),
    (r"lamb", "lamb"),
    (r"sgd", "sgd-momentum"),
    (r"adam", "adamw"),
)

PRECISIONS: tuple[tuple[str, str], ...] = (
    (r"fp8|float8|mxfp8|nvfp4", "fp8"),
    (r"bf16|nf4", "bf16"),
    (r"fp16|amp", "fp16"),
    (r"tf32", "tf32"),
    (r"fp32", "fp32"),
)

RECOMPUTE: tuple[tuple[str, Any], ...] = (
    (r"selective: (none|moe|layernorm|mla)", "none"),
    (r"(\d+) layers per checkpoint", {"every": 2}),
    (r"selective", "selective"),
    (r"full|per recipe|block checkpointing|recompute\b.*true", "full"),
    (r"none", "none"),
)
"""Megatron-Core's lists of recomputed modules are not modelled: without the attention core among them, none.
torchtune's recipes turn activation checkpointing on.
"""

NETWORKS: tuple[tuple[str, str], ...] = (
    (r"omni-path", "omni_path_100"),
    (r"100gb/s roce", "roce_100"),
    (r"200gb/s", "ib_hdr"),
    (r"slingshot", "slingshot_11"),
    (r"400gb/s", "ib_ndr"),
)
"""``inter_node`` -> network row; a speed per node alone (800 Gb/s) names no network and takes the default."""

USUAL_NETWORKS = {"H100-SXM-96GB": "ib_ndr", "H800-SXM-80GB": "ib_ndr", "RTX-4090": "eth_10", "RTX-3090": "eth_10"}
"""Where no machine row has the accelerator and the row names no network."""

SCHEDULES: tuple[tuple[str, str], ...] = (
    (r"zb-?2p|zb-?h2", "zb-h2"),
    (r"zb-?1p|zb-?h1|zbb|zero-bubble", "zb-h1"),
    (r"zb-?v|v-half|v-min", "zb-v"),
    (r"interleaved|1f1b-i", "interleaved"),
    (r"gpipe", "gpipe"),
    (r"1f1b", "1f1b"),
)

FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"stablelm-alpha", {"family": "gpt", "tied_embeddings": False, "max_positions": 0, "dropout": False}),
    (r"falcon", {"family": "gpt", "max_positions": 0, "bias": False, "dropout": False}),
    (r"mpt", {"family": "gpt", "max_positions": 0, "bias": False, "dropout": False}),
    (r"moonlight", {"preset": "moonlight-16b-a3b"}),
    (r"llama3\.2-3b", {"family": "llama", "tied_embeddings": True}),
    (r"llama|mistral|baichuan|qwen|internlm", {"family": "llama"}),
    (r"bert", {"family": "bert"}),
    (r"t5", {"family": "t5"}),
    (r"gpt", {"family": "gpt"}),
)
"""What the name of a model tells of its make: GPT-NeoX (rotary, no dropout), ALiBi, ..."""

UNITS = {"GB": 1e9, "GiB": 2.0**30, "MiB": 2.0**20, "MB": 1e6, "bytes": 1.0}


def find(table: tuple[tuple[str, Any], ...], text: object) -> Any:
    """Value of the first pattern found in ``text``; ``None`` without text or without a hit."""
    plain = str(text or "").lower()
    return next((value for pattern, value in table if re.search(pattern, plain, re.DOTALL)), None)
