"""The laws of a whole simulation hold with offloading, adapters, frozen parts, fp8 and the optimizer in backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtrain.cost.memory import resting
from simtrain.cost.offload import host_bytes
from simtrain.program.demand import Memory, TimeKind
from simtrain.program.lowered import PieceKind
from simtrain.scenario.checks import has_pairs
from simtrain.scenario.hardware import Machine, Precision
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Scenario, Training, Zero
from simtrain.scenario.tuning import BaseFormat, Fp8, Fp8Kernels, Fp8Recipe, Lora, Offload, Place, Trainable
from simtrain.simulate import simulate
from simtrain.trace.metrics import time_split
from tests.laws.test_mixture_laws import mixtures
from tests.laws.test_simulation import scenarios, uncontended

HOST = Machine("host", "A100-SXM4-80GB", 8, "NVLink3", "InfiniBand-HDR", 8, 64, 1e12, ram_bandwidth=2e11, host_links=4)
CPU, NVME, DEVICE = Place.CPU, Place.NVME, Place.DEVICE


def may_offload(made: Scenario) -> bool:
    """Whether the optimizer may leave the device (``checks.together``)."""
    late = made.is_hybrid and not made.parallelism.replica_sync_every_microbatch and made.microbatches > 1
    return not late and not has_pairs(made.parallelism)


@st.composite
def tuned(draw: st.DrawFn) -> Scenario:
    """A dense job with any mixture of what frameworks allow together."""
    made = draw(scenarios())
    alone, zero = made.replicas == 1, made.parallelism.zero
    optimizer = draw(st.sampled_from([DEVICE, CPU, NVME])) if (alone or zero) and may_offload(made) else DEVICE
    fetch = optimizer is not DEVICE and (alone or zero is Zero.PARAMETERS) and draw(st.booleans())
    offload = Offload(
        optimizer=optimizer,
        parameters=CPU if fetch else DEVICE,
        activations=DEVICE if has_pairs(made.parallelism) else draw(st.sampled_from([DEVICE, CPU])),
        overlap=draw(st.booleans()),
        nvme_bandwidth=1e10,
    )
    trainable = draw(
        st.sampled_from(
            [
                Trainable(),
                Trainable(lora=Lora(8, 16.0, ("q", "v"))),
                Trainable(lora=Lora(4, 8.0, ("q", "k", "v", "o", "up", "down"), BaseFormat.NF4_DOUBLE)),
                Trainable(frozen=("attention",)),
            ]
        )
    )
    if draw(st.booleans()) and made.parallelism.layout.pp == 1:
        trainable = Trainable(frozen=("embedding", "head"), frozen_blocks=2)
    early = made.microbatches == 1 and optimizer is DEVICE and draw(st.booleans())
    training = replace(made.training, offload=offload, trainable=trainable, optimizer_in_backward=early)
    if draw(st.booleans()) and trainable.lora is None:
        made = with_fp8(made)
        training = replace(
            training, precision=Precision.FP8, fp8=Fp8(draw(st.sampled_from(Fp8Recipe)), draw(st.booleans()))
        )
    return replace(made, training=training, cluster=replace(made.cluster, host=HOST))


@st.composite
def tuned_mixtures(draw: st.DrawFn) -> Scenario:
    """A mixture of experts, with context parallelism or not, under any tuning that frameworks allow with it."""
    made = draw(mixtures())
    alone, zero = max(made.copies("dp"), made.copies("edp")) == 1, made.parallelism.zero
    optimizer = draw(st.sampled_from([DEVICE, CPU])) if (zero or alone) and may_offload(made) else DEVICE
    fetch = optimizer is CPU and (zero is Zero.PARAMETERS or alone) and draw(st.booleans())
    activations = DEVICE if has_pairs(made.parallelism) else draw(st.sampled_from([DEVICE, CPU]))
    offload = Offload(optimizer, CPU if fetch else DEVICE, activations, draw(st.booleans()))
    own = ("o", "kv_b", "gate", "up", "down")
    loras = [Lora(8, 16.0, ("q", "v", "kv_b")), Lora(4, 8.0, own, BaseFormat.NF4_DOUBLE)]
    choices = [Trainable(), *(Trainable(lora=lora) for lora in loras), Trainable(frozen=("mlp",))]
    trainable = draw(st.sampled_from(choices))
    early = made.microbatches == 1 and optimizer is DEVICE and draw(st.booleans())
    training = replace(made.training, offload=offload, trainable=trainable, optimizer_in_backward=early)
    if draw(st.booleans()) and trainable.lora is None:
        made = with_fp8(made)
        recipe = Fp8(draw(st.sampled_from(Fp8Recipe)), draw(st.booleans()))
        training = replace(training, precision=Precision.FP8, fp8=recipe)
    if draw(st.booleans()) and made.model.kv_lora_rank == 0:
        made = replace(made, stack=replace(made.stack, selective_ops=True))
    return replace(made, training=training, cluster=replace(made.cluster, host=HOST))


def with_fp8(made: Scenario) -> Scenario:
    device = made.cluster.accelerator
    peaks = {**device.matrix_peak, Precision.FP8: 2 * device.matrix_peak[Precision.BF16]}
    cluster = replace(made.cluster, accelerator=replace(device, matrix_peak=peaks, architecture="Hopper"))
    return replace(made, cluster=cluster, stack=replace(made.stack, fp8=Fp8Kernels.TRANSFORMER_ENGINE))


@given(tuned() | tuned_mixtures())
@settings(max_examples=60)
def test_merged_equals_unmerged(made: Scenario) -> None:
    merged, cut = simulate(made), simulate(made, merge=False)
    assert merged.step_time == pytest.approx(cut.step_time, rel=1e-9)
    for index in merged.memory.ranks:
        assert cut.memory.peak(index)[1] * (1 - 1e-9) <= merged.memory.peak(index)[1]


@given(tuned() | tuned_mixtures())
@settings(max_examples=30)
def test_folded_equals_unfolded(made: Scenario) -> None:
    assert uncontended(made) == pytest.approx(uncontended(made, fold=False), rel=1e-9)


@given(tuned() | tuned_mixtures())
@settings(max_examples=60)
def test_streams_split_and_memory(made: Scenario) -> None:
    result = simulate(made)
    for _, spans in result.trace.groupby(["rank", "stream"], observed=True):
        if spans["stream"].iloc[0] not in ("send", "recv"):
            ordered = spans.sort_values(["start", "end"])
            assert (ordered["start"].to_numpy()[1:] >= ordered["end"].to_numpy()[:-1] - 1e-12).all()
    assert sum(time_split(result.spans).values()) == pytest.approx(result.step_time)
    for index, rank in enumerate(result.spans.lowered.ranks):
        level = resting(made, dict(rank.coordinate)["pp"])
        for category, held in result.memory.curves[index].items():
            assert held[-1] == pytest.approx(level.get(category, 0.0), abs=2.0), category
            assert held.min() >= -2.0, category


@given(tuned() | tuned_mixtures())
@settings(max_examples=30)
def test_what_leaves_comes_back(made: Scenario) -> None:
    """Activations: every run out and in once a microbatch. Weights: as many parameters come back as gradients left."""
    works = simulate(made).spans.lowered
    for sim in works.ranks:
        pieces = [works.works[task.work].pieces[0] for task in works.lists[sim.tasks].tasks]
        saved = [(piece.kind, piece.layer) for piece in pieces if piece.part is Part.SAVED]
        out = sorted(layer for kind, layer in saved if kind is PieceKind.TO_HOST)
        assert out == sorted(layer for kind, layer in saved if kind is PieceKind.FROM_HOST)
        stepped = sum(piece.elements for piece in pieces if piece.kind is PieceKind.HOST_OPTIMIZER)
        sent = sum(p.elements for p in pieces if p.kind is PieceKind.TO_HOST and p.part is Part.GRADIENT)
        times = made.microbatches if made.training.sync_every_microbatch else 1
        assert sent == pytest.approx(times * stepped)


def test_offloading_moves_memory_to_the_host_and_time_to_its_own_kind() -> None:
    made = scenarios_one()
    away = replace(made.training, offload=Offload(CPU, CPU, CPU))
    moved = simulate(replace(made, training=away))
    here = simulate(made)
    assert resting(moved.scenario, 0)[Memory.OPTIMIZER] == resting(moved.scenario, 0)[Memory.PARAMETERS] == 0
    assert host_bytes(moved.scenario, 0)["optimizer"] == resting(made, 0)[Memory.OPTIMIZER]
    assert moved.memory.peak(0)[1] < here.memory.peak(0)[1]
    assert time_split(moved.spans)[TimeKind.OFFLOAD] > 0 == time_split(here.spans)[TimeKind.OFFLOAD]
    serial = replace(made, training=replace(away, offload=Offload(CPU, CPU, CPU, overlap=False)))
    assert simulate(serial).step_time > moved.step_time


def scenarios_one() -> Scenario:
    from tests.factories import scenario
    from tests.laws.test_simulation import SMALL

    made = scenario(**SMALL, microbatches=1)
    assert isinstance(made.training, Training)
    return replace(made, cluster=replace(made.cluster, host=HOST))
