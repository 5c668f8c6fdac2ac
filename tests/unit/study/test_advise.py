"""Which changes are tried, which are kept, in what order; on a machine whose times and peaks are simple arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from simtrain.errors import InputError
from simtrain.scenario.hardware import (
    Accelerator,
    AcceleratorKind,
    AttentionPoint,
    Cluster,
    Efficiency,
    Link,
    Precision,
)
from simtrain.scenario.layout import Layout
from simtrain.scenario.model import Family, Model
from simtrain.scenario.scenario import Attention, Optimizer, Parallelism, Recompute, Scenario, Stack, Training, Zero
from simtrain.scenario.yamltext import parse_value
from simtrain.study import advise as module
from simtrain.study.advise import advise, candidates, fit_changes

LINK = Link(name="wire", bandwidth=1e11, efficiency=1.0, latency=1e-6)
ACCELERATOR = Accelerator(
    name="A",
    vendor="v",
    kind=AcceleratorKind.GPU,
    architecture="x",
    matrix_peak={Precision.BF16: 1e14, Precision.FP32: 1e13},
    vector_peak=1e13,
    memory_bytes=100.0,
    memory_bandwidth=1e12,
    units=100,
    array_dim=0,
    l2_bytes=1e6,
    host_bandwidth=1e10,
    power=0.0,
    efficiency=Efficiency(attention=(AttentionPoint("flash2", "forward", 64, 1024, True, 1e13),)),
)
MODEL = Model(
    name="m",
    family=Family.GPT,
    layers=8,
    hidden=64,
    heads=8,
    kv_heads=8,
    head_dim=8,
    ffn_hidden=256,
    gated_mlp=False,
    vocab=100,
    tied_embeddings=True,
    max_positions=16,
    bias=True,
    rms_norm=False,
    dropout=True,
)
STACK = Stack(
    name="s",
    fused_softmax=True,
    fused_elementwise=True,
    fused_norm=True,
    compiled=False,
    attention=Attention.UNFUSED,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    overlap_p2p=True,
    scatter_gather_p2p=True,
    grad_bytes=4.0,
    reduce_bytes=4.0,
    fp32_shards=False,
    bucket_bytes=1e6,
    host_seconds_per_op=0.0,
)
BASE: dict[str, dict[str, Any]] = {
    "training": {
        "micro_batch": 2,
        "precision": "bf16",
        "recompute": "full",
        "attention": "unfused",
        "accumulation": 16,
    },
    "parallelism": {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "sequence_parallel": False, "virtual_stages": 1},
}
BASE["parallelism"] |= {"schedule": "1f1b", "overlap": True, "stage_layers": "auto"}


def from_mapping(document: Mapping[str, Any], *, specs: object = (), overrides: Sequence[str] = ()) -> Scenario:
    """A scenario of 64 sequences on 8 devices; like the real one it refuses what cannot be."""
    document = {section: dict(keys) for section, keys in document.items()}
    for text in overrides:
        key, _, value = text.partition("=")
        section, _, name = key.partition(".")
        document[section][name] = parse_value(value)
    training, plan = document["training"], document["parallelism"]
    layout = Layout(dp=plan["dp"], tp=plan["tp"], pp=plan["pp"])
    stages = layout.pp * plan["virtual_stages"]
    if layout.world != 8 or 64 % (training["micro_batch"] * layout.dp) or MODEL.layers % stages:
        raise InputError("does not divide")
    return Scenario(
        name="base",
        seed=0,
        cluster=Cluster(ACCELERATOR, 8, 8, LINK, LINK, 1),
        model=MODEL,
        training=Training(
            global_batch=64,
            micro_batch=training["micro_batch"],
            seq_len=16,
            precision=Precision(training["precision"]),
            optimizer=Optimizer("adam", 8.0, 4.0, 28.0, 0.0),
            recompute=Recompute(training["recompute"]),
            attention=Attention(training["attention"]),
        ),
        parallelism=Parallelism(
            layout=layout,
            zero=Zero(plan["zero"]),
            sequence_parallel=plan["sequence_parallel"],
            schedule=plan["schedule"],
            virtual_stages=plan["virtual_stages"],
            stage_layers=(MODEL.layers // stages,) * stages,
            overlap=plan["overlap"],
        ),
        stack=STACK,
        document=document,
    )


def test_what_the_file_left_open_follows_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO 1 was a default here, and so was the accumulation that the document spells out."""
    here = machine(monkeypatch, capacity=100.0)
    scenario = replace(with_changes(zero=1), defaults=("parallelism.zero", "seed", "model.bias"))
    seen: list[Mapping[str, Any]] = []

    def watched(document: Mapping[str, Any], *, specs: object, overrides: Sequence[str]) -> Scenario:
        seen.append(document)
        return from_mapping({**document, "parallelism": {"zero": 1, **document["parallelism"]}}, overrides=overrides)

    monkeypatch.setattr(module.files, "from_mapping", watched)
    advise(scenario, here.simulate(scenario))
    assert seen
    assert not any("zero" in document["parallelism"] or "accumulation" in document["training"] for document in seen)
    assert scenario.document["training"]["accumulation"] == 16, "the original is left alone"


def test_a_change_that_makes_too_much_to_simulate_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(monkeypatch, capacity=100.0)
    scenario = from_mapping(BASE)
    before = here.simulate(scenario)
    whole = advise(scenario, before)

    def simulate(changed: Scenario) -> Any:
        if changed.training.recompute is Recompute.NONE:
            raise InputError("more than 1 pieces of work to simulate")
        return here.simulate(changed)

    monkeypatch.setattr(module, "simulate", simulate)
    left = advise(scenario, before)
    assert any("recompute=none" in one.change for one in whole)
    assert left
    assert not any("recompute=none" in one.change for one in left)


def with_changes(**changes: Any) -> Scenario:
    document = {section: dict(keys) for section, keys in BASE.items()}
    for key, value in changes.items():
        next(keys for keys in document.values() if key in keys)[key] = value
    return from_mapping(document)


class Machine:
    """Counts its runs; recomputation costs time, everything else memory."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.ran: list[Scenario] = []

    def simulate(self, scenario: Scenario) -> Any:
        self.ran.append(scenario)
        plan, training = scenario.parallelism, scenario.training
        time = {"none": 6.0, "selective": 6.5, "full": 8.0}[training.recompute.value]
        time *= 1 + (plan.layout.pp - 1) / (scenario.microbatches * plan.virtual_stages)
        peak = 80.0 / (plan.layout.tp * plan.layout.pp) + {0: 30.0, 1: 20.0, 2: 15.0, 3: 10.0}[plan.zero]
        peak += training.micro_batch * {"none": 15.0, "selective": 10.0, "full": 5.0}[training.recompute.value]
        fits = peak <= self.capacity
        memory = {"peak_bytes": peak, "capacity_bytes": self.capacity}
        return SimpleNamespace(summary={"step_time_s": time, "fits": fits, "memory": memory})


def machine(monkeypatch: pytest.MonkeyPatch, capacity: float) -> Machine:
    made = Machine(capacity)
    monkeypatch.setattr(module, "simulate", made.simulate)
    monkeypatch.setattr(module.files, "from_mapping", from_mapping)
    return made


def test_single_changes_cover_what_one_would_try() -> None:
    assert [dict(change) for change in candidates(with_changes())] == [
        {"training.micro_batch": 4},
        {"training.micro_batch": 1},
        {"training.recompute": "none"},
        {"training.recompute": "selective"},
        {"parallelism.sequence_parallel": True},
        {"parallelism.zero": 2},
        {"parallelism.zero": 0},
        {"parallelism.schedule": "interleaved", "parallelism.virtual_stages": 2, "parallelism.stage_layers": "auto"},
        {"parallelism.schedule": "interleaved", "parallelism.virtual_stages": 4, "parallelism.stage_layers": "auto"},
        {"parallelism.tp": 4, "parallelism.pp": 1, "parallelism.stage_layers": "auto"},
        {"parallelism.tp": 4, "parallelism.dp": 1},
        {"parallelism.pp": 4, "parallelism.tp": 1, "parallelism.stage_layers": "auto"},
        {"parallelism.pp": 4, "parallelism.dp": 1, "parallelism.stage_layers": "auto"},
        {"parallelism.dp": 4, "parallelism.tp": 1},
        {"parallelism.dp": 4, "parallelism.pp": 1, "parallelism.stage_layers": "auto"},
        {"training.attention": "flash2"},
    ]


def test_single_precision_is_asked_to_go_to_what_the_device_has() -> None:
    assert {"training.precision": "bf16"} in list(candidates(with_changes(precision="fp32")))


def test_interleaving_is_undone_where_the_pipeline_vanishes() -> None:
    changes = list(candidates(with_changes(schedule="interleaved", virtual_stages=2)))
    no_pipeline = {"parallelism.schedule": "1f1b", "parallelism.virtual_stages": 1, "parallelism.stage_layers": "auto"}
    assert {"parallelism.tp": 4, "parallelism.pp": 1, **no_pipeline} in changes


def test_gains_are_sorted_and_true(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(monkeypatch, capacity=100.0)
    scenario = with_changes()
    before = here.simulate(scenario)
    told = advise(scenario, before)
    assert [one.change for one in told] == [
        "training.recompute=none",
        "training.recompute=selective",
        "parallelism.dp=4 parallelism.pp=1 parallelism.stage_layers=auto",
    ]
    assert before.summary["step_time_s"] == 8.5
    assert told[0].step_time_s == 6.0 * (1 + 1 / 16)
    assert told[0].gain == pytest.approx(1 - 6.375 / 8.5)
    assert "6.375 s a step instead of 8.5 s (25.0% less); fits" in told[0].text


def test_changes_that_no_longer_fit_are_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(monkeypatch, capacity=61.0)
    scenario = with_changes()
    told = advise(scenario, here.simulate(scenario), limit=20)
    assert told
    assert all(one.fits and one.gain > 0 and one.peak_bytes <= 61.0 for one in told)
    assert "training.recompute=none" not in {one.change for one in told}


def test_where_nothing_fits_yet_the_fastest_that_fits_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(monkeypatch, capacity=49.0)
    scenario = with_changes()
    before = here.simulate(scenario)
    assert not before.summary["fits"]
    told = advise(scenario, before)
    assert all(one.fits for one in told)
    assert [one.step_time_s for one in told] == sorted(one.step_time_s for one in told)
    assert {one.change for one in told} <= {change.change for change in fit_changes(scenario, before, 20)}


def test_changes_are_combined_where_one_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(monkeypatch, capacity=46.0)
    scenario = with_changes(dp=4, tp=1)
    told = fit_changes(scenario, here.simulate(scenario), 3)
    assert told[0].fits
    assert len(told[0].change.split()) > 1
    assert not any(one.fits for one in told[1:])
    assert [one.peak_bytes for one in told[1:]] == sorted(one.peak_bytes for one in told[1:])


def test_hopeless_is_said_to_be_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(monkeypatch, capacity=1.0)
    scenario = with_changes()
    told = fit_changes(scenario, here.simulate(scenario), 3)
    assert told
    assert not any(one.fits for one in told)


def test_expensive_candidates_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(monkeypatch, capacity=100.0)
    monkeypatch.setattr(module, "SMALL_WORK", 0.0)
    scenario = with_changes(zero=2)
    advise(scenario, here.simulate(scenario))
    assert Zero.NONE not in {one.parallelism.zero for one in here.ran}
    assert Zero.PARAMETERS not in {one.parallelism.zero for one in here.ran}, "32 tasks a microbatch against 2"
    assert len(here.ran) <= 1 + module.MAX_CANDIDATES


def test_stages_are_left_to_the_file_where_it_left_them_open() -> None:
    scenario = replace(with_changes(), defaults=("parallelism.stage_layers",))
    assert not any("parallelism.stage_layers" in change for change in candidates(scenario))


def test_same_question_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(monkeypatch, capacity=100.0)
    scenario = with_changes()
    before = here.simulate(scenario)
    assert advise(scenario, before) == advise(replace(scenario), before)
