"""Physics checks: what cannot divide, what does not exist, what no framework does; with reason and choice."""

from __future__ import annotations

import math
from collections.abc import Iterable

from simtrain.scenario.hardware import Accelerator, Precision
from simtrain.scenario.layout import Layout
from simtrain.scenario.model import Model
from simtrain.scenario.pipelines import RULES, grid_microbatches, grid_stages
from simtrain.scenario.problems import Problems, choices_text
from simtrain.scenario.scenario import Attention, Dispatch, Parallelism, Stack, Training, Zero
from simtrain.scenario.schema import ParallelismSpec, ScenarioFile
from simtrain.scenario.tuning import BaseFormat, Place

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


def experts(
    model: Model, parallelism: Parallelism, stack: Stack | None, spec: ScenarioFile, problems: Problems
) -> None:
    """Experts by ep, their width by etp, ep x etp within the ranks of a stage (Megatron core ``arguments.py``)."""
    key, layout = "parallelism.", parallelism.layout
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
    elif layout.experts_apart:
        _spread_shards(parallelism, stack, problems)
    if layout.tp > 1 and not parallelism.sequence_parallel:
        problems.add(
            key + "sequence_parallel",
            f"experts with tensor parallelism (tp {layout.tp}) need sequence parallelism, as in Megatron: without it"
            " each tensor rank would route every token again; set it to true, or tp: 1",
        )


def together(training: Training, parallelism: Parallelism, problems: Problems) -> None:
    """Offloading and narrow weights beside schedules and sharding: what no framework runs."""
    offload, key = training.offload, "training.offload"
    if offload.active and has_pairs(parallelism):
        problems.add(
            key,
            f"schedule {parallelism.schedule} weaves a forward into a backward on the device alone (DualPipe has no"
            " offloading); choose another schedule, such as zb-v",
        )
    once = training.global_batch == training.micro_batch * parallelism.layout.dp
    late = parallelism.layout.replica > 1 and not parallelism.replica_sync_every_microbatch
    if late and not once and offload.optimizer is not Place.DEVICE:
        problems.add(
            key,
            "gradients that leave for the host after every microbatch cannot wait there for the reduction between shard"
            " groups; choose parallelism.replica_sync_every_microbatch: true",
        )
    lora, fp8 = training.trainable.lora, training.fp8
    narrow = (lora and lora.base is not BaseFormat.BF16) or (fp8 and fp8.primary)
    if parallelism.gather_dtype and narrow:
        problems.add(
            "parallelism.gather_dtype",
            f"parameters are gathered as they are stored, {lora.base.value if lora else 'fp8'}; leave it out, or store"
            " them in bf16",
        )


def has_pairs(parallelism: Parallelism) -> bool:
    """Whether a schedule weaves forwards into backwards (DualPipe; ``OVERLAP_F_B`` of a written one)."""
    return parallelism.schedule.startswith("dualpipe") or any("OVERLAP" in row for row in parallelism.grid)


def _spread_shards(parallelism: Parallelism, stack: Stack | None, problems: Problems) -> None:
    """How ZeRO goes with experts that are spread over ranks."""
    layout, key = parallelism.layout, "parallelism."
    if layout.expert_data % layout.replica:
        problems.add(
            key + "shard_size",
            f"ep {layout.ep} x etp {layout.expert_tensor} do not divide tp {layout.tp} x cp {layout.cp} x shard_size"
            f" {layout.shard}: each shard group holds all experts (torchtitan dp_shard, Megatron core"
            " num_distributed_optimizer_instances); choose a larger shard_size",
        )
    if parallelism.zero is Zero.PARAMETERS and layout.secondary:
        problems.add(
            key + "reshard_after_forward",
            "no partial copy of spread experts stays after a forward (torchtitan always reshards them or never); choose"
            " true or false",
        )
    if parallelism.zero is Zero.PARAMETERS and stack and stack.gather_by_module:
        problems.add(
            key + "zero",
            f"{stack.name} has no ZeRO-3 with expert parallelism (DeepSpeed engine: MoE not supported with Stage 3);"
            " choose 2 at most",
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
    key = "parallelism.schedule"
    if name not in RULES:
        hint = " (a file ends in .csv)" if "/" in name else ""
        problems.add(key, f"unknown schedule {name!r}{choices_text(name, RULES)}{hint}")
        return
    if virtual > 1 and pp == 1:
        problems.add("parallelism.virtual_stages", f"{virtual} virtual stages need a pipeline (pp above 1)")
    elif name == "interleaved" and virtual == 1:
        problems.add(key, "interleaved needs virtual_stages of at least 2")
    elif why := RULES[name].problem(name, pp, microbatches, virtual):
        counts = virtual in RULES[name].virtual
        problems.add(key, why + ("; change global_batch, micro_batch, dp or pp, or use 1f1b" if counts else ""))


def grid(rows: tuple[str, ...], pp: int, virtual: int, microbatches: int | None, problems: Problems) -> None:
    """The extent of a written schedule; whether it can run is judged where it is lowered."""
    key, held = "parallelism.schedule", grid_stages(rows)
    named = {stage for stages in held for stage in stages}
    count, found = pp * virtual, grid_microbatches(rows)
    if len(held) != pp:
        problems.add(key, f"the grid has {len(held)} ranks (lines), but pp is {pp}")
    elif named != set(range(count)):
        problems.add(
            key, f"the grid names the stages {_list(named)}, but pp {pp} x virtual_stages {virtual} = 0..{count - 1}"
        )
    elif microbatches is not None and found != microbatches:
        problems.add(
            key,
            f"the grid runs {found} microbatches, but the batch makes {microbatches}"
            " (global_batch / (micro_batch x dp))",
        )


def tied_ends(rows: tuple[str, ...], pp: int, problems: Problems) -> None:
    """Tied embeddings of a written schedule: kept equal between the first and the last rank, or on one rank."""
    held = grid_stages(rows)
    last = max(stage for stages in held for stage in stages)
    if 0 not in held[0] or not any(last in held[rank] for rank in (0, pp - 1)):
        problems.add(
            "parallelism.schedule",
            f"tied embeddings need stage 0 on the first rank of the grid and stage {last} on the last (or the first);"
            " change the grid, or set model.tied_embeddings: false",
        )


def passes(stages: int, microbatches: int, problems: Problems) -> None:
    """A schedule of millions of passes would take minutes and gigabytes, and no job looks like that."""
    if stages * microbatches > MAX_PASSES:
        problems.add(
            "training.global_batch",
            f"{microbatches} microbatches x {stages} stages are more than {MAX_PASSES:,} forward passes to simulate;"
            " take a smaller global_batch, a larger micro_batch or more dp",
        )


def _list(numbers: Iterable[int], most: int = 8) -> str:
    listed = sorted(numbers)
    return ", ".join(map(str, listed[:most])) + (", ..." if len(listed) > most else "")


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
    if layers < count and given is None:
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
    elif 0 in given[1:-1] or (0 in given and count == 1):
        problems.add(
            "parallelism.stage_layers", "only the first and the last stage (embedding, head) can do without layers"
        )
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
