"""simtrain: how long a training step takes, what it waits for, whether it fits, what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Result", "load", "simulate"]

if TYPE_CHECKING:
    from simtrain.scenario.files import load
    from simtrain.simulate import Result, simulate


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that ``import simtrain`` stays cheap (PEP 562)."""
    if name == "load":
        from simtrain.scenario.files import load

        return load
    if name in ("Result", "simulate"):
        from simtrain import simulate as module

        return getattr(module, name)
    raise AttributeError(f"module 'simtrain' has no attribute {name!r}")
