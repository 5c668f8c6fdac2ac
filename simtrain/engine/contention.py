"""Activities that can meet on a resource: their rates over simulated time.

Compute units: a communication kernel holds its units until it ends, however slowly its network lets it go on; computing
gets the rest. A network resource is shared fairly by bytes a second, as flows share a NIC: weight = 1 / share, so one
that needs little gets all of it and the rest is split evenly. A running activity is re-rated only when something starts
or ends on a resource that is (or was) oversubscribed and that couples to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from simpy import Environment, Event, Timeout
from simpy.events import EventPriority

from simtrain.engine.sharing import fits, rates

LEAST = 1e-6
"""Share of the compute units left to computing when communication kernels hold them all: it waits, all but stopped."""

LATE = EventPriority(2)
"""After all that happens at an instant."""

Members = tuple[tuple[int, int, int], ...]
"""(simulated rank, task, span that released it) of each party."""


class Activity:
    """A task, or the tasks of all parties of a joint one, under way."""

    __slots__ = (
        *("members", "start", "shares", "holds", "weight"),
        *("carry", "remaining", "since", "rate", "version"),
    )

    def __init__(
        self,
        members: Members,
        *,
        start: float,
        shares: dict[int, float],
        holds: dict[int, float],
        weight: float,
    ) -> None:
        self.members = members
        self.start = start
        self.shares = shares
        """Resource -> share that it uses at full rate, and gets less of where oversubscribed."""
        self.holds = holds
        """Resource -> share that it takes before all others."""
        self.weight = weight
        self.carry = 0.0
        self.remaining = 0.0
        """Seconds left at full rate, as of ``since``."""
        self.since = start
        self.rate = 0.0
        self.version = 0
        """Of its timeout: older ones are void."""


class Instant(Event):
    """Calls back once everything else of the present instant has happened."""

    def __init__(self, env: Environment, callback: Callable[[Event], None]) -> None:
        self.env = env
        self.callbacks = [callback]
        self._ok = True
        self._value = None
        env.schedule(self, LATE)


class Contention:
    """The resources that can be oversubscribed, and who is on them now."""

    def __init__(self, env: Environment, resources: int, ended: Callable[[Activity], None]) -> None:
        self._env = env
        self._ended = ended
        self._users: list[dict[Activity, float]] = [{} for _ in range(resources)]
        self._holders: list[dict[Activity, float]] = [{} for _ in range(resources)]
        self._taken = [0.0] * resources
        """Sum of the shares on each resource, holders included."""
        self._changed: dict[int, None] = {}

    def start(self, activity: Activity, seconds: float) -> None:
        """Begin an activity that takes ``seconds`` when alone."""
        activity.remaining = seconds
        taken = self._taken
        for resource, share in activity.shares.items():
            self._users[resource][activity] = share
            taken[resource] += share
        for resource, share in activity.holds.items():
            self._holders[resource][activity] = share
            taken[resource] += share
        self._mark(activity)
        if not self._changed or not any(resource in self._changed for resource in activity.shares):
            self._proceed(activity, 1.0)

    def _crowded(self, resource: int) -> bool:
        return not fits(self._taken[resource])

    def _mark(self, activity: Activity) -> None:
        """Have the oversubscribed resources of one that starts or ends looked at, once, at the end of this instant."""
        taken = self._taken
        for on in (activity.shares, activity.holds):
            for resource in on:
                if taken[resource] > 1.0 and self._crowded(resource):
                    if not self._changed:
                        Instant(self._env, self._settle)
                    self._changed[resource] = None

    def _proceed(self, activity: Activity, rate: float) -> None:
        now = self._env.now
        activity.remaining = max(0.0, activity.remaining - activity.rate * (now - activity.since))
        activity.since = now
        activity.rate = rate
        activity.version += 1
        delay = activity.remaining / rate
        activity.carry = delay - (now + delay - now)
        timeout = Timeout(self._env, delay, (activity, activity.version))
        timeout.callbacks.append(self._due)

    def _due(self, event: Event) -> None:
        activity, version = cast(tuple[Activity, int], event.value)
        if version != activity.version:
            return
        self._mark(activity)
        for resource in activity.shares:
            self._leave(resource, self._users[resource], activity)
        for resource in activity.holds:
            self._leave(resource, self._holders[resource], activity)
        self._ended(activity)

    def _leave(self, resource: int, crowd: dict[Activity, float], activity: Activity) -> None:
        left = self._taken[resource] - crowd.pop(activity)
        self._taken[resource] = left if self._users[resource] or self._holders[resource] else 0.0

    def _settle(self, _: Event) -> None:
        changed, self._changed = self._changed, {}
        for component, crowded in self._components(changed):
            shares = [{r: s for r, s in activity.shares.items() if r in crowded} for activity in component]
            capacity = {r: max(LEAST, 1.0 - sum(self._holders[r].values())) for r in crowded}
            weights = [activity.weight for activity in component]
            for activity, rate in zip(component, rates(shares, weights, capacity), strict=True):
                if rate != activity.rate:
                    self._proceed(activity, rate)

    def _components(self, changed: Iterable[int]) -> Iterator[tuple[list[Activity], set[int]]]:
        """Sets of activities coupled through oversubscribed resources, with those resources."""
        seen: set[Activity] = set()
        for resource in changed:
            for first in self._users[resource]:
                if first in seen:
                    continue
                seen.add(first)
                component, crowded = [first], set[int]()
                for activity in component:  # grows while it is walked
                    for r in activity.shares:
                        if r in crowded or not self._crowded(r):
                            continue
                        crowded.add(r)
                        fresh = [other for other in self._users[r] if other not in seen]
                        seen.update(fresh)
                        component += fresh
                yield component, crowded
