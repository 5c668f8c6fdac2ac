"""What one device holds all step long: parameters, gradients, optimizer state, buffers, runtime.

Mixed-precision Adam holds 2 bytes of weight, 2 (or 4) of gradient and 12 of optimizer state a parameter: 16 (to 18), 20
where a stack keeps both gradient forms; ZeRO divides the optimizer, the gradient and the parameter part by the
data-parallel size (Rajbhandari 2020, "ZeRO", section 3 and Figure 1). FSDP keeps fp32 shards: 4 + 4 + 8.
"""

from __future__ import annotations

from simtrain.cost.memory.activations import FP32, element_bytes
from simtrain.program.demand import Memory
from simtrain.scenario.scenario import Scenario, Zero


def held_parameters(scenario: Scenario, pp_rank: int, axis: str = "") -> float:
    """Parameters of one tensor rank of a pipeline rank before sharding; a tied embedding's second copy included.

    ``axis`` counts only those whose copies lie along this process group (``Scenario.gradient_axis``).
    """
    parts = (part for stage in scenario.rank_stages(pp_rank) for part in scenario.parts(stage))
    return sum(
        scenario.part_parameters(part, layer) for part, layer in parts if axis in ("", scenario.gradient_axis(part))
    )


def unsharded_gradient_bytes(scenario: Scenario) -> float:
    """Bytes a parameter of the gradient that a backward writes, before any sharding."""
    element = element_bytes(scenario.training.precision)
    if element == FP32 or scenario.stack.fp32_shards:
        return element
    return scenario.stack.grad_bytes


def sharded_gradient_bytes(scenario: Scenario) -> float:
    """Bytes a parameter of the gradient that accumulates or that the optimizer reads, before division by the shards."""
    element = element_bytes(scenario.training.precision)
    return FP32 if element == FP32 or scenario.stack.fp32_shards else scenario.stack.grad_bytes


def master_gradient_bytes(scenario: Scenario) -> float:
    """Bytes a parameter of the fp32 copy of low-precision gradients that the step of a master-weight optimizer makes.

    Megatron ``_copy_model_grads_to_main_grads``, DeepSpeed ``FP16_Optimizer.step``: 20 bytes a parameter, for a moment.
    """
    copied = scenario.training.optimizer.master_bytes > 0 and sharded_gradient_bytes(scenario) < FP32
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
    return scenario.stack.fp32_shards and scenario.microbatches == 1


def gradients(scenario: Scenario, parameters: float, axis: str = "dp") -> float:
    """Bytes of gradient held all step by a rank with ``parameters`` parameters.

    Accumulation without synchronisation under ZeRO-2/3 keeps the whole gradient between microbatches, beside the shard.
    """
    if gradients_appear_late(scenario):
        return 0.0
    shard = parameters * sharded_gradient_bytes(scenario)
    if scenario.parallelism.zero < Zero.GRADIENTS or scenario.shards(axis) == 1:
        return shard
    whole = 0.0 if shards_gradients_at_once(scenario, axis) else parameters * unsharded_gradient_bytes(scenario)
    return shard / scenario.shards(axis) + whole


def bucket(scenario: Scenario, parameters: float) -> float:
    """Bytes of the bucket that gradients are copied (and cast) into for reduction; 0 where they reduce in place."""
    stack, zero = scenario.stack, scenario.parallelism.zero
    in_place = zero < Zero.GRADIENTS and stack.reduce_bytes == sharded_gradient_bytes(scenario)
    if scenario.replicas == 1 or in_place or zero is Zero.PARAMETERS:
        return 0.0
    return min(stack.bucket_bytes, parameters * stack.reduce_bytes)


def resting(scenario: Scenario, pp_rank: int) -> dict[Memory, float]:
    """Return the bytes by category that one device of pipeline rank ``pp_rank`` holds all step.

    Under ZeRO-3 the copies that buckets need are transients of the reductions; gathered parameters likewise.
    """
    training, stack, zero = scenario.training, scenario.stack, scenario.parallelism.zero
    held = {axis: held_parameters(scenario, pp_rank, axis) for axis in ("dp", "edp")}
    count = sum(held.values())
    shard = sum(parameters / scenario.shards(axis) for axis, parameters in held.items())
    full = element_bytes(training.precision) == FP32 or stack.fp32_shards
    weight = FP32 if full else element_bytes(training.precision)
    state = training.optimizer.state_bytes + (0.0 if full else training.optimizer.master_bytes)
    return {
        Memory.PARAMETERS: (shard if zero >= Zero.PARAMETERS else count) * weight,
        Memory.GRADIENTS: sum(gradients(scenario, parameters, axis) for axis, parameters in held.items()),
        Memory.OPTIMIZER: (shard if zero >= Zero.OPTIMIZER else count) * state,
        Memory.BUFFERS: bucket(scenario, count),
        Memory.RUNTIME: stack.runtime_bytes,
    }
