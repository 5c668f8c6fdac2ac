"""Does it fit? The allocated peak, the allocator's reserve and the runtime against the capacity of the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simtrain.program.demand import Memory


@dataclass(frozen=True, slots=True)
class Verdict:
    """Fits or not, and by how much."""

    fits: bool
    needed: float
    """byte: peak, runtime and reserve together."""
    margin: float
    """byte left over; negative where it does not fit."""
    by_category: Mapping[Memory, float]
    """byte at the peak, allocator reserve included; they sum to ``needed``."""


def verdict(peak: Mapping[Memory, float], *, capacity: float, reserve_fraction: float) -> Verdict:
    """Compare a peak with the capacity.

    Parameters
    ----------
    peak
        byte by category at the moment of the peak, ``RUNTIME`` included, ``RESERVE`` not.
    capacity
        byte that a process can address.
    reserve_fraction
        What the allocator holds over what is allocated (fragmentation); the runtime does not come from the allocator.
    """
    allocated = sum(count for category, count in peak.items() if category is not Memory.RUNTIME)
    by_category = {category: count for category, count in peak.items() if count}
    by_category[Memory.RESERVE] = reserve_fraction * allocated
    needed = sum(by_category.values())
    return Verdict(fits=needed <= capacity, needed=needed, margin=capacity - needed, by_category=by_category)
