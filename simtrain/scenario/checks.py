"""Physics checks: what cannot divide, what does not exist, what no framework does; with reason and choice."""

from __future__ import annotations

import math
from collections.abc import Iterable

from simtrain.scenario.hardware import Accelerator, Precision
from simtrain.scenario.layout import Layout
from simtrain.scenario.model import Model
from simtrain.scenario.problems import Problems, choices_text
from simtrain.scenario.scenario import Attention, Dispatch, Parallelism, Stack
from simtrain.scenario.schema import LATER_SCHEDULES, SCHEDULES, ParallelismSpec, ScenarioFile

MAX_MICROBATCHES = 100_000
MAX_PASSES = 500_000
"""Microbatches x stages of a schedule."""


def _divisors(number: int, most: int = 1024) -> str:
    return ", ".join(str(d) for d in range(1, min(number, most) + 1) if number % d == 0)


def not_modelled(spec: ScenarioFile, problems: Problems) -> None:
    """Parts of the schema that nothing computes yet, where a scenario uses them."""
    later: list[tuple[str, bool, str]] = [
        ("input", bool(spec.input), "input pipelines"),
        ("job", bool(spec.job), "whole jobs (failures, checkpoints, cost)"),
        ("cluster.placement", spec.cluster.placement not in (None, "auto", "packed"), "placements other than packed"),
        ("cluster.degraded", bool(spec.cluster.degraded), "degraded devices and links"),
        ("model.op_table", spec.model.op_table is not None, "operator tables"),
        ("parallelism.schedule", spec.parallelism.schedule in LATER_SCHEDULES, f"schedule {spec.parallelism.schedule}"),
    ]
    for key, used, what in later:
        if used:
            problems.add(key, f"not modelled yet: {what}")


def precision(accelerator: Accelerator, wanted: Precision, problems: Problems) -> None:
    """The matrix unit must have a rate at the precision; fp32 runs on the vector unit everywhere."""
    if wanted is Precision.FP32 or wanted in accelerator.matrix_peak:
        return
    has = sorted({Precision.FP32, *accelerator.matrix_peak}, key=list(Precision).index)
    problems.add("training.precision", f"{accelerator.name} has no {wanted} matrix rate; choose from {', '.join(has)}")


def attention_runs(accelerator: Accelerator, kernel: Attention) -> str:
    """Why the kernel cannot run there; empty if it can (README of flash-attention: 2 from Ampere on, 3 on Hopper)."""
    gpu, architecture = accelerator.kind.value == "gpu", accelerator.architecture
    if kernel in (Attention.FLASH2, Attention.FLASH3, Attention.CUDNN) and not gpu:
        return "is a GPU kernel"
    if kernel in (Attention.FLASH2, Attention.CUDNN) and architecture.startswith(("Volta", "Turing")):
        return "needs Ampere or later"
    if kernel is Attention.FLASH3 and not architecture.startswith("Hopper"):
        return "needs Hopper"
    return ""


def tensor(model: Model, layout: Layout, seq_len: int, sequence_parallel: bool, problems: Problems) -> None:
    """Heads, key-value heads, hidden and feed-forward sizes by tp; sequence by tp under sequence parallelism."""
    tp = layout.tp
    for what, size in (("heads", model.heads), ("hidden", model.hidden), ("ffn_hidden", model.ffn_hidden)):
        if size % tp:
            choices = _divisors(math.gcd(model.heads, model.hidden, model.ffn_hidden))
            problems.add(
                "parallelism.tp", f"{tp} tensor ranks cannot share {what} {size} evenly; choose from {choices}"
            )
    if model.kv_heads % tp and tp % model.kv_heads:
        problems.add("parallelism.tp", f"{tp} ranks can neither share nor repeat {model.kv_heads} kv_heads evenly")
    if sequence_parallel and seq_len % tp:
        problems.add(
            "parallelism.sequence_parallel",
            f"seq_len {seq_len} cannot be split over {tp} tensor ranks; choose a multiple, or sequence_parallel: false",
        )


def experts(model: Model, layout: Layout, parallelism: Parallelism, spec: ScenarioFile, problems: Problems) -> None:
    """Experts by ep, their width by etp, ep x etp within the ranks of a stage (Megatron core ``arguments.py``)."""
    key = "parallelism."
    if not model.experts:
        said = [("ep", layout.ep > 1), ("etp", layout.expert_tensor != layout.tp)]
        said += [("dispatch", parallelism.dispatch is not Dispatch.ALLTOALL)]
        for name in (name for name, used in said if used):
            problems.add(key + name, f"says nothing: {model.name} has no experts")
        for name in ("capacity_factor", "imbalance"):
            if getattr(spec.training, name) not in (None, ("factor", 1.0)):
                problems.add(f"training.{name}", f"says nothing: {model.name} has no experts")
        return
    ep, etp, ranks = layout.ep, layout.expert_tensor, layout.tp * layout.cp * layout.dp
    if model.experts % ep:
        problems.add(
            key + "ep",
            f"{ep} ranks cannot share {model.experts} experts evenly; choose from {_divisors(model.experts)}",
        )
    if model.expert_ffn_hidden % etp:
        choices = _divisors(model.expert_ffn_hidden)
        problems.add(
            key + "etp", f"{etp} ranks cannot share expert_ffn_hidden {model.expert_ffn_hidden}; choose from {choices}"
        )
    if ranks % (ep * etp):
        problems.add(
            key + "ep",
            f"ep {ep} x etp {etp} = {ep * etp} cannot divide tp {layout.tp} x cp {layout.cp} x dp {layout.dp} ="
            f" {ranks}, the ranks of a stage; with this etp choose ep from {_divisors(max(1, ranks // etp))}",
        )
    if layout.tp > 1 and not parallelism.sequence_parallel:
        problems.add(
            key + "sequence_parallel",
            f"experts with tensor parallelism (tp {layout.tp}) need sequence parallelism, as in Megatron: without it"
            " each tensor rank would route every token again; set it to true, or tp: 1",
        )


def positions(model: Model, seq_len: int, problems: Problems) -> None:
    """A sequence cannot be longer than learned positions reach."""
    if model.max_positions and seq_len > model.max_positions:
        problems.add(
            "training.seq_len",
            f"{seq_len} tokens, but {model.name} has {model.max_positions} learned"
            " positions (shorten it, or set model.max_positions)",
        )


def schedule(name: str, pp: int, virtual: int, microbatches: int | None, problems: Problems) -> None:
    """Schedule, virtual stages and microbatches must go together."""
    if name not in SCHEDULES:
        if name not in LATER_SCHEDULES:
            problems.add("parallelism.schedule", f"unknown schedule {name!r}{choices_text(name, SCHEDULES)}")
        return
    if virtual > 1 and pp == 1:
        problems.add("parallelism.virtual_stages", f"{virtual} virtual stages need a pipeline (pp above 1)")
    elif virtual > 1 and name != "interleaved":
        problems.add("parallelism.schedule", f"{name} runs one stage a rank; {virtual} virtual stages need interleaved")
    elif name == "interleaved" and virtual == 1:
        problems.add("parallelism.schedule", "interleaved needs virtual_stages of at least 2")
    elif name == "interleaved" and microbatches is not None and microbatches % pp:
        problems.add(
            "parallelism.schedule",
            f"interleaved runs microbatches in rounds of pp (as Megatron does):"
            f" {microbatches} is no multiple of {pp}; change global_batch, micro_batch or dp, or use 1f1b",
        )


def passes(stages: int, microbatches: int, problems: Problems) -> None:
    """A schedule of millions of passes would take minutes and gigabytes, and no job looks like that."""
    if stages * microbatches > MAX_PASSES:
        problems.add(
            "training.global_batch",
            f"{microbatches} microbatches x {stages} stages are more than {MAX_PASSES:,} forward passes to simulate;"
            " take a smaller global_batch, a larger micro_batch or more dp",
        )


def zero(stage: int, pp: int, stack: Stack, problems: Problems) -> None:
    """ZeRO-2 and 3 shard gradients that a pipeline adds to after every microbatch."""
    if stage >= 2 and pp > 1 and not stack.fp32_shards:
        problems.add(
            "parallelism.zero",
            f"ZeRO-{stage} with a pipeline (pp {pp}) would reduce gradients after every"
            f" microbatch; {stack.name} and DeepSpeed allow ZeRO-1 at most there (FSDP stacks allow more)",
        )


def stages(layers: int, pp: int, virtual: int, given: list[int] | None, problems: Problems) -> tuple[int, ...] | None:
    """Blocks of each of the pp x virtual stages: as given, or as even as they can be."""
    count = pp * virtual
    if layers < count:
        key = "parallelism.virtual_stages" if layers >= pp else "parallelism.pp"
        by = f"{pp} x {virtual} virtual" if virtual > 1 else str(pp)
        problems.add(key, f"{layers} layers cannot fill {by} stages; at most {layers} stages")
        return None
    if given is None:
        return spread(layers, count)
    if len(given) != count:
        problems.add(
            "parallelism.stage_layers", f"{len(given)} entries for pp {pp} x virtual_stages {virtual} = {count}"
        )
    elif sum(given) != layers:
        problems.add("parallelism.stage_layers", f"adds up to {sum(given)} layers, but the model has {layers}")
    else:
        return tuple(given)
    return None


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """As even as possible; inner stages take the remainder first, then the first, because embedding and head weigh too.

    >>> spread(126, 16)[0], spread(126, 16)[1], spread(126, 16)[15]
    (7, 8, 7)
    """
    base, extra = divmod(layers, stages)
    order: Iterable[int] = (*range(1, stages - 1), 0, stages - 1)
    heavy = set(list(order)[:extra])
    return tuple(base + (stage in heavy) for stage in range(stages))


def degrees(layout: Layout, devices: int, spec: ParallelismSpec, problems: Problems) -> None:
    """tp x pp x cp x dp must be the number of devices."""
    if layout.world == devices:
        return
    rest = layout.tp * layout.pp * layout.cp
    split = f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp}"
    key = next((k for k in ("dp", "tp", "pp", "cp") if getattr(spec, k) is not None), "dp")
    if spec.dp is None or devices % rest:
        problems.add(f"parallelism.{'tp' if key == 'dp' else key}", f"{split} = {rest} cannot divide {devices} devices")
    else:
        problems.add(
            f"parallelism.{key}",
            f"{split} x dp {layout.dp} = {layout.world}, but there are {devices}"
            f" devices; dp would be {devices // rest} (or auto)",
        )
