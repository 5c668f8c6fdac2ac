from __future__ import annotations

import math
from dataclasses import replace

import pytest

from simtrain.cost.compute import Constants, Device, attention_rate, gemm_seconds, matrix_peak, systolic_seconds
from simtrain.cost.ops import FusedAttention, MatMul, Sweep
from simtrain.errors import InputError
from simtrain.scenario.hardware import AcceleratorKind, AttentionPoint, Efficiency, Precision
from simtrain.scenario.scenario import Attention
from simtrain.scenario.tables import load_tables
from tests.bench.fit_gemm import Kind, errors, fit, points, sustained
from tests.factories import A100

IDEAL = Constants(
    gemm_fraction=1.0,
    gemm_ramp=0.0,
    gemm_tile=1.0,
    gemm_seconds=0.0,
    sustained=1.0,
    hbm_copy=1.0,
    sweep_seconds=0.0,
    score_fraction=1.0,
    flash_fraction=0.5,
    flash_backward=0.8,
    flash_half_seq=0.0,
)
DEVICE = Device(A100, IDEAL, Attention.FLASH2)


def test_a_product_that_fills_every_wave_runs_at_peak() -> None:
    flops = 2.0 * (108 * 256) * 128 * 4096
    assert gemm_seconds((1, 108 * 256, 128, 4096), 312e12, 108, IDEAL) == pytest.approx(flops / 312e12)


def test_one_tile_more_costs_a_wave() -> None:
    full = gemm_seconds((1, 108 * 64, 64, 4096), 312e12, 108, IDEAL)
    more = gemm_seconds((1, 108 * 64 + 1, 64, 4096), 312e12, 108, IDEAL)
    assert more == pytest.approx(2 * full)


@pytest.mark.parametrize(("k", "padded"), [(96, 96), (97, 128)])
def test_k_advances_in_steps_and_pays_its_ramp(k: int, padded: int) -> None:
    constants = replace(IDEAL, gemm_ramp=32.0)
    time = gemm_seconds((1, 108 * 256, 128, k), 312e12, 108, constants)
    assert time == pytest.approx(2.0 * 108 * 256 * 128 * (padded + 32) / 312e12)


def test_a_systolic_array_pads_small_head_dimensions() -> None:
    assert systolic_seconds((1, 1024, 1024, 64), 197e12, 128, IDEAL) == pytest.approx(2.0 * 1024**2 * 128 / 197e12)


def test_roofline_takes_the_slower_side_and_adds_the_epilogue() -> None:
    skinny = MatMul(1, 4096, 4096, Precision.BF16)
    assert DEVICE.seconds(skinny) == pytest.approx(skinny.hbm_bytes / 2.039e12)
    wide = MatMul(27 * 256, 4 * 128, 65536, Precision.BF16)
    assert DEVICE.seconds(wide) == pytest.approx(wide.flops / 312e12)
    adding = wide._replace(epilogue_bytes=2.039e9)
    assert DEVICE.seconds(adding) == pytest.approx(wide.flops / 312e12 + 1e-3)


def test_score_sized_passes_run_at_their_own_bandwidth() -> None:
    device = replace(DEVICE, constants=replace(IDEAL, score_fraction=0.5))
    assert device.seconds(Sweep(2.039e12, scores=True)) == pytest.approx(2.0)
    assert device.seconds(Sweep(2.039e12)) == pytest.approx(1.0)


def _points(kernel: str, pass_: str, rates: dict[int, float]) -> tuple[AttentionPoint, ...]:
    return tuple(AttentionPoint(kernel, pass_, 128, seq, True, rate) for seq, rate in rates.items())


def _core(*, backward: bool, keys: int) -> FusedAttention:
    return FusedAttention(backward, 32, keys, keys, 128, True, 0.0)


def test_attention_table_is_interpolated_in_the_logarithm_of_the_sequence() -> None:
    table = _points("flash2", "forward", {1024: 100e12, 4096: 200e12})
    device = replace(A100, efficiency=Efficiency((), table, {}))
    rates = [attention_rate(device, _core(backward=False, keys=n), Attention.FLASH2, IDEAL) for n in (512, 2048, 8192)]
    assert rates == pytest.approx([100e12, 150e12, 200e12])
    assert attention_rate(device, _core(backward=True, keys=4096), Attention.FLASH2, IDEAL) == pytest.approx(160e12)


def test_joint_table_gives_the_backward_what_forward_leaves() -> None:
    table = _points("flash2", "forward", {4096: 200e12}) + _points("flash2", "forward_backward", {4096: 175e12})
    device = replace(A100, efficiency=Efficiency((), table, {}))
    ops = [_core(backward=back, keys=4096) for back in (False, True)]
    total = sum(op.executed_flops / attention_rate(device, op, Attention.FLASH2, IDEAL) for op in ops)
    assert total == pytest.approx(sum(op.executed_flops for op in ops) / 175e12)
    assert ops[1].executed_flops == 2.5 * ops[0].executed_flops


def test_without_table_the_family_constants_count_causal_keys() -> None:
    constants = replace(IDEAL, flash_half_seq=1024.0)
    rate = attention_rate(A100, _core(backward=False, keys=2048), Attention.FLASH3, constants)
    assert rate == pytest.approx(0.5 * 312e12 * 0.5)


def test_missing_rate_and_missing_constants_are_input_errors() -> None:
    assert matrix_peak(A100, Precision.FP32) == 19.5e12
    with pytest.raises(InputError, match="has no fp8 matrix rate"):
        matrix_peak(A100, Precision.FP8)
    with pytest.raises(InputError, match="no efficiency constants gemm_fraction, gemm_ramp"):
        Constants.of(replace(A100, efficiency=Efficiency()))


def test_every_shipped_accelerator_has_its_constants() -> None:
    for name in load_tables().accelerators:
        constants = Constants.of(load_tables().accelerators.find(name))
        assert 0.3 < constants.gemm_fraction * constants.sustained <= 1.0, name
        assert 0.5 < constants.hbm_copy <= 1.0, name


FITTED = {
    "A100-SXM4-80GB": 0.066,
    "H100-SXM5-80GB": 0.044,
    "H200-SXM-141GB": 0.054,
    "B200-SXM-180GB": 0.052,
    "L40S": 0.068,
}


@pytest.mark.parametrize(("name", "error"), FITTED.items())
def test_constants_reproduce_the_product_table(name: str, error: float) -> None:
    tables = load_tables()
    device, row = tables.accelerators.find(name), tables.efficiencies.rows[name].data
    off = errors(device, Constants.of(device), points(row, Kind.BENCHMARK))
    assert sum(abs(off)) / len(off) < error
    if points(row, Kind.SEARCH) or points(row, Kind.TRAINING):
        assert Constants.of(device).sustained == pytest.approx(sustained(device, Constants.of(device), row), abs=0.005)


def test_the_fit_is_what_the_file_holds() -> None:
    tables = load_tables()
    device, row = tables.accelerators.find("A100-SXM4-80GB"), tables.efficiencies.rows["A100-SXM4-80GB"].data
    held = Constants.of(device)
    found = fit(device, held, points(row, Kind.BENCHMARK), ("gemm_fraction",))
    assert found.gemm_fraction == pytest.approx(held.gemm_fraction, rel=0.005)


def test_a_tpu_device_times_products_on_its_array() -> None:
    tpu = load_tables().accelerators.find("TPU-v5e")
    assert tpu.kind is AcceleratorKind.TPU
    device = Device(tpu, Constants.of(tpu), Attention.XLA)
    narrow, full = (device.seconds(MatMul(8192, 4096, k, Precision.BF16)) for k in (64 + 4096, 128 + 4096))
    assert narrow == full
    assert math.isfinite(full)
