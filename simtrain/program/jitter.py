"""Speed factors of ranks: one draw a rank and step, so that ranks in lock-step go at the pace of the slowest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simtrain.scenario.scenario import Scenario


def slowdowns(scenario: Scenario) -> NDArray[np.float64] | None:
    """Factor on compute time of every rank, log-normal with mean 1, drawn from the scenario's seed.

    Returns
    -------
    array of shape (world,), dimensionless, or None without jitter
        A rank class that is simulated once takes the largest draw among its members, so folding changes nothing.
    """
    sigma = scenario.cluster.jitter.sigma
    if sigma == 0.0:
        return None
    draws = np.random.default_rng(scenario.seed).standard_normal(scenario.parallelism.layout.world)
    return np.exp(sigma * draws - sigma**2 / 2)
