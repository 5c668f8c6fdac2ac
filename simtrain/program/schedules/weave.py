"""What the schedules of the 1F1B family share: how one rank's forwards and backwards alternate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from simtrain.program.actions import Action


def weave(forwards: Sequence[Action], backwards: Sequence[Action], *, lead: int) -> tuple[Action, ...]:
    """``lead`` forwards (or all, if fewer), then one forward and one backward in turn, then the backwards left over."""
    lead = min(lead, len(forwards))
    pairs = zip(forwards[lead:], backwards, strict=False)
    return (*forwards[:lead], *chain.from_iterable(pairs), *backwards[len(forwards) - lead :])
