"""A few rows with round numbers, so that tests of files depend on no shipped table."""

from __future__ import annotations

from dataclasses import dataclass, field

from simtrain.scenario.hardware import Accelerator, AcceleratorKind, Link, Machine, Precision
from simtrain.scenario.scenario import Attention, Optimizer, Stack


def _accelerator(name: str, kind: AcceleratorKind, architecture: str, peaks: str, scale_up: str) -> Accelerator:
    return Accelerator(
        name=name,
        vendor="x",
        kind=kind,
        architecture=architecture,
        matrix_peak={Precision(p): 1e14 for p in peaks.split()},
        vector_peak=1e13,
        memory_bytes=80e9,
        memory_bandwidth=2e12,
        units=100,
        array_dim=0 if kind is AcceleratorKind.GPU else 128,
        l2_bytes=4e7,
        host_bandwidth=3e10,
        power=400.0,
        scale_up=scale_up,
    )


def _machine(name: str, accelerator: str, devices: int, scale_up: str, network: str, nics: int) -> Machine:
    return Machine(name, accelerator, devices, scale_up, network, nics, cores=64, ram_bytes=1e12)


def _stack(name: str, attention: Attention, fsdp: bool) -> Stack:
    return Stack(
        name=name,
        fused_softmax=True,
        fused_elementwise=True,
        fused_norm=True,
        compiled=False,
        attention=attention,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        overlap_p2p=True,
        scatter_gather_p2p=True,
        grad_bytes=4.0,
        reduce_bytes=2.0,
        fp32_shards=fsdp,
        bucket_bytes=4e7,
        host_seconds_per_op=0.0,
    )


GPU, TPU = AcceleratorKind.GPU, AcceleratorKind.TPU


@dataclass(frozen=True)
class SmallTables:
    """The interface of ``simtrain.scenario.tables.Tables`` that scenario files use."""

    accelerators: dict[str, Accelerator] = field(
        default_factory=lambda: {
            row.name: row
            for row in (
                _accelerator("A100", GPU, "Ampere", "tf32 fp16 bf16", "nvlink3"),
                _accelerator("H100", GPU, "Hopper", "tf32 fp16 bf16 fp8", "nvlink4"),
                _accelerator("T4", GPU, "Turing", "fp16", "pcie3"),
                _accelerator("TPU-v5e", TPU, "TPU v5e", "bf16", "ici_v5e"),
                _accelerator("Lonely", GPU, "Ampere", "bf16", "nvlink3"),
            )
        }
    )
    networks: dict[str, Link] = field(
        default_factory=lambda: {
            name: Link(name, rate, 0.9, 5e-6)
            for name, rate in (
                ("nvlink3", 3e11), ("nvlink4", 4.5e11), ("pcie3", 1.5e10), ("ici_v5e", 9e10),
                ("ib_hdr", 2.5e10), ("ib_ndr", 5e10), ("eth_100", 1.25e10), ("dcn", 1.25e10),
            )
        }
    )  # fmt: skip
    machines: dict[str, Machine] = field(
        default_factory=lambda: {
            row.name: row
            for row in (
                _machine("DGX-A100", "A100", 8, "nvlink3", "ib_hdr", 8),
                _machine("DGX-H100", "H100", 8, "nvlink4", "ib_ndr", 8),
                _machine("t4x4", "T4", 4, "pcie3", "eth_100", 1),
                _machine("v5e-host", "TPU-v5e", 4, "ici_v5e", "dcn", 2),
            )
        }
    )
    stacks: dict[str, Stack] = field(
        default_factory=lambda: {
            row.name: row
            for row in (
                _stack("megatron-core-2024", Attention.FLASH2, False),
                _stack("torchtitan-2024", Attention.FLASH2, True),
                _stack("maxtext-2024", Attention.XLA, True),
            )
        }
    )
    optimizers: dict[str, Optimizer] = field(
        default_factory=lambda: {name: Optimizer(name, 8.0, 4.0, 30.0, 0.0) for name in ("adam", "adamw")}
    )
