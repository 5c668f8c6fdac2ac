"""Model presets: rows of ``scenarios/models/*.yaml``, one file a family, every row with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from simtrain.errors import InputError, Problem
from simtrain.scenario import yamltext
from simtrain.scenario.paths import data_dir
from simtrain.scenario.schema import ModelSpec

_ABOUT = ("seq_len", "parameters", "active", "source", "note", "aliases")
"""Keys of a row that say something about the model and are none of its sizes."""


@dataclass(frozen=True, slots=True)
class Preset:
    """One published model."""

    name: str
    sizes: Mapping[str, Any]
    """Keys of ``ModelSpec``."""
    seq_len: int
    """Tokens a sequence in its pre-training."""
    parameters: float
    """Published total."""
    last_digit: float
    """Weight of the last digit of the published total as printed: 1.7 B is known to 0.1e9."""
    source: str
    note: str = ""
    active: tuple[float, float] | None = None
    """Published parameters that one token passes through, and the weight of their last digit; None where dense."""


_PRINTED = re.compile(r"(\d+)(?:\.(\d+))?( [MBT])?")
_SCALE = {None: 1.0, " M": 1e6, " B": 1e9, " T": 1e12}


def _published(text: str) -> tuple[float, float]:
    match = _PRINTED.fullmatch(text)
    if match is None:
        raise ValueError(f"not a number of parameters: {text!r} (expected e.g. '1.7 B')")
    scale = _SCALE[match[3]]
    return float(f"{match[1]}.{match[2] or 0}") * scale, scale / 10 ** len(match[2] or "")


def read_presets(path: Path) -> dict[str, Preset]:
    """Rows of one file, ``aliases`` included.

    Raises
    ------
    InputError
        Not readable as YAML, or a row that misses ``seq_len``, ``parameters`` or ``source`` or has an unknown key.
    """
    document = yamltext.read(path)
    common = document.data.get("common") or {}
    rows: dict[str, Preset] = {}
    for name, row in document.data["presets"].items():
        full = common | row
        sizes = {key: value for key, value in full.items() if key not in _ABOUT}
        try:
            ModelSpec.model_validate(sizes)
            parameters, digit = _published(str(full["parameters"]))
            active = _published(str(full["active"])) if "active" in full else None
            about = (full["source"], full.get("note", ""), active)
            preset = Preset(name, sizes, full["seq_len"], parameters, digit, *about)
        except (ValidationError, ValueError, KeyError) as error:
            place = document.position(("presets", name))
            raise InputError([Problem(str(path), *place, key=name, message=f"bad preset row: {error}")]) from None
        rows |= dict.fromkeys((name, *full.get("aliases", ())), preset)
    return rows


@cache
def presets() -> Mapping[str, Preset]:
    """All shipped presets by name and alias."""
    rows: dict[str, Preset] = {}
    for path in sorted((data_dir("scenarios") / "models").glob("*.yaml")):
        rows |= read_presets(path)
    return rows
