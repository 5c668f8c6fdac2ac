"""simtrain: how long a training step takes, what it waits for, whether it fits, what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simtrain.simulate import Result, simulate

if TYPE_CHECKING:
    from simtrain.scenario.files import load

__version__ = "0.1.0"
__all__ = ["Result", "load", "simulate"]


def __getattr__(name: str) -> Any:
    """Import ``load`` on first use, so that ``import simtrain`` and ``simtrain --help`` stay cheap (PEP 562).

    ``simulate`` is imported at once: its module has the same name, and importing it later would put the module in
    the place of the function.
    """
    if name == "load":
        from simtrain.scenario.files import load

        return load
    raise AttributeError(f"module 'simtrain' has no attribute {name!r}")
