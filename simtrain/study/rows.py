"""One published row -> a scenario, what was measured, and what had to be assumed.

Two forms are read, those of ``scenarios/published/*.yaml``: a training run (sections ``cluster, model, training,
measured, source``) and a memory case (``peak_memory, peak_unit, peak_metric, outcome`` beside ``cluster, model,
training``). Keys that are not known are counted and left alone. Null is unknown and takes the documented default:

tp, pp, cp, ep 1; dp the devices that are left; etp 1 where it cannot be tp; vocab 50,257 (gpt), 32,000 (llama); heads
of 128 (96, 64, 32 where tp asks for more); sharding words (FSDP, full shard) mean ZeRO-3, a distributed optimizer (as
Megatron calls it) ZeRO-1, else no ZeRO; accumulation 1, with a pipeline two rounds of microbatches; recompute none;
everything else as a scenario file without the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from simtrain.study import words

REQUIRED = ("layers", "hidden", "seq_len", "devices", "accelerator", "batch")
"""What a row must state to be eligible, beside a measured value. ``batch``: global_batch, or micro_batch (and dp)."""
_READ = {
    "": {"id", "cluster", "model", "training", "measured", "source", "note", "notes", "outcome"}
    | {"peak_memory", "peak_unit", "peak_metric"},
    "cluster": {"accelerator", "devices", "nodes", "devices_per_node", "memory_gb", "intra_node", "inter_node"},
    "model": {"name", "family", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "gated_mlp", "vocab"}
    | {"seq_len", "params_b", "experts", "experts_per_token", "tied_embeddings", "preset", "head_dim"},
    "training": {"framework", "method", "seq_len", "global_batch", "micro_batch", "accumulation", "precision"}
    | {"optimizer", "zero", "zero_stage", "sharding", "dp", "tp", "pp", "vpp", "cp", "ep", "recompute", "offload"}
    | {"sequence_parallel", "flash_attention", "pipeline_schedule", "stage_layers", "stack", "notes", "trainable"}
    | {"etp"},
    "measured": {"step_time_s", "mfu", "tokens_per_s_per_device", "tflops_per_device", "flops_convention"}
    | {"peak_memory_gb"},
    "source": {"title", "where", "year", "verified"},
}
"""Keys that mean something here, by section."""


class Metric(StrEnum):
    """What a row measured."""

    STEP_TIME = "step_time"
    """s."""
    MFU = "mfu"
    """Fraction."""
    PEAK_MEMORY = "peak_memory"
    """byte."""


class PeakKind(StrEnum):
    """What a printed peak counts; like is compared with like."""

    ALLOCATED = "allocated"
    """``torch.cuda.max_memory_allocated`` (or active): tensors, without allocator reserve and runtime."""
    RESERVED = "reserved"
    """``max_memory_reserved``: what the caching allocator holds, without the runtime."""
    DEVICE = "device"
    """nvidia-smi: all that the process takes from the device."""
    UNSTATED = "unstated"
    """The source prints a peak and not of what; compared with what the device holds."""


@dataclass(frozen=True, slots=True)
class Row:
    """A published row, ready to run."""

    id: str
    source: str
    """Title of the source."""
    scenario: Mapping[str, Any]
    """Keys of a scenario file."""
    measured: Mapping[Metric, float]
    peak_kind: PeakKind
    fits: bool | None
    """Whether the run fitted, where the source says so (a run with a measured peak did)."""
    defaults: tuple[str, ...]
    """What the row leaves open and a documented default fills."""
    missing: tuple[str, ...]
    """Of ``REQUIRED``: what the row does not state. Empty means eligible."""
    ignored: int
    """Keys of the row that are not read."""


def read(row: Mapping[str, Any]) -> Row:
    """Convert one row.

    Parameters
    ----------
    row
        As read from YAML, see the module's docstring.

    Returns
    -------
    Row
        ``missing`` says why a row cannot run; a row that can is never dropped.
    """
    return _Reader(row).row()


class _Reader:
    def __init__(self, row: Mapping[str, Any]) -> None:
        self.data = row
        self.cluster, self.model, self.training, self.measured, self.source = (
            dict(row.get(section) or {}) for section in ("cluster", "model", "training", "measured", "source")
        )
        self.defaults: list[str] = []
        self.note = str(row.get("notes") or row.get("note") or "")
        framework, sharding, notes = (self.training.get(key) for key in ("framework", "sharding", "notes"))
        parts = (framework, sharding, row.get("id"), self._title, self.source.get("year"), notes)
        self.text = " | ".join(str(part) for part in parts if part)

    @property
    def _title(self) -> str:
        return str(self.source.get("title") or "unknown source")

    def row(self) -> Row:
        name = str(self.data.get("id") or "row")
        accelerator = words.find(words.ACCELERATORS, self.cluster.get("accelerator"))
        measured = {metric: value for metric, value in self._measured() if value}
        outcome = self.data.get("outcome")
        return Row(
            id=name,
            source=self._title,
            scenario=self._scenario(name, accelerator),
            measured=measured,
            peak_kind=self._peak_kind(),
            fits=outcome == "fits" if outcome else True if Metric.PEAK_MEMORY in measured else None,
            defaults=tuple(self.defaults),
            missing=tuple(self._missing(accelerator)),
            ignored=self._ignored(),
        )

    # -- what it says --------------------

    def _measured(self) -> Iterator[tuple[Metric, float | None]]:
        yield Metric.STEP_TIME, self.measured.get("step_time_s")
        yield Metric.MFU, self.measured.get("mfu")
        peak, unit = self.data.get("peak_memory"), self.data.get("peak_unit") or "GB"
        if peak is None:
            peak, unit = self.measured.get("peak_memory_gb"), "GB"
            if re.search(r"memory \(?gib|memory in gib|in gib|memory gib", self._notes):
                unit = "GiB"
        if self._peak_kind() is PeakKind.DEVICE and unit == "GB":
            unit = "GiB"  # nvidia-smi counts MiB; people print a 1024th of it as GB
        usable = self.data.get("outcome") != "oom"
        yield Metric.PEAK_MEMORY, peak * words.UNITS[unit] if peak is not None and usable else None

    @property
    def _notes(self) -> str:
        return f"{self.training.get('notes') or ''} {self.note}".lower()

    def _peak_kind(self) -> PeakKind:
        metric = str(self.data.get("peak_metric") or "").lower()
        text = metric if self.data.get("peak_memory") is not None else self._notes
        if "nvidia-smi" in text:
            return PeakKind.DEVICE
        if re.search(r"max[- _](memory[- _])?(gpu ram )?\(?(max )?allocated|allocated|active$", text):
            return PeakKind.ALLOCATED
        if "reserved" in text or "torchtitan" in self.text.lower():
            return PeakKind.RESERVED
        return PeakKind.UNSTATED

    def _missing(self, accelerator: str | None) -> Iterator[str]:
        said = {**self.model, **self.training, **self.cluster, "accelerator": accelerator}
        said["seq_len"] = self._seq_len()
        said["batch"] = said.get("global_batch") or said.get("micro_batch")
        preset = self.model.get("preset")
        yield from (key for key in REQUIRED if not said.get(key) and not (preset and key in ("layers", "hidden")))

    def _ignored(self) -> int:
        count = len([key for key in self.data if key not in _READ[""]])
        for section in ("cluster", "model", "training", "measured", "source"):
            found = self.data.get(section) or {}
            count += len([key for key in found if key not in _READ[section]])
        return count

    # -- the scenario --------------------

    def _or(self, value: Any, key: str, default: Any) -> Any:
        """The value, or the default with a note."""
        if value is None:
            self.defaults.append(key)
            return default
        return value

    def _seq_len(self) -> int | None:
        """Tokens a sequence; where samples are not packed, a printed length is a limit that few of them reach."""
        said = self.training.get("seq_len") or self.model.get("seq_len")
        return int(said) if said and "unpacked" not in self.text else None

    def _scenario(self, name: str, accelerator: str | None) -> dict[str, Any]:
        stack = self.training.get("stack") or words.find(words.STACKS, self.text)
        built = {
            "name": re.sub(r"[^A-Za-z0-9._+-]", "-", name)[:100],
            "stack": self._or(stack, "stack", None),
            "cluster": self._cluster(accelerator),
            "model": self._model(),
            "training": self._training(),
            "parallelism": self._parallelism(),
        }
        return {key: value for key, value in built.items() if value is not None}

    def _cluster(self, accelerator: str | None) -> dict[str, Any]:
        devices, nodes = self.cluster.get("devices"), self.cluster.get("nodes")
        per = self.cluster.get("devices_per_node") or (devices // nodes if devices and nodes else None)
        per = min(per or 8, devices) if devices else per
        network = words.find(words.NETWORKS, self.cluster.get("inter_node"))
        found: dict[str, Any] = {"accelerator": accelerator, "devices": devices, "devices_per_machine": per}
        if network and devices and per and devices > per:
            found["network"] = network
            match = re.match(r"(\d+)x", str(self.cluster.get("inter_node")))
            found["nics_per_machine"] = int(match[1]) if match else None
        if accelerator in words.USUAL_NETWORKS and "network" not in found:
            found["network"] = self._or(None, "cluster.network", words.USUAL_NETWORKS[accelerator])
        return _said(found)

    def _model(self) -> dict[str, Any]:
        said = self.model
        make = words.find(words.FAMILIES, said.get("name") or said.get("family")) or {}
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "gated_mlp", "vocab")
        found = make | _said({key: said.get(key) for key in (*sizes, "family", "tied_embeddings", "preset")})
        if found.get("preset"):
            found.pop("family", None)
            return found
        family = found.setdefault("family", "gpt")
        if said.get("experts"):
            found |= {"family": "moe", **_said({key: said.get(key) for key in ("experts", "experts_per_token")})}
            found["expert_ffn_hidden"] = found.pop("ffn_hidden", None)
        elif family == "moe":
            found["family"] = "llama"
        if found.get("hidden") and not found.get("heads"):
            tp = self.training.get("tp") or 1
            sizes_of_heads = (size for size in (128, 96, 64, 32) if found["hidden"] % (size * tp) == 0)
            found["heads"] = self._or(None, "model.heads", found["hidden"] // next(sizes_of_heads, 128))
        if not found.get("vocab"):
            found["vocab"] = self._or(
                None, "model.vocab", {"llama": 32000, "bert": 30522, "t5": 32128}.get(family, 50257)
            )
        if family == "bert":
            found["encoder_layers"] = found.get("layers")
        if said.get("name"):
            found["name"] = str(said["name"])[:100]
        return _said(found)

    def _training(self) -> dict[str, Any]:
        said = self.training
        precision = str(said.get("precision") or "")
        method = str(said.get("method") or "")
        optimizer = words.find(words.OPTIMIZERS, said.get("optimizer") or self.note)
        flash = said.get("flash_attention")
        found = {
            "micro_batch": said.get("micro_batch"),
            "seq_len": self._seq_len(),
            "precision": words.find(words.PRECISIONS, precision),
            "optimizer": optimizer,
            "recompute": self._recompute(said.get("recompute")),
            "attention": "unfused" if flash is False else None,
            "trainable": said.get("trainable") or _trainable(method),
            "offload": _offload(str(said.get("offload") or "")),
            **self._batch(),
        }
        return _said(found)

    def _recompute(self, text: str | None) -> Any:
        """The form the words stand for; words of another kind stay as they are, and the scenario is refused."""
        return self._or(words.find(words.RECOMPUTE, text) or text, "training.recompute", "none")

    def _batch(self) -> dict[str, Any]:
        whole, micro, steps = (self.training.get(key) for key in ("global_batch", "micro_batch", "accumulation"))
        dp = self._dp()
        if whole and micro and whole % (micro * dp):
            self.defaults.append("training.global_batch")  # does not divide: the next that does
            whole = max(1, round(whole / (micro * dp))) * micro * dp
        if whole:
            return {"global_batch": whole}
        pp = self.training.get("pp") or 1
        return {"accumulation": self._or(steps, "training.accumulation", 1 if pp == 1 else 2 * pp)}

    def _dp(self) -> int:
        tp, pp, cp = (self.training.get(axis) or 1 for axis in ("tp", "pp", "cp"))
        return int(self.training.get("dp") or max(1, (self.cluster.get("devices") or 1) // (tp * pp * cp)))

    def _parallelism(self) -> dict[str, Any]:
        said = self.training
        axes = {axis: self._or(said.get(axis), f"parallelism.{axis}", 1) for axis in ("tp", "pp", "cp", "ep")}
        zero = said.get("zero") if said.get("zero") is not None else said.get("zero_stage")
        if zero is None:
            sharded = re.search(
                r"fsdp|full[ _]shard|zero-?3", f"{said.get('sharding')} {said.get('framework')}".lower()
            )
            distributed = re.search(r"distributed", str(said.get("optimizer")).lower())
            stage = 3 if sharded else 1 if distributed else None  # Megatron's distributed optimizer is ZeRO-1
            zero = self._or(None, "parallelism.zero", stage if self._dp() > 1 else None)
        label = re.search(r"schedule (?:label )?([\w-]+)", self._notes)
        schedule = words.find(words.SCHEDULES, label[1] if label else said.get("pipeline_schedule"))
        virtual = said.get("vpp") or 1
        if axes["pp"] == 1:
            schedule, virtual = None, 1
        elif schedule == "interleaved" and virtual == 1:
            virtual = self._interleaving(axes["pp"])
        found = {
            **{axis: degree for axis, degree in axes.items() if degree != 1},
            "etp": self._expert_tensor(axes["ep"] * axes["tp"], axes["tp"] * axes["cp"] * self._dp()),
            "dp": self._dp(),
            "zero": zero,
            "sequence_parallel": said.get("sequence_parallel"),
            "virtual_stages": virtual if virtual > 1 else None,
            "schedule": "interleaved" if virtual > 1 and schedule in (None, "1f1b") else schedule,
            "stage_layers": said.get("stage_layers"),
        }
        return _said(found)

    def _expert_tensor(self, spread: int, ranks: int) -> int | None:
        """Ranks that share an expert, as said; 1 where ``spread`` = ep x tp cannot divide the ranks of a stage."""
        named = re.search(r"\betp(\d+)\b", str(self.data.get("id")))
        said = self.training.get("etp") or (int(named[1]) if named else None)
        return self._or(None, "parallelism.etp", 1) if said is None and ranks % spread else said

    def _interleaving(self, pp: int) -> int:
        """Interleaved without a number: every layer its own chunk where the source says so, else two."""
        layers = int(self.model.get("layers") or 2 * pp)
        if "every layer its own chunk" in self._notes:
            return max(1, layers // pp)
        self.defaults.append("parallelism.virtual_stages")
        return min(2, max(1, layers // pp))


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _trainable(method: str) -> dict[str, Any] | None:
    """LoRA, QLoRA and adapters of the method column: rank 8 on queries and values unless it says more."""
    if "lora" not in method and "adapter" not in method:
        return None
    rank = re.search(r"rank (\d+)", method)
    base = "nf4-double" if "nf4-dq" in method else "nf4" if "qlora" in method or "nf4" in method else "bf16"
    targets = "all" if "all layers" in method else ["q", "v"]
    return {"lora": {"rank": int(rank[1]) if rank else 8, "targets": targets, "base": base}}


def _offload(text: str) -> dict[str, Any] | None:
    """Offload column: optimizer, parameters, activations to the CPU; a share of them is refused by the scenario."""
    ratio = re.search(r"ratio ([\d.]+)", text)
    if not text or (ratio and float(ratio[1]) == 0):
        return None
    if ratio and float(ratio[1]) < 1:
        return {"activations": f"{ratio[1]} of them"}
    if "activation" in text:
        return {"activations": "cpu"}
    return {"optimizer": "cpu"} if "optimizer" in text else {"optimizer": "cpu", "parameters": "cpu"}
