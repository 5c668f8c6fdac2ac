"""What one device holds all step long: parameters, gradients, optimizer state, buffers, runtime.

Mixed-precision Adam holds 2 bytes of weight, 2 (or 4) of gradient and 12 of optimizer state a parameter: 16 (to 18), 20
where a stack keeps both gradient forms; ZeRO divides the optimizer, the gradient and the parameter part by the
data-parallel size (Rajbhandari 2020, "ZeRO", section 3 and Figure 1). FSDP keeps fp32 shards: 4 + 4 + 8.
"""

from __future__ import annotations

from simtrain.cost.memory.activations import FP32, element_bytes
from simtrain.program.demand import Memory
from simtrain.program.shards import elements, wrap_units
from simtrain.scenario.hardware import AcceleratorKind
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Scenario, Zero
from simtrain.scenario.tuning import BaseFormat, Fp8Kernels, Fp8Recipe, Place, linear_shapes

BASE_BYTES = {
    BaseFormat.BF16: 2.0,
    BaseFormat.NF4: 0.5 + 4 / 64,
    BaseFormat.NF4_DOUBLE: 0.5 + 1 / 64 + 4 / (64 * 256),
}
"""Bytes of a frozen linear weight: 4 bits and its share of the scales, 0.5 or 0.127 bit (Dettmers 2023, section 3)."""

PAIR, GROUP = 544 * 2.0**20, 688 * 2.0**20
"""byte that an NCCL communicator of two, and of more ranks takes (NVIDIA/nccl issue 964: four A100)."""


def communicators(scenario: Scenario) -> float:
    """Bytes of the NCCL communicators of one device.

    One for all ranks, one for each smaller group it reduces or sends in: tensor, context (heads and ring), data,
    pipeline, model (the norm of the gradients), embedding, experts', those of hybrid sharding and of DualPipe's two
    copies. They do not share buffers (NVIDIA/nccl issues 864 and 964). XLA has none.
    """
    layout, world = scenario.parallelism.layout, scenario.cluster.devices
    if scenario.cluster.accelerator.kind is not AcceleratorKind.GPU:
        return 0.0
    context = (scenario.parallelism.head_split, scenario.parallelism.sequence_split)
    groups = [layout.tp, *context, scenario.replicas, layout.pp, 2 if scenario.has_tied_copy else 1]
    groups += [scenario.shards(), layout.replica] if scenario.is_hybrid else []
    groups += [layout.secondary * layout.cp, 2 if scenario.held_twice else 1]
    groups += [layout.ep, layout.expert_tensor, layout.expert_data] if layout.has_expert_groups else []
    groups += [layout.tp * layout.pp] if layout.pp > 1 and layout.tp > 1 else []
    return sum(PAIR if size == 2 else GROUP for size in [world, *(one for one in groups if one < world)] if size > 1)


def held_parameters(scenario: Scenario, pp_rank: int, axis: str = "") -> float:
    """Parameters of one tensor rank of a pipeline rank before sharding; a tied embedding's second copy included.

    ``axis`` counts only those whose copies lie along this process group (``Scenario.gradient_axis``).
    """
    return sum(scenario.part_parameters(*one) for one in _parts(scenario, pp_rank, axis))


def trained_parameters(scenario: Scenario, pp_rank: int, axis: str = "") -> float:
    """Those of ``held_parameters``, adapters included, that get gradients and optimizer state."""
    return sum(scenario.trainable_parameters(*one) for one in _parts(scenario, pp_rank, axis))


def _parts(scenario: Scenario, pp_rank: int, axis: str = "") -> list[tuple[Part, int]]:
    parts = (one for stage in scenario.rank_stages(pp_rank) for one in scenario.parts(stage))
    return [one for one in parts if axis in ("", scenario.gradient_axis(one[0]))]


def linear_elements(scenario: Scenario, part: Part) -> float:
    """Elements of the linear layers of a part inside a block, on one tensor rank; the router stays as it is."""
    ranks, alike = scenario.linear_split(part)
    shapes = linear_shapes(scenario.model, part, ranks).values()
    return alike * sum(out * inp for out, inp in shapes) if part is not Part.HEAD else 0.0


def holds_fp32_weights(scenario: Scenario) -> bool:
    """Whether the weights that are trained are fp32 themselves, not 16 bit beside a master copy (or without one)."""
    shards = scenario.stack.fp32_shards and not scenario.stack.low_precision
    return shards or element_bytes(scenario.training.precision) == FP32


def fp8_copies(scenario: Scenario) -> float:
    """Bytes of fp8 weight that stay beside, or instead of, the 16-bit weight of a linear layer.

    Transformer Engine keeps the copies that the forward and the input gradient read. Scaled a tensor at a time the
    second is a transpose, which Blackwell's products do not need; block scales differ by direction: always two.
    """
    fp8 = scenario.training.fp8
    if fp8 is None or scenario.stack.fp8 is not Fp8Kernels.TRANSFORMER_ENGINE:
        return 0.0
    scales = {Fp8Recipe.BLOCK: 4 / 128**2, Fp8Recipe.MXFP8: 1 / 32}.get(fp8.recipe, 0.0)
    whole_tensor = fp8.recipe in (Fp8Recipe.DELAYED, Fp8Recipe.CURRENT)
    blackwell = scenario.cluster.accelerator.architecture.startswith("Blackwell")
    return (1.0 if whole_tensor and blackwell else 2.0) * (1.0 + scales)


def weight_bytes(scenario: Scenario, part: Part, layer: int) -> float:
    """Bytes of the weights of a part on one tensor rank before sharding, adapters and fp8 copies included."""
    training = scenario.training
    weight = FP32 if holds_fp32_weights(scenario) else element_bytes(training.precision)
    count = scenario.part_parameters(part, layer)
    inner = linear_elements(scenario, part)
    if training.trainable.lora:
        base = element_bytes(training.precision)
        linear = BASE_BYTES[training.trainable.lora.base] if base < FP32 else base
        return (count - inner) * base + inner * linear + scenario.adapter_parameters(part, layer) * weight
    copies = fp8_copies(scenario)
    if training.fp8 and training.fp8.primary and copies and weight < FP32:
        return (count - inner) * weight + inner * copies
    return count * weight + inner * copies


def gathered_bytes(scenario: Scenario, layer: int, axis: str) -> float:
    """Bytes a parameter of a unit gathered over (or fetched by the ranks of) ``axis``: the compute format, or what the
    frozen base is stored in. ``layer`` -1 means embedding, head, or everything at once.
    """
    training, element = scenario.training, element_bytes(scenario.training.precision)
    lora, fp8 = training.trainable.lora, training.fp8
    narrow = BASE_BYTES[lora.base] if lora and element < FP32 else 1.0 if fp8 and fp8.primary else element
    if layer < 0 or narrow == element:
        return element
    stage = next(stage for stage in range(scenario.stages) if layer in scenario.stage_range(stage))
    units = (
        unit for unit in wrap_units(scenario, stage) if unit.axis == axis and layer in {at for _, at in unit.parts}
    )
    parts = [one for unit in units for one in unit.parts]
    inner = sum(linear_elements(scenario, part) for part, _ in parts)
    return element + (narrow - element) * inner / elements(scenario, parts)


def state_bytes(scenario: Scenario, part: Part, layer: int) -> float:
    """Bytes of optimizer state of a part on one tensor rank before sharding, a master copy included.

    Moments have the format of their parameters (torch.optim: ``zeros_like``) unless the row stores its own, in 8 bit
    or, where it knows no master copy, in 16.
    """
    row, stack = scenario.training.optimizer, scenario.stack
    count = scenario.trainable_parameters(part, layer)
    matrices = min(count, linear_elements(scenario, part)) if row.newton_schulz else count
    moments = matrices * row.state_bytes + (count - matrices) * row.vector_state_bytes
    if element_bytes(scenario.training.precision) == FP32 or holds_fp32_weights(scenario):
        return moments
    if stack.low_precision:
        return moments if row.quantised_state or not row.master_bytes else moments / 2
    return moments + count * row.master_bytes


def temporary_bytes(scenario: Scenario) -> float:
    """Bytes a parameter that the step of the optimizer holds for a moment beside state and gradients."""
    narrow = scenario.stack.low_precision and element_bytes(scenario.training.precision) < FP32
    return scenario.training.optimizer.temporary_bytes / (2 if narrow else 1)


def unsharded_gradient_bytes(scenario: Scenario) -> float:
    """Bytes a parameter of the gradient that a backward writes, before any sharding."""
    element = element_bytes(scenario.training.precision)
    if element == FP32 or scenario.stack.fp32_shards:
        return element
    return scenario.stack.grad_bytes


def sharded_gradient_bytes(scenario: Scenario) -> float:
    """Bytes a parameter of the gradient that accumulates or that the optimizer reads, before division by the shards."""
    element = element_bytes(scenario.training.precision)
    if scenario.stack.low_precision:
        return element
    return FP32 if element == FP32 or scenario.stack.fp32_shards else scenario.stack.grad_bytes


def master_gradient_bytes(scenario: Scenario) -> float:
    """Bytes a parameter of the fp32 copy of low-precision gradients that the step of a master-weight optimizer makes.

    Megatron ``_copy_model_grads_to_main_grads``, DeepSpeed ``FP16_Optimizer.step``: 20 bytes a parameter, for a moment.
    """
    row, host = scenario.training.optimizer, scenario.training.offload.optimizer is not Place.DEVICE
    copied = row.master_bytes > 0 and sharded_gradient_bytes(scenario) < FP32
    copied = copied and not (scenario.stack.low_precision or host)
    return FP32 if copied else 0.0


def shards_gradients_at_once(scenario: Scenario, axis: str = "dp") -> bool:
    """Whether each backward's gradients are reduced and sharded before the next: ZeRO-2/3 without a no-sync phase."""
    every = scenario.microbatches == 1 or scenario.training.sync_every_microbatch
    return scenario.parallelism.zero >= Zero.GRADIENTS and scenario.shards(axis) > 1 and every


def gradients_appear_late(scenario: Scenario) -> bool:
    """Whether gradients exist only from the backward to the optimizer.

    PyTorch's own stacks set gradients to none after each step; with one microbatch the forward then runs without them.
    Megatron and DeepSpeed hold contiguous buffers all step.
    """
    training, once = scenario.training, scenario.microbatches == 1
    if training.offload.optimizer is not Place.DEVICE and (once or training.sync_every_microbatch):
        return True  # each gradient leaves for the host as soon as it is complete (ZeRO-Offload, section 4.1)
    return training.optimizer_in_backward or (scenario.stack.fp32_shards and once)


def gradients(scenario: Scenario, parameters: float, axis: str = "dp") -> float:
    """Bytes of gradient held all step by a rank with ``parameters`` parameters.

    Accumulation without synchronisation under ZeRO-2/3 keeps the whole gradient between microbatches, beside the shard.
    """
    if gradients_appear_late(scenario):
        return 0.0
    shard = parameters * (sharded_gradient_bytes(scenario) + scenario.stack.grad_copy_bytes)
    if scenario.parallelism.zero < Zero.GRADIENTS or scenario.shards(axis) == 1:
        return shard
    whole = 0.0 if shards_gradients_at_once(scenario, axis) else parameters * unsharded_gradient_bytes(scenario)
    return shard / scenario.shards(axis) + whole


def bucket(scenario: Scenario, parameters: float) -> float:
    """Bytes of the bucket that gradients are copied (and cast) into for reduction; 0 where they reduce in place."""
    stack, zero = scenario.stack, scenario.parallelism.zero
    in_place = zero < Zero.GRADIENTS and stack.reduce_bytes == sharded_gradient_bytes(scenario)
    in_place = in_place and not (stack.keeps_buckets and zero is not Zero.NONE)
    if scenario.replicas == 1 or in_place or zero is Zero.PARAMETERS:
        return 0.0
    return min(stack.bucket_bytes, parameters * stack.reduce_bytes)


def resting(scenario: Scenario, pp_rank: int) -> dict[Memory, float]:
    """Return the bytes by category that one device of pipeline rank ``pp_rank`` holds all step.

    Under ZeRO-3 the copies that buckets need are transients of the reductions; gathered parameters likewise.
    """
    offload = scenario.training.offload
    trained = {axis: trained_parameters(scenario, pp_rank, axis) for axis in ("dp", "edp")}
    weights, states = sharded_weights(scenario, pp_rank), sharded_states(scenario, pp_rank)
    return {
        Memory.PARAMETERS: weights if offload.parameters is Place.DEVICE else 0.0,
        Memory.GRADIENTS: sum(gradients(scenario, count, axis) for axis, count in trained.items()),
        Memory.OPTIMIZER: states if offload.optimizer is Place.DEVICE else 0.0,
        Memory.BUFFERS: bucket(scenario, sum(trained.values())),
        Memory.RUNTIME: scenario.stack.runtime_bytes + communicators(scenario),
    }


def loading(scenario: Scenario, pp_rank: int) -> dict[Memory, float]:
    """Return the bytes held while a checkpoint is loaded, where a stack does so with all parameters gathered.

    FSDP's full state dictionary unshards every parameter on every rank, beside the shards
    (``FullyShardedDataParallel.state_dict_type``): the peak of many fine-tuning jobs. Empty otherwise.
    """
    if not scenario.stack.loads_gathered or scenario.parallelism.zero < Zero.PARAMETERS or scenario.shards() == 1:
        return {}
    runtime = scenario.stack.runtime_bytes + communicators(scenario)
    whole = sum(weight_bytes(scenario, *one) for one in _parts(scenario, pp_rank))
    return {Memory.PARAMETERS: sharded_weights(scenario, pp_rank), Memory.GATHERED: whole, Memory.RUNTIME: runtime}


def sharded_weights(scenario: Scenario, pp_rank: int) -> float:
    """Bytes of weights that belong to one device of a pipeline rank, wherever they live."""
    shared = scenario.parallelism.zero >= Zero.PARAMETERS
    return sum(
        weight_bytes(scenario, part, layer) / (scenario.shards(scenario.gradient_axis(part)) if shared else 1)
        for part, layer in _parts(scenario, pp_rank)
    )


def sharded_states(scenario: Scenario, pp_rank: int) -> float:
    """Bytes of optimizer state, master copies included, that belong to one device, wherever they live."""
    shared = scenario.parallelism.zero >= Zero.OPTIMIZER
    return sum(
        state_bytes(scenario, part, layer) / (scenario.shards(scenario.gradient_axis(part)) if shared else 1)
        for part, layer in _parts(scenario, pp_rank)
    )
