"""Wording of published rows -> scenario keys."""

from __future__ import annotations

from typing import Any

import pytest

from simtrain.study.rows import Metric, PeakKind, read

RUN: dict[str, Any] = {
    "id": "run-1",
    "source": {"title": "Some Megatron-LM paper", "year": 2021},
    "cluster": {
        "accelerator": "A100",
        "devices": 32,
        "devices_per_node": 8,
        "inter_node": "4x100Gb/s Omni-Path per node",
    },
    "model": {"family": "gpt", "layers": 12, "hidden": 1536, "heads": 12, "vocab": None, "seq_len": 1024},
    "training": {"precision": "fp16", "global_batch": 64, "micro_batch": 2, "tp": 4, "pp": 2, "cp": None, "zero": 1},
    "measured": {"step_time_s": 2.0, "mfu": 0.4, "peak_memory_gb": 30, "colour": "red"},
}
CASE: dict[str, Any] = {
    "id": "case-1",
    "source": {"title": "torchtitan benchmarks", "year": 2024},
    "cluster": {"accelerator": "H100-80GB", "memory_gb": 80, "devices": 8},
    "model": {"name": "llama3.1-8b", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "training": {"framework": "torchtitan (FSDP2)", "seq_len": 8192, "micro_batch": 2, "sharding": "fsdp8 full shard"},
    "outcome": "fits",
    "peak_memory": 77.0,
    "peak_unit": "GiB",
    "peak_metric": "max reserved",
}


def changed(row: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return row | {key: row.get(key, {}) | new if isinstance(new, dict) else new for key, new in sections.items()}


def test_training_run() -> None:
    found = read(RUN)
    assert found.missing == ()
    assert found.measured == {Metric.STEP_TIME: 2.0, Metric.MFU: 0.4, Metric.PEAK_MEMORY: 30e9}
    assert found.ignored == 1  # the colour
    assert found.scenario["stack"] == "megatron-core-2024"
    cluster = {"accelerator": "A100-SXM4-80GB", "devices": 32, "devices_per_machine": 8}
    assert found.scenario["cluster"] == cluster | {"network": "omni_path_100", "nics_per_machine": 4}
    assert found.scenario["parallelism"] == {"tp": 4, "pp": 2, "dp": 4, "zero": 1}
    assert found.scenario["model"]["vocab"] == 50257
    assert {"model.vocab", "parallelism.cp", "training.recompute"} <= set(found.defaults)
    assert "parallelism.tp" not in found.defaults


def test_memory_case() -> None:
    found = read(CASE)
    assert found.measured == {Metric.PEAK_MEMORY: 77 * 2**30}
    assert (found.peak_kind, found.fits) == (PeakKind.RESERVED, True)
    assert found.scenario["stack"] == "torchtitan-2024-eager"
    assert found.scenario["parallelism"]["zero"] == 3
    assert found.scenario["training"]["accumulation"] == 1
    assert "training.accumulation" in found.defaults


def test_a_distributed_optimizer_is_zero_1() -> None:
    plain = changed(CASE, training={"sharding": None, "framework": "Megatron-Core", "optimizer": "adam"})
    assert "zero" not in read(plain).scenario["parallelism"]
    sharded = changed(CASE, training={"sharding": None, "framework": "Megatron-Core", "optimizer": "distributed adam"})
    assert read(sharded).scenario["parallelism"]["zero"] == 1


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        ("torch max_memory_allocated", PeakKind.ALLOCATED),
        ("peak active", PeakKind.ALLOCATED),
        ("max GPU RAM (max allocated/reserved as printed)", PeakKind.ALLOCATED),
        ("peak allocated after iteration 2", PeakKind.ALLOCATED),
        ("peak reserved (active 20.2)", PeakKind.RESERVED),
        ("nvidia-smi style reading", PeakKind.DEVICE),
        ("peak per GPU", PeakKind.UNSTATED),
    ],
)
def test_what_a_peak_counts(metric: str, kind: PeakKind) -> None:
    row = changed(CASE, peak_metric=metric, training={"framework": "DeepSpeed"}, source={"title": "an issue"})
    assert read(row).peak_kind is kind


def test_units_of_peaks() -> None:
    gb = {"peak_unit": "GB", "peak_memory": 16}
    assert read(changed(CASE, **gb)).measured[Metric.PEAK_MEMORY] == 16e9
    smi = changed(CASE, **gb, peak_metric="nvidia-smi style reading")
    assert read(smi).measured[Metric.PEAK_MEMORY] == 16 * 2**30  # nvidia-smi counts MiB
    noted = changed(RUN, training={"notes": "memory (GiB) is the maximum over GPUs"})
    assert read(noted).measured[Metric.PEAK_MEMORY] == 30 * 2**30


def test_what_makes_a_row_eligible() -> None:
    assert read(changed(RUN, model={"layers": None})).missing == ("layers",)
    assert read(changed(CASE, training={"micro_batch": None})).missing == ("batch",)
    assert read(changed(CASE, cluster={"accelerator": "K80"})).missing == ("accelerator",)
    limit = changed(CASE, id="baseline-unpacked")  # a limit of the length, which few samples reach
    assert read(limit).missing == ("seq_len",)


def test_out_of_memory_has_no_peak() -> None:
    found = read(changed(CASE, outcome="oom"))
    assert (found.fits, found.measured) == (False, {})


@pytest.mark.parametrize(
    ("words", "stack"),
    [
        ("torchtitan + torch.compile", "torchtitan-2024"),
        ("torchtune", "torchtune-2024"),
        ("LitGPT FSDP", "litgpt-2023"),
        ("Megatron-DeepSpeed", "deepspeed-2022"),
        ("HF Transformers DDP", "pytorch-eager-2020"),
        ("llm-foundry (FSDP)", "llm-foundry-2023"),
        ("Megatron-Kwai", "megatron-core-2024"),
    ],
)
def test_stack_of_the_framework(words: str, stack: str) -> None:
    found = read(changed(CASE, training={"framework": words}, source={"title": "notes", "year": None}))
    assert found.scenario["stack"] == stack


def test_an_unknown_framework_takes_the_default_stack() -> None:
    found = read(changed(CASE, training={"framework": "Thing"}, source={"title": "notes"}))
    assert "stack" not in found.scenario
    assert "stack" in found.defaults


def test_batches_that_do_not_divide_are_rounded_and_listed() -> None:
    found = read(changed(RUN, training={"global_batch": 65}))
    assert found.scenario["training"]["global_batch"] == 64
    assert "training.global_batch" in found.defaults
