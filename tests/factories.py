"""Records for tests, made by hand: a small GPT on A100 machines, any field of it changed by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from simtrain.scenario.hardware import Accelerator, AcceleratorKind, Cluster, Efficiency, Link, Precision
from simtrain.scenario.layout import Layout
from simtrain.scenario.model import Family, Model
from simtrain.scenario.scenario import (
    Attention,
    Loss,
    Optimizer,
    Parallelism,
    Recompute,
    Scenario,
    Stack,
    Training,
    Zero,
)

A100 = Accelerator(
    name="A100-SXM4-80GB",
    vendor="NVIDIA",
    kind=AcceleratorKind.GPU,
    architecture="Ampere",
    matrix_peak={
        Precision.FP32: 19.5e12,
        Precision.TF32: 156e12,
        Precision.FP16: 312e12,
        Precision.BF16: 312e12,
    },
    vector_peak=19.5e12,
    memory_bytes=80 * 2.0**30,
    memory_bandwidth=2.039e12,
    units=108,
    array_dim=0,
    l2_bytes=40 * 2.0**20,
    host_bandwidth=31.5e9,
    power=400.0,
    scale_up="NVLink3",
    efficiency=Efficiency(
        constants={
            "gemm_fraction": 0.9,
            "gemm_ramp": 128.0,
            "gemm_tile": 0.9,
            "gemm_seconds": 4e-6,
            "sustained": 0.9,
            "hbm_copy": 0.8,
            "sweep_seconds": 3e-6,
            "score_fraction": 0.9,
            "flash_fraction": 0.65,
            "flash_backward": 0.9,
            "flash_half_seq": 256.0,
        }
    ),
)
"""Datasheet figures, and efficiency constants of the right size that no fit will move."""
NVLINK = Link(name="NVLink3", bandwidth=300e9, efficiency=0.78, latency=2e-6)
INFINIBAND = Link(name="InfiniBand-HDR", bandwidth=25e9, efficiency=0.9, latency=5e-6)
ADAM = Optimizer(name="adam", state_bytes=8.0, master_bytes=4.0, read_write_bytes=30.0, launches=0.0)
GPT = Model(
    name="gpt-test",
    family=Family.GPT,
    layers=8,
    hidden=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    ffn_hidden=4096,
    gated_mlp=False,
    vocab=51200,
    tied_embeddings=True,
    max_positions=2048,
    bias=True,
    rms_norm=False,
    dropout=True,
)
MEGATRON = Stack(
    name="megatron-test",
    fused_softmax=True,
    fused_elementwise=True,
    fused_norm=True,
    compiled=False,
    attention=Attention.UNFUSED,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
    overlap_p2p=False,
    scatter_gather_p2p=True,
    grad_bytes=2.0,
    reduce_bytes=2.0,
    fp32_shards=False,
    bucket_bytes=40e6,
    host_seconds_per_op=0.0,
)
TORCH = replace(
    MEGATRON,
    name="torch-test",
    fused_softmax=False,
    fused_elementwise=False,
    fused_norm=False,
    attention=Attention.FLASH2,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    grad_bytes=4.0,
    reduce_bytes=4.0,
    fp32_shards=True,
    loss=Loss.EAGER,
)
"""Plain PyTorch with FSDP."""


def scenario(*, model: Model = GPT, stack: Stack = MEGATRON, microbatches: int = 8, **changes: Any) -> Scenario:
    """A scenario, one device and plain training unless told otherwise.

    ``changes`` are fields of Training, Parallelism, Layout, Model, Stack or Cluster, by name (looked up in that order).
    What follows from others follows: global batch from ``microbatches``, stage layers by equal split (the first ones
    take the rest), devices from the layout.
    """
    layout = replace(Layout(), **_take(changes, Layout))
    training = Training(
        global_batch=microbatches * layout.dp * changes.get("micro_batch", 1),
        micro_batch=1,
        seq_len=2048,
        precision=Precision.BF16,
        optimizer=ADAM,
        recompute=Recompute.NONE,
        attention=changes.get("attention", stack.attention),
    )
    training = replace(training, **_take(changes, Training))
    virtual = changes.get("virtual_stages", 1)
    layers = changes.get("layers", model.layers)
    parallelism = Parallelism(
        layout=layout,
        zero=Zero.NONE,
        sequence_parallel=False,
        schedule="1f1b" if virtual == 1 else "interleaved",
        virtual_stages=virtual,
        stage_layers=_split(layers, layout.pp * virtual),
        overlap=True,
    )
    parallelism = replace(parallelism, **_take(changes, Parallelism))
    model = replace(model, **_take(changes, Model))
    stack = replace(stack, **_take(changes, Stack))
    cluster = Cluster(A100, layout.world, 8, NVLINK, INFINIBAND, 8)
    cluster = replace(cluster, **_take(changes, Cluster))
    if changes:
        raise TypeError(f"no such field: {sorted(changes)}")
    return Scenario("test", 0, cluster, model, training, parallelism, stack)


def _take(changes: dict[str, Any], record: type) -> dict[str, Any]:
    return {field.name: changes.pop(field.name) for field in fields(record) if field.name in changes}


def _split(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
