"""The interpreter: a lowered job on SimPy's clock.

A task, or all parties of a joint activity at once, is one ``Timeout`` with a callback; there is no process. What an end
lets start is started from its callback, so chains of any length, of zero-duration tasks too, do not recurse. Ties are
SimPy's: time, priority, order of scheduling; one input gives one trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
from simpy import Environment, Event, Timeout

from simtrain.engine.contention import Activity, Contention, Members
from simtrain.engine.ranks import Plan, unfinished
from simtrain.errors import ProgramError
from simtrain.program.demand import Demand
from simtrain.program.lowered import Lowered
from simtrain.trace.spans import Trace

Ended = tuple[Members, float, float]
"""Members, start and carry of an activity."""
Claim = tuple[Any, ...]
"""Group, then (simulated rank, work) of each party."""
Wanted = tuple[dict[int, float], dict[int, float], float]
"""Shares and holds by resource, weight."""

SHOWN = 8
"""Waiting tasks that a deadlock message names."""


def run(lowered: Lowered, demands: Sequence[Demand]) -> Trace:
    """Execute a lowered job.

    Parameters
    ----------
    lowered
        What every simulated rank does.
    demands
        Price of each of ``lowered.works``.

    Returns
    -------
    Trace
        A span a task, in order of end.

    Raises
    ------
    ProgramError
        The job is inconsistent, or stops before all tasks are done (a deadlock): names the waiting ranks and tasks.
    """
    return _Interpreter(Plan(lowered, demands)).run()


class _Interpreter:
    """State of one run.

    Sums of durations are compensated (Kahan): ``carry`` is what rounding took from the end of the task before, so that
    a chain of any length ends when the sum of its durations says, to a few units in the last place.
    """

    def __init__(self, plan: Plan) -> None:
        ranks, groups = plan.lowered.ranks, plan.lowered.groups
        tables = [plan.tables[rank.tasks] for rank in ranks]
        self.plan = plan
        self.env = Environment()
        self.contention = Contention(self.env, len(ranks) + len(plan.lowered.resources), self.end_contended)
        self.work = [table.work for table in tables]
        self.slot = [table.slot for table in tables]
        self.successors = [table.successors for table in tables]
        self.waiting = [list(table.predecessors) for table in tables]
        self.groups = [rank.groups for rank in ranks]
        self.parties = [len(group.parties) for group in groups]
        self.arrived: list[list[tuple[int, int, int]]] = [[] for _ in groups]
        self.contended = [
            bool(plan.loads[index]) or any(plan.shared_units[party] for party in group.parties)
            for index, group in enumerate(groups)
        ]
        self.claims: dict[Claim, Wanted | None] = {}
        self.sim, self.task, self.released = array("i"), array("i"), array("q")
        self.start, self.end = array("d"), array("d")

    def run(self) -> Trace:
        for sim, waiting in enumerate(self.waiting):
            for task in [task for task, count in enumerate(waiting) if not count]:
                self.ready(sim, task, -1, 0.0)
        self.env.run()
        if len(self.end) < self.plan.lowered.task_count:
            raise ProgramError(self.deadlock())
        return Trace(
            lowered=self.plan.lowered,
            demands=tuple(self.plan.demands),
            sim_rank=np.array(self.sim, np.int32),
            task=np.array(self.task, np.int32),
            start=np.array(self.start),
            end=np.array(self.end),
            released_by=np.array(self.released, np.int64),
        )

    def ready(self, sim: int, task: int, released: int, carry: float) -> None:
        """All that the task waited for has ended, last of all span ``released``: start it, or join its group."""
        slot = self.slot[sim][task]
        if slot < 0:
            duration = self.plan.rank_seconds[sim][self.work[sim][task]]
            self.begin(((sim, task, released),), duration, self.plan.shared_units[sim], -1, carry)
            return
        group = self.groups[sim][slot]
        arrived = self.arrived[group]
        arrived.append((sim, task, released))
        if len(arrived) == self.parties[group]:
            seconds = self.plan.group_seconds[group]
            duration = max([seconds[self.work[sim][task]] for sim, task, _ in arrived])
            self.arrived[group] = []
            self.begin(self.released_by(arrived, released), duration, self.contended[group], group, carry)

    def released_by(self, arrived: list[tuple[int, int, int]], last: int) -> Members:
        """Who released each party of a joint activity: its own predecessor unless another ended later."""
        latest = self.end[last] * (1 - 1e-12) if last >= 0 else 0.0
        return tuple([(sim, task, own if own >= 0 and self.end[own] >= latest else last) for sim, task, own in arrived])

    def begin(self, members: Members, duration: float, contended: bool, group: int, carry: float) -> None:
        now = self.env.now
        exact = duration + carry
        activity = self.claim(members, group) if contended and duration else None
        if activity is not None:
            self.contention.start(activity, exact)
            return
        delay = exact if exact > 0 else 0.0
        timeout = Timeout(self.env, delay, (members, now, exact - (now + delay - now)))
        timeout.callbacks.append(self.end_alone)

    def claim(self, members: Members, group: int) -> Activity | None:
        """An activity with the shares of oversubscribable resources that it wants; None where it wants none."""
        key = (group, *[(sim, self.work[sim][task]) for sim, task, _ in members])
        if key not in self.claims:
            self.claims[key] = self.wants(key)
        wanted = self.claims[key]
        if wanted is None:
            return None
        shares, holds, weight = wanted
        return Activity(members, start=self.env.now, shares=shares, holds=holds, weight=weight)

    def wants(self, key: Claim) -> Wanted | None:
        """Shares, holds and weight of an activity.

        Resources are numbered: compute units of the simulated ranks first, network resources after them.
        """
        group, *parties = key
        plan = self.plan
        shares: dict[int, float] = {}
        holds: dict[int, float] = {}
        units = network = 0.0
        for sim, work in parties:
            demand = plan.demands[work]
            network = max(network, demand.network_share)
            if demand.sm_share and plan.shared_units[sim]:
                units = max(units, demand.sm_share)
                (shares if plan.computes[work] else holds)[sim] = demand.sm_share
        if network and group >= 0:
            for resource, load in plan.loads[group]:
                shares[len(self.work) + resource] = network * load
        return (shares, holds, 1 / (network or units)) if shares or holds else None

    def end_alone(self, event: Event) -> None:
        self.finish(*cast(Ended, event.value))

    def end_contended(self, activity: Activity) -> None:
        self.finish(activity.members, activity.start, activity.carry)

    def finish(self, members: Members, start: float, carry: float) -> None:
        """Record the spans of an activity, and start what waited for the last of them."""
        now = self.env.now
        span = len(self.end)
        for sim, task, released in members:
            self.sim.append(sim)
            self.task.append(task)
            self.start.append(start)
            self.end.append(now)
            self.released.append(released)
            waiting = self.waiting[sim]
            for after in self.successors[sim][task]:
                waiting[after] -= 1
                if not waiting[after]:
                    self.ready(sim, after, span, carry)
            span += 1

    def deadlock(self) -> str:
        ended: list[set[int]] = [set() for _ in self.work]
        for sim, task in zip(self.sim, self.task, strict=True):
            ended[sim].add(task)
        lines = list(islice(unfinished(self.plan, ended, self.waiting), SHOWN + 1))
        more = ["..."] * (len(lines) > SHOWN)
        left = self.plan.lowered.task_count - len(self.end)
        return "\n  ".join([f"deadlock: {left} tasks can never start", *lines[:SHOWN], *more])
