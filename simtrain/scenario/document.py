"""``Scenario`` -> the mapping that its file would hold with everything filled in."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from simtrain.scenario.pipelines import GRID
from simtrain.scenario.scenario import Recompute, Scenario, Training, Zero
from simtrain.scenario.schema import NetworkSpec, ScenarioFile
from simtrain.scenario.tuning import Place


def document(built: Scenario, spec: ScenarioFile) -> dict[str, Any]:
    """The filled-in file of a scenario: loading it gives an equal scenario.

    A default network stays ``auto``: a network that nobody chose is a class of its own where predictions are compared.
    """
    cluster, training, parallel = built.cluster, built.training, built.parallelism
    layout = parallel.layout
    recompute: Any = training.recompute.value
    if training.recompute in (Recompute.BLOCKS, Recompute.EVERY):
        recompute = {recompute: training.recompute_layers}
    filled: dict[str, Any] = {
        "name": built.name,
        "stack": built.stack.name,
        "seed": built.seed,
        "cluster": {
            "accelerator": cluster.accelerator.name,
            **({"machine": cluster.machine.name} if cluster.machine else {}),
            "devices": cluster.devices,
            "devices_per_machine": cluster.devices_per_machine,
            "nics_per_machine": cluster.nics_per_machine,
            "network": _network(spec.cluster.network) or "auto",
            "scale_up": _network(spec.cluster.scale_up) or cluster.scale_up.name,
            "jitter": {"sigma": cluster.jitter.sigma},
        },
        "model": asdict(built.model) | {"family": built.model.family.value},
        "training": {
            "global_batch": training.global_batch,
            "micro_batch": training.micro_batch,
            "accumulation": built.microbatches,
            "seq_len": training.seq_len,
            "precision": training.precision.value,
            "optimizer": {"name": training.optimizer.name, "in_backward": True}
            if training.optimizer_in_backward
            else training.optimizer.name,
            "recompute": recompute,
            "attention": training.attention.value,
            "sync_every_microbatch": training.sync_every_microbatch,
            **({"packed_length": list(training.documents)} if training.documents else {}),
            "capacity_factor": training.capacity_factor or None,
            "imbalance": {"sigma": training.imbalance_sigma} if training.imbalance_sigma else training.imbalance,
            **_tuning(training),
        },
        "parallelism": {
            **{axis: layout.degree(axis) for axis in ("dp", "tp", "pp", "cp", "ep")},
            "etp": layout.etp or None,
            "dispatch": parallel.dispatch.value,
            "zero": int(parallel.zero),
            "sequence_parallel": parallel.sequence_parallel,
            "virtual_stages": parallel.virtual_stages,
            "schedule": list(parallel.grid) if parallel.schedule == GRID else parallel.schedule,
            "post_validation": parallel.post_validation,
            "stage_layers": list(parallel.stage_layers),
            "mesh_order": list(layout.order),
            "overlap": parallel.overlap,
            **({"cp_kind": parallel.cp_kind.value} if layout.cp > 1 else {}),
            **({"cp_inner": parallel.cp_inner} if parallel.cp_inner > 1 else {}),
            **_sharding(built),
        },
    }
    if built.measured:
        filled["measured"] = _with_units(dict(built.measured))
    filled["defaults"] = list(built.defaults)
    return filled


def _tuning(training: Training) -> dict[str, Any]:
    """fp8, trainable and offload as their file would say them; nothing where they are plain."""
    found: dict[str, Any] = {}
    trainable, offload = training.trainable, training.offload
    if training.fp8:
        found["fp8"] = {"recipe": training.fp8.recipe.value, "primary": training.fp8.primary}
    if trainable.lora:
        lora = asdict(trainable.lora) | {"targets": list(trainable.lora.targets), "base": trainable.lora.base.value}
        found["trainable"] = {"lora": lora}
    elif not trainable.everything:
        found["trainable"] = {"frozen": list(trainable.frozen)}
        if trainable.frozen_blocks:
            found["trainable"]["frozen_blocks"] = trainable.frozen_blocks
    if offload.active:
        found["offload"] = {key: getattr(offload, key).value for key in ("optimizer", "parameters", "activations")}
        found["offload"]["overlap"] = offload.overlap
        if offload.nvme_bandwidth:
            found["offload"]["nvme_bandwidth"] = f"{offload.nvme_bandwidth!r} B/s"
    return found


def _sharding(built: Scenario) -> dict[str, Any]:
    """The keys of sharding, where they were chosen or mean something: gathered units, hybrids, tensor parallelism."""
    parallel, layout = built.parallelism, built.parallelism.layout
    gathers = parallel.zero is Zero.PARAMETERS or built.training.offload.parameters is not Place.DEVICE
    units = ("reshard_after_backward", "reshard_root", "wrap_blocks", "wrap_ends")
    matters = {
        "reshard_after_forward": gathers,
        **dict.fromkeys(units, gathers),
        "replica_sync_every_microbatch": built.is_hybrid,
        "vocab_parallel_loss": layout.tp > 1,
        "tp_overlap": parallel.sequence_parallel,
    }
    found: dict[str, Any] = {"shard_size": layout.shard or layout.dp}
    found |= {
        key: getattr(parallel, key) for key in matters if matters[key] or f"parallelism.{key}" not in built.defaults
    }
    if layout.secondary:
        found["reshard_after_forward"] = layout.secondary * layout.cp
    formats = {"gather_dtype": parallel.gather_dtype, "reduce_dtype": parallel.reduce_dtype}
    found |= {key: held.value for key, held in formats.items() if held}
    return found | {"prefetch": parallel.prefetch, "backward_prefetch": parallel.backward_prefetch}


def _network(spec: NetworkSpec | None) -> Any:
    """A network as its file would say it: nothing, a row, or a row with figures."""
    if spec is None:
        return None
    said = _with_units(spec.model_dump(exclude_none=True))
    return said["row"] if list(said) == ["row"] else said


_UNITS = {"step_time": "s", "latency": "s", "peak_memory": "B", "bandwidth": "B/s"}


def _with_units(values: dict[str, Any]) -> dict[str, Any]:
    return {key: f"{value!r} {_UNITS[key]}" if key in _UNITS else value for key, value in values.items()}
