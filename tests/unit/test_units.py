from __future__ import annotations

import contextlib
import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simtrain import units
from simtrain.units import Dimension, parse


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("3.35 TB/s", Dimension.BANDWIDTH, 3.35e12),
        ("400 Gb/s", Dimension.BANDWIDTH, 50e9),
        ("400 Gbps", Dimension.BANDWIDTH, 50e9),
        ("80 GiB", Dimension.DATA, 80 * 2.0**30),
        ("80 GB", Dimension.DATA, 80e9),
        ("80GB", Dimension.DATA, 80e9),
        ("8 Gbit", Dimension.DATA, 1e9),
        ("2 us", Dimension.TIME, 2e-6),
        ("1.5 h", Dimension.TIME, 5400.0),
        ("1e3 ms", Dimension.TIME, 1.0),
        ("312 TFLOP/s", Dimension.COMPUTE, 312e12),
        ("312 TFLOPS", Dimension.COMPUTE, 312e12),
        ("1_000 W", Dimension.POWER, 1000.0),
        ("1410 MHz", Dimension.FREQUENCY, 1.41e9),
        ("32.77 USD/h", Dimension.PRICE, 32.77),
    ],
)
def test_worked_values(text: str, dimension: Dimension, value: float) -> None:
    assert parse(text, dimension) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "dimension", "why"),
    [
        (900, Dimension.BANDWIDTH, "a bandwidth needs a unit: write 900 with one, e.g. '900 GB/s'"),
        (9e11, Dimension.BANDWIDTH, "a bandwidth needs a unit"),
        ("900", Dimension.BANDWIDTH, "a bandwidth needs a unit: write 900 with one"),
        ("80 GB", Dimension.BANDWIDTH, "'GB' measures amount of data"),
        ("900 GB/s", Dimension.DATA, "'GB/s' measures bandwidth"),
        ("2 parsec", Dimension.TIME, "unknown unit 'parsec'"),
        ("2 gb", Dimension.DATA, "unknown unit 'gb'"),
        ("fast", Dimension.TIME, "not a time: 'fast'"),
        ("", Dimension.TIME, "not a time: ''"),
        ("1e999 s", Dimension.TIME, "time out of range"),
        (None, Dimension.TIME, "not a time: 'None'"),
        (True, Dimension.TIME, "not a time: 'True'"),
        (["2 s"], Dimension.TIME, "not a time"),
        ("nan s", Dimension.TIME, "not a time: 'nan s'"),
        ("1" * 5000 + " s", Dimension.TIME, "not a time"),
    ],
)
def test_what_is_no_quantity(text: object, dimension: Dimension, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        parse(text, dimension)
    assert len(str(caught.value)) < 200


@given(st.text(max_size=80) | st.none() | st.integers() | st.floats(), st.sampled_from(Dimension))
def test_anything_else_is_a_value_error(text: object, dimension: Dimension) -> None:
    with contextlib.suppress(ValueError):
        assert math.isfinite(parse(text, dimension))


@pytest.mark.parametrize("text", ["1e300 s", "1e-320 s", "-1e300 s", "1e308 d"])
def test_what_nobody_can_mean_is_out_of_range(text: str) -> None:
    with pytest.raises(ValueError, match=r"time out of range: .* \(from 1e-12 to 1e\+10 s\)"):
        parse(text, Dimension.TIME)
    assert parse("0 s", Dimension.TIME) == 0.0


@given(st.floats(1e-12, 1e12), st.sampled_from([(d, unit) for d in Dimension for unit in d.units]))
def test_written_values_read_back(value: float, unit: tuple[Dimension, str]) -> None:
    dimension, name = unit
    least, most = dimension.plausible
    assume(least <= value * dimension.units[name] <= most)
    assert parse(f"{value!r} {name}", dimension) == pytest.approx(value * dimension.units[name], rel=1e-15)


@given(st.floats(1e-9, 1e6))
def test_printed_times_read_back(seconds: float) -> None:
    assert parse(units.format_time(seconds, 17), Dimension.TIME) == pytest.approx(seconds, rel=1e-12)


@given(st.floats(1, 1e15))
def test_printed_amounts_and_rates_read_back(value: float) -> None:
    assert parse(units.format_bytes(value, 17), Dimension.DATA) == pytest.approx(value, rel=1e-12)
    assert parse(units.format_bandwidth(value, 17), Dimension.BANDWIDTH) == pytest.approx(value, rel=1e-12)
    assert parse(units.format_compute(value, 17), Dimension.COMPUTE) == pytest.approx(value, rel=1e-12)


def test_printed_forms() -> None:
    assert units.format_time(0.0123) == "12.3 ms"
    assert units.format_bytes(80 * 2**30) == "80 GiB"
    assert units.format_bandwidth(3.35e12) == "3.35 TB/s"
    assert units.format_compute(3.12e14) == "312 TFLOP/s"


def test_decimal_and_binary_prefixes_differ() -> None:
    assert parse("1 GiB", Dimension.DATA) / parse("1 GB", Dimension.DATA) == pytest.approx(1.073741824)
    assert parse("8 Gb", Dimension.DATA) == parse("1 GB", Dimension.DATA)
