"""fp8, optimizer in backward, ``trainable`` and ``offload`` of a scenario file -> records, with what forbids them.

Defaults: recipe delayed (mxfp8 on Blackwell), weights in 16 bit beside their fp8 copies; adapters on q and v with
alpha 2 x rank, over 16-bit weights (``qlora``: nf4-double); transfers overlap compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from simtrain.scenario import checks
from simtrain.scenario.clusters import Hardware, look_up
from simtrain.scenario.hardware import AcceleratorKind, Precision
from simtrain.scenario.model import Model, Part
from simtrain.scenario.problems import Problems
from simtrain.scenario.scenario import Parallelism, Recompute, Stack, Training, Zero
from simtrain.scenario.schema import LoraSpec, OffloadSpec, TrainableSpec, TrainingSpec
from simtrain.scenario.tuning import (
    LINEARS,
    BaseFormat,
    Fp8,
    Fp8Kernels,
    Fp8Recipe,
    Lora,
    Offload,
    Place,
    Trainable,
    linear_shapes,
)
from simtrain.units import Dimension, parse

if TYPE_CHECKING:
    from simtrain.scenario.tables import Tables

ALIASES = {
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "o_proj": ("o",),
    "output_proj": ("o",),
    "w1": ("gate",),
    "w3": ("up",),
    "w2": ("down",),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "down_proj": ("down",),
    "lm_head": ("output",),
    "q_a_proj": ("q_a",),
    "q_b_proj": ("q_b",),
    "kv_a_proj_with_mqa": ("kv_a",),
    "kv_b_proj": ("kv_b",),
    "attention": LINEARS[Part.ATTENTION],
    "mlp": ("gate", "up", "down"),
    "all-linear": (*LINEARS[Part.ATTENTION], *LINEARS[Part.MLP]),
}
"""Names that PEFT, Hugging Face and torchtune use for the linear layers (``all-linear``: PEFT, all but the head)."""
TARGETS = ("q", "v")
"""PEFT's default for Llama models, and Hu 2021, section 7.1."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """Training with its tuning, and the keys that defaults filled."""

    training: Training
    defaults: tuple[str, ...]


def tune(
    spec: TrainingSpec,
    training: Training,
    parallelism: Parallelism,
    model: Model,
    stack: Stack,
    hardware: Hardware,
    tables: Tables,
    problems: Problems,
) -> Tuned:
    """Fill in the tuning of ``training``; problems are noted."""
    defaults: list[str] = []
    fp8 = _fp8(spec, training, stack, hardware, problems, defaults)
    trainable = _trainable(spec.trainable, model, problems, defaults)
    offload = _offload(spec.offload, training, parallelism, hardware, tables, problems)
    early = bool(spec.optimizer and spec.optimizer.in_backward)
    made = replace(training, fp8=fp8, trainable=trainable, offload=offload, optimizer_in_backward=early)
    if problems.sound("training.trainable", "training.offload", "training.fp8"):
        _together(made, parallelism, model, stack, problems)
        checks.together(made, parallelism, problems)
    return Tuned(made, tuple(defaults))


def _fp8(
    spec: TrainingSpec,
    training: Training,
    stack: Stack,
    hardware: Hardware,
    problems: Problems,
    defaults: list[str],
) -> Fp8 | None:
    device = hardware.accelerator
    if training.precision is not Precision.FP8:
        if spec.fp8 is not None:
            problems.add("training.fp8", f"a recipe without precision fp8 (it is {training.precision})")
        return None
    assert device is not None
    if stack.fp8 is Fp8Kernels.NONE:
        problems.add(
            "training.precision",
            f"{stack.name} has no fp8 linear layers; choose megatron-core-2024 (Transformer Engine),"
            " torchtitan-2024 (torchao) or maxtext-2024",
        )
        return None
    blackwell = device.architecture.startswith("Blackwell")
    said = spec.fp8.recipe if spec.fp8 else None
    if said is None:
        defaults.append("training.fp8")
    recipe = Fp8Recipe(said) if said else Fp8Recipe.MXFP8 if blackwell else _usual_recipe(stack)
    if recipe is Fp8Recipe.MXFP8 and not blackwell:
        problems.add(
            "training.fp8",
            f"mxfp8 needs Blackwell's matrix units; {device.name} is {device.architecture}:"
            " choose delayed, current or block",
        )
    if recipe is Fp8Recipe.BLOCK and device.kind is AcceleratorKind.GPU and not _from_hopper(device.architecture):
        problems.add("training.fp8", f"block scaling needs Hopper or later; {device.name} is {device.architecture}")
    return Fp8(recipe, bool(spec.fp8 and spec.fp8.primary))


def _usual_recipe(stack: Stack) -> Fp8Recipe:
    """torchao scales by the current tensor (dynamic scaling), Transformer Engine by history."""
    return Fp8Recipe.CURRENT if stack.fp8 is Fp8Kernels.TORCHAO else Fp8Recipe.DELAYED


def _from_hopper(architecture: str) -> bool:
    return architecture.startswith(("Hopper", "Blackwell"))


def _trainable(spec: TrainableSpec | None, model: Model, problems: Problems, defaults: list[str]) -> Trainable:
    key = "training.trainable"
    if spec is None:
        return Trainable()
    said = [name for name in ("lora", "qlora") if getattr(spec, name) is not None]
    if len(said) == 2 or (said and (spec.frozen or spec.frozen_blocks)):
        problems.add(key, "give one of lora, qlora, and frozen with frozen_blocks (under adapters all else is frozen)")
        return Trainable()
    if said:
        return Trainable(lora=_lora(getattr(spec, said[0]), said[0], model, problems, defaults))
    frozen = tuple(dict.fromkeys(spec.frozen or ()))
    blocks = spec.frozen_blocks or 0
    if blocks > model.layers:
        problems.add(key, f"{blocks} frozen_blocks, but the model has {model.layers} layers")
    if model.tied_embeddings and ("embedding" in frozen) != ("head" in frozen):
        problems.add(key, f"{model.name} ties embedding and head: freeze both or neither")
    made = Trainable(frozen=frozen, frozen_blocks=blocks)
    inner = [(part, layer) for layer in range(model.layers) for part in (Part.ATTENTION, Part.MLP)]
    if not any(made.is_trained(*one) for one in [(Part.EMBEDDING, -1), *inner, (Part.HEAD, -1)]):
        problems.add(key, "everything is frozen: nothing is left to train")
    return made


def _lora(spec: LoraSpec, kind: str, model: Model, problems: Problems, defaults: list[str]) -> Lora:
    key = f"training.trainable.{kind}"
    if spec.targets is None:
        defaults.append(f"{key}.targets")
    names = [spec.targets] if isinstance(spec.targets, str) else spec.targets or list(TARGETS)
    shapes = {name for part in (Part.ATTENTION, Part.MLP, Part.HEAD) for name in linear_shapes(model, part, 1)}
    targets: list[str] = []
    for name in names:
        meant = [one for one in ALIASES.get(name, (name,)) if one in shapes]
        if not meant:
            choices = ", ".join(sorted({*shapes, *ALIASES}))
            problems.add(key, f"no linear layer {name!r} in {model.name}; choose from {choices}")
        targets += meant
    base = spec.base or ("nf4-double" if kind == "qlora" else "bf16")
    alpha = float(spec.alpha) if spec.alpha is not None else 2.0 * spec.rank
    return Lora(spec.rank, alpha, tuple(dict.fromkeys(targets)), BaseFormat(base))


def _offload(
    spec: OffloadSpec | None,
    training: Training,
    parallelism: Parallelism,
    hardware: Hardware,
    tables: Tables,
    problems: Problems,
) -> Offload:
    key = "training.offload"
    if spec is None:
        return Offload()
    places = {name: Place(getattr(spec, name) or "device") for name in ("optimizer", "parameters", "activations")}
    bandwidth = spec.nvme_bandwidth or 0.0
    if spec.storage:
        row = look_up(tables.storage, spec.storage, f"{key}.storage", "storage", problems)
        cell = tables.storage.rows[spec.storage].data.get("read_bandwidth") if row and not bandwidth else None
        bandwidth = bandwidth or (_rate(cell) if cell else 0.0)
    made = Offload(**places, overlap=spec.overlap is not False, nvme_bandwidth=bandwidth)
    if not made.active:
        return Offload()
    layout = parallelism.layout
    replicas = max(layout.dp * layout.cp, layout.expert_data)
    device = hardware.accelerator
    if Place.NVME in places.values() and not bandwidth:
        problems.add(key, "nvme needs a rate: give nvme_bandwidth, or storage: a row with read_bandwidth")
    if hardware.usual is None:
        problems.add(key, f"no machine of {device.name if device else 'it'} is known: name one in cluster.machine")
    if device and device.kind is AcceleratorKind.TPU and made.optimizer is not Place.DEVICE:
        problems.add(key, "the host's optimizer step (CPU Adam) is a GPU framework's; offload activations, or nothing")
    if made.parameters is not Place.DEVICE and replicas > 1 and parallelism.zero is not Zero.PARAMETERS:
        problems.add(key, f"parameters leave the device under ZeRO-3 alone (zero is {int(parallelism.zero)})")
    if made.parameters is not Place.DEVICE and made.optimizer is Place.DEVICE:
        problems.add(key, "parameters off the device need the optimizer off it too (DeepSpeed and FSDP alike)")
    if made.optimizer is not Place.DEVICE and replicas > 1 and parallelism.zero is Zero.NONE:
        problems.add(key, "every rank would step all parameters on its host: choose parallelism.zero 1, 2 or 3")
    rule = training.optimizer
    if made.optimizer is not Place.DEVICE and (rule.quantised_state or rule.newton_schulz):
        problems.add(key, f"no host version of {rule.name} exists; choose adamw, lion or sgd")
    return made


def _rate(cell: object) -> float:
    return parse(cell["value"] if isinstance(cell, dict) else cell, Dimension.BANDWIDTH)


def _together(training: Training, parallelism: Parallelism, model: Model, stack: Stack, problems: Problems) -> None:
    """Combinations over several keys that no framework runs."""
    trainable, offload, pp = training.trainable, training.offload, parallelism.layout.pp
    lora = trainable.lora
    steps = training.global_batch // (training.micro_batch * parallelism.layout.dp)
    if training.optimizer_in_backward and steps > 1:
        problems.add(
            "training.optimizer",
            f"in_backward updates after every backward, so gradients cannot accumulate over {steps} microbatches",
        )
    if training.optimizer_in_backward and offload.optimizer is not Place.DEVICE:
        problems.add("training.optimizer", "in_backward steps on the device; the optimizer is offloaded")
    if lora and lora.base is not BaseFormat.BF16 and training.precision is Precision.FP8:
        problems.add("training.trainable", "fp8 products over 4-bit weights exist nowhere; choose bf16 or base: bf16")
    if lora and "output" in lora.targets and model.tied_embeddings:
        problems.add("training.trainable", f"{model.name} ties its head to the embedding: it takes no adapter")
    if trainable.frozen_blocks and pp > 1 and "embedding" in trainable.frozen:
        first = parallelism.stage_layers[0]
        if trainable.frozen_blocks >= first:
            problems.add(
                "training.trainable",
                f"stage 0 ({first} blocks) would have no backward at all; freeze fewer blocks, or use no pipeline",
            )
    if training.recompute is Recompute.SELECTIVE and stack.selective_ops and model.kv_lora_rank:
        problems.add(
            "training.recompute",
            f"selective recomputation by operator ({stack.name}) of latent attention is not modelled; choose full",
        )
