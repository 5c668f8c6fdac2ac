"""Offloading against ZeRO-Offload (Ren 2021) and ZeRO-Infinity (Rajbhandari 2021)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simtrain.cost.memory import resting, states
from simtrain.cost.offload import Host, host_bytes, host_memory, moved_bytes, step_seconds, transfer_seconds
from simtrain.program.demand import Memory
from simtrain.program.lowered import Piece, PieceKind, Stream
from simtrain.scenario.hardware import Cluster
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Optimizer, Recompute, Scenario, Zero
from simtrain.scenario.tables import load_tables
from simtrain.scenario.tuning import Offload, Place
from simtrain.simulate import simulate
from simtrain.trace.metrics import streams_busy
from tests.factories import TORCH, scenario

CPU, NVME, DEVICE = Place.CPU, Place.NVME, Place.DEVICE
ADAM = Optimizer("adam", 8.0, 4.0, 34.0, 0.0)
OUT, IN = PieceKind.TO_HOST, PieceKind.FROM_HOST


def dgx2(devices: int) -> Cluster:
    tables = load_tables()
    device, machine = tables.accelerators["V100-SXM3-32GB"], tables.machines["DGX-2"]
    made = scenario(devices_per_machine=16).cluster
    return replace(made, accelerator=device, devices=devices, host=machine)


def offloaded(offload: Offload, **changes: Any) -> Scenario:
    made = scenario(optimizer=ADAM, **changes)
    return replace(made, training=replace(made.training, offload=offload), cluster=replace(made.cluster, host=HOST))


HOST = load_tables().machines["DGX-A100"]


@pytest.mark.parametrize(("billions", "seconds"), [(1, 0.22), (2, 0.51), (4, 1.03), (8, 2.41), (10, 2.57)])
def test_cpu_adam(billions: float, seconds: float) -> None:
    """ZeRO-Offload, Table 4: latency of CPU-Adam on a DGX-2 with one GPU at work."""
    made = replace(scenario(optimizer=ADAM), cluster=dgx2(1))
    assert step_seconds(made, billions * 1e9, Host.of(dgx2(1), 0.0)) == pytest.approx(seconds, rel=0.20)


def test_sixteen_gpus_share_four_links() -> None:
    """ZeRO-Infinity, Fig. 2b: about 12 GB/s for one GPU of a DGX-2, 3 GB/s each for all of them."""
    assert Host.of(dgx2(1), 0.0).link == pytest.approx(12e9, rel=0.06)
    assert Host.of(dgx2(16), 0.0).link == pytest.approx(3e9, rel=0.06)
    assert Host.of(dgx2(16), 28e9).nvme == 28e9 / 16


def test_a_step_moves_two_bytes_of_gradient_out_and_two_of_weight_in() -> None:
    """ZeRO-Offload, section 3: 4 M bytes between device and host, 2 M bytes of weights on the device."""
    made = offloaded(Offload(optimizer=CPU), microbatches=1)
    result = simulate(made)
    count = states.held_parameters(made, 0)
    moved = result.trace.groupby(result.trace["stream"].astype(str))["bytes"].sum()
    assert moved["to_host"] == moved["from_host"] == 2 * count
    held = resting(made, 0)
    assert (held[Memory.PARAMETERS], held[Memory.OPTIMIZER], held[Memory.GRADIENTS]) == (2 * count, 0, 0)
    assert host_bytes(made, 0) == {"optimizer": 12 * count, "gradients": 2 * count}


def test_fsdp_moves_fp32_shards() -> None:
    made = offloaded(Offload(CPU, CPU), stack=TORCH, dp=4, zero=Zero.PARAMETERS, sync_every_microbatch=True)
    assert moved_bytes(made, Piece(IN, Part.PARAMETER, 0, elements=1e6)) == 4e6
    assert moved_bytes(made, Piece(OUT, Part.GRADIENT, 0, elements=1e6)) == 4e6
    whole = states.held_parameters(made, 0)
    assert host_bytes(made, 0) == {"parameters": whole, "optimizer": 2 * whole, "gradients": whole}  # 4, 8, 4 over 4
    assert resting(made, 0)[Memory.PARAMETERS] == 0


def test_drives_pace_what_lives_on_them() -> None:
    fast, slow = (offloaded(Offload(NVME, NVME, nvme_bandwidth=rate)) for rate in (1e12, 1e9))
    piece = Piece(IN, Part.PARAMETER, 0, elements=1e8)
    quick, paced = (transfer_seconds(one, piece, host_of(one)) for one in (fast, slow))
    assert paced == pytest.approx(2e8 / 1e9, rel=1e-3)
    assert quick < paced
    assert step_seconds(slow, 1e8, host_of(slow)) == pytest.approx(24e8 / 1e9)  # 12 bytes in, 12 out
    assert step_seconds(fast, 1e8, host_of(fast)) < 1.0


def host_of(made: Scenario) -> Host:
    return Host.of(made.cluster, made.training.offload.nvme_bandwidth)


def test_activations_leave_behind_the_forward_and_return_before_the_backward() -> None:
    made = offloaded(Offload(activations=CPU), microbatches=1, recompute=Recompute.NONE)
    plain = replace(made, training=replace(made.training, offload=Offload()))
    away, here = simulate(made), simulate(plain)
    kept = here.memory.curves[0][Memory.ACTIVATIONS].max()
    assert host_bytes(made, 0)["activations"] == pytest.approx(7 / 8 * kept, rel=0.05)  # the last block stays
    assert away.memory.curves[0][Memory.ACTIVATIONS].max() < 0.6 * kept
    assert away.step_time > here.step_time
    busy = streams_busy(away.spans, 0)
    rate = host_of(made).link
    assert busy[Stream.TO_HOST] == pytest.approx(host_bytes(made, 0)["activations"] / rate, rel=0.05)


def test_checkpoints_are_all_that_leaves_under_full_recomputation() -> None:
    made = offloaded(Offload(activations=CPU), recompute=Recompute.FULL, microbatches=1)
    assert host_bytes(made, 0)["activations"] == 7 * 2 * 2048 * 1024


def test_pipelines_keep_several_microbatches_on_the_host() -> None:
    made = offloaded(Offload(activations=CPU), recompute=Recompute.FULL, microbatches=8, pp=4)
    boundary = 2 * 2048 * 1024
    assert [host_bytes(made, rank)["activations"] / boundary for rank in range(4)] == [8, 6, 4, 1]


def test_host_memory_is_compared_with_the_machine() -> None:
    made = offloaded(Offload(optimizer=CPU), dp=8, zero=Zero.OPTIMIZER)
    found = host_memory(made)
    assert found is not None
    assert found["needed_bytes"] == pytest.approx(14 * states.held_parameters(made, 0))  # all shards of one machine
    assert found["fits"]
    small = replace(made, cluster=replace(made.cluster, host=replace(HOST, ram_bytes=1e9)))
    summary = simulate(small).summary
    assert not summary["host_memory"]["fits"]
    assert not summary["fits"]
    assert any("does not fit in the RAM of a DGX-A100" in warning for warning in summary["warnings"])
    assert host_memory(scenario()) is None
    drives = host_memory(offloaded(Offload(NVME, nvme_bandwidth=1e10)))
    assert drives is not None
    assert drives["nvme_bytes"] == drives["by_category"]["optimizer"]
    assert drives["needed_bytes"] == drives["by_category"]["gradients"]
