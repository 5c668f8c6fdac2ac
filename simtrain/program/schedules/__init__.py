"""Pipeline schedules: pure functions ``(ranks, microbatches, virtual) -> Program``, a file a family, and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from simtrain.errors import InputError, ProgramError, did_you_mean
from simtrain.program.actions import Program
from simtrain.program.grid import from_csv, located
from simtrain.program.schedules.dualpipe import dualpipe, dualpipe_v
from simtrain.program.schedules.gpipe import gpipe
from simtrain.program.schedules.interleaved import interleaved
from simtrain.program.schedules.looped_bfs import looped_bfs
from simtrain.program.schedules.one_f_one_b import one_f_one_b
from simtrain.program.schedules.zero_bubble import zb_h1, zb_h2, zb_v
from simtrain.program.validation import validate
from simtrain.scenario.checks import MAX_PASSES
from simtrain.scenario.pipelines import RULES


@dataclass(frozen=True, slots=True)
class Schedule:
    """A row of the table; what it needs is in ``scenario.pipelines.RULES``."""

    name: str
    function: Callable[[int, int, int], Program]
    """``function(ranks, microbatches, virtual)``; pure."""
    source: str

    def problem(self, ranks: int, microbatches: int, virtual: int) -> str:
        """Why this schedule cannot run so, in words; the empty string if it can."""
        if min(ranks, microbatches, virtual) < 1:
            return f"ranks, microbatches and virtual stages must be at least 1, not {ranks}, {microbatches}, {virtual}"
        return RULES[self.name].problem(self.name, ranks, microbatches, virtual)


_ZERO_BUBBLE = "Qi et al. 2023, Zero Bubble Pipeline Parallelism"
SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", gpipe, "Huang et al., NeurIPS 2019"),
        Schedule("1f1b", one_f_one_b, "Narayanan et al., SC21 (PipeDream-Flush)"),
        Schedule("interleaved", interleaved, "Narayanan et al., SC21, section 2.2"),
        Schedule("looped-bfs", looped_bfs, "Lamy-Poirier 2022, Breadth-First Pipeline Parallelism"),
        Schedule("zb-h1", zb_h1, _ZERO_BUBBLE + ", section 2.1"),
        Schedule("zb-h2", zb_h2, _ZERO_BUBBLE + ", section 2.2"),
        Schedule("zb-v", zb_v, _ZERO_BUBBLE + ", section 6"),
        Schedule("dualpipe", dualpipe, "DeepSeek-V3 technical report 2024, section 3.2.1"),
        Schedule("dualpipe-v", dualpipe_v, "deepseek-ai/DualPipe (Sea AI Lab's cut in half)"),
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


@lru_cache(maxsize=16)
def written(rows: tuple[str, ...], stages: int, microbatches: int, *, file: str) -> Program:
    """A program that somebody wrote down, validated.

    Parameters
    ----------
    rows
        Lines of PyTorch's compute-only CSV.
    stages, microbatches
        What it must cover.
    file
        Where it comes from, for messages.

    Raises
    ------
    InputError
        Cells that are no actions, each with line and cell, or what keeps the program from running, with the place.
    """
    program = from_csv("\n".join(rows), file)
    try:
        validate(program, stages, microbatches)
    except ProgramError as error:
        raise InputError([located(error, "\n".join(rows), file)]) from error
    return program
