"""``hardware_specs/efficiencies/<accelerator>.yaml`` -> ``Efficiency``: measured points and fitted constants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from simtrain.scenario.hardware import AttentionPoint, Efficiency, GemmPoint, Precision
from simtrain.scenario.rows import Reader, Row
from simtrain.scenario.yamltext import describe
from simtrain.units import Dimension, parse

_SHAPE = re.compile(r"(\d{1,7})x(\d{1,7})x(\d{1,7})")
_LENGTH = re.compile(r"[1-9]\d{0,7}")
HBM_COPY = "hbm_copy"
"""Constant: achieved share of the memory bandwidth by a large copy, read plus write."""


@dataclass(frozen=True, slots=True)
class Table:
    """One file."""

    figures: Efficiency
    same_as: str = ""
    """Accelerator whose points stand for this one too (the same chip with other memory, links or clock)."""

    def adopt(self, twin: Efficiency, ratio: Mapping[Precision, float]) -> Efficiency:
        """Points of the twin, rates times the ratio of the matrix peaks; its constants, where this file has none."""
        gemm = (replace(one, rate=one.rate * ratio[one.precision]) for one in twin.gemm if one.precision in ratio)
        half = ratio.get(Precision.FP16, ratio.get(Precision.BF16, 1.0))
        attention = (replace(one, rate=one.rate * half) for one in twin.attention)
        return Efficiency(tuple(gemm), tuple(attention), {**twin.constants, **self.figures.constants})


def efficiency(row: Row) -> Table:
    """Read a file (the row is the whole of it).

    Raises
    ------
    InputError
        An unknown section or field, a point that is no shape, a rate without unit or source.
    """
    reader = Reader(row, (), row.data)
    same_as = reader.text("same_as", "")
    gemm: list[GemmPoint] = []
    attention: list[AttentionPoint] = []
    for inner in _tables(reader, "gemm"):
        precision = inner.choice("precision", Precision)
        for at, rate in _points(inner).items():
            if match := _SHAPE.fullmatch(at):
                gemm.append(GemmPoint(int(match[1]), int(match[2]), int(match[3]), precision, rate))
            else:
                inner.wrong("points", f"{at!r} is no shape MxNxK")
        inner.unknown(("envelope",))
    for inner in _tables(reader, "attention"):
        kernel, pass_, causal = inner.text("kernel"), inner.text("pass"), inner.flag("causal")
        head_dim = int(inner.number("head_dim"))
        for at, rate in _points(inner).items():
            if _LENGTH.fullmatch(at):
                attention.append(AttentionPoint(kernel, pass_, head_dim, int(at), causal, rate))
            else:
                inner.wrong("points", f"{at!r} is no sequence length")
        inner.unknown()
    constants = _constants(reader)
    reader.done(("sources", "summary", "same_as"))
    return Table(Efficiency(tuple(gemm), tuple(attention), constants), same_as)


def _constants(reader: Reader) -> dict[str, float]:
    given = reader.data.get("constants") or {}
    if not isinstance(given, dict):
        reader.wrong("constants", f"must be a mapping (name: value), not {describe(given)}")
        given = {}
    inner = reader.inner("constants", given)
    constants = {name: inner.number(name) for name in given}
    reader.seen.update(("constants", HBM_COPY))
    return constants | ({HBM_COPY: reader.share(HBM_COPY)} if reader.data.get(HBM_COPY) else {})


def _tables(reader: Reader, section: str) -> list[Reader]:
    reader.seen.add(section)
    given = reader.data.get(section) or []
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        reader.wrong(section, "must be a list of tables (- precision: ..., points: {...})")
        return []
    return [Reader(reader.row, (section, index), one, problems=reader.problems) for index, one in enumerate(given)]


def _points(inner: Reader) -> dict[str, float]:
    """Where measured -> rate, FLOP/s."""
    unit, given = inner.text("unit"), inner.data.get("points")
    inner.seen.add("points")
    if not inner.data.get("src"):
        inner.wrong("points", "have no source: add src: [...]")
    if not isinstance(given, dict) or not given:
        inner.wrong("points", "must be a mapping (shape or length: rate)")
        return {}
    found = {}
    for at, rate in given.items():
        try:
            found[str(at)] = parse(f"{rate} {unit}", Dimension.COMPUTE)
        except ValueError as error:
            inner.wrong("points", f"{at}: {error}")
    return found
