"""What holds of every schedule, whatever the numbers."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simtrain.errors import ProgramError
from simtrain.program.actions import Action, ActionKind, Program
from simtrain.program.grid import from_csv, render, to_csv
from simtrain.program.schedules import SCHEDULES, build
from simtrain.program.timing import (
    bubble_fraction,
    in_flight_1f1b,
    in_flight_interleaved,
    makespan,
    peak_in_flight,
    unit_times,
)
from simtrain.program.validation import validate

DURATION = st.floats(1e-3, 1e3)


@st.composite
def cases(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES)) -> tuple[str, int, int, int]:
    """A schedule's name, ranks, microbatches and virtual stages that it can run with."""
    schedule = SCHEDULES[draw(st.sampled_from(names))]
    ranks = draw(st.integers(1, 8))
    microbatches = draw(st.integers(1, 24 // ranks)) * ranks if schedule.needs_divisible else draw(st.integers(1, 24))
    return schedule.name, ranks, microbatches, draw(st.integers(1, 4)) if schedule.virtual else 1


@given(cases(), DURATION, DURATION)
def test_makespan_is_the_closed_form(case: tuple[str, int, int, int], f: float, b: float) -> None:
    _, ranks, microbatches, virtual = case
    ideal = microbatches * virtual * (f + b)
    expected = ideal * (1 + bubble_fraction(ranks, microbatches, virtual))
    assert makespan(build(*case), f, b) == pytest.approx(expected, rel=1e-12)


@given(cases(), DURATION, DURATION)
def test_times_respect_order_and_inputs(case: tuple[str, int, int, int], f: float, b: float) -> None:
    program = build(*case)
    times = unit_times(program, f, b)
    last = case[1] * case[3] - 1
    for actions in program:
        for earlier, later in pairwise(actions):
            assert times[earlier][1] <= times[later][0]
    for (stage, kind, m), (start, _) in times.items():
        if kind is ActionKind.FORWARD and stage:
            assert times[Action(stage - 1, kind, m)][1] <= start
        if kind is ActionKind.BACKWARD:
            assert times[Action(stage, ActionKind.FORWARD, m)][1] <= start
            assert stage == last or times[Action(stage + 1, kind, m)][1] <= start


@given(cases())
def test_activations_in_flight(case: tuple[str, int, int, int]) -> None:
    name, ranks, microbatches, virtual = case
    peaks = peak_in_flight(build(*case))
    if name == "gpipe":
        assert peaks == (microbatches,) * ranks
    elif name == "1f1b":
        assert peaks == tuple(in_flight_1f1b(stage, ranks, microbatches) for stage in range(ranks))
    else:
        assert max(peaks) == peaks[0] <= microbatches * virtual
        if microbatches >= 2 * ranks:
            assert peaks[0] / virtual == pytest.approx(in_flight_interleaved(ranks, virtual))


@given(cases(), st.randoms())
def test_csv_reads_back(case: tuple[str, int, int, int], random: Random) -> None:
    program = build(*case)
    text = to_csv(program)
    assert from_csv(text) == program
    idle = "".join("," * random.randint(1, 3) if c == "," else c for c in text)
    assert from_csv("# a comment\n\n," + idle) == program


@given(cases())
def test_grid_shows_each_action_once_in_its_step(case: tuple[str, int, int, int]) -> None:
    program = build(*case)
    times = unit_times(program, 1.0, 1.0)
    rows = [line.split()[2:] for line in render(program).splitlines()[1:]]
    for row, actions in zip(rows, program, strict=True):
        assert [cell for cell in row if cell != "."] == [str(action) for action in actions]
        assert [row.index(str(action)) for action in actions] == [times[action][0] for action in actions]


@given(cases(), st.data())
def test_a_lost_or_doubled_action_is_refused(case: tuple[str, int, int, int], data: st.DataObject) -> None:
    program = build(*case)
    rank = data.draw(st.integers(0, len(program) - 1))
    at = data.draw(st.integers(0, len(program[rank]) - 1))
    lost = (*program[rank][:at], *program[rank][at + 1 :])
    doubled = (*program[rank], program[rank][at])
    for row in (lost, doubled):
        with pytest.raises(ProgramError, match=f"{program[rank][at]}"):
            validate((*program[:rank], row, *program[rank + 1 :]), case[1] * case[3], case[2])


@given(cases(), st.data())
def test_a_shuffled_program_is_refused_just_if_it_cannot_end(
    case: tuple[str, int, int, int], data: st.DataObject
) -> None:
    program = build(*case)
    rank = data.draw(st.integers(0, len(program) - 1))
    row = data.draw(st.permutations(program[rank])) if data.draw(st.booleans()) else _swap(program[rank], data)
    shuffled = (*program[:rank], tuple(row), *program[rank + 1 :])
    if _ends(shuffled):
        validate(shuffled, case[1] * case[3], case[2])
    else:
        with pytest.raises(ProgramError, match=r"(?s)(deadlock|before).*>.*<"):
            validate(shuffled, case[1] * case[3], case[2])


def _swap(row: tuple[Action, ...], data: st.DataObject) -> tuple[Action, ...]:
    assume(len(row) > 1)
    at = data.draw(st.integers(0, len(row) - 2))
    return (*row[:at], row[at + 1], row[at], *row[at + 2 :])


def _ends(program: Program) -> bool:
    """Reference: the graph of inputs and issue order has no cycle (actions are removed as long as any is free)."""
    last = max(action.stage for row in program for action in row)
    before: dict[Action, set[Action]] = {}
    for row in program:
        for at, action in enumerate(row):
            stage, kind, m = action
            needs = {row[at - 1]} if at else set()
            if kind is ActionKind.FORWARD:
                needs |= {Action(stage - 1, kind, m)} if stage else set()
            else:
                needs |= {Action(stage, ActionKind.FORWARD, m)}
                needs |= {Action(stage + 1, kind, m)} if stage < last else set()
            before[action] = needs
    while free := [action for action, needs in before.items() if not needs]:
        for action in free:
            del before[action]
        for needs in before.values():
            needs.difference_update(free)
    return not before
