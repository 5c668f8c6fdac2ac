"""A summary such as ``simulate`` builds, made from a trace and given memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simtrain.cost.memory import verdict
from simtrain.program.demand import Memory
from simtrain.trace.communication import communication_table
from simtrain.trace.memory import MemoryProfile, profile
from simtrain.trace.metrics import binds, summarise_time, time_split
from simtrain.trace.spans import Trace

GIB = 2.0**30


def with_memory(trace: Trace) -> tuple[Trace, MemoryProfile]:
    """Forwards keep activations, backwards free them (works come in eights: see ``pipelines``)."""
    stages = len(trace.lowered.ranks)
    kept = ((Memory.ACTIVATIONS, 30 * GIB / stages),)
    demands = tuple(
        replace(demand, keeps=kept, transient=((Memory.WORKSPACE, GIB),))
        if work % 8 == 0
        else replace(demand, frees=kept, transient=((Memory.WORKSPACE, 3 * GIB),))
        if work % 8 == 1
        else demand
        for work, demand in enumerate(trace.demands)
    )
    resting = {
        Memory.PARAMETERS: 5 * GIB,
        Memory.GRADIENTS: 10 * GIB,
        Memory.OPTIMIZER: 8 * GIB,
        Memory.RUNTIME: 1.5 * GIB,
    }
    trace = replace(trace, demands=demands)
    return trace, profile(trace, [resting] * stages, 80 * GIB)


def summary(trace: Trace, memory: MemoryProfile, **changes: Any) -> dict[str, Any]:
    """All keys that the report reads."""
    step, stages = trace.step_time, len(trace.lowered.ranks)
    needs = [verdict(memory.peak(i)[2], capacity=memory.capacity, reserve_fraction=0.04) for i in memory.ranks]
    worst = needs[memory.worst]
    return {
        "scenario": "gpt3-175b-1024xa100",
        "devices": 128 * stages,
        "accelerator": "A100-SXM4-80GB",
        "step_time_s": step,
        "tokens_per_s": 3145728 / step,
        "tokens_per_s_per_device": 3145728 / step / (128 * stages),
        "mfu": 0.439,
        "hfu": 0.578,
        "mfu_formula": "72 B s l h^2 (1 + s/6h + V/12lh) / (time x 312 TFLOP/s dense bf16)",
        "hfu_formula": "executed matrix FLOPs, recomputation included / (time x 312 TFLOP/s dense bf16)",
        "naive_step_time_s": 0.83 * step,
        "measured": {"step_time_s": 1.026 * step, "error": -0.0253, "source": "Narayanan 2021, Table 1"},
        "fits": worst.fits,
        "memory": {
            "peak_bytes": worst.needed,
            "capacity_bytes": memory.capacity,
            "margin_bytes": worst.margin,
            "by_category": {category.value: size for category, size in worst.by_category.items()},
            "peak_rank": trace.lowered.ranks[memory.worst].rank,
            "peak_stage": memory.worst,
            "by_stage": [
                {"stage": index, "rank": trace.lowered.ranks[index].rank, "peak_bytes": needs[index].needed}
                for index in memory.ranks
            ],
        },
        "time": summarise_time(time_split(trace)),
        "communication": communication_table(trace, inside="NVLink3", between="InfiniBand HDR"),
        "binds": binds(trace),
        "advice": [
            {
                "change": f"{key}={value}",
                "step_time_s": step * (1 - gain),
                "gain": gain,
                "fits": fits,
                "peak_bytes": 1.1 * worst.needed,
                "text": f"{key} {value}: {gain:.1%} faster",
            }
            for key, value, gain, fits in (
                ("training.recompute", "selective", 0.131, False),
                ("parallelism.virtual_stages", "2", 0.064, True),
                ("training.micro_batch", "2", 0.021, True),
            )
        ],
        "warnings": ["the network of this machine type was taken from its documented default (HDR x 8)"],
        "microbatches": 96,
        "stages": stages,
        "simulated_ranks": stages,
        "tasks": len(trace.end),
        **changes,
    }
