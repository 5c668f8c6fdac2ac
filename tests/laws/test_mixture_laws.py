"""Laws of a simulation with experts: those of dense models, however experts are spread and sequences are split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtrain.cost.memory import resting
from simtrain.program.demand import TimeKind
from simtrain.scenario.hardware import Jitter
from simtrain.scenario.pipelines import RULES
from simtrain.scenario.scenario import Attention, ContextKind, Dispatch, Recompute, Scenario, Zero
from simtrain.simulate import simulate
from simtrain.trace.metrics import time_split
from tests.factories import MEGATRON, TORCH, scenario
from tests.laws.test_simulation import check_merging, sharding, uncontended

SMALL = {
    "layers": 4,
    "hidden": 512,
    "heads": 8,
    "kv_heads": 8,
    "ffn_hidden": 1024,
    "seq_len": 512,
    "vocab": 8192,
    "experts": 8,
    "experts_per_token": 2,
    "expert_ffn_hidden": 512,
    "gated_mlp": True,
    "bias": False,
    "tied_embeddings": False,
}


@st.composite
def mixtures(draw: st.DrawFn, *, jitter: bool = False) -> Scenario:
    """Small mixtures of experts on machines that the mesh may not fill evenly."""
    pp, tp = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([1, 2]))
    dp = draw(st.sampled_from([1, 2, 4]))
    cp = draw(st.sampled_from([1, 1, 2]))
    ranks = tp * cp * dp
    etp = draw(st.sampled_from([d for d in (1, 2) if ranks % d == 0]))
    ep = draw(st.sampled_from([d for d in (1, 2, 4, 8) if ranks // etp % d == 0]))
    virtual = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    stack = draw(st.sampled_from([MEGATRON, TORCH]))
    zero = Zero(draw(st.sampled_from([0, 1, 2, 3] if pp == 1 or stack is TORCH else [0, 1])))
    changes: dict[str, Any] = SMALL | {
        "layers": max(4, pp * virtual),
        "experts_shared": draw(st.sampled_from([0, 1])),
        "dense_layers": draw(st.sampled_from([0, 1])),
        "moe_every": draw(st.sampled_from([1, 2])),
        "dispatch": draw(st.sampled_from(list(Dispatch))),
        "capacity_factor": draw(st.sampled_from([0.0, 0.0, 1.25])),
        "imbalance": draw(st.sampled_from([1.0, 1.0, 1.5])),
        "sequence_parallel": tp > 1,
        "recompute": draw(st.sampled_from([Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])),
        "sync_every_microbatch": draw(st.booleans()),
        "devices_per_machine": draw(st.sampled_from([2, 3, 4, 8])),
        "nics_per_machine": draw(st.sampled_from([1, 8])),
        "overlap": draw(st.booleans()),
        "bucket_bytes": draw(st.sampled_from([1e5, 1e7])),
        "jitter": Jitter(0.05) if jitter else Jitter(),
    }
    if cp > 1:
        changes |= {"cp_kind": draw(st.sampled_from([ContextKind.P2P, ContextKind.ALL_GATHER, ContextKind.A2A]))}
        changes |= {"attention": Attention.FLASH2}
    if draw(st.booleans()):
        changes |= {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
        changes["q_lora_rank"] = draw(st.sampled_from([0, 128]))
    if pp > 1:
        able = [name for name, rule in RULES.items() if virtual in rule.virtual]
        changes["schedule"] = draw(st.sampled_from(able))
    least = RULES[changes.get("schedule", "1f1b")].least_rounds
    if zero is not Zero.NONE:
        changes |= sharding(draw, dp, zero) | {"near": 0}
        if tp * cp * changes["shard"] % (ep * etp):
            changes["shard"] = dp
    return scenario(
        stack=stack,
        microbatches=pp * draw(st.integers(max(1, least), 2)),
        pp=pp,
        tp=tp,
        cp=cp,
        dp=dp,
        ep=ep,
        etp=etp,
        virtual_stages=virtual,
        zero=zero,
        **changes,
    )


@given(mixtures())
@settings(max_examples=40)
def test_merged_equals_unmerged(made: Scenario) -> None:
    check_merging(made)


@given(mixtures())
@settings(max_examples=40)
def test_folded_equals_unfolded(made: Scenario) -> None:
    """Exactly where nothing is contended; imbalance is a factor of all ranks, so it changes nothing here."""
    assert uncontended(made) == pytest.approx(uncontended(made, fold=False), rel=1e-9)
    folded, whole = simulate(made), simulate(made, fold=False)
    assert len(whole.spans.lowered.ranks) == made.parallelism.layout.world
    aligned = made.cluster.devices_per_machine != 3
    assert folded.step_time == pytest.approx(whole.step_time, rel=1e-9 if aligned else 0.05)


@given(mixtures(jitter=True))
@settings(max_examples=25)
def test_folded_bounds_unfolded_with_jitter(made: Scenario) -> None:
    """Expert ranks meet in every layer, but attention behind the last meeting runs at a rank's own pace."""
    folded, whole = uncontended(made), uncontended(made, fold=False)
    assert whole * (1 - 1e-9) <= folded <= whole * 1.03


@given(mixtures())
@settings(max_examples=40)
def test_bytes_split_and_memory(made: Scenario) -> None:
    result = simulate(made)
    frame = result.trace
    moved = (frame["bytes"] * frame["multiplicity"]).groupby(frame["stream"].astype(str)).sum()
    assert moved.get("send", 0.0) == moved.get("recv", 0.0)
    split = time_split(result.spans)
    assert sum(split.values()) == pytest.approx(result.step_time)
    layout = made.parallelism.layout
    assert (split.get(TimeKind.EP, 0.0) > 0.0) == (layout.ep > 1 or layout.expert_tensor > 1)
    for index, rank in enumerate(result.spans.lowered.ranks):
        level = resting(made, dict(rank.coordinate)["pp"])
        for category, held in result.memory.curves[index].items():
            assert held[-1] == pytest.approx(level.get(category, 0.0), abs=1.0)
            assert held.min() >= -1.0


@given(mixtures())
@settings(max_examples=20)
def test_imbalance_and_capacity_only_lengthen_a_step(made: Scenario) -> None:
    even = replace(made, training=replace(made.training, imbalance=1.0, capacity_factor=0.0))
    assert uncontended(made) >= uncontended(even) * (1 - 1e-12)
