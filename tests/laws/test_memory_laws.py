"""Laws of memory: a step ends where it began, merging changes no peak, splitting further never costs memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simtrain.cost.memory import fold_pieces, resting, sizes
from simtrain.cost.memory.activations import boundary
from simtrain.engine.run import run
from simtrain.program.demand import Demand, Memory
from simtrain.program.lowered import Work
from simtrain.program.lowering import lower
from simtrain.scenario.hardware import Precision
from simtrain.scenario.scenario import Attention, Recompute, Scenario, Zero
from simtrain.trace.memory import MemoryProfile, profile
from tests.factories import MEGATRON, TORCH, scenario
from tests.unit.cost.memory_walk import forward_and_backward, walk

SIZES = {"hidden": 256, "heads": 8, "kv_heads": 8, "head_dim": 32, "ffn_hidden": 1024, "vocab": 1000, "seq_len": 128}


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Model and training choices."""
    return {
        **SIZES,
        "layers": draw(st.sampled_from([4, 6, 8])),
        "kv_heads": draw(st.sampled_from([2, 8])),
        "gated_mlp": draw(st.booleans()),
        "dropout": draw(st.booleans()),
        "tied_embeddings": draw(st.booleans()),
        "precision": draw(st.sampled_from([Precision.BF16, Precision.FP32])),
        "attention": draw(st.sampled_from([Attention.UNFUSED, Attention.FLASH2])),
        "micro_batch": draw(st.sampled_from([1, 3])),
        "recompute": draw(st.sampled_from(list(Recompute))),
        "recompute_layers": draw(st.integers(1, 3)),
        "stack": draw(st.sampled_from([MEGATRON, TORCH])),
    }


@st.composite
def jobs(draw: st.DrawFn) -> Scenario:
    """Small jobs of every kind of split."""
    changes = draw(shapes())
    tp = draw(st.sampled_from([1, 2]))
    changes |= {
        "tp": tp,
        "pp": draw(st.sampled_from([1, 2])),
        "dp": draw(st.sampled_from([1, 2])),
        "virtual_stages": draw(st.sampled_from([1, 2])),
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "zero": draw(st.sampled_from(list(Zero))),
        "reshard_after_forward": draw(st.booleans()),
        "sync_every_microbatch": draw(st.booleans()),
        "microbatches": draw(st.sampled_from([1, 4])),
    }
    if changes["pp"] == 1 or changes["microbatches"] == 1:
        changes["virtual_stages"] = 1
    return scenario(**changes)


def simulated(case: Scenario, *, merge: bool) -> MemoryProfile:
    """A run in which every piece takes a second and nothing contends."""
    lowered = lower(case, merge=merge)
    trace = run(lowered, tuple(_demand(case, work) for work in lowered.works))
    held = [resting(case, dict(rank.coordinate)["pp"]) for rank in lowered.ranks]
    return profile(trace, held, capacity=1e12)


def _demand(case: Scenario, work: Work) -> Demand:
    keeps, frees, transient = fold_pieces(case, work.pieces)
    return Demand(float(len(work.pieces)), (), keeps=keeps, frees=frees, transient=transient)


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_memory_returns_to_rest_and_is_never_below(case: Scenario) -> None:
    found = simulated(case, merge=True)
    ranks = lower(case, merge=True).ranks
    for index in found.ranks:
        rest = sum(resting(case, dict(ranks[index].coordinate)["pp"]).values())
        total = found.total(index)
        assert total[-1] == pytest.approx(rest, abs=len(total))
        assert total.min() >= rest - len(total)
        for curve in found.curves[index].values():
            assert curve.min() >= 0


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_merged_and_unmerged_have_one_peak(case: Scenario) -> None:
    """A merged work holds its most throughout. Where another stream allocates meanwhile (messages, sharded gradients,
    gathers) that is never less than piece by piece; a message buffer more with pipelines, where nothing else overlaps.
    """
    merged, single = simulated(case, merge=True), simulated(case, merge=False)
    messages = 4 * boundary(sizes(case)) if case.parallelism.layout.pp > 1 else 0.0
    for index in merged.ranks:
        total, finer = merged.peak(index)[1], single.peak(index)[1]
        assert total >= finer * (1 - 1e-9)
        if case.parallelism.zero < Zero.GRADIENTS:
            assert total <= finer * (1 + 1e-9) + messages


def highest(**changes: Any) -> float:
    """Bytes of tensors at the peak; more groups need more communicators, which are the runtime's."""
    case = scenario(**changes)
    top = walk(case, forward_and_backward(case))[0]
    return sum(count for category, count in top.items() if category is not Memory.RUNTIME)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from([1, 2, 4]))
def test_more_tensor_ranks_never_need_more(shape: dict[str, Any], tp: int) -> None:
    assert highest(**shape, tp=2 * tp) <= highest(**shape, tp=tp)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from([2, 8]), st.booleans())
def test_higher_zero_stages_and_more_ranks_never_need_more(shape: dict[str, Any], dp: int, once: bool) -> None:
    """Of what is held all step; transient gathers of a tiny model can outweigh it at the peak."""
    count = {"microbatches": 1} if once else {"sync_every_microbatch": True}
    states = (Memory.PARAMETERS, Memory.GRADIENTS, Memory.OPTIMIZER)

    def held(zero: Zero, dp: int) -> float:
        rest = resting(scenario(**shape, **count, zero=zero, dp=dp), 0)
        return sum(rest[category] for category in states)

    by_stage = [held(zero, dp) for zero in Zero]
    assert by_stage == sorted(by_stage, reverse=True)
    assert all(held(zero, 2 * dp) <= held(zero, dp) for zero in Zero)


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_recomputing_more_never_needs_more(shape: dict[str, Any]) -> None:
    shape["stack"] = MEGATRON  # an RMS norm written out saves no tensor that doubles as the checkpoint
    modes = [Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE]
    peaks = [highest(**shape | {"recompute": mode}) for mode in modes]
    assert peaks == sorted(peaks)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from([1, 2, 4]))
def test_longer_sequences_need_more(shape: dict[str, Any], factor: int) -> None:
    shape["grad_bytes"] = 4.0  # else the optimizer's fp32 copy of gradients can be the peak, whatever the sequence
    assert highest(**shape | {"seq_len": 128 * factor}) < highest(**shape | {"seq_len": 256 * factor})
