"""The figures of a run as one plain mapping: what ``--json`` prints and what the pages draw (keys in ``contracts``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simtrain.cost.experts import expert_rows, imbalance
from simtrain.cost.flops import CONVENTION, hardware_flops, model_flops, naive_step_time, peak
from simtrain.cost.memory import loading, verdict
from simtrain.cost.offload import host_memory
from simtrain.program.demand import Memory
from simtrain.scenario.scenario import Scenario
from simtrain.trace.communication import communication_table
from simtrain.trace.memory import MemoryProfile
from simtrain.trace.metrics import binds, summarise_time, time_split
from simtrain.trace.spans import Trace


def summarise(scenario: Scenario, trace: Trace, profile: MemoryProfile) -> dict[str, Any]:
    """Reduce a run to its figures.

    Parameters
    ----------
    scenario
        What was run.
    trace, profile
        What came out.

    Returns
    -------
    dict
        Plain JSON values; times in s (``_s``), sizes in byte (``_bytes``), shares and errors as fractions.
    """
    cluster, step = scenario.cluster, trace.step_time
    rate = scenario.tokens / step
    budget = cluster.devices * peak(scenario) * step
    memory, host = _memory(scenario, trace, profile), host_memory(scenario)
    executed = hardware_flops(trace.lowered, trace.demands, trace.sim_rank, trace.task)
    return {
        "scenario": scenario.name,
        "accelerator": cluster.accelerator.name,
        "devices": cluster.devices,
        "model": scenario.model.name,
        "parameters": scenario.model.parameters(),
        "layout": {axis: scenario.parallelism.layout.degree(axis) for axis in ("tp", "cp", "dp", "pp")},
        **({"experts": _experts(scenario)} if scenario.model.experts else {}),
        "seed": scenario.seed,
        "step_time_s": step,
        "tokens_per_s": rate,
        "tokens_per_s_per_device": rate / cluster.devices,
        "mfu": model_flops(scenario) / budget,
        "mfu_formula": CONVENTION,
        "hfu": executed / budget,
        "hfu_formula": "matrix FLOPs executed, recomputation included / (devices x dense peak x step time)",
        "naive_step_time_s": naive_step_time(scenario, executed),
        "measured": _measured(scenario, step),
        "fits": memory["fits"] and (host is None or host["fits"]),
        "memory": memory,
        "host_memory": host,
        "time": summarise_time(time_split(trace)),
        "communication": communication_table(trace, inside=cluster.scale_up.name, between=cluster.scale_out.name),
        "binds": binds(trace, matrix_peak=peak(scenario), memory_bandwidth=cluster.accelerator.memory_bandwidth),
        "microbatches": scenario.microbatches,
        "stages": scenario.stages,
        "simulated_ranks": len(trace.lowered.ranks),
        "tasks": len(trace.end),
        "warnings": _warnings(scenario, memory, host, executed / budget),
    }


def _experts(scenario: Scenario) -> dict[str, Any]:
    """How the experts are spread and loaded; rows are those of one microbatch."""
    model, layout, training = scenario.model, scenario.parallelism.layout, scenario.training
    local, rows = expert_rows(scenario)
    return {
        "active_parameters": model.active_parameters(),
        "ep": layout.ep,
        "etp": layout.expert_tensor,
        "copies": layout.expert_data,
        "dispatch": scenario.parallelism.dispatch.value,
        "capacity_factor": training.capacity_factor or None,
        "imbalance": imbalance(scenario),
        "experts_per_rank": local,
        "rows_per_expert": rows,
    }


def _memory(scenario: Scenario, trace: Trace, profile: MemoryProfile) -> dict[str, Any]:
    reserve = scenario.stack.reserve_fraction
    peaks = [_peak(scenario, trace, profile, index) for index in range(len(profile.ranks))]
    verdicts = [verdict(by, capacity=profile.capacity, reserve_fraction=reserve) for _, _, by in peaks]
    worst = max(range(len(peaks)), key=lambda index: verdicts[index].needed)
    ranks = trace.lowered.ranks
    return {
        "peak_bytes": verdicts[worst].needed,
        "allocated_peak_bytes": max(held - by.get(Memory.RUNTIME, 0.0) for _, held, by in peaks),
        "capacity_bytes": profile.capacity,
        "margin_bytes": verdicts[worst].margin,
        "fits": all(one.fits for one in verdicts),
        "peak_rank": ranks[worst].rank,
        "peak_stage": dict(ranks[worst].coordinate).get("pp", 0),
        "peak_time_s": peaks[worst][0],
        "by_category": {kind.value: held for kind, held in verdicts[worst].by_category.items() if held},
        "by_stage": [
            {
                "rank": ranks[index].rank,
                "stage": dict(ranks[index].coordinate).get("pp", 0),
                "multiplicity": ranks[index].multiplicity,
                "peak_bytes": one.needed,
                "by_category": {kind.value: held for kind, held in one.by_category.items() if held},
            }
            for index, one in enumerate(verdicts)
        ],
    }


def _peak(
    scenario: Scenario, trace: Trace, profile: MemoryProfile, index: int
) -> tuple[float, float, dict[Memory, float]]:
    """Time, bytes and categories of the peak of the step, or of loading before it (at 0 s)."""
    before = loading(scenario, dict(trace.lowered.ranks[index].coordinate).get("pp", 0))
    step = profile.peak(index)
    return step if step[1] >= sum(before.values()) else (0.0, sum(before.values()), before)


def _measured(scenario: Scenario, step: float) -> dict[str, Any] | None:
    published: Mapping[str, Any] = scenario.measured
    if not published:
        return None
    seconds = published.get("step_time")
    return {
        "step_time_s": seconds,
        "error": step / seconds - 1 if seconds else None,
        "tokens_per_s": published.get("tokens_per_s"),
        "mfu": published.get("mfu"),
        "peak_memory_bytes": published.get("peak_memory"),
        "source": published.get("source"),
    }


def _warnings(scenario: Scenario, memory: Mapping[str, Any], host: Mapping[str, Any] | None, hfu: float) -> list[str]:
    found = []
    if not memory["fits"]:
        found.append(f"does not fit: {-memory['margin_bytes'] / 2**30:.1f} GiB over on rank {memory['peak_rank']}")
    if host and not host["fits"]:
        over = (host["needed_bytes"] - host["capacity_bytes"]) / 2**30
        found.append(f"does not fit in the RAM of a {host['machine']}: {over:.1f} GiB over")
    if scenario.cluster.network_is_default and scenario.cluster.machines > 1:
        found.append(f"network between machines not given: {scenario.cluster.network_name} assumed")
    if scenario.parallelism.post_validation:
        found.append(
            "optimizer post-validation: no rank waits for the others at the end of a step, and the step time is that"
            " from one step to the next"
        )
    if hfu > 1.0:
        found.append("HFU above 1: the convention counts causal attention in full, a fused kernel computes half of it")
    return found
