"""Any scenario that the schema allows: refused with a reason, or simulated to figures that can be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simtrain.cost.flops import model_flops, peak
from simtrain.errors import InputError
from simtrain.scenario.files import from_mapping
from simtrain.scenario.pipelines import RULES
from simtrain.scenario.tables import load_tables
from simtrain.simulate import simulate

TABLES = load_tables()
SIGNED = (".memory.margin_bytes", ".measured.error")
"""Figures that may be negative."""


def auto(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A value, or none said."""
    return st.none() | st.just("auto") | values


@st.composite
def models(draw: st.DrawFn, *, layers: int) -> dict[str, Any]:
    """A small model of any family, with experts or without, or a small preset."""
    if draw(st.integers(0, 4)) == 0:
        return {"preset": draw(st.sampled_from(["gpt2", "bert-base", "t5-small", "mistral-7b"])), "layers": layers}
    heads = draw(st.sampled_from([4, 8, 12]))
    made = {
        "family": draw(st.sampled_from(["gpt", "llama", "bert", "t5"])),
        "layers": layers,
        "hidden": heads * draw(st.sampled_from([8, 64, 128])),
        "heads": heads,
        "kv_heads": draw(auto(st.sampled_from([1, 2, 4]))),
        "ffn_hidden": draw(auto(st.sampled_from([96, 1536, 3072]))),
        "vocab": draw(st.integers(1, 60_000)),
        "vocab_multiple": draw(auto(st.sampled_from([1, 128]))),
        "sliding_window": draw(auto(st.sampled_from([0, 128]))),
        "head_dim": draw(auto(st.sampled_from([16, 64]))),
    }
    flags = ("gated_mlp", "tied_embeddings", "bias", "qkv_bias", "rms_norm", "dropout")
    if draw(st.integers(0, 2)) == 0:
        made |= {
            "family": "moe",
            "bias": False,
            "experts": draw(st.sampled_from([4, 8])),
            "experts_per_token": draw(st.integers(1, 4)),
            "experts_shared": draw(auto(st.integers(0, 2))),
            "expert_ffn_hidden": draw(st.sampled_from([64, 768])),
            "dense_layers": draw(st.sampled_from([0, 0, 1])),
            "moe_every": draw(st.sampled_from([1, 1, 2])),
        }
        flags = flags[3:]
    return made | {flag: draw(auto(st.booleans())) for flag in flags}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Files that are valid but for what the hardware or the model rules out."""
    tp, pp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 1, 2, 3, 4])), draw(st.integers(1, 5))
    virtual = draw(st.sampled_from([1, 1, 2])) if pp > 1 else 1
    stages, cp = pp * virtual, draw(st.sampled_from([1, 1, 2, 4]))
    stage_layers = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    stage_layers[-1] += sum(stage_layers) < 2  # a T5 has an encoder and a decoder
    accelerator = draw(st.sampled_from(sorted(TABLES.accelerators)))
    tpu = accelerator.startswith("TPU")
    cluster: dict[str, Any] = {
        "accelerator": accelerator,
        "devices": tp * pp * cp * dp,
        "devices_per_machine": draw(auto(st.integers(1, 8))),
        "nics_per_machine": draw(auto(st.integers(1, 8))),
        "jitter": {"sigma": draw(st.sampled_from([0.0, 0.0, 0.05, 1.0]))},
    }
    network = draw(st.sampled_from(["ib_ndr", "eth_10", "efa_v2"]))
    cluster["network"] = "auto" if tpu else {"row": network, "latency": draw(auto(st.sampled_from(["1 ns", "1 s"])))}
    precisions = [str(one) for one in TABLES.accelerators[accelerator].matrix_peak if str(one) != "fp8"]
    sync = draw(auto(st.booleans()))
    training: dict[str, Any] = {
        "micro_batch": draw(st.sampled_from([1, 2, 7])),
        "accumulation": pp * draw(st.integers(1, 3)) if virtual > 1 else draw(st.integers(1, 6)),
        "seq_len": 32 * draw(st.integers(1, 16)),
        "packed_length": draw(auto(st.sampled_from([1, 32, 100, 512]))),
        "precision": draw(auto(st.sampled_from(["fp32", *precisions]))) if precisions else "fp32",
        "optimizer": draw(auto(st.sampled_from(sorted(TABLES.optimizers)))),
        "recompute": draw(
            auto(
                st.sampled_from(["none", "selective", "full"])
                | st.builds(lambda n: {"blocks": n}, st.integers(1, 4))
                | st.builds(lambda n: {"every": n}, st.sampled_from(["sqrt", 1, 2, 5]))
            )
        ),
        "attention": draw(auto(st.sampled_from(["unfused", "xla" if tpu else "flash2"] if cp == 1 else ["xla"]))),
        "sync_every_microbatch": None if sync == "auto" else sync,
    }
    model = draw(models(layers=sum(stage_layers)))
    parallelism: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "cp_kind": draw(auto(st.sampled_from(["p2p", "all_gather", "a2a", "a2a+p2p"]))) if cp > 1 else None,
        "dp": draw(auto(st.just(dp))),
        "zero": draw(auto(st.integers(0, 1 if pp > 1 else 3))),
        "sequence_parallel": draw(auto(st.booleans())),
        "virtual_stages": virtual,
        "schedule": draw(st.sampled_from(["1f1b", "gpipe"])) if virtual == 1 else "interleaved",
        "stage_layers": draw(auto(st.just(stage_layers))),
        "mesh_order": draw(st.none() | st.permutations(["tp", "cp", "dp", "pp"])),
        "overlap": draw(auto(st.booleans())),
        "reshard_after_forward": draw(auto(st.booleans())),
        "prefetch": draw(auto(st.integers(0, 3))),
    }
    if model.get("experts"):
        parallelism |= {
            "ep": draw(auto(st.sampled_from([1, 2, 4]))),
            "etp": draw(auto(st.sampled_from([1, tp]))),
            "dispatch": draw(auto(st.sampled_from(["alltoall", "allgather", "deduplicated"]))),
            "sequence_parallel": True,
        }
        training |= {
            "capacity_factor": draw(st.none() | st.sampled_from([0.5, 1.0, 2.0])),
            "imbalance": draw(auto(st.sampled_from([1.0, 3.0, {"sigma": 0.5}]))),
        }
    return {
        "seed": draw(st.integers(0, 2**63 - 1)),
        "stack": draw(st.sampled_from(sorted(TABLES.stacks))),
        "cluster": cluster,
        "model": model,
        "training": training,
        "parallelism": parallelism,
    }


@st.composite
def features(draw: st.DrawFn) -> dict[str, Any]:
    """The same with schedules, sharding, fp8, adapters, frozen parts and offloading, mixed at will."""
    made = draw(documents())
    parallelism, training = made["parallelism"], made["training"]
    pp, dp = parallelism["pp"], parallelism["dp"] if isinstance(parallelism["dp"], int) else 1
    made["stack"] = draw(st.sampled_from(["torchtitan-2024", "torchtitan-2024", made["stack"]]))
    if pp > 1:
        able = [name for name, rule in RULES.items() if parallelism["virtual_stages"] in rule.virtual]
        parallelism["schedule"] = draw(st.sampled_from(able))
        training["accumulation"] = 2 * pp * draw(st.integers(1, 2))
        parallelism["post_validation"] = draw(auto(st.booleans()))
        parallelism["reshard_after_forward"] = None
    divisors = [one for one in range(2, dp + 1) if dp % one == 0]
    if divisors and parallelism["zero"] != 0:
        parallelism["shard_size"] = draw(auto(st.sampled_from(divisors)))
    for key in ("reshard_after_backward", "reshard_root", "wrap_ends", "replica_sync_every_microbatch"):
        parallelism[key] = draw(auto(st.booleans()))
    parallelism |= {
        "wrap_blocks": draw(auto(st.integers(1, 3))),
        "backward_prefetch": draw(auto(st.integers(0, 3))),
        "reduce_dtype": draw(st.none() | st.sampled_from(["fp32", "bf16", "int8", "int4"])),
        "gather_dtype": None if parallelism["zero"] == 0 else draw(st.none() | st.just("int8")),
    }
    if draw(st.booleans()):
        made["cluster"] |= {"accelerator": "H100-SXM5-80GB", "network": "ib_ndr"}
        training |= {"precision": draw(st.sampled_from(["fp8", "bf16"])), "attention": None}
    lora = st.fixed_dictionaries({"rank": st.integers(1, 64), "base": st.sampled_from(["bf16", "nf4"])})
    frozen = st.sampled_from([{"frozen": ["attention"]}, {"frozen": ["embedding", "head"], "frozen_blocks": 1}])
    training["trainable"] = draw(st.none() | st.builds(lambda one: {"lora": one}, lora) | frozen)
    places = st.sampled_from([None, "cpu"])
    training["offload"] = draw(
        st.none() | st.fixed_dictionaries({"optimizer": places, "activations": places, "overlap": auto(st.booleans())})
    )
    if training["offload"] and training["offload"]["optimizer"]:
        training["offload"]["parameters"] = draw(places)
        training["optimizer"] = None
    return made


def figures(found: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a summary with its path."""
    if isinstance(found, dict | list):
        for key, value in found.items() if isinstance(found, dict) else enumerate(found):
            yield from figures(value, f"{path}.{key}")
    elif isinstance(found, int | float):
        yield path, float(found)


@given(documents() | features())
@settings(max_examples=300)
def test_any_scenario_is_refused_or_gives_figures_that_can_be(document: dict[str, Any]) -> None:
    try:
        made = from_mapping(document)
        summary = simulate(made).summary
    except InputError:
        assume(False)
    step, memory = summary["step_time_s"], summary["memory"]
    for path, value in figures(summary):
        assert math.isfinite(value), path
        assert value >= 0.0 or path in SIGNED, path
    assert 0.0 < summary["mfu"] <= 1.0
    if not made.training.capacity_factor:  # experts that drop tokens execute less than the model has
        assert summary["hfu"] >= summary["mfu"] - 1e-12
    assert step >= model_flops(made) / (made.cluster.devices * peak(made)) * (1 - 1e-12)
    assert sum(summary["time"]["by_kind"].values()) == pytest.approx(step, rel=1e-9)
    assert sum(value for key, value in summary["time"].items() if key != "by_kind") == pytest.approx(step, rel=1e-9)
    for one in (memory, *memory["by_stage"]):
        assert sum(one["by_category"].values()) == pytest.approx(one["peak_bytes"], abs=1.0)
    assert memory["fits"] is (memory["margin_bytes"] >= 0.0)
    again = from_mapping(made.document)
    assert again == made
    assert again.defaults == made.defaults
