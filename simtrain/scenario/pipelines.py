"""Pipeline schedules as a scenario sees them: what each needs, and which rank holds which stage.

The schedules themselves are functions in ``program.schedules``, under the same names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

GRID = "grid"
"""Name of a schedule that a file (or the scenario itself) spells out, in PyTorch's notation."""


class Placement(StrEnum):
    """Which stages a pipeline rank holds."""

    LOOP = "loop"
    """Every p-th (Narayanan et al., SC21, section 2.2)."""
    V = "v"
    """r and 2p - 1 - r, so that the first and the last stage meet on rank 0 (Qi et al. 2023, section 6)."""
    MIRRORED = "mirrored"
    """r and p - 1 - r: the model is held twice, the second time in reverse (DeepSeek-V3, section 3.2.1)."""
    WRITTEN = "written"
    """As a grid says."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a schedule needs."""

    placement: Placement = Placement.LOOP
    virtual: range = range(1, 2)
    """Stages a rank."""
    rounds: bool = False
    """Microbatches go in rounds of as many as there are ranks."""
    flexible: bool = False
    """Rounds may be larger, as long as they are equal."""
    split: bool = False
    """The backward is split into input and weight gradients."""
    least_rounds: int = 0
    """Least microbatches a rank."""
    even: bool = False
    """Ranks and microbatches come in twos, one a direction."""
    rolls: bool = False
    """The steps of its authors' system flow into one another (optimizer post-validation, Qi et al. 2023, section 4)."""

    def problem(self, name: str, ranks: int, microbatches: int | None, virtual: int) -> str:
        """Why it cannot run so, in words; the empty string if it can. ``microbatches`` may be unknown."""
        if virtual not in self.virtual:
            able = ", ".join(other for other, rule in RULES.items() if virtual in rule.virtual)
            return (
                f"{name} runs {_stages(self.virtual)} a rank, not {virtual} ({virtual} virtual stages run with: {able})"
            )
        if self.even and ranks % 2:
            return f"{name} runs in two directions, so its ranks must be even, not {ranks}"
        if microbatches is None:
            return ""
        if self.even and microbatches % 2:
            return f"{name} runs in two directions, so microbatches must be even, not {microbatches}"
        if self.rounds and virtual > 1:
            size = microbatches // max(1, microbatches // ranks) if self.flexible else ranks
            if microbatches % size:
                kind = (
                    "equal rounds of at least pp (as PyTorch does)"
                    if self.flexible
                    else "rounds of pp (as Megatron does)"
                )
                return f"{name} runs microbatches in {kind}: {microbatches} is no multiple of {size}"
        if microbatches < self.least_rounds * ranks:
            return f"{name} needs at least {self.least_rounds} x {ranks} ranks microbatches, not {microbatches}"
        return ""


ANY = range(1, 10_001)
TWO = range(2, 3)
RULES: Mapping[str, Rule] = {
    "gpipe": Rule(),
    "1f1b": Rule(),
    "interleaved": Rule(virtual=ANY, rounds=True),
    "looped-bfs": Rule(virtual=ANY),
    "zb-h1": Rule(virtual=ANY, rounds=True, flexible=True, split=True, rolls=True),
    "zb-h2": Rule(split=True, rolls=True),
    "zb-v": Rule(Placement.V, TWO, split=True, rolls=True),
    "dualpipe": Rule(Placement.MIRRORED, split=True, even=True, least_rounds=2),
    "dualpipe-v": Rule(Placement.V, TWO, split=True, least_rounds=2),
}


def _stages(virtual: range) -> str:
    if len(virtual) > 1:
        return "any number of stages"
    return "one stage" if virtual[0] == 1 else f"{virtual[0]} stages"


def rank_stages(placement: Placement, rank: int, ranks: int, stages: int) -> tuple[int, ...]:
    """Stages of a pipeline rank, in model order (not for ``WRITTEN``)."""
    if placement is Placement.LOOP:
        return tuple(range(rank, stages, ranks))
    return tuple(sorted((rank, stages - 1 - rank)))


@lru_cache(maxsize=16)
def grid_stages(rows: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Stages that each rank of a grid names, in model order; nothing else about the grid is judged here."""
    lines = [row for row in rows if row.strip() and not row.lstrip().startswith("#")]
    return tuple(tuple(sorted({int(stage) for stage in re.findall(r"(\d+)[FBIW]\d", row)})) for row in lines)


@lru_cache(maxsize=16)
def grid_microbatches(rows: tuple[str, ...]) -> int:
    """One more than the largest microbatch that a grid names."""
    return 1 + max((int(m) for row in rows for m in re.findall(r"\d[FBIW](\d+)", row)), default=-1)


def grid_splits(rows: tuple[str, ...]) -> bool:
    """Whether a grid has backwards in two halves."""
    return any(re.search(r"\d[IW]\d", row) for row in rows)
