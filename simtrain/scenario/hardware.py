"""Accelerators, links, machines and clusters as frozen records, in SI units (s, byte, FLOP/s, byte/s, W).

These are what the rest of simtrain computes with. ``tables`` reads them from ``hardware_specs/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Precision(StrEnum):
    """Training precision, named after the matrix-unit input format."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


class AcceleratorKind(StrEnum):
    """What executes a matrix product: tensor cores behind SMs, or a systolic array."""

    GPU = "gpu"
    TPU = "tpu"


@dataclass(frozen=True, slots=True)
class GemmPoint:
    """One measured matrix product C[m,n] += A[m,k] B[k,n]; ``rate`` in FLOP/s."""

    m: int
    n: int
    k: int
    precision: Precision
    rate: float


@dataclass(frozen=True, slots=True)
class AttentionPoint:
    """One measured fused-attention kernel; ``rate`` in FLOP/s of the FLOPs that are really needed (half if causal)."""

    kernel: str
    """Generation: ``flash2``, ``flash3``, ``cudnn``."""
    pass_: str
    """``forward`` or ``forward_backward``."""
    head_dim: int
    seq_len: int
    causal: bool
    rate: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Measured or fitted figures of one accelerator (``efficiencies/<name>.yaml``), never datasheet ones."""

    gemm: tuple[GemmPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    """Named constants, dimensionless or SI, each with its origin in the file."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device as a process sees it. All peaks are dense and at the vendor's rating clock."""

    name: str
    vendor: str
    kind: AcceleratorKind
    architecture: str
    matrix_peak: Mapping[Precision, float]
    """FLOP/s by input precision; a precision that the matrix unit lacks is absent."""
    vector_peak: float
    """FLOP/s of fp32 element-wise arithmetic."""
    memory_bytes: float
    """Capacity that a process can address."""
    memory_bandwidth: float
    """byte/s, datasheet."""
    units: int
    """SMs, compute units, or matrix units (MXU) of the whole device."""
    array_dim: int
    """Side of the systolic array; 0 on a GPU."""
    l2_bytes: float
    host_bandwidth: float
    """byte/s to the host, one direction."""
    power: float
    """W, board or chip; 0 if unpublished."""
    scale_up: str = ""
    """Name of the network row that joins devices of one machine (NVLink, ICI, PCIe)."""
    efficiency: Efficiency = Efficiency()


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link, alpha-beta: time = latency + bytes / (bandwidth x efficiency)."""

    name: str
    bandwidth: float
    """byte/s on the wire, one direction, one device (or one NIC)."""
    efficiency: float
    """Share of the wire rate that large transfers reach."""
    latency: float
    """s a step of a collective, or a point-to-point message."""
    base_latency: float = 0.0
    """s once a collective call (launch, protocol set-up)."""
    domain: int = 0
    """Most devices that one such fabric joins; 0 = a network between machines."""
    half_bytes: float = 0.0
    """byte a step at which half of the achieved rate is reached (chunking, protocol switch); 0 = none."""
    nvls_efficiency: float = 0.0
    """Bus bandwidth of an all-reduce in the switch (NVLS) over the one-way wire rate; 0 = the switch cannot."""

    @property
    def achieved(self) -> float:
        """byte/s that large transfers reach."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, slots=True)
class Machine:
    """One host: its accelerators, NICs, cores, memory, price."""

    name: str
    accelerator: str
    devices: int
    scale_up: str
    """Network row inside the machine."""
    network: str
    """Network row between machines: the default where a scenario says nothing."""
    nics: int
    """NICs for accelerator traffic."""
    cores: int
    ram_bytes: float
    local_storage_bytes: float = 0.0
    usd_per_hour: float | None = None
    price_note: str = ""
    ram_bandwidth: float = 0.0
    """byte/s of all sockets, by channels and rate; 0 = not known (``cost.offload`` then goes by cores)."""
    host_links: int = 0
    """PCIe links between the CPUs and the accelerators; 0 = one an accelerator."""


@dataclass(frozen=True, slots=True)
class Jitter:
    """Run-to-run variation of device speed: each rank draws one factor a step, log-normal with mean 1."""

    sigma: float = 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of accelerators joined by two levels of network."""

    accelerator: Accelerator
    devices: int
    devices_per_machine: int
    """How many ranks share a machine (the last machine may have fewer)."""
    scale_up: Link
    scale_out: Link
    """Per NIC."""
    nics_per_machine: int
    machine: Machine | None = None
    network_name: str = ""
    network_is_default: bool = False
    jitter: Jitter = Jitter()
    host: Machine | None = None
    """The machine, or the one its accelerator usually sits in: cores, RAM and PCIe of offloading."""

    @property
    def machines(self) -> int:
        """Number of machines, the last one perhaps part-filled."""
        return -(-self.devices // self.devices_per_machine)
