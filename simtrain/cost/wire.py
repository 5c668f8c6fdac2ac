"""What collectives carry, and how they hide behind products that run chunk by chunk.

ZeRO++ (Wang et al. 2023, sections 3.1 and 3.3): weights are quantised to int8 in blocks before the gather (half of the
bytes), gradients to int4 before a hierarchical all-to-all that stands for the reduce-scatter (a quarter of the bytes
between machines); each is quantised and dequantised in one fused pass at either end.
"""

from __future__ import annotations

from simtrain.cost.compute import Device
from simtrain.cost.memory import states
from simtrain.cost.ops import MatMul
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Scenario, WireType


def gather_bytes(scenario: Scenario, layer: int, axis: str) -> float:
    """Bytes a parameter element of a block's unit on the wire; ``axis`` is that over which its copies lie."""
    said = scenario.parallelism.gather_dtype
    return said.bytes if said else states.gathered_bytes(scenario, layer, axis)


def reduce_bytes(scenario: Scenario) -> float:
    """Bytes a gradient element on the wire."""
    said = scenario.parallelism.reduce_dtype
    return said.bytes if said else scenario.stack.reduce_bytes


def quantisation_bytes(scenario: Scenario, part: Part, elements: float, element: float, shards: int) -> float:
    """HBM bytes of quantising and dequantising ``elements`` of a collective; 0 where it is not quantised.

    A gather quantises its shard and dequantises the whole; a scatter quantises the whole and dequantises it for the sum
    (ZeRO++ 3.3: once inside the machine, once between, each on what is left).
    """
    parallelism = scenario.parallelism
    said: WireType | None = parallelism.gather_dtype if part is Part.PARAMETER else parallelism.reduce_dtype
    if said is None or not said.is_quantised:
        return 0.0
    once = (element + said.bytes) * elements
    return once * (1.0 + 1.0 / shards) if part is Part.PARAMETER else 2.0 * once


def chunked_seconds(transfer: float, product: MatMul, chunks: int, device: Device) -> float:
    """Exposed seconds of a gather before, or a scatter behind, a product that is split into chunks of its rows.

    The first chunk of a gather (the last of a scatter) has nothing to hide behind, the others are exposed where they
    are longer than the chunk of product beside them; smaller products run less efficiently:

        T / c + max(0, (c - 1) (T / c - g)) + c g - G    with g the time of a chunk, G of the whole product

    Source: Wang et al. 2023 (ASPLOS), "Overlap Communication with Dependent Computation via Decomposition"; Transformer
    Engine user buffers split into tp chunks. Never more than unsplit: then a library does not split.

    Parameters
    ----------
    transfer
        s, T, the collective alone.
    product
        The product that needs the gathered rows or makes the scattered ones.
    chunks
        c, the number of tensor ranks.
    device
        Prices the product.
    """
    whole = device.seconds(product)
    one = device.seconds(product._replace(m=max(1, product.m // chunks)))
    step = transfer / chunks
    exposed = step + max(0.0, (chunks - 1) * (step - one)) + max(0.0, chunks * one - whole)
    return min(transfer, exposed)
