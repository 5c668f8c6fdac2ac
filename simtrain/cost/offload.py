"""What the host costs: the PCIe link, RAM bandwidth, NVMe, the optimizer step on cores, and RAM itself.

All devices of a machine are taken to move at once, which is what data-parallel ranks do, so that each has a fixed share
of what they have in common: the links between CPUs and accelerators, RAM bandwidth, drives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simtrain.cost.memory import states
from simtrain.cost.memory.activations import FP32
from simtrain.cost.memory.pieces import saved_bytes
from simtrain.program.actions import ActionKind, flat
from simtrain.program.lowered import Piece
from simtrain.program.lowering import pipeline_program
from simtrain.program.offloading import saved_runs
from simtrain.program.shards import split
from simtrain.scenario.hardware import Cluster, Machine
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Scenario
from simtrain.scenario.tuning import Place

COPY_FRACTION = 0.8
"""Of the PCIe rate, by a large copy of pinned memory (12 of 15.75 GB/s: Rajbhandari 2021, ZeRO-Infinity, Fig. 2b,
recalled, not opened)."""
COPY_SECONDS = 10e-6
"""A copy call and its start (known from use, not measured here)."""
CPU_STEP_FRACTION = 0.46
"""Of RAM bandwidth, by the vectorised Adam of DeepSpeed: 10 B parameters in 2.57 s, 30 bytes each, on a DGX-2's
256 GB/s (Ren 2021, ZeRO-Offload, Table 4, recalled, not opened; 1 B in 0.22 s would give 0.53, 8 B in 2.41 s 0.39)."""
RAM_BANDWIDTH_A_CORE = 5e9
"""byte/s of RAM that comes with a core where a machine's row does not say (DGX-2: 256 GB/s for 48 cores)."""


@dataclass(frozen=True, slots=True)
class Host:
    """One machine's host as one of its devices sees it while all of them move; rates in byte/s."""

    link: float
    """Between device and RAM, one direction."""
    step: float
    """RAM traffic of an optimizer step."""
    nvme: float
    """Drives, either direction; 0 = none."""

    @staticmethod
    def of(cluster: Cluster, nvme_bandwidth: float) -> Host:
        """Shares of the host of a cluster's machines, which must be known."""
        machine = cluster.host
        assert machine is not None
        devices = min(cluster.devices, cluster.devices_per_machine)
        links = min(machine.host_links or machine.devices, devices)
        ram = ram_bandwidth(machine) / devices
        link = COPY_FRACTION * cluster.accelerator.host_bandwidth * links / devices
        return Host(min(link, ram), CPU_STEP_FRACTION * ram, nvme_bandwidth / devices)


def ram_bandwidth(machine: Machine) -> float:
    """RAM bandwidth of a machine, byte/s: its row's, or by cores."""
    return machine.ram_bandwidth or RAM_BANDWIDTH_A_CORE * machine.cores


def moved_bytes(scenario: Scenario, piece: Piece) -> float:
    """Bytes of one transfer between device and host.

    FSDP moves its fp32 shards and casts on the device; other stacks move 16-bit weights (Ren 2021, section 3: 2 bytes
    of gradient out and 2 of weight in, a parameter and step).
    """
    if piece.part is Part.SAVED:
        return saved_bytes(scenario, piece.layer)
    if piece.part is Part.GRADIENT:
        return piece.elements * states.sharded_gradient_bytes(scenario)
    lora = scenario.training.trainable.lora is not None
    wide = states.holds_fp32_weights(scenario) and not lora
    return piece.elements * (FP32 if wide else states.gathered_bytes(scenario, piece.layer, piece.axis))


def transfer_seconds(scenario: Scenario, piece: Piece, host: Host) -> float:
    """Time of one transfer, s; parameters that live on drives pass RAM at the slower of the two rates."""
    rate = host.link
    if piece.part is Part.PARAMETER and scenario.training.offload.parameters is Place.NVME:
        rate = min(rate, host.nvme)
    return COPY_SECONDS + moved_bytes(scenario, piece) / rate


def step_seconds(scenario: Scenario, elements: float, host: Host) -> float:
    """Time of the host's step over ``elements`` parameters, s: RAM traffic, or the drives that states stream from.

    RAM traffic is that of the row (28 bytes for Adam) and the 16-bit copy it writes (2). States on drives are read and
    written once (Rajbhandari 2021, section 5.2.2), overlapped with the step.
    """
    row = scenario.training.optimizer
    seconds = elements * (row.read_write_bytes - 4.0) / host.step
    if scenario.training.offload.optimizer is Place.NVME:
        seconds = max(seconds, elements * 2.0 * (row.state_bytes + FP32) / host.nvme)
    return seconds


def host_bytes(scenario: Scenario, pp_rank: int) -> dict[str, float]:
    """Bytes of RAM (or drives) that one device of a pipeline rank needs on its host, by what they hold.

    A host that steps 32-bit weights of which the device holds a copy keeps another (torchao CPUOffloadOptimizer).
    """
    offload = scenario.training.offload
    found: dict[str, float] = {}
    if offload.parameters is not Place.DEVICE:
        found["parameters"] = states.sharded_weights(scenario, pp_rank)
    if offload.optimizer is not Place.DEVICE:
        axes = ("dp", "edp")
        trained = sum(states.trained_parameters(scenario, pp_rank, axis) / split(scenario, axis) for axis in axes)
        found["optimizer"] = states.sharded_states(scenario, pp_rank)
        if states.holds_fp32_weights(scenario) and offload.parameters is Place.DEVICE:
            found["optimizer"] += trained * FP32
        found["gradients"] = trained * states.sharded_gradient_bytes(scenario)
    if offload.activations is not Place.DEVICE:
        found["activations"] = _activations(scenario, pp_rank)
    return found


def _activations(scenario: Scenario, pp_rank: int) -> float:
    """Bytes of activations on the host with the most microbatches between forward and backward."""
    stages = scenario.rank_stages(pp_rank)
    held = {stage: sum(_saved(scenario, stage)) for stage in stages}
    level = most = 0.0
    for action in flat(pipeline_program(scenario)[pp_rank]):
        if action.kind is ActionKind.FORWARD:
            level += held[action.stage]
            most = max(most, level)
        elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
            level -= held[action.stage]
    return most


def _saved(scenario: Scenario, stage: int) -> list[float]:
    return [saved_bytes(scenario, run[0]) for run in saved_runs(scenario, stage)]


def host_memory(scenario: Scenario) -> dict[str, Any] | None:
    """What offloading needs of one machine's host; ``None`` where nothing leaves the device.

    Every device of the machine is taken for the neediest pipeline rank. What lives on drives needs no RAM.

    Returns
    -------
    dict
        ``machine``, ``by_category`` (byte of all its devices), ``needed_bytes`` of RAM, ``nvme_bytes``,
        ``capacity_bytes`` and ``fits``.
    """
    offload, machine = scenario.training.offload, scenario.cluster.host
    if not offload.active or machine is None:
        return None
    devices = min(scenario.cluster.devices, scenario.cluster.devices_per_machine)
    each = [host_bytes(scenario, rank) for rank in range(scenario.parallelism.layout.pp)]
    worst = {kind: devices * count for kind, count in max(each, key=lambda one: sum(one.values())).items()}
    on_drives = [kind for kind in ("parameters", "optimizer") if getattr(offload, kind) is Place.NVME]
    drives = sum(worst.get(kind, 0.0) for kind in on_drives)
    needed = sum(worst.values()) - drives
    return {
        "machine": machine.name,
        "by_category": worst,
        "needed_bytes": needed,
        "nvme_bytes": drives,
        "capacity_bytes": machine.ram_bytes,
        "fits": needed <= machine.ram_bytes,
    }
