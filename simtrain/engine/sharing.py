"""Weighted max-min fair rates: how activities share what they oversubscribe. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SLACK = 1e-12
"""Relative excess up to which the shares on a resource still count as fitting: nine ninths can sum to more than one."""


def fits(shares: float, capacity: float = 1.0) -> bool:
    """Whether activities that ask for ``shares`` altogether can all run at full rate on a resource of ``capacity``."""
    return shares <= capacity * (1 + SLACK)


def rates(
    shares: Sequence[Mapping[int, float]],
    weights: Sequence[float],
    capacity: Mapping[int, float],
) -> list[float]:
    """Weighted max-min fair rates of activities that share resources.

    The rates x are those with 0 < x_i <= 1 and, on every resource, sum_i share_i x_i <= capacity, under which no x_i
    can grow without lowering some x_j with x_j / w_j <= x_i / w_i. They exist and are unique, and progressive filling
    finds them: all grow as x_i = w_i t from t = 0; one stops when it reaches 1 or when a resource it uses is full.

    Why the result is max-min fair: a rate below 1 stopped because some resource became full at some t, and every other
    activity on that resource stopped at that t or before, hence has x_j / w_j <= x_i / w_i. The resource is full, so to
    raise x_i one of those must fall. (The converse, that each rate has such a bottleneck, makes them unique.)

    Where no resource is oversubscribed all rates are exactly 1.0.

    Parameters
    ----------
    shares
        For each activity: resource -> share of it used at rate 1, > 0.
    weights
        For each activity: > 0; on one full resource rates are in proportion to weights.
    capacity
        Resource -> what there is to share, > 0.

    Returns
    -------
    list of float
        Rate of each activity, 1 = not slowed.

    Source: Bertsekas & Gallager, Data Networks, 2nd ed. 1992, section 6.5.2 (max-min flow control; weights as in
    Parekh & Gallager 1993).

    >>> rates([{0: 1.0}, {0: 1.0}, {0: 0.2}], [1.0, 1.0, 5.0], {0: 1.0})
    [0.4, 0.4, 1.0]
    """
    users: dict[int, list[int]] = {}
    for i, used in enumerate(shares):
        for resource in used:
            users.setdefault(resource, []).append(i)
    full = {r: on for r, on in users.items() if not fits(sum(shares[i][r] for i in on), capacity[r])}
    rate = [1.0] * len(shares)
    rising = dict.fromkeys(i for on in full.values() for i in on)
    left = {r: capacity[r] for r in full}
    while rising:
        level = {r: left[r] / sum(shares[i][r] * weights[i] for i in on) for r, on in full.items()}
        bottleneck = min(level, key=level.__getitem__, default=None)
        at = float("inf") if bottleneck is None else level[bottleneck]
        stopped = [i for i in rising if weights[i] * at >= 1]  # they reach 1 before anything else fills up
        if not stopped and bottleneck is not None:
            stopped = full[bottleneck]
            for i in stopped:
                rate[i] = weights[i] * at
        for i in stopped:
            del rising[i]
            for resource in shares[i]:
                if resource in left:
                    left[resource] -= shares[i][resource] * rate[i]
        full = {r: still for r, on in full.items() if (still := [i for i in on if i in rising])}
    return rate
