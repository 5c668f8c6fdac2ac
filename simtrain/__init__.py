"""simtrain: how long a training step takes, what it waits for, whether it fits, what it costs.

>>> import simtrain
>>> scenario = simtrain.load("llm/gpt3-175b-1024xa100")
>>> result = simtrain.simulate(scenario)
>>> result.summary["fits"]
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simtrain.simulate import Result, simulate

if TYPE_CHECKING:
    from simtrain.scenario.files import load

__version__ = "0.1.0"
__all__ = ["Result", "load", "simulate"]


def __getattr__(name: str) -> Any:
    """Import ``load`` on first use, so that ``import simtrain`` stays cheap (PEP 562)."""
    if name == "load":
        from simtrain.scenario.files import load

        return load
    raise AttributeError(f"module 'simtrain' has no attribute {name!r}")
