"""Where the data that ships with simtrain lies: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def folder(name: str) -> Path:
    """Folder of shipped data: ``hardware_specs`` or ``scenarios``."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


@cache
def scenarios() -> dict[str, Path]:
    """Shipped scenario files by name, the path below ``scenarios/`` without its suffix; presets are not among them."""
    root = folder("scenarios")
    files = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
    return {name: path for name, path in files.items() if not name.startswith("models/")}


def scenario(name: str) -> Path | None:
    """Shipped scenario of that name, or of that last part of a name if only one has it."""
    plain = name.removesuffix(".yaml").removeprefix("scenarios/")
    alike = [path for key, path in scenarios().items() if key == plain or key.rsplit("/", 1)[-1] == plain]
    return scenarios().get(plain) or (alike[0] if len(alike) == 1 else None)
