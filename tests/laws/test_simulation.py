"""Laws of a whole simulation: symmetry, conservation, bounds, closed forms of pipelines, monotony."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtrain.cost.memory import resting
from simtrain.engine.run import run
from simtrain.program.demand import Demand, Memory, TimeKind
from simtrain.program.lowered import Lowered, PieceKind
from simtrain.program.lowering import lower
from simtrain.program.schedules import build
from simtrain.program.timing import longest_stage, makespan
from simtrain.scenario.hardware import Jitter
from simtrain.scenario.pipelines import RULES
from simtrain.scenario.scenario import Recompute, Scenario, WireType, Zero
from simtrain.simulate import simulate
from simtrain.trace.metrics import time_split
from tests.factories import MEGATRON, TORCH, scenario

K = PieceKind
MODULES = replace(MEGATRON, gather_by_module=True, list_collective_ops=2.0, host_seconds_per_op=1e-6)
"""Early DeepSpeed: a gather a weight, collectives over lists."""
SMALL = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn_hidden": 2048, "seq_len": 512, "vocab": 8192}


@st.composite
def scenarios(draw: st.DrawFn, *, jitter: bool = False) -> Scenario:
    """Small jobs of every dense strategy, on machines that the mesh may not fill evenly."""
    pp, tp = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    dp = draw(st.sampled_from([1, 2, 3, 4]))
    virtual = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    stack = draw(st.sampled_from([MEGATRON, TORCH, MODULES]))
    zero = Zero(draw(st.sampled_from([0, 1, 2, 3] if pp == 1 or stack is TORCH else [0, 1])))
    changes: dict[str, Any] = SMALL | {
        "layers": max(4, pp * virtual),
        "tied_embeddings": draw(st.booleans()),
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "recompute": draw(st.sampled_from([Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])),
        "sync_every_microbatch": draw(st.booleans()),
        "devices_per_machine": draw(st.sampled_from([2, 3, 4, 8])),
        "nics_per_machine": draw(st.sampled_from([1, 2, 8])),
        "overlap": draw(st.booleans()),
        "bucket_bytes": draw(st.sampled_from([1e5, 1e7])),
        "jitter": Jitter(0.05) if jitter else Jitter(),
    }
    if zero is not Zero.NONE:
        changes |= sharding(draw, dp, zero)
    if tp > 1:
        changes["vocab_parallel_loss"] = draw(st.booleans())
        changes["tp_overlap"] = changes["sequence_parallel"] and draw(st.booleans())
    if pp > 1:
        able = [name for name, rule in RULES.items() if virtual in rule.virtual and name != "gpipe"]
        changes["schedule"] = draw(st.sampled_from(able))
        changes["post_validation"] = draw(st.booleans())
    least = RULES[changes.get("schedule", "1f1b")].least_rounds
    microbatches = pp * draw(st.integers(max(1, least), 2))
    return scenario(
        stack=stack, microbatches=microbatches, pp=pp, tp=tp, dp=dp, virtual_stages=virtual, zero=zero, **changes
    )


def sharding(draw: st.DrawFn, dp: int, zero: Zero) -> dict[str, Any]:
    """Shard and replica groups, wire formats, and with ZeRO-3 what is wrapped and freed."""
    shard = draw(st.sampled_from([d for d in range(1, dp + 1) if dp % d == 0 and (d > 1 or dp == 1)]))
    changes: dict[str, Any] = {
        "shard": shard,
        "gather_dtype": draw(st.sampled_from([None, WireType.INT8])),
        "reduce_dtype": draw(st.sampled_from([None, WireType.FP32, WireType.INT4])),
        "replica_sync_every_microbatch": draw(st.booleans()),
    }
    if zero is Zero.PARAMETERS:
        changes |= {key: draw(st.booleans()) for key in ("wrap_ends", "reshard_root", "reshard_after_backward")}
        changes["reshard_after_forward"] = draw(st.booleans())
        changes["wrap_blocks"] = draw(st.sampled_from([1, 3]))
        near = [d for d in range(2, shard) if shard % d == 0]
        changes["near"] = draw(st.sampled_from([0, *near])) if changes["reshard_after_forward"] else 0
    return changes


def check_merging(made: Scenario) -> None:
    """Merged equals unmerged: to rounding in time; in memory the merged peak bounds the other.

    A merged run holds its peak from its start to its end, so what other streams gather, send and reduce meanwhile may
    come on top of it, at most as much as that varies over the step.
    """
    merged, cut = simulate(made), simulate(made, merge=False)
    assert merged.step_time == pytest.approx(cut.step_time, rel=1e-9)
    for index in merged.memory.ranks:
        curves, peak = merged.memory.curves[index], cut.memory.peak(index)[1]
        beside = {Memory.GATHERED, Memory.BUFFERS, Memory.GRADIENTS} & set(curves)
        others = sum(float(np.ptp(curves[category])) for category in beside)
        assert peak * (1 - 1e-9) <= merged.memory.peak(index)[1] <= peak * (1 + 1e-9) + others


@given(scenarios())
@settings(max_examples=40)
def test_merged_equals_unmerged(made: Scenario) -> None:
    check_merging(made)


@given(scenarios())
@settings(max_examples=40)
def test_folded_equals_unfolded(made: Scenario) -> None:
    """To rounding where nothing is contended, and on shared NICs where machines hold whole boxes of the mesh.

    On an uneven placement rounding decides which of two mirror images starts first, and contention carries that on.
    """
    assert uncontended(made) == pytest.approx(uncontended(made, fold=False), rel=1e-9)
    folded, whole = simulate(made), simulate(made, fold=False)
    assert len(whole.spans.lowered.ranks) == made.parallelism.layout.world
    aligned = made.cluster.devices_per_machine != 3 and made.parallelism.layout.dp != 3
    assert folded.step_time == pytest.approx(whole.step_time, rel=1e-9 if aligned else 0.05)
    for kind, seconds in time_split(folded.spans).items():
        assert seconds == pytest.approx(time_split(whole.spans)[kind], abs=0.05 * folded.step_time)


@given(scenarios(jitter=True))
@settings(max_examples=25)
def test_folded_equals_unfolded_with_jitter(made: Scenario) -> None:
    """The class takes the largest draw of its members, and lock-step makes that exact where nothing is contended.

    On shared links folding assumes that all members meet at once; jitter spreads them, which is worth about a percent.
    """
    assert uncontended(made) == pytest.approx(uncontended(made, fold=False), rel=1e-9)
    assert simulate(made).step_time == pytest.approx(simulate(made, fold=False).step_time, rel=0.02)


@given(scenarios())
@settings(max_examples=30)
def test_streams_bytes_split_and_memory(made: Scenario) -> None:
    result = simulate(made)
    frame = result.trace
    for _, spans in frame.groupby(["rank", "stream"], observed=True):
        if spans["stream"].iloc[0] in ("compute", "reduce", "gather"):
            ordered = spans.sort_values(["start", "end"])
            assert (ordered["start"].to_numpy()[1:] >= ordered["end"].to_numpy()[:-1] - 1e-12).all()
    assert (frame["end"] >= frame["start"]).all()
    moved = (frame["bytes"] * frame["multiplicity"]).groupby(frame["stream"].astype(str)).sum()
    assert moved.get("send", 0.0) == moved.get("recv", 0.0)
    assert sum(time_split(result.spans).values()) == pytest.approx(result.step_time)
    for index, rank in enumerate(result.spans.lowered.ranks):
        level = resting(made, dict(rank.coordinate)["pp"])
        for category, held in result.memory.curves[index].items():
            assert held[-1] == pytest.approx(level.get(category, 0.0), abs=1.0)
            assert held.min() >= -1.0


@given(scenarios())
@settings(max_examples=25)
def test_never_below_the_uncontended_critical_path(made: Scenario) -> None:
    assert simulate(made).step_time >= uncontended(made) * (1 - 1e-12)


def faster(made: Scenario, what: str) -> Scenario:
    cluster, device = made.cluster, made.cluster.accelerator
    changed = {
        "bandwidth": {
            "scale_up": replace(cluster.scale_up, bandwidth=2 * cluster.scale_up.bandwidth),
            "scale_out": replace(cluster.scale_out, bandwidth=2 * cluster.scale_out.bandwidth),
        },
        "latency": {
            "scale_up": replace(cluster.scale_up, latency=cluster.scale_up.latency / 2),
            "scale_out": replace(cluster.scale_out, latency=cluster.scale_out.latency / 2),
        },
        "flops": {"accelerator": replace(device, matrix_peak={k: 2 * v for k, v in device.matrix_peak.items()})},
        "hbm": {"accelerator": replace(device, memory_bandwidth=2 * device.memory_bandwidth)},
    }[what]
    return replace(made, cluster=replace(cluster, **changed))


def uncontended(made: Scenario, *, fold: bool = True) -> float:
    """Step time if nothing shared anything, s."""
    result = simulate(made, fold=fold)
    free = tuple(replace(demand, sm_share=0.0, network_share=0.0) for demand in result.spans.demands)
    return run(result.spans.lowered, free).step_time


@given(scenarios(), st.sampled_from(["bandwidth", "latency", "flops", "hbm"]))
@settings(max_examples=40)
def test_better_hardware_is_never_slower_without_contention(made: Scenario, what: str) -> None:
    assert uncontended(faster(made, what)) <= uncontended(made) * (1 + 1e-12)


@given(scenarios(jitter=True))
@settings(max_examples=10)
def test_same_scenario_same_trace(made: Scenario) -> None:
    first, second = simulate(made).spans, simulate(made).spans
    for column in ("sim_rank", "task", "start", "end", "released_by"):
        assert np.array_equal(getattr(first, column), getattr(second, column))


def test_seeds_differ() -> None:
    made = scenario(**SMALL, jitter=Jitter(0.05))
    assert simulate(made).step_time != simulate(replace(made, seed=1)).step_time


def ideal(lowered: Lowered, forward: float, backward: float) -> tuple[Demand, ...]:
    """Equal stages, free communication: a block's forward and backward take given times, all else none."""
    half = backward / 2
    price = {K.FORWARD: forward, K.BACKWARD: backward, K.INPUT_GRAD: half, K.WEIGHT_GRAD: half}
    demands = []
    for work in lowered.works:
        pieces = [piece for piece in (*work.pieces, *work.beside) if piece.layer >= 0 and not piece.axis]
        blocks = {(piece.layer, piece.kind) for piece in pieces}
        seconds = sum(price.get(kind, 0.0) for _, kind in blocks)
        demands.append(Demand(seconds, ((TimeKind.COMPUTE, seconds),)))
    return tuple(demands)


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    st.integers(2, 6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
)
@settings(max_examples=60)
def test_pipelines_reach_their_closed_forms(
    schedule: str, pp: int, rounds: int, blocks: int, forward: float, backward: float
) -> None:
    """Step = (m + (p - 1)/v) (F + B) (Narayanan 2021, section 2.2); interleaved: m a multiple of p."""
    virtual = 2 if schedule == "interleaved" else 1
    microbatches = rounds * pp if schedule == "interleaved" else rounds + pp - 1
    made = scenario(
        pp=pp,
        virtual_stages=virtual,
        schedule=schedule,
        microbatches=microbatches,
        **SMALL | {"layers": blocks * pp * virtual},
    )
    lowered = lower(made)
    trace = run(lowered, ideal(lowered, forward, backward))
    stage = blocks * virtual * (forward + backward)
    assert trace.step_time == pytest.approx((microbatches + (pp - 1) / virtual) * stage, rel=1e-12)


@given(
    st.sampled_from([n for n, rule in RULES.items() if rule.split]), st.integers(1, 3), st.integers(2, 3), st.booleans()
)
@settings(max_examples=30)
def test_split_pipelines_take_what_their_grids_say(schedule: str, half: int, rounds: int, rolling: bool) -> None:
    """Equal stages, free communication, F = I = W: the replay of the grid, and so the closed forms of its laws.

    Where steps flow into one another, a step takes what the rank does that is busy for longest.
    """
    pp, virtual = 2 * half, RULES[schedule].virtual[0]
    layers = pp * virtual
    made = scenario(
        pp=pp,
        virtual_stages=virtual,
        schedule=schedule,
        microbatches=rounds * pp,
        post_validation=rolling,
        **SMALL | {"layers": layers, "tied_embeddings": False},  # which would make the first rank wait for the last
    )
    lowered = lower(made)
    trace = run(lowered, ideal(lowered, 1.0, 2.0))
    program = build(schedule, pp, rounds * pp, virtual)
    expected = longest_stage(program) if rolling else makespan(program)
    assert trace.step_time == pytest.approx(expected, rel=1e-12)
    split = time_split(trace)
    assert sum(split.values()) == pytest.approx(trace.step_time, rel=1e-12)
    busy = rounds * pp * 3 * virtual
    assert split[TimeKind.BUBBLE] == pytest.approx(expected - busy, abs=1e-9)
