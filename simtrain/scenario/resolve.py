"""Checked scenario file -> ``Scenario``: names become rows, ``auto`` becomes numbers, documented defaults fill in.

The defaults, in one place (a scenario lists those it used in ``Scenario.defaults``):

seed 0; tp, pp, cp, ep 1; etp as tp; dispatch alltoall, dropless and balanced; stack by kind of accelerator
(``STACKS``); precision bf16, or fp16 or fp32 where the matrix units lack it; optimizer adamw; recompute none; attention
the stack's kernel, unfused where the accelerator cannot run it; zero 3 on FSDP stacks, else 0; sequence_parallel where
tp is above 1; virtual_stages 1; schedule 1f1b, interleaved with virtual stages; stage_layers as even as possible,
lighter ends; overlap true; post_validation with zero-bubble schedules, not in FSDP stacks; with cp, cp_kind all_gather
on FSDP stacks, else p2p; one document a sequence; sync_every_microbatch from ZeRO-2 on; micro_batch 1; accumulation 1
without a global_batch; devices_per_machine 8, or what a TPU host holds; network and NICs of the first machine row with
that accelerator, ICI between the hosts of a TPU slice; no jitter; what a model leaves out by its family (``models``);
the keys of sharding in ``sharding``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

from simtrain.errors import InputError
from simtrain.scenario import checks, clusters, contexts, models, sharding, tunings
from simtrain.scenario.document import document
from simtrain.scenario.hardware import Accelerator, AcceleratorKind, Precision
from simtrain.scenario.layout import AXES, Layout
from simtrain.scenario.model import Model
from simtrain.scenario.pipelines import GRID, RULES, grid_splits, grid_stages
from simtrain.scenario.problems import Problems
from simtrain.scenario.scenario import (
    Attention,
    ContextKind,
    Dispatch,
    Optimizer,
    Parallelism,
    Recompute,
    Scenario,
    Stack,
    Training,
    Zero,
)
from simtrain.scenario.schema import EVERY_SQRT, MAX_DEVICES, ScenarioFile, TrainingSpec
from simtrain.scenario.yamltext import read_text

if TYPE_CHECKING:
    from simtrain.scenario.tables import Tables

Value = TypeVar("Value")
STACKS = {AcceleratorKind.GPU: "megatron-core-2024", AcceleratorKind.TPU: "maxtext-2024"}
OPTIMIZER = "adamw"


def resolve(spec: ScenarioFile, *, name: str, tables: Tables, problems: Problems) -> Scenario | None:
    """The scenario; ``None`` if anything is wrong, all of it noted in ``problems``."""
    return _Resolver(spec, tables, problems).scenario(name)


class _Resolver:
    def __init__(self, spec: ScenarioFile, tables: Tables, problems: Problems) -> None:
        self.spec, self.tables, self.problems = spec, tables, problems
        self.defaults: list[str] = []

    def _or(self, value: Value | None, key: str, default: Value) -> Value:
        """The value, or the default with a note that it was used."""
        if value is None:
            self.defaults.append(key)
            return default
        return value

    def scenario(self, name: str) -> Scenario | None:
        spec, problems = self.spec, self.problems
        found = clusters.find(spec.cluster, self.tables, problems)
        accelerator = found.accelerator
        stack = self._stack(accelerator)
        optimizer = self._optimizer()
        precision = self._precision(accelerator)
        stack = stack.at(precision) if stack and precision else stack
        checks.not_modelled(spec, problems)
        given, usual_length = models.base(spec.model, problems)
        seq_len = self._seq_len(usual_length)
        model, model_defaults = models.model(spec.model, given, seq_len, problems)
        layout = self._layout(found.devices, model)
        batch = self._batch(layout) if layout else None
        parallelism = self._parallelism(model, layout, stack, batch)
        if model and layout and seq_len and parallelism:
            checks.tensor(model, layout, seq_len, parallelism.sequence_parallel, problems)
        if model and parallelism:
            checks.experts(model, parallelism, stack, spec, problems)
        if model and seq_len:
            checks.positions(model, seq_len, problems)
        training = self._training(accelerator, stack, optimizer, precision, seq_len, batch, parallelism)
        if model and training and parallelism and stack:
            contexts.check(model, training, parallelism, stack, problems)
            tuned = tunings.tune(spec.training, training, parallelism, model, stack, found, self.tables, problems)
            self.defaults += tuned.defaults
            training = tuned.training
        if problems.found or not (layout and model and training and parallelism and stack):
            return None
        seed = self._or(spec.seed, "seed", 0)
        jitter = self._or(spec.cluster.jitter.sigma if spec.cluster.jitter else None, "cluster.jitter", 0.0)
        self.defaults += [*found.defaults, *(f"model.{key}" for key in model_defaults)]
        built = Scenario(
            name=name,
            seed=seed,
            cluster=clusters.cluster(found, layout.world, jitter),
            model=model,
            training=training,
            parallelism=parallelism,
            stack=stack,
            measured=_measured(spec),
            defaults=tuple(sorted({*self.defaults, *(spec.defaults or ())})),
        )
        object.__setattr__(built, "document", document(built, spec))
        return built

    def _stack(self, accelerator: Accelerator | None) -> Stack | None:
        if self.spec.stack is None and accelerator is None:
            return None
        kind = accelerator.kind if accelerator else AcceleratorKind.GPU
        name = self._or(self.spec.stack, "stack", STACKS[kind])
        return clusters.look_up(self.tables.stacks, name, "stack", "stack", self.problems)

    def _optimizer(self) -> Optimizer | None:
        said = self.spec.training.optimizer
        name = self._or(said.name if said else None, "training.optimizer", OPTIMIZER)
        return clusters.look_up(self.tables.optimizers, name, "training.optimizer", "optimizer", self.problems)

    def _precision(self, accelerator: Accelerator | None) -> Precision | None:
        if accelerator is None or not self.problems.sound("training.precision"):
            return None
        best = next((p for p in (Precision.BF16, Precision.FP16) if p in accelerator.matrix_peak), Precision.FP32)
        said = self.spec.training.precision
        wanted = Precision(self._or(said, "training.precision", best.value))
        checks.precision(accelerator, wanted, self.problems)
        return wanted

    def _seq_len(self, usual: int | None) -> int | None:
        said = self.spec.training.seq_len
        if said is None and usual is None:
            if self.problems.sound("model.preset", "training.seq_len"):
                self.problems.add("training.seq_len", "missing: no usual sequence length of this model is known")
            return None
        return said if usual is None else self._or(said, "training.seq_len", usual)

    def _layout(self, devices: int | None, model: Model | None) -> Layout | None:
        spec, problems = self.spec.parallelism, self.problems
        keys = [f"parallelism.{axis}" for axis in ("dp", "tp", "pp", "cp", "ep", "etp", "mesh_order")]
        counted = [f"cluster.{key}" for key in ("nodes", "devices", "slice", "machine", "devices_per_machine")]
        if not problems.sound(*keys, *counted):
            return None
        tp, pp, cp, ep = (self._or(getattr(spec, axis), f"parallelism.{axis}", 1) for axis in ("tp", "pp", "cp", "ep"))
        if devices is None and spec.dp is None:
            problems.add("cluster", "missing: give nodes, devices or slice (or parallelism.dp)")
            return None
        dp = spec.dp or max(1, (devices or 0) // (tp * pp * cp))
        order: tuple[str, ...] = tuple(self._or(spec.mesh_order, "parallelism.mesh_order", [*AXES]))
        if sorted(order) != sorted(AXES):
            problems.add("parallelism.mesh_order", f"must name each of {', '.join(AXES)} once, innermost first")
            return None
        etp = spec.etp or 0
        if model and model.experts:
            etp = self._or(spec.etp, "parallelism.etp", tp)
        layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, order=order)
        if devices is not None:
            checks.degrees(layout, devices, spec, problems)
        elif layout.world > MAX_DEVICES:
            problems.add("parallelism.dp", f"{layout.world} devices in all (at most {MAX_DEVICES})")
        return layout if problems.sound(*keys) else None

    def _batch(self, layout: Layout) -> tuple[int, int, int] | None:
        """(global_batch, micro_batch, accumulation): global = micro x accumulation x dp, at most one of them free."""
        spec, dp = self.spec.training, layout.dp
        keys = ("training.global_batch", "training.micro_batch", "training.accumulation")
        if not self.problems.sound(*keys):
            return None
        whole, micro, steps = spec.global_batch, spec.micro_batch, spec.accumulation
        if whole is None and micro is None and steps is None:
            self.problems.add(keys[0], "missing: give global_batch, or micro_batch and accumulation")
            return None
        if whole is None:
            micro, steps = self._or(micro, keys[1], 1), self._or(steps, keys[2], 1)
            whole = micro * steps * dp
        elif micro is None:
            micro = max(1, whole // (steps * dp)) if steps else self._or(micro, keys[1], 1)
        steps = steps or max(1, whole // (micro * dp))
        if whole != micro * steps * dp:
            self.problems.add(keys[0], _not_whole(spec, whole, micro=micro, steps=steps, dp=dp))
            return None
        if steps > checks.MAX_MICROBATCHES:
            self.problems.add(keys[0], f"{steps} microbatches a step (at most {checks.MAX_MICROBATCHES})")
            return None
        return whole, micro, steps

    def _parallelism(
        self, model: Model | None, layout: Layout | None, stack: Stack | None, batch: tuple[int, int, int] | None
    ) -> Parallelism | None:
        spec, problems, key = self.spec.parallelism, self.problems, "parallelism."
        pp = layout.pp if layout else (spec.pp or 1)
        written = self._written()
        usual = 1 if written is None else max(1, len({s for stages in grid_stages(written) for s in stages}) // pp)
        virtual = self._or(spec.virtual_stages, key + "virtual_stages", usual)
        name = (
            GRID
            if written
            else str(self._or(spec.schedule, key + "schedule", "interleaved" if virtual > 1 else "1f1b"))
        )
        microbatches = batch[2] if batch else None
        if problems.sound(key + "pp", key + "virtual_stages", key + "schedule"):
            if written:
                checks.grid(written, pp, virtual, microbatches, problems)
            else:
                checks.schedule(name, pp, virtual, microbatches, problems)
        if model and model.tied_embeddings and written and problems.sound(key + "schedule"):
            checks.tied_ends(written, pp, problems)
        blocks = None
        if model and problems.sound(key + "pp", key + "virtual_stages", key + "stage_layers"):
            blocks = checks.stages(model.layers, pp, virtual, spec.stage_layers, problems)
        zero = self._or(spec.zero, key + "zero", 3 if stack and stack.fp32_shards else 0)
        if stack and problems.sound(key + "zero", key + "pp"):
            checks.zero(zero, pp, stack, problems)
        if batch and blocks:
            checks.passes(len(blocks), batch[2], problems)
        splits = grid_splits(written) if written else name in RULES and RULES[name].split
        rolls = name in RULES and RULES[name].rolls and pp > 1 and not (stack and stack.fp32_shards)
        rolling = self._or(spec.post_validation, key + "post_validation", rolls)
        if rolling and pp == 1:
            problems.add(key + "post_validation", "is about the stages of a pipeline (pp above 1)")
        if layout is None or blocks is None or model is None:
            return None
        split_by = name if splits else ""
        offload = self.spec.training.offload
        shards = sharding.resolve(
            spec,
            layout,
            zero,
            gathers=zero == 3 or bool(offload and offload.parameters not in (None, "device")),
            split_by=split_by,
            stack=stack,
            fill=self._or,
            problems=problems,
        )
        how, inner = ContextKind.P2P, 1
        if layout.cp > 1:
            how = self._or(
                None if spec.cp_kind is None else contexts.kind(spec.cp_kind, stack, problems),
                key + "cp_kind",
                contexts.kind(None, stack, problems),
            )
            inner = contexts.inner(spec, how, layout, model, problems)
        return Parallelism(
            layout=shards.layout,
            zero=Zero(zero),
            sequence_parallel=self._or(spec.sequence_parallel, key + "sequence_parallel", True) and layout.tp > 1,
            schedule=name,
            virtual_stages=virtual,
            stage_layers=blocks,
            overlap=self._or(spec.overlap, key + "overlap", True),
            post_validation=rolling,
            grid=written or (),
            grid_file=spec.schedule
            if written and isinstance(spec.schedule, str)
            else key + "schedule"
            if written
            else "",
            cp_kind=how,
            cp_inner=inner,
            dispatch=Dispatch(self._or(spec.dispatch, key + "dispatch", Dispatch.ALLTOALL.value)),
            **shards.fields,
        )

    def _written(self) -> tuple[str, ...] | None:
        """Lines of a schedule that the scenario or a file beside it spells out; ``None`` where it is named."""
        said, key = self.spec.parallelism.schedule, "parallelism.schedule"
        if said is None or (isinstance(said, str) and not said.endswith(".csv")):
            return None
        if isinstance(said, list):
            rows = tuple(said)
        else:
            try:
                rows = tuple(read_text(said).splitlines())
            except InputError as error:
                self.problems.add(key, str(error))
                return None
        if not any(grid_stages(rows)):
            self.problems.add(key, "holds no action, such as 2F0 (stage, one of F B I W, microbatch)")
        return rows

    def _training(
        self,
        accelerator: Accelerator | None,
        stack: Stack | None,
        optimizer: Optimizer | None,
        precision: Precision | None,
        seq_len: int | None,
        batch: tuple[int, int, int] | None,
        parallelism: Parallelism | None,
    ) -> Training | None:
        spec = self.spec.training
        attention = self._attention(accelerator, stack)
        if not (optimizer and precision and seq_len and batch and parallelism and attention):
            return None
        mode, number = self._or(spec.recompute, "training.recompute", ("none", 0))
        if mode == "every" and number == EVERY_SQRT:
            number = max(1, round(math.sqrt(max(parallelism.stage_layers))))
        spread, amount = self._or(spec.imbalance, "training.imbalance", ("factor", 1.0))
        sharded = parallelism.zero >= Zero.GRADIENTS
        early = self._or(spec.sync_every_microbatch, "training.sync_every_microbatch", sharded)
        return Training(
            global_batch=batch[0],
            micro_batch=batch[1],
            seq_len=seq_len,
            precision=precision,
            optimizer=optimizer,
            recompute=Recompute(mode),
            attention=attention,
            recompute_layers=number,
            sync_every_microbatch=early,
            documents=contexts.documents(spec.packed_length, seq_len, self.problems),
            capacity_factor=spec.capacity_factor or 0.0,
            imbalance=amount if spread == "factor" else 1.0,
            imbalance_sigma=amount if spread == "sigma" else 0.0,
        )

    def _attention(self, accelerator: Accelerator | None, stack: Stack | None) -> Attention | None:
        said = self.spec.training.attention
        if accelerator is None or (said is None and stack is None):
            return None
        kernel = Attention(said) if said else stack.attention if stack else Attention.UNFUSED
        why = checks.attention_runs(accelerator, kernel)
        if said is None:
            self.defaults.append("training.attention")
            return Attention.UNFUSED if why else kernel
        if why:
            self.problems.add(
                "training.attention",
                f"{kernel} {why}; {accelerator.name} is {accelerator.architecture}; choose another kernel or auto",
            )
        return kernel


def _not_whole(spec: TrainingSpec, whole: int, *, micro: int, steps: int, dp: int) -> str:
    """Message: the batch identity cannot hold."""
    if spec.micro_batch and spec.accumulation:
        return f"{whole} is not micro_batch {micro} x accumulation {steps} x dp {dp} = {micro * steps * dp}"
    what, step = (f"accumulation {steps}", steps * dp) if spec.accumulation else (f"micro_batch {micro}", micro * dp)
    return f"{whole} is no multiple of {what} x dp {dp} = {step}; e.g. {max(1, round(whole / step)) * step} is"


def _measured(spec: ScenarioFile) -> dict[str, Any]:
    return spec.measured.model_dump(exclude_none=True) if spec.measured else {}
