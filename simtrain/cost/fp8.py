"""Casts of fp8 linear layers: bytes and kernels by recipe.

A linear layer quantises its input and its output gradient once each and writes them twice where the weight gradient
needs the other direction: per-tensor scales on Hopper and Ada, whose fp8 products take K-contiguous operands alone (a
transpose; Transformer Engine, "FP8 primer"), block scales everywhere, because they differ by direction (DeepSeek-V3,
section 3.5.2). Blackwell reads a per-tensor copy either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simtrain.cost.ops import Op, Sweep
from simtrain.scenario.tuning import Fp8Kernels, Fp8Recipe

if TYPE_CHECKING:
    from simtrain.cost.layers import Shapes

_SCALES = {Fp8Recipe.BLOCK: 4 / 128, Fp8Recipe.MXFP8: 1 / 32}
"""Bytes of scale an activation element: fp32 for 128, one byte for 32."""


def cast(c: Shapes, elements: float) -> Iterator[Op]:
    """Quantise an activation or a gradient for its two products."""
    fp8 = c.scenario.training.fp8
    if fp8 is None:
        return
    whole_tensor = fp8.recipe in (Fp8Recipe.DELAYED, Fp8Recipe.CURRENT)
    blackwell = c.scenario.cluster.accelerator.architecture.startswith("Blackwell")
    copies = 1.0 if whole_tensor and blackwell else 2.0
    written = copies * (1.0 + _SCALES.get(fp8.recipe, 0.0))
    if c.xla:  # the producer writes it
        yield Sweep(written * elements)
        return
    if fp8.recipe is Fp8Recipe.CURRENT:
        yield Sweep(c.e * elements)  # the largest value
    yield Sweep((c.e + written) * elements)


def norm_casts(c: Shapes) -> bool:
    """Whether norms write their output in fp8, in two layouts that together have the bytes of a 16-bit tensor.

    Transformer Engine ``LayerNormLinear``; the scale must be known beforehand (delayed) or local (mxfp8).
    """
    fp8, stack = c.scenario.training.fp8, c.scenario.stack
    known = fp8 is not None and fp8.recipe in (Fp8Recipe.DELAYED, Fp8Recipe.MXFP8)
    return known and stack.fp8 is Fp8Kernels.TRANSFORMER_ENGINE and stack.fused_norm


def weight_cast(c: Shapes, elements: float) -> Iterator[Op]:
    """Quantise a weight for a forward: once a step where copies are kept, at every use elsewhere, never if primary."""
    fp8, stack = c.scenario.training.fp8, c.scenario.stack
    if fp8 is None or fp8.primary:
        return
    if stack.fp8 is Fp8Kernels.TRANSFORMER_ENGINE:
        yield Sweep((c.e + 2.0) * elements / c.scenario.microbatches, 1.0 / c.scenario.microbatches)
    else:
        yield from cast(c, elements)
