"""Scenario -> Result: the simulated wiring of the chapters. No formula and no loop over time lives here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from simtrain.scenario.scenario import Scenario
    from simtrain.trace.memory import MemoryProfile
    from simtrain.trace.spans import Trace


@dataclass(frozen=True)
class Result:
    """One simulated training step."""

    scenario: Scenario
    spans: Trace
    """The record as columns."""
    memory: MemoryProfile
    """Bytes by category over time, of every simulated rank."""

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures of the report, as ``--json`` prints them (keys in ``report.summary``)."""
        from simtrain.report.summary import summarise

        return summarise(self.scenario, self.spans, self.memory)

    @property
    def step_time(self) -> float:
        """Duration of the step, s."""
        return self.spans.step_time

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before trusting the figures."""
        return tuple(self.summary["warnings"])

    @property
    def trace(self) -> DataFrame:
        """The spans, one row each (columns in ``trace.spans``)."""
        return self.spans.frame()

    def plot_timeline(self) -> Figure:
        """Rank x time, coloured by kind."""
        from simtrain.report.timeline import timeline

        return timeline(self.spans, title=self.scenario.name)


def simulate(scenario: Scenario, *, fold: bool = True, merge: bool = True) -> Result:
    """Simulate one training step.

    Parameters
    ----------
    scenario
        From ``simtrain.load`` or ``scenario.files``.
    fold
        Simulate ranks that are identical by symmetry once.
    merge
        Join runs of work that nothing else can interact with. Both change the cost of the simulation, not its result.

    Returns
    -------
    Result
        Trace, memory and summary. A model that does not fit is a result too.
    """
    from simtrain.cost.memory import resting
    from simtrain.cost.pricing import price
    from simtrain.engine.run import run
    from simtrain.program.lowering import lower
    from simtrain.trace.memory import profile

    lowered = lower(scenario, fold=fold, merge=merge)
    trace = run(lowered, price(lowered, scenario))
    held = {rank: resting(scenario, rank) for rank in range(scenario.parallelism.layout.pp)}
    return Result(
        scenario=scenario,
        spans=trace,
        memory=profile(
            trace,
            [held[dict(rank.coordinate)["pp"]] for rank in lowered.ranks],
            scenario.cluster.accelerator.memory_bytes,
        ),
    )
