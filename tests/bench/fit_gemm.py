"""Fit the shape constants of ``cost.compute`` on the measured product tables: ``python tests/bench/fit_gemm.py``.

Prints, for every accelerator with a table of its own, the constants that ``hardware_specs/efficiencies/<name>.yaml``
holds and the error of each point. ``gemm_fraction, gemm_ramp, gemm_tile, gemm_seconds`` minimise the soft absolute
error of log time over the table; ``sustained`` is what training shapes reach of that, or the best of a random-data
search over the best of the table. No training run is used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from simtrain.cost.compute import Constants, Device
from simtrain.cost.ops import MatMul
from simtrain.scenario.hardware import Accelerator, Precision
from simtrain.scenario.scenario import Attention
from simtrain.scenario.tables import load_tables

Points = dict[tuple[int, int, int], float]
NAMES = ("gemm_fraction", "gemm_ramp", "gemm_tile", "gemm_seconds")
SCALE = (0.1, 100.0, 0.1, 1e-6)
BOUNDS = ((0.4, 0.0, 0.4, 1e-6), (1.0, 2000.0, 1.0, 6e-6))
STARTS = [(f, k, t, 2.4e-6) for f in (0.8, 0.9) for k in (64.0, 200.0, 500.0) for t in (0.7, 0.85, 0.95)]


class Kind(Enum):
    """What the points of a table are."""

    BENCHMARK = "benchmark"
    SEARCH = "search"
    """Best shapes of a search with random data."""
    TRAINING = "training"
    """Shapes of training at a sustained clock."""

    @staticmethod
    def of(table: Mapping[str, Any]) -> Kind:
        """By the envelope mark, or the source that fitted training shapes."""
        return (
            Kind.SEARCH if table.get("envelope") else Kind.TRAINING if table["src"] == ["simumax"] else Kind.BENCHMARK
        )


def points(row: Mapping[str, Any], kind: Kind) -> Points:
    """bf16 points of an efficiency file, FLOP/s."""
    found: Points = {}
    for table in row.get("gemm") or ():
        if table["precision"] == "bf16" and Kind.of(table) is kind:
            for shape, rate in table["points"].items():
                m, n, k = (int(size) for size in shape.split("x"))
                found[m, n, k] = rate * 1e12
    return found


def errors(device: Accelerator, constants: Constants, table: Points) -> np.ndarray:
    """log(predicted time / measured time) of each point; the search for the sustained rate is apart."""
    timed = Device(device, replace(constants, sustained=1.0), Attention.UNFUSED)
    made = ((MatMul(*shape, precision=Precision.BF16), rate) for shape, rate in table.items())
    return np.array([np.log(timed.seconds(op) * rate / op.flops) for op, rate in made])


def fit(device: Accelerator, start: Constants, table: Points, free: tuple[str, ...] = NAMES) -> Constants:
    """The constants that fit a table best; those not in ``free`` stay."""
    index = [NAMES.index(name) for name in free]

    def residuals(x: np.ndarray) -> np.ndarray:
        return errors(device, replace(start, **dict(zip(free, x, strict=True))), table)

    bounds = tuple([limit[i] for i in index] for limit in BOUNDS)
    tries = [
        least_squares(
            residuals,
            [x[i] for i in index],
            x_scale=[SCALE[i] for i in index],
            bounds=bounds,
            loss="soft_l1",
            f_scale=0.05,
        )
        for x in STARTS
    ]
    best = min(tries, key=lambda found: float(found.cost))
    return replace(start, **{name: float(x) for name, x in zip(free, best.x, strict=True)})


def fit_fp8(device: Accelerator, start: Constants) -> tuple[Constants, np.ndarray]:
    """``gemm_fraction_fp8`` and ``gemm_ramp_fp8`` on the fp8 points, all else as it is; and the error of each."""
    table = [point for point in device.efficiency.gemm if point.precision is Precision.FP8]

    def residuals(x: np.ndarray) -> np.ndarray:
        held = replace(start, sustained=1.0, gemm_fraction_fp8=x[0], gemm_ramp_fp8=x[1])
        timed = Device(device, held, Attention.UNFUSED)
        made = [(MatMul(p.m, p.n, p.k, Precision.FP8, in_bytes=1.0), p.rate) for p in table]
        return np.array([np.log(timed.seconds(op) * rate / op.flops) for op, rate in made])

    tries = [
        least_squares(residuals, [f, k], bounds=((0.2, 0), (1, 3000)), x_scale=(0.1, 100), loss="soft_l1", f_scale=0.05)
        for f in (0.6, 0.8)
        for k in (64.0, 300.0, 1000.0)
    ]
    best = min(tries, key=lambda found: float(found.cost))
    found = replace(start, gemm_fraction_fp8=float(best.x[0]), gemm_ramp_fp8=float(best.x[1]))
    return found, residuals(best.x)


def sustained(device: Accelerator, found: Constants, row: Mapping[str, Any]) -> float:
    """Training over benchmark: measured training shapes, else the random-data search over the best of the benchmark."""
    benchmark, search, training = (points(row, kind) for kind in (Kind.BENCHMARK, Kind.SEARCH, Kind.TRAINING))
    if benchmark and training:
        return float(np.exp(errors(device, found, training).mean()))
    return min(1.0, max(search.values()) / max(benchmark.values())) if benchmark and search else 1.0


def main() -> None:
    """Fit and print."""
    tables = load_tables()
    for name, row in tables.efficiencies.rows.items():
        device = tables.accelerators.find(name)
        benchmark = points(row.data, Kind.BENCHMARK)
        table = benchmark or points(row.data, Kind.TRAINING)
        if not table or device.array_dim:
            continue
        free = NAMES if benchmark else NAMES[:1]
        found = fit(device, Constants.of(device), table, free)
        off = errors(device, found, table)
        fitted = {key: float(f"{getattr(found, key):.3g}") for key in free}
        lines = [
            f"{name} {fitted} mean error {np.abs(off).mean():.1%}, sustained {sustained(device, found, row.data):.3f}"
        ]
        lines += [f"   {'x'.join(map(str, at)):>18s} {np.expm1(err):+.1%}" for at, err in zip(table, off, strict=True)]
        sys.stdout.write("\n".join(lines) + "\n")
        if Precision.FP8 in device.matrix_peak and "precision: fp8" in str(row.data.get("gemm")).replace("'", ""):
            found, off = fit_fp8(device, Constants.of(device))
            error = f"{np.abs(off).mean():.1%}"
            sys.stdout.write(f"   fp8 {found.gemm_fraction_fp8:.3g} {found.gemm_ramp_fp8:.3g} mean error {error}\n")


if __name__ == "__main__":
    main()
