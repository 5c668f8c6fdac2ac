"""fp8 linear layers: rates, casts, copies of weights, saved inputs, gathers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simtrain.cost.compute import Constants, Device
from simtrain.cost.fp8 import cast, norm_casts, weight_cast
from simtrain.cost.layers import Pass, Shapes, ops
from simtrain.cost.memory import activations as act
from simtrain.cost.memory import inputs, resting, states
from simtrain.cost.ops import MatMul
from simtrain.cost.pricing import price_piece
from simtrain.program.demand import Memory
from simtrain.program.lowered import Piece, PieceKind, Span
from simtrain.scenario.hardware import Precision
from simtrain.scenario.model import BlockKind, Part
from simtrain.scenario.scenario import Attention, Scenario, Zero
from simtrain.scenario.tables import load_tables
from simtrain.scenario.tuning import Fp8, Fp8Kernels, Fp8Recipe
from tests.factories import A100, scenario

TE, AO = Fp8Kernels.TRANSFORMER_ENGINE, Fp8Kernels.TORCHAO
DELAYED, CURRENT, BLOCK, MXFP8 = Fp8Recipe
HOPPER = replace(
    A100, architecture="Hopper", matrix_peak={**A100.matrix_peak, Precision.FP8: 2 * A100.matrix_peak[Precision.BF16]}
)


def fp8(recipe: Fp8Recipe = DELAYED, *, kernels: Fp8Kernels = TE, primary: bool = False, **changes: Any) -> Scenario:
    given = {"accelerator": HOPPER, "attention": Attention.FLASH2} | changes
    made = scenario(precision=Precision.FP8, **given)
    training = replace(made.training, fp8=Fp8(recipe, primary))
    return replace(made, training=training, stack=replace(made.stack, fp8=kernels))


def test_only_linear_layers_inside_blocks_run_in_fp8() -> None:
    c = Shapes.of(fp8(attention=Attention.UNFUSED))
    inside = [op for part in (Part.ATTENTION, Part.MLP) for op in _products(c, part)]
    assert {op.precision for op in inside if not op.scores} == {Precision.FP8}
    assert {op.precision for op in inside if op.scores} == {Precision.BF16}
    assert {op.precision for op in _products(c, Part.HEAD)} == {Precision.BF16}


def _products(c: Shapes, part: Part) -> list[MatMul]:
    found = (op for which in Pass for op in ops(c, which, part, BlockKind.DECODER))
    return [op for op in found if isinstance(op, MatMul)]


@pytest.mark.parametrize("name", ["H100-SXM5-80GB", "H200-SXM-141GB", "B200-SXM-180GB", "L40S"])
def test_fp8_products_have_their_own_efficiency(name: str) -> None:
    """Faster than bf16, and under the best that a search found (ml-engineering, MAMF) where the table has it."""
    device = load_tables().accelerators[name]
    timed = Device(device, Constants.of(device), Attention.FLASH2)
    best = {"H100-SXM5-80GB": 1402.6e12, "H200-SXM-141GB": 1453.4e12, "B200-SXM-180GB": 3432.5e12, "L40S": 7.33e14}
    for size in (4096, 8192, 16384):
        wide, narrow = (
            MatMul(size, size, size, kind, in_bytes=width)
            for kind, width in ((Precision.BF16, 2.0), (Precision.FP8, 1.0))
        )
        assert 1.2 < timed.seconds(wide) / timed.seconds(narrow) < 2.2
        assert narrow.flops / timed.seconds(narrow) <= 1.12 * best[name]


@pytest.mark.parametrize(
    ("recipe", "bytes_each", "launches"),
    [
        (DELAYED, 2 + 2, 1),
        (CURRENT, 2 + 2 + 2, 2),
        (BLOCK, 2 + 2 * (1 + 4 / 128), 1),
        (MXFP8, 2 + 2 * (1 + 1 / 32), 1),
    ],
)
def test_casts(recipe: Fp8Recipe, bytes_each: float, launches: float) -> None:
    """Read 2, write 1 and the transpose 1; the largest value is a pass of its own where the scale is of this tensor."""
    found = list(cast(Shapes.of(fp8(recipe)), 1e6))
    assert sum(op.hbm_bytes for op in found) == pytest.approx(bytes_each * 1e6)
    assert len(found) == launches


def test_blackwell_needs_no_transposes_of_per_tensor_copies() -> None:
    blackwell = replace(HOPPER, architecture="Blackwell")
    for recipe, hopper, newer in ((DELAYED, 2, 1), (CURRENT, 2, 1), (BLOCK, 2 + 8 / 128**2, 2 + 8 / 128**2)):
        assert states.fp8_copies(fp8(recipe)) == pytest.approx(hopper)
        assert states.fp8_copies(fp8(recipe, accelerator=blackwell)) == pytest.approx(newer)
    assert states.fp8_copies(fp8(MXFP8, accelerator=blackwell)) == 2 + 2 / 32


def test_weights_keep_sixteen_bits_beside_their_copies_unless_primary() -> None:
    linear = 12 * 1024**2 * 8
    rest = states.held_parameters(fp8(), 0) - linear
    assert resting(fp8(), 0)[Memory.PARAMETERS] == 2 * rest + 4 * linear
    assert resting(fp8(primary=True), 0)[Memory.PARAMETERS] == 2 * (rest + linear)
    assert resting(fp8(kernels=AO), 0)[Memory.PARAMETERS] == 2 * (rest + linear)


def test_transformer_engine_saves_the_fp8_input_torchao_the_other() -> None:
    z = act.sizes(fp8())
    tokens, h = 2048, 1024
    assert inputs.change(fp8(), z, Part.MLP, 0) == -tokens * (h + 4 * h)
    assert inputs.change(fp8(), z, Part.ATTENTION, 0) == tokens * (-h + h)  # QKV's halves; attention keeps its output
    assert inputs.change(fp8(), z, Part.HEAD, -1) == 0
    assert inputs.change(fp8(kernels=AO), z, Part.MLP, 0) == 0


def test_weights_are_cast_once_a_step_or_at_every_use() -> None:
    per_step, per_use = (Shapes.of(fp8(kernels=kernels, microbatches=8)) for kernels in (TE, AO))
    assert sum(op.hbm_bytes for op in weight_cast(per_step, 8e6)) == 4e6
    assert sum(op.hbm_bytes for op in weight_cast(per_use, 8e6)) == 32e6
    assert not list(weight_cast(Shapes.of(fp8(primary=True)), 8e6))


def test_norms_write_fp8_where_the_scale_is_known() -> None:
    assert norm_casts(Shapes.of(fp8(DELAYED)))
    assert not norm_casts(Shapes.of(fp8(CURRENT)))
    assert not norm_casts(Shapes.of(fp8(DELAYED, kernels=AO)))


def test_sequence_parallelism_gathers_fp8() -> None:
    piece = Piece(PieceKind.ALL_GATHER, Part.MLP, 0, axis="tp", span=Span(8, 1, 8))
    wide, narrow = (
        price_piece(made, piece).wire_bytes
        for made in (scenario(tp=8, sequence_parallel=True), fp8(tp=8, sequence_parallel=True))
    )
    assert narrow == wide / 2
    head = piece._replace(part=Part.HEAD)
    assert price_piece(fp8(tp=8, sequence_parallel=True), head).wire_bytes == wide


def test_primary_weights_are_gathered_in_fp8() -> None:
    piece = Piece(PieceKind.ALL_GATHER, Part.PARAMETER, 0, axis="dp", elements=1e9, span=Span(8, 1, 8))
    plain, primary = (fp8(dp=8, zero=Zero.PARAMETERS, primary=flag) for flag in (False, True))
    linear = 12 * 1024**2 / (12 * 1024**2 + 13 * 1024)
    assert price_piece(plain, piece).wire_bytes == pytest.approx(7 / 8 * 2e9)
    assert price_piece(primary, piece).wire_bytes == pytest.approx(7 / 8 * (2 - linear) * 1e9)
    root = piece._replace(layer=-1)
    assert price_piece(primary, root).wire_bytes == pytest.approx(7 / 8 * 2e9)
