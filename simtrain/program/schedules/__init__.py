"""Pipeline schedules: pure functions ``(ranks, microbatches, virtual) -> Program``, a file a family, and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from simtrain.errors import InputError, did_you_mean
from simtrain.program.actions import Program
from simtrain.program.schedules.gpipe import gpipe
from simtrain.program.schedules.interleaved import interleaved
from simtrain.program.schedules.one_f_one_b import one_f_one_b
from simtrain.program.validation import validate
from simtrain.scenario.checks import MAX_PASSES


@dataclass(frozen=True, slots=True)
class Schedule:
    """A row of the table."""

    name: str
    function: Callable[[int, int, int], Program]
    """``function(ranks, microbatches, virtual)``; pure."""
    source: str
    virtual: bool = False
    """More than one stage a rank is allowed."""
    needs_divisible: bool = False
    """``microbatches`` must be a multiple of ``ranks``."""

    def problem(self, ranks: int, microbatches: int, virtual: int) -> str:
        """Why this schedule cannot run so, in words; the empty string if it can."""
        if min(ranks, microbatches, virtual) < 1:
            return f"ranks, microbatches and virtual stages must be at least 1, not {ranks}, {microbatches}, {virtual}"
        if virtual > 1 and not self.virtual:
            able = ", ".join(schedule.name for schedule in SCHEDULES.values() if schedule.virtual)
            return f"schedule {self.name!r} runs one stage a rank, not {virtual} (virtual stages need: {able})"
        if self.needs_divisible and microbatches % ranks:
            return f"schedule {self.name!r} needs microbatches ({microbatches}) to be a multiple of the {ranks} ranks"
        return ""


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", gpipe, "Huang et al., NeurIPS 2019"),
        Schedule("1f1b", one_f_one_b, "Narayanan et al., SC21 (PipeDream-Flush)"),
        Schedule("interleaved", interleaved, "Narayanan et al., SC21, section 2.2", virtual=True, needs_divisible=True),
    )
}


@lru_cache(maxsize=16)
def build(name: str, ranks: int, microbatches: int, virtual: int = 1) -> Program:
    """Look a schedule up, call it, and validate what it returns.

    Parameters
    ----------
    name
        Key of ``SCHEDULES``.
    ranks, microbatches, virtual
        Pipeline ranks, microbatches a step, stages a rank.

    Raises
    ------
    InputError
        Unknown name, or numbers that the schedule cannot run with.
    ProgramError
        The schedule is defective.
    """
    if name not in SCHEDULES:
        raise InputError(f"unknown schedule {name!r}{did_you_mean(name, SCHEDULES)}; one of {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[name]
    if problem := schedule.problem(ranks, microbatches, virtual):
        raise InputError(problem)
    if ranks * virtual * microbatches > MAX_PASSES:
        what = f"{ranks} ranks x {virtual} virtual stages x {microbatches} microbatches"
        raise InputError(f"{what} are more than {MAX_PASSES:,} forward passes; take fewer")
    program = schedule.function(ranks, microbatches, virtual)
    validate(program, ranks * virtual, microbatches)
    return program
