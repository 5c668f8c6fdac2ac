"""The price tag of a work: its uncontended duration, where that time goes, what it uses and what memory it moves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TimeKind(StrEnum):
    """Where the time of a rank goes; the split of a step adds up to the step."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    HOST = "host"
    """Device idle because the host had not launched the next kernel."""
    TP = "tensor_parallel"
    CP = "context_parallel"
    DP_REDUCE = "gradient_reduction"
    DP_GATHER = "parameter_gather"
    PP = "pipeline"
    """Point-to-point messages between stages."""
    EP = "expert_parallel"
    CONTENTION = "contention"
    """Slow-down by others on a shared resource."""
    BUBBLE = "bubble"
    """Waiting for another rank."""
    INPUT = "input_stall"
    OFFLOAD = "offload"
    """Waiting for a transfer to or from the host, or for the host's optimizer step."""


EXPOSED_COMMUNICATION = (TimeKind.TP, TimeKind.CP, TimeKind.DP_REDUCE, TimeKind.DP_GATHER, TimeKind.PP, TimeKind.EP)


class Memory(StrEnum):
    """Categories of device memory."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    GATHERED = "transient_gathers"
    BUFFERS = "communication_buffers"
    WORKSPACE = "workspace"
    """Short-lived tensors of a backward: recomputed activations, gradients of activations."""
    RUNTIME = "runtime"
    RESERVE = "allocator_reserve"


MemoryBytes = tuple[tuple[Memory, float], ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """What one work asks of the machine, uncontended."""

    duration: float
    """s; a lower bound, contention only lengthens it."""
    split: tuple[tuple[TimeKind, float], ...]
    """Seconds by kind; they sum to ``duration``."""
    flops: float = 0.0
    """Matrix FLOPs executed by one rank (recomputation included)."""
    hbm_bytes: float = 0.0
    wire_bytes: float = 0.0
    """Bytes one rank sends."""
    sm_share: float = 0.0
    """Share of the rank's compute units held while running (1 for compute, a few percent for a collective)."""
    network_share: float = 0.0
    """Share of a network resource that one group uses while running; multiplied by ``Group.loads``."""
    keeps: MemoryBytes = ()
    """Allocated at its start and kept after it."""
    frees: MemoryBytes = ()
    """Released at its end."""
    transient: MemoryBytes = ()
    sent: tuple[tuple[TimeKind, float], ...] = ()
    """``wire_bytes`` by kind, where a work communicates in more than one way: a hidden ring sends much in no time."""
    """Held while it runs."""
