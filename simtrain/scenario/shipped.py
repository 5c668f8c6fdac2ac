"""Shipped scenarios by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from simtrain.scenario.paths import data_dir


@cache
def scenarios() -> dict[str, Path]:
    """Shipped scenario files by name, the path below ``scenarios/`` without its suffix; presets and
    tables are not among them.
    """
    root = data_dir("scenarios")
    files = {path.relative_to(root).as_posix().removesuffix(".yaml"): path for path in sorted(root.rglob("*.yaml"))}
    others = {root / "models", root / "published"}
    return {name: path for name, path in files.items() if path.parent not in others}


def published() -> tuple[Path, ...]:
    """Shipped tables of published runs (``scenarios/published/*.yaml``): lists of rows, no scenarios."""
    return tuple(sorted((data_dir("scenarios") / "published").glob("*.yaml")))


def scenario(name: str) -> Path | None:
    """Shipped scenario of that name, or of that last part of a name if only one has it."""
    plain = name.removesuffix(".yaml").removeprefix("scenarios/")
    alike = [path for key, path in scenarios().items() if key.rsplit("/", 1)[-1] == plain]
    return scenarios().get(plain) or (alike[0] if len(alike) == 1 else None)
