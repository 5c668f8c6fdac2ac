"""How long one device takes for one op: a roofline with achieved rates that depend on the shape of the op.

GPU product, in waves of thread blocks (one output tile an SM at a time; tiles and K ramp as in NVIDIA, "Matrix
Multiplication Background User's Guide", sections 3 and 4):

    waves = ceil(batch ceil(m / tm) ceil(n / tn) / SMs)
    rate  = fraction sustained tile^log2(TM TN / tm tn) peak / SMs
    time  = max(waves 2 tm tn (k + ramp) / rate, bytes / (hbm bandwidth)) + epilogue bytes / (hbm bandwidth) + kernel

with the fastest of a few tiles. TPU product: every dimension pads to the systolic array and to the 8 sublanes.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, log, log2

from simtrain.cost.ops import FusedAttention, MatMul, Op, Sweep
from simtrain.errors import InputError
from simtrain.scenario.hardware import Accelerator, AcceleratorKind, AttentionPoint, Precision
from simtrain.scenario.scenario import Attention

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
"""Output tiles of a thread block that vendor libraries choose from; the first is the reference of ``gemm_tile``."""
_SUBLANES = 8
_K_STEP = 32
"""K advances in steps of this many elements."""


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of one device that this module reads from ``hardware_specs/efficiencies/<name>.yaml``.

    Fractions are of the datasheet figure; times in s. ``tests/bench/fit_gemm.py`` reproduces the fitted ones.
    """

    gemm_fraction: float
    """Share of the matrix peak inside a full tile, after ramps and quantisation."""
    gemm_ramp: float
    """Elements of K that the prologue and epilogue of a tile cost."""
    gemm_tile: float
    """Factor on the rate for every halving of the tile."""
    gemm_seconds: float
    """Fixed time of a product kernel."""
    sustained: float
    """Long training over short benchmark: power and clock."""
    hbm_copy: float
    """Achieved over datasheet bandwidth of a large copy."""
    sweep_seconds: float
    """Fixed time of an element-wise kernel."""
    score_fraction: float
    """Bandwidth over the score matrix of unfused attention, as a share of that of a copy."""
    flash_fraction: float
    """Fused attention, forward, long sequences, head dimension 128 and more, over the matrix peak."""
    flash_backward: float
    """Rate of its backward over that of its forward."""
    flash_half_seq: float
    """Sequence at which it reaches half of that rate (causal sees half the sequence)."""
    gemm_fraction_fp8: float = 0.0
    """``gemm_fraction`` of fp8 products; 0 = the same share of their peak as 16-bit ones."""
    gemm_ramp_fp8: float = 0.0
    """``gemm_ramp`` of fp8 products; read with the above."""

    def at(self, precision: Precision) -> Constants:
        """Constants for products of this input format."""
        if precision is not Precision.FP8 or not self.gemm_fraction_fp8:
            return self
        return replace(self, gemm_fraction=self.gemm_fraction_fp8, gemm_ramp=self.gemm_ramp_fp8)

    @staticmethod
    def of(device: Accelerator) -> Constants:
        """Constants of a device; ``InputError`` names the missing ones."""
        found = device.efficiency.constants
        names = [one.name for one in fields(Constants) if one.default is MISSING or one.name in found]
        missing = [name for name in names if name not in found]
        if missing:
            raise InputError(f"accelerator {device.name}: no efficiency constants {', '.join(missing)}")
        return Constants(**{name: found[name] for name in names})


def gemm_seconds(shape: tuple[int, int, int, int], peak: float, units: int, constants: Constants) -> float:
    """Time of a GPU matrix product that waits for nothing but its matrix units, s.

    Parameters
    ----------
    shape
        (batch, m, n, k).
    peak
        Dense peak of the device, FLOP/s.
    units
        SMs or compute units.
    constants
        ``gemm_fraction``, ``gemm_ramp``, ``gemm_tile``, ``sustained``; the fixed kernel time is not included.
    """
    batch, m, n, k = shape
    depth = ceil(k / _K_STEP) * _K_STEP + constants.gemm_ramp
    rate = constants.gemm_fraction * constants.sustained * peak / units
    reference = TILES[0][0] * TILES[0][1]
    best = float("inf")
    for tile_m, tile_n in TILES:
        waves = ceil(batch * ceil(m / tile_m) * ceil(n / tile_n) / units)
        area = tile_m * tile_n
        best = min(best, waves * 2.0 * area * depth / (rate * constants.gemm_tile ** log2(reference / area)))
    return best


def systolic_seconds(shape: tuple[int, int, int, int], peak: float, array: int, constants: Constants) -> float:
    """Time of a TPU matrix product, s: k and n pad to the array, m to the sublanes; each pass fills the array once."""
    batch, m, n, k = shape
    padded = ceil(m / _SUBLANES) * _SUBLANES + constants.gemm_ramp
    flops = 2.0 * batch * padded * ceil(n / array) * array * ceil(k / array) * array
    return flops / (constants.gemm_fraction * constants.sustained * peak)


def matrix_peak(device: Accelerator, precision: Precision) -> float:
    """Dense peak for a product of this input format, FLOP/s; fp32 without a matrix unit runs on the vector units."""
    if precision in device.matrix_peak:
        return device.matrix_peak[precision]
    if precision is Precision.FP32:
        return device.vector_peak
    raise InputError(f"accelerator {device.name} has no {precision.value} matrix rate")


def _interpolate(points: dict[int, float], at: float) -> float:
    """Piecewise linear in the logarithm of the argument, flat outside."""
    known = sorted(points)
    if at <= known[0]:
        return points[known[0]]
    for low, high in pairwise(known):
        if at <= high:
            share = log(at / low) / log(high / low)
            return points[low] * (1 - share) + points[high] * share
    return points[known[-1]]


def _table_rate(points: tuple[AttentionPoint, ...], pass_: str, op: FusedAttention, kernel: str) -> float | None:
    """Measured rate of a kernel at the nearest head dimension and the interpolated sequence, FLOP/s."""
    fits = [p for p in points if p.kernel == kernel and p.pass_ == pass_ and p.causal == op.causal]
    if not fits:
        return None
    dims = sorted({p.head_dim for p in fits})
    by_dim = {d: _interpolate({p.seq_len: p.rate for p in fits if p.head_dim == d}, op.keys) for d in dims}
    return _interpolate(by_dim, op.head_dim)


def attention_rate(device: Accelerator, op: FusedAttention, kernel: Attention, constants: Constants) -> float:
    """FLOP/s of a fused attention kernel: from the measured table where there is one, else from the family's constants.

    A table of forward and backward together gives the backward what remains: 2 + 5 products in all, at the joint rate.
    """
    points = device.efficiency.attention
    forward = _table_rate(points, "forward", op, kernel.value)
    both = _table_rate(points, "forward_backward", op, kernel.value)
    if forward is None and both is None:
        keys = op.keys * (0.5 if op.causal else 1.0)
        narrow = min(1.0, op.head_dim / max(128, device.array_dim))
        width = narrow if device.array_dim else narrow**0.25
        peak = matrix_peak(device, Precision.FP16 if Precision.FP16 in device.matrix_peak else Precision.BF16)
        forward = constants.flash_fraction * peak * width * keys / (keys + constants.flash_half_seq)
    if not op.backward:
        return forward if forward is not None else both or 0.0
    if both is None:
        return (forward or 0.0) * constants.flash_backward
    return both if forward is None else 5.0 / (7.0 / both - 2.0 / forward)


@dataclass(frozen=True)
class Device:
    """Times of ops on one accelerator."""

    accelerator: Accelerator
    constants: Constants
    attention: Attention

    @property
    def hbm(self) -> float:
        """Achieved memory bandwidth, byte/s."""
        return self.accelerator.memory_bandwidth * self.constants.hbm_copy

    def seconds(self, op: Op) -> float:
        """Uncontended device time of one op, s."""
        if isinstance(op, FusedAttention):
            rate = attention_rate(self.accelerator, op, self.attention, self.constants)
            return max(op.executed_flops / rate, op.hbm_bytes / self.hbm) + self.constants.gemm_seconds
        hbm = self.hbm * (self.constants.score_fraction if op.scores else 1.0)
        if isinstance(op, Sweep):
            return op.hbm_bytes / hbm + op.launches * self.constants.sweep_seconds
        return _matmul_seconds(self, op, hbm)


@lru_cache(maxsize=65536)
def _product_seconds(
    shape: tuple[int, int, int, int], peak: float, size: tuple[int, int], constants: Constants
) -> float:
    units, array = size
    return systolic_seconds(shape, peak, array, constants) if array else gemm_seconds(shape, peak, units, constants)


def _matmul_seconds(device: Device, op: MatMul, hbm: float) -> float:
    accelerator = device.accelerator
    peak = matrix_peak(accelerator, op.precision)
    size = (accelerator.units, accelerator.array_dim if accelerator.kind is AcceleratorKind.TPU else 0)
    compute = _product_seconds((op.batch, op.m, op.n, op.k), peak, size, device.constants.at(op.precision))
    memory = (op.hbm_bytes - op.epilogue_bytes) / hbm
    return max(compute, memory) + op.epilogue_bytes / hbm + device.constants.gemm_seconds
