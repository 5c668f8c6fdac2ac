"""What holds of every schedule, whatever the numbers."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simtrain.errors import ProgramError
from simtrain.program.actions import Action, ActionKind, Program, Step, actions_of
from simtrain.program.grid import from_csv, render, to_csv
from simtrain.program.schedules import SCHEDULES, build
from simtrain.program.timing import (
    Costs,
    bubble_fraction,
    dualpipe_bubble,
    in_flight_1f1b,
    in_flight_interleaved,
    longest_stage,
    makespan,
    peak_in_flight,
    replay,
    unit_times,
    zero_bubble_h1,
    zero_bubble_h2,
)
from simtrain.program.validation import validate
from simtrain.scenario.pipelines import RULES

DURATION = st.floats(1e-3, 1e3)


CLOSED = ("gpipe", "1f1b", "interleaved", "looped-bfs")
"""Without split backward: all have the same idle time."""


@st.composite
def cases(
    draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES), *, full: bool = False
) -> tuple[str, int, int, int]:
    """A schedule's name, ranks, microbatches and virtual stages that it can run with; ``full``: enough for its laws."""
    name = draw(st.sampled_from(names))
    rule = RULES[name]
    ranks = 2 * draw(st.integers(1, 4)) if rule.even else draw(st.integers(1, 8))
    virtual = draw(st.integers(rule.virtual[0], min(4, rule.virtual[-1])))
    fills = 2 if name in ("zb-h2", "zb-v") else int(len(rule.virtual) > 1)
    least = max(rule.least_rounds, fills if full else 0) * ranks
    rounds = draw(st.integers(1, 4)) * ranks
    microbatches = rounds if rule.rounds else max(1, least) + draw(st.integers(0, 16)) * (2 if rule.even else 1)
    return name, ranks, microbatches, virtual


@given(cases(CLOSED, full=True), DURATION, DURATION)
def test_makespan_is_the_closed_form(case: tuple[str, int, int, int], f: float, b: float) -> None:
    _, ranks, microbatches, virtual = case
    ideal = microbatches * virtual * (f + b)
    expected = ideal * (1 + bubble_fraction(ranks, microbatches, virtual))
    assert makespan(build(*case), f, b) == pytest.approx(expected, rel=1e-12)


@given(cases(("zb-h1",), full=True), DURATION, DURATION, st.floats(0, 1))
def test_zb_h1_is_idle_as_its_paper_says(case: tuple[str, int, int, int], f: float, i: float, part: float) -> None:
    """Qi et al. 2023, table 2, for weight gradients that take no longer than a forward."""
    name, ranks, microbatches, _ = case
    costs = Costs(f, i, part * f, i + part * f)
    expected = microbatches * (f + costs.b) + zero_bubble_h1(ranks, f, i, costs.w)
    assert longest_stage(build(name, ranks, microbatches, 1), costs) == pytest.approx(expected, rel=1e-9)


@given(cases(("zb-h2",), full=True), DURATION, DURATION, st.floats(0, 1))
def test_zb_h2_is_idle_as_its_paper_says(case: tuple[str, int, int, int], f: float, i: float, part: float) -> None:
    """Qi et al. 2023, table 2: nothing where the three passes take the same time."""
    w = part * min(f, (f + i) / 2)
    expected = case[2] * (f + i + w) + zero_bubble_h2(case[1], f, i, w)
    assert longest_stage(build(*case), Costs(f, i, w, i + w)) == pytest.approx(expected, rel=1e-9)
    assert longest_stage(build(*case), Costs()) == 3 * case[2]


@given(cases(("zb-v",), full=True))
def test_zb_v_is_never_idle_if_all_passes_take_the_same_time(case: tuple[str, int, int, int]) -> None:
    """Qi et al. 2023, section 6."""
    assert longest_stage(build(*case), Costs()) == 3 * 2 * case[2]


@given(cases(("dualpipe", "dualpipe-v")), DURATION, st.floats(0, 1))
def test_dualpipe_is_idle_as_its_readme_says(case: tuple[str, int, int, int], f: float, part: float) -> None:
    """(PP/2 - 1)(F&B + B - 3 W); exact where F = I >= W and a pair takes the sum."""
    _, ranks, microbatches, virtual = case
    w = part * f
    busy = microbatches * virtual * (2 * f + w)
    expected = busy + dualpipe_bubble(ranks * virtual, f, f + w, w, 2 * f + w)
    assert makespan(build(*case), f, f + w, w) == pytest.approx(expected, rel=1e-9)


@given(cases(), DURATION, DURATION)
def test_times_respect_order_and_inputs(case: tuple[str, int, int, int], f: float, b: float) -> None:
    program = build(*case)
    of_step = unit_times(program, f, b)
    times = {action: of_step[step] for steps in program for step in steps for action in actions_of(step)}
    ends = {(stage, kind is ActionKind.FORWARD, m): time[1] for (stage, kind, m), time in times.items() if kind != "W"}
    for steps in program:
        for earlier, later in pairwise(steps):
            assert of_step[earlier][1] <= of_step[later][0]
    last = max(action.stage for action in times)
    for (stage, kind, m), (start, _) in times.items():
        if kind is ActionKind.FORWARD:
            assert not stage or ends[stage - 1, True, m] <= start
        elif kind is ActionKind.WEIGHT_GRAD:
            assert ends[stage, False, m] <= start
        else:
            assert ends[stage, True, m] <= start
            assert stage == last or ends[stage + 1, False, m] <= start


@given(cases(("zb-h1", "zb-h2"), full=True), st.floats(0, 1))
def test_zero_bubble_holds_what_its_paper_says(case: tuple[str, int, int, int], kept: float) -> None:
    """Qi et al. 2023, section 2: stage i (from 1) holds (p - i + 1) M_B + (i - 1) M_W, and twice that less one M_B."""
    name, ranks, microbatches, _ = case
    ahead = 1 if name == "zb-h1" else 2
    expected = [ahead * (ranks - 1 - r) + 1 + ahead * r * kept for r in range(ranks)]
    assert peak_in_flight(build(name, ranks, microbatches, 1), kept) == pytest.approx(expected)


@given(cases())
def test_activations_in_flight(case: tuple[str, int, int, int]) -> None:
    name, ranks, microbatches, virtual = case
    peaks = peak_in_flight(build(*case))
    if name == "gpipe":
        assert peaks == (microbatches,) * ranks
    elif name == "1f1b":
        assert peaks == tuple(in_flight_1f1b(stage, ranks, microbatches) for stage in range(ranks))
    elif name == "looped-bfs":
        assert peaks == (microbatches * virtual,) * ranks
    elif name == "zb-v":  # the memory of 1F1B
        assert max(peaks) <= 2 * in_flight_1f1b(0, ranks, microbatches)
    elif name.startswith("dualpipe"):  # PP + 1 stages x microbatches (README of deepseek-ai/DualPipe)
        assert max(peaks) == min(ranks * virtual + 1, microbatches * virtual)
    elif name == "interleaved":
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
def test_grid_shows_each_step_once_in_its_column(case: tuple[str, int, int, int]) -> None:
    program = build(*case)
    times = replay(program, Costs(b=1.0, pair=1.0)).times
    rows = [line.split()[2:] for line in render(program).splitlines()[1:]]
    for row, steps, done in zip(rows, program, times, strict=True):
        assert [cell for cell in row if cell != "."] == [str(step) for step in steps]
        assert [row.index(str(step)) for step in steps] == [start for start, _ in done]


@given(cases(), st.data())
def test_a_lost_or_doubled_action_is_refused(case: tuple[str, int, int, int], data: st.DataObject) -> None:
    program = build(*case)
    rank = data.draw(st.integers(0, len(program) - 1))
    at = data.draw(st.integers(0, len(program[rank]) - 1))
    lost = (*program[rank][:at], *program[rank][at + 1 :])
    doubled = (*program[rank], program[rank][at])
    named = "|".join(map(str, actions_of(program[rank][at])))
    for row in (lost, doubled):
        with pytest.raises(ProgramError, match=named):
            validate((*program[:rank], row, *program[rank + 1 :]), _stages(case), case[2])


def _stages(case: tuple[str, int, int, int]) -> int:
    return case[1] * case[3]


@given(cases(), st.data())
def test_a_shuffled_program_is_refused_just_if_it_cannot_end(
    case: tuple[str, int, int, int], data: st.DataObject
) -> None:
    program = build(*case)
    rank = data.draw(st.integers(0, len(program) - 1))
    row = data.draw(st.permutations(program[rank])) if data.draw(st.booleans()) else _swap(program[rank], data)
    shuffled = (*program[:rank], tuple(row), *program[rank + 1 :])
    if _ends(shuffled):
        validate(shuffled, _stages(case), case[2])
    else:
        with pytest.raises(ProgramError, match=r"(?s)(deadlock|before).*>.*<"):
            validate(shuffled, _stages(case), case[2])


def _swap(row: tuple[Step, ...], data: st.DataObject) -> tuple[Step, ...]:
    assume(len(row) > 1)
    at = data.draw(st.integers(0, len(row) - 2))
    return (*row[:at], row[at + 1], row[at], *row[at + 2 :])


def _ends(program: Program) -> bool:
    """Reference: the graph of inputs and issue order has no cycle (steps are removed as long as any is free)."""
    made = {action: step for row in program for step in row for action in actions_of(step)}
    last = max(action.stage for action in made)

    def gradient(stage: int, m: int) -> Step:
        full = Action(stage, ActionKind.BACKWARD, m)
        return made[full if full in made else Action(stage, ActionKind.INPUT_GRAD, m)]

    before: dict[Step, set[Step]] = {}
    for row in program:
        for at, step in enumerate(row):
            needs: set[Step] = {row[at - 1]} if at else set()
            for stage, kind, m in actions_of(step):
                if kind is ActionKind.FORWARD:
                    needs |= {made[Action(stage - 1, kind, m)]} if stage else set()
                elif kind is ActionKind.WEIGHT_GRAD:
                    needs.add(gradient(stage, m))
                else:
                    needs.add(made[Action(stage, ActionKind.FORWARD, m)])
                    needs |= {gradient(stage + 1, m)} if stage < last else set()
            before[step] = needs
    while free := [step for step, needs in before.items() if not needs]:
        for step in free:
            del before[step]
        for needs in before.values():
            needs.difference_update(free)
    return not before
