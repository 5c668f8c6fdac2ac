"""Ops of low-rank adapters and of 4-bit bases (Hu 2021, section 4.1; Dettmers 2023, equation 5).

y = W x + (alpha / r) B (A x): forward two thin products, a scaled addition; backward two for the input gradient and two
for the weight gradients. A 4-bit base is expanded to 16 bit before every product that reads it, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simtrain.cost import experts
from simtrain.cost.memory.states import BASE_BYTES
from simtrain.cost.ops import MatMul, Op, Sweep
from simtrain.scenario.model import Part
from simtrain.scenario.tuning import BaseFormat, linear_shapes

if TYPE_CHECKING:
    from simtrain.cost.layers import Pass, Shapes


def ops(c: Shapes, which: Pass, part: Part) -> Iterator[Op]:
    """Ops that adapters add to one pass of a part; nothing without LoRA."""
    scenario, trainable = c.scenario, c.scenario.training.trainable
    if trainable.lora is None:
        return
    shapes = linear_shapes(scenario.model, part, scenario.linear_split(part)[0])
    found = _of_layers(c, which, part, {name: (int(out), int(inp)) for name, (out, inp) in shapes.items()})
    yield from (experts.grouped(scenario, op) for op in found) if part is Part.EXPERTS else found


def _of_layers(c: Shapes, which: Pass, part: Part, shapes: dict[str, tuple[int, int]]) -> Iterator[Op]:
    trainable = c.scenario.training.trainable
    assert trainable.lora is not None
    weights = which.value != "weight_grad" and part is not Part.HEAD
    if weights and trainable.lora.base is not BaseFormat.BF16:
        for out, inp in shapes.values():
            yield Sweep((BASE_BYTES[trainable.lora.base] + c.e) * out * inp)
    for name in trainable.adapters(part):
        if name in shapes:
            alone = name in ("q_a", "kv_a")  # every tensor rank compresses its own tokens
            rows = experts.expert_rows(c.scenario)[1] if part is Part.EXPERTS else c.local_tokens if alone else c.tokens
            yield from _adapter(c, which, rows, trainable.lora.rank, *shapes[name])


def _adapter(c: Shapes, which: Pass, tokens: int, rank: int, out: int, inp: int) -> Iterator[Op]:
    if which.value == "forward":
        yield MatMul(tokens, rank, inp, c.core, in_bytes=c.e, out_bytes=c.e)
        yield MatMul(tokens, out, rank, c.core, in_bytes=c.e, out_bytes=c.e)
        yield Sweep(5 * c.e * tokens * out, 2.0)  # scaled, then added
    elif which.value == "input_grad":
        yield Sweep(2 * c.e * tokens * out)  # scaled
        yield MatMul(tokens, rank, out, c.core, in_bytes=c.e, out_bytes=c.e)
        yield MatMul(tokens, inp, rank, c.core, in_bytes=c.e, out_bytes=c.e)
        yield Sweep(3 * c.e * tokens * inp)  # added to the base's
    else:
        yield MatMul(out, rank, tokens, c.core, in_bytes=c.e, out_bytes=c.e)
        yield MatMul(rank, inp, tokens, c.core, in_bytes=c.e, out_bytes=c.e)
