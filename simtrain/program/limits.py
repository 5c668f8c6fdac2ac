"""How large a simulation may get: what would take minutes and many gigabytes is refused, with what to change."""

from __future__ import annotations

from simtrain.errors import InputError, Problem

MAX_TASKS = 2_000_000
"""Tasks over all simulated ranks: a minute or two, and some 10 GB once the spans are written."""
MAX_RANKS = 50_000
"""Ranks that no symmetry lets us simulate as one."""
MAX_CELLS = 5_000_000
"""Ranks x steps of a grid that is printed."""


def bound_tasks(tasks: int) -> None:
    """Raise ``InputError`` where there are more than ``MAX_TASKS`` to simulate."""
    if tasks > MAX_TASKS:
        raise InputError(
            [
                Problem(
                    key="training.global_batch",
                    message=f"more than {MAX_TASKS:,} pieces of work to simulate; take fewer microbatches (a smaller"
                    " global_batch, a larger micro_batch), fewer stages, or a placement with fewer unlike ranks"
                    " (no jitter; tp x dp a multiple of devices_per_machine)",
                )
            ]
        )


def bound_ranks(ranks: int) -> None:
    """Raise ``InputError`` where more than ``MAX_RANKS`` must be simulated one by one."""
    if ranks > MAX_RANKS:
        raise InputError(
            [
                Problem(
                    key="cluster.devices",
                    message=f"{ranks:,} ranks that are not alike, each to be simulated (at most {MAX_RANKS:,}); take"
                    " fewer devices, no jitter, or tp x dp a multiple of devices_per_machine",
                )
            ]
        )
