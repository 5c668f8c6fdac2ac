"""TPU slice names: what ``v5litepod-16`` means."""

from __future__ import annotations

import re

_GENERATIONS = {
    "v2": ("TPU-v2", 2),
    "v3": ("TPU-v3", 2),
    "v4": ("TPU-v4", 2),
    "v5litepod": ("TPU-v5e", 1),
    "v5e": ("TPU-v5e", 1),
    "v5p": ("TPU-v5p", 2),
    "v6e": ("TPU-v6e", 1),
    "tpu7x": ("TPU-v7x", 2),
}
"""Prefix -> (accelerator row, what the number counts for one chip). Cores are counted on v2 to v4, v5p and 7x, chips on
v5e and v6e (cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e; AI-Hypercomputer/xpk system_characteristics.py)."""


def parse(name: str) -> tuple[str, int]:
    """Accelerator row and number of chips of a slice.

    Raises
    ------
    ValueError
        Not a slice name, or a number of cores that makes no whole chips.

    >>> parse("v5litepod-16"), parse("v4-8")
    (('TPU-v5e', 16), ('TPU-v4', 4))
    """
    match = re.fullmatch(r"([a-z0-9]+)-([1-9]\d{0,5})", name)
    if not match or match[1] not in _GENERATIONS:
        known = ", ".join(_GENERATIONS)
        raise ValueError(f"not a TPU slice name: {name!r} (expected e.g. v5litepod-16; prefixes: {known})")
    accelerator, cores = _GENERATIONS[match[1]]
    if int(match[2]) % cores:
        raise ValueError(f"{name!r} counts cores, {cores} a chip: {match[2]} is no whole number of chips")
    return accelerator, int(match[2]) // cores
