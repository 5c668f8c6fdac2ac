"""Formats on the wire, chunked overlap with products, logits gathered or not."""

from __future__ import annotations

from typing import Any

import pytest

from simtrain.cost import wire
from simtrain.cost.compute import Constants, Device
from simtrain.cost.ops import MatMul
from simtrain.cost.pricing import Pricer
from simtrain.program.demand import Memory, TimeKind
from simtrain.program.lowered import Piece, PieceKind, Span
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Attention, Scenario, WireType, Zero
from simtrain.simulate import simulate
from simtrain.trace.metrics import time_split
from tests.factories import A100, TORCH, scenario

DEVICE = Device(A100, Constants.of(A100), Attention.FLASH2)
PRODUCT = MatMul(16384, 12288, 8192, Precision.BF16)


def test_short_collectives_leave_one_chunk_exposed() -> None:
    """All but the first chunk hides: T / c, and what eight smaller products take more."""
    whole = DEVICE.seconds(PRODUCT)
    transfer = whole / 4
    loss = 8 * DEVICE.seconds(PRODUCT._replace(m=2048)) - whole
    assert 0 < loss < 0.2 * whole
    assert wire.chunked_seconds(transfer, PRODUCT, 8, DEVICE) == pytest.approx(transfer / 8 + loss)


def test_long_collectives_hide_the_products_but_one_chunk() -> None:
    one = DEVICE.seconds(PRODUCT._replace(m=2048))
    transfer = 16 * one
    expected = transfer - 7 * one + 8 * one - DEVICE.seconds(PRODUCT)
    assert wire.chunked_seconds(transfer, PRODUCT, 8, DEVICE) == pytest.approx(expected)


def test_tiny_products_are_not_split() -> None:
    assert wire.chunked_seconds(1e-6, MatMul(64, 64, 64, Precision.BF16), 8, DEVICE) == 1e-6


def tensor(**changes: Any) -> Scenario:
    settings: dict[str, Any] = {
        "tp": 8,
        "layers": 2,
        "hidden": 8192,
        "ffn_hidden": 28672,
        "heads": 64,
        "kv_heads": 64,
        "micro_batch": 8,
    }
    return scenario(microbatches=1, sequence_parallel=True, **(settings | {"head_dim": 128} | changes))


def test_chunks_hide_most_of_the_tensor_parallel_time() -> None:
    plain, split = simulate(tensor()), simulate(tensor(tp_overlap=True))
    times = [time_split(result.spans)[TimeKind.TP] for result in (plain, split)]
    assert times[1] < 0.7 * times[0]
    assert split.step_time == pytest.approx(plain.step_time - times[0] + times[1])


def test_without_a_parallel_loss_logits_travel_and_lie_whole() -> None:
    whole, split = tensor(vocab_parallel_loss=False), tensor()
    gather = Piece(PieceKind.ALL_GATHER, Part.LOGITS, axis="tp", span=Span(8, 1, 8))
    price = Pricer(whole).price((gather,))
    assert price.wire_bytes == pytest.approx(7 / 8 * 2.0 * 8 * 2048 * whole.model.padded_vocab(8))
    results = [simulate(made) for made in (whole, split)]
    peaks = [max(result.memory.curves[0][Memory.LOGITS]) for result in results]
    assert peaks[0] == pytest.approx(8 * peaks[1])
    assert results[0].step_time > results[1].step_time + price.duration


def test_quantised_bytes_and_the_passes_they_cost() -> None:
    made = scenario(stack=TORCH, dp=8, zero=Zero.PARAMETERS, gather_dtype=WireType.INT8, reduce_dtype=WireType.INT4)
    assert (wire.gather_bytes(made, 0, "dp"), wire.reduce_bytes(made)) == (1.0, 0.5)
    assert wire.quantisation_bytes(made, Part.PARAMETER, 8.0, 2.0, 8) == (2 + 1) * 8 * (1 + 1 / 8)
    assert wire.quantisation_bytes(made, Part.GRADIENT, 8.0, 2.0, 8) == 2 * (2 + 0.5) * 8
    plain = scenario(stack=TORCH, dp=8, zero=Zero.PARAMETERS)
    assert (wire.gather_bytes(plain, 0, "dp"), wire.reduce_bytes(plain)) == (2.0, 4.0)
    assert wire.quantisation_bytes(plain, Part.GRADIENT, 8.0, 2.0, 8) == 0.0
