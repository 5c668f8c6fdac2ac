"""Inputs of linear layers among the saved tensors: which are needed, and in which format.

A linear layer saves its input for its weight gradient alone; where the weight is frozen and carries no adapter, nothing
reads it again (Hu 2021, section 4.2: no gradients for most parameters). Under fp8 Transformer Engine saves the fp8 copy
that the product read; torchao saves the 16-bit tensor and casts again.
"""

from __future__ import annotations

from simtrain.cost.memory.activations import Sizes
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Scenario
from simtrain.scenario.tuning import Fp8Kernels, linear_shapes

FP8 = 1.0
"""byte."""


def change(scenario: Scenario, z: Sizes, part: Part, layer: int) -> float:
    """Bytes to add to what a part saves with all its linear inputs in the activation format; mostly negative."""
    training = scenario.training
    narrow = training.precision is Precision.FP8 and scenario.stack.fp8 is Fp8Kernels.TRANSFORMER_ENGINE
    if training.trainable.everything and not narrow:
        return 0.0
    total = 0.0
    router = part is Part.ROUTER and training.trainable.learns_input(part, (), layer)
    for names, elements, shared in _inputs(z, part, router=router):
        width = z.element
        if not training.trainable.learns_input(part, names, layer):
            width = 0.0
        elif narrow and part is not Part.HEAD:
            width = FP8
        if shared:  # kept whatever the linear layer does: the attention kernel's output, the router's input
            total += elements * width if width == FP8 else 0.0
        else:
            total += elements * (width - z.element)
    return total + _adapters(scenario, z, part)


def _adapters(scenario: Scenario, z: Sizes, part: Part) -> float:
    """The low-rank products A x of a part's adapters."""
    lora, shapes = scenario.training.trainable.lora, linear_shapes(scenario.model, part, 1)
    rows = z.expert_rows if part is Part.EXPERTS else z.tokens
    adapted = sum(name in shapes for name in scenario.training.trainable.adapters(part))
    return z.element * rows * lora.rank * adapted if lora else 0.0


def _inputs(z: Sizes, part: Part, *, router: bool) -> list[tuple[tuple[str, ...], float, bool]]:
    """(linear layers, elements of their common input, whether something else keeps it anyway).

    ``router``: a router is trained, which keeps its input in the activation format; shared experts read the same.
    """
    match part:
        case Part.ATTENTION if z.compressed:
            return [
                (("q", "q_a", "kv_a"), z.rows * z.hidden, False),
                (("q_b", "kv_b"), z.rows * z.compressed, False),
                (("o",), z.tokens * z.value, z.fused_attention),
            ]
        case Part.ATTENTION | Part.CROSS_ATTENTION:
            return [(("q", "k", "v"), z.rows * z.hidden, False), (("o",), z.tokens * z.query, z.fused_attention)]
        case Part.ROUTER:
            names = ("gate", "up") if z.shared_ffn else ()
            inside = [(names, z.rows * z.hidden, router)] if names or not router else []
            return [*inside, (("down",), z.tokens * z.shared_ffn, False)]
        case Part.EXPERTS:
            return [(("gate", "up"), z.expert_rows * z.hidden, False), (("down",), z.expert_rows * z.expert_ffn, False)]
        case Part.MLP:
            return [(("gate", "up"), z.rows * z.hidden, False), (("down",), z.tokens * z.ffn, False)]
        case Part.HEAD:
            return [(("output",), z.rows * z.hidden, False)]
    return []
