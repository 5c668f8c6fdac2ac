"""Text with a unit <-> SI float: ``"3.35 TB/s"`` <-> ``3.35e12``.

Decimal and binary prefixes are told apart (GB, GiB), bytes and bits too (B, b). A bare number is refused with a hint.
"""

from __future__ import annotations

import re
from enum import Enum

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTE = {f"{p}B": f for p, f in (_DECIMAL | _BINARY).items()}
_BIT = {f"{p}{b}": f / 8 for p, f in (_DECIMAL | _BINARY).items() for b in ("b", "bit")}
_FLOP = {f"{p}{f}": v for p, v in _DECIMAL.items() for f in ("FLOP", "OP")}


def _rate(units: dict[str, float]) -> dict[str, float]:
    return {f"{name}/s": factor for name, factor in units.items()}


class Dimension(Enum):
    """Physical dimension: (name for messages, an example, unit -> SI factor, least and most that can be meant, SI)."""

    TIME = (
        "time",
        "2 us",
        {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0},
        (1e-12, 1e10),
    )
    DATA = ("amount of data", "80 GiB", _BYTE | _BIT, (1e-3, 1e21))
    BANDWIDTH = (
        "bandwidth",
        "900 GB/s",
        _rate(_BYTE | _BIT) | {f"{p}bps": f / 8 for p, f in _DECIMAL.items()},
        (1.0, 1e18),
    )
    COMPUTE = (
        "compute rate",
        "312 TFLOP/s",
        _rate(_FLOP) | {f"{p}FLOPS": v for p, v in _DECIMAL.items()},
        (1.0, 1e21),
    )
    POWER = ("power", "700 W", {"W": 1.0, "kW": 1e3, "MW": 1e6}, (1e-3, 1e12))
    FREQUENCY = ("frequency", "1410 MHz", {"Hz": 1.0, "kHz": 1e3, "MHz": 1e6, "GHz": 1e9}, (1.0, 1e12))
    PRICE = ("price", "32.77 USD/h", {"USD/h": 1.0}, (1e-6, 1e9))

    def __init__(self, label: str, example: str, units: dict[str, float], plausible: tuple[float, float]) -> None:
        self.label = label
        self.example = example
        self.units = units
        self.plausible = plausible


_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S.*?)?\s*")


def parse(text: object, dimension: Dimension) -> float:
    """Read a quantity.

    Parameters
    ----------
    text
        For example ``"3.35 TB/s"``.
    dimension
        What the text must measure.

    Returns
    -------
    float
        SI value: s, byte, byte/s, FLOP/s, W, Hz; prices in USD/h.

    Raises
    ------
    ValueError
        With a message that says what was wrong and shows a valid example.

    >>> parse("400 Gb/s", Dimension.BANDWIDTH)
    50000000000.0
    """
    example = f"e.g. {dimension.example!r}"
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        raise ValueError(f"a {dimension.label} needs a unit: write {text:g} with one, {example}")
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) and len(text) <= 64 else None
    if not match:
        raise ValueError(f"not a {dimension.label}: {str(text)[:64]!r} (expected a number and a unit, {example})")
    number, unit = float(match[1].replace("_", "")), match[2]
    if unit is None:
        raise ValueError(f"a {dimension.label} needs a unit: write {match[1]} with one, {example}")
    if unit not in dimension.units:
        other = next((d.label for d in Dimension if unit in d.units), None)
        why = f"{unit!r} measures {other}" if other else f"unknown unit {unit!r}"
        raise ValueError(f"not a {dimension.label}: {why} (expected {example})")
    value = number * dimension.units[unit]
    least, most = dimension.plausible
    if value and not least <= abs(value) <= most:
        base = next(iter(dimension.units))
        raise ValueError(f"{dimension.label} out of range: {text!r} (from {least:g} to {most:g} {base})")
    return value


def _scaled(value: float, steps: tuple[tuple[str, float], ...], digits: int) -> str:
    unit, factor = next(((u, f) for u, f in steps if abs(value) >= f), steps[-1])
    return f"{value / factor:.{digits}g} {unit}"


def format_time(seconds: float, digits: int = 4) -> str:
    """``0.0123`` -> ``"12.3 ms"``."""
    return _scaled(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)), digits)


def format_bytes(count: float, digits: int = 4) -> str:
    """Binary prefixes: ``85899345920`` -> ``"80 GiB"``."""
    return _scaled(count, (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)), digits)


def format_bandwidth(rate: float, digits: int = 4) -> str:
    """Decimal prefixes: ``3.35e12`` -> ``"3.35 TB/s"``."""
    return _scaled(rate, (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0)), digits)


def format_compute(rate: float, digits: int = 4) -> str:
    """Decimal prefixes: ``3.12e14`` -> ``"312 TFLOP/s"``."""
    return _scaled(rate, (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("FLOP/s", 1.0)), digits)
