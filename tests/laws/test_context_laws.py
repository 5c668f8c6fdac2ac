"""The laws of a whole simulation, for context parallelism, packing and windows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtrain.cost.memory import resting
from simtrain.scenario.hardware import Jitter
from simtrain.scenario.pipelines import RULES
from simtrain.scenario.scenario import Attention, ContextKind, Recompute, Scenario, Zero
from simtrain.simulate import simulate
from simtrain.trace.metrics import time_split
from tests.factories import MEGATRON, TORCH, scenario
from tests.laws.test_simulation import SMALL, check_merging, sharding, uncontended


@st.composite
def scenarios(draw: st.DrawFn, *, jitter: bool = False) -> Scenario:
    """Small jobs with every kind of context parallelism, under any schedule and sharding."""
    pp, tp, dp = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    virtual = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    zero = Zero(draw(st.sampled_from([0, 1, 3] if pp == 1 else [0, 1])))
    cp, kind = draw(st.sampled_from([2, 4])), draw(st.sampled_from(list(ContextKind)))
    if kind is ContextKind.A2A_P2P:
        cp = 4
    ring = kind in (ContextKind.P2P, ContextKind.A2A_P2P)
    changes: dict[str, Any] = SMALL | {
        "kv_heads": 8,
        "attention": Attention.FLASH2,
        "cp": cp,
        "cp_kind": kind,
        "cp_inner": 2 if kind is ContextKind.A2A_P2P else 1,
        "documents": draw(st.sampled_from([(), (256, 128, 128)])),
        "sliding_window": 0 if ring else draw(st.sampled_from([0, 100])),
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "recompute": draw(st.sampled_from([Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])),
        "devices_per_machine": draw(st.sampled_from([2, 4, 8])),
        "nics_per_machine": draw(st.sampled_from([1, 2, 8])),
        "overlap": draw(st.booleans()),
        "zero": zero,
        "virtual_stages": virtual,
        "jitter": Jitter(0.05) if jitter else Jitter(),
    }
    if pp > 1:
        changes["schedule"] = draw(st.sampled_from([name for name, rule in RULES.items() if virtual in rule.virtual]))
    if zero is not Zero.NONE:
        changes |= sharding(draw, dp, zero)
    order = draw(st.sampled_from([("tp", "cp", "dp", "pp"), ("tp", "dp", "cp", "pp")]))
    stack = draw(st.sampled_from([MEGATRON, TORCH]))
    return scenario(stack=stack, microbatches=2 * pp, pp=pp, tp=tp, dp=dp, order=order, **changes)


@given(scenarios())
@settings(max_examples=30)
def test_merged_equals_unmerged(made: Scenario) -> None:
    check_merging(made)


@given(scenarios())
@settings(max_examples=30)
def test_folded_equals_unfolded(made: Scenario) -> None:
    assert uncontended(made) == pytest.approx(uncontended(made, fold=False), rel=1e-9)
    folded, whole = simulate(made), simulate(made, fold=False)
    assert len(whole.spans.lowered.ranks) == made.parallelism.layout.world
    assert folded.step_time == pytest.approx(whole.step_time, rel=1e-9)
    for kind, seconds in time_split(folded.spans).items():
        assert seconds == pytest.approx(time_split(whole.spans)[kind], abs=0.05 * folded.step_time)


@given(scenarios(jitter=True))
@settings(max_examples=15)
def test_folding_bounds_jitter(made: Scenario) -> None:
    """Context ranks meet in every attention core; what a fast one gains behind the last core it hands on down the
    pipeline, and folding leaves that out: at most 2 % on two blocks a stage, nothing without a pipeline.
    """
    folded, whole = uncontended(made), uncontended(made, fold=False)
    assert whole * (1 - 1e-9) <= folded <= whole * (1.02 if made.parallelism.layout.pp > 1 else 1 + 1e-9)


@given(scenarios())
@settings(max_examples=30)
def test_split_bytes_and_memory(made: Scenario) -> None:
    """The split adds up, memory returns to rest, all ranks of a group send the same, whoever is simulated."""
    result = simulate(made)
    assert sum(time_split(result.spans).values()) == pytest.approx(result.step_time)
    assert result.step_time >= uncontended(made) * (1 - 1e-12)
    for index, rank in enumerate(result.spans.lowered.ranks):
        level = resting(made, dict(rank.coordinate)["pp"])
        for category, held in result.memory.curves[index].items():
            assert held[-1] == pytest.approx(level.get(category, 0.0), abs=1.0)
            assert held.min() >= -1.0
    merged = [row["bytes"] for row in result.summary["communication"] if row["axis"] == "cp"]
    cut = [row["bytes"] for row in simulate(made, merge=False).summary["communication"] if row["axis"] == "cp"]
    assert sum(merged) == pytest.approx(sum(cut))
    assert sum(cut) > 0
