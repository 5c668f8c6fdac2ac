from __future__ import annotations

import pytest

from simtrain.errors import InputError, ProgramError
from simtrain.program.actions import Action, ActionKind
from simtrain.program.grid import figures, from_csv, located, render, to_csv
from simtrain.program.schedules import build
from simtrain.program.timing import Costs
from simtrain.program.validation import validate


def test_grid_of_1f1b_by_hand() -> None:
    assert render(build("1f1b", 2, 3)) == (
        "Step    0   1   2   3   4   5   6   7\n"
        "Rank 0  0F0 0F1 .   0B0 0F2 0B1 .   0B2\n"
        "Rank 1  .   1F0 1B0 1F1 1B1 1F2 1B2 ."
    )


def test_columns_stay_aligned_with_two_digits() -> None:
    lines = render(build("gpipe", 2, 11)).splitlines()
    assert lines[1].index("0B10") == lines[0].index("23")


def test_one_rank_accumulates_gradients() -> None:
    assert to_csv(build("1f1b", 1, 3)) == "0F0,0B0,0F1,0B1,0F2,0B2\n"


def test_csv_keeps_split_backwards() -> None:
    program = from_csv("0F0,,0I0, 0W0 \n")
    assert program[0] == tuple(
        Action(0, kind, 0) for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
    )


def test_errors_name_every_line_and_cell() -> None:
    with pytest.raises(InputError) as caught:
        from_csv("# made by hand\n0F0,0B0\n1F0,,1X0\n,F1,1F1\n", file="mine.csv")
    assert [(p.file, p.line, p.column, p.key) for p in caught.value.problems] == [
        ("mine.csv", 3, 6, "cell 3"),
        ("mine.csv", 4, 2, "cell 2"),
    ]
    assert "1X0" in str(caught.value)
    assert "2F0" in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", " ,, ,\n,\n"])
def test_a_file_without_ranks_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no ranks"):
        from_csv(text)


def test_a_program_that_cannot_run_prints_as_far_as_it_gets() -> None:
    assert render(from_csv("0F0,0B0\n1B0,1F0\n")).splitlines()[1:] == ["Rank 0  0F0", "Rank 1  ."]


def test_a_grid_in_proportion_to_durations() -> None:
    program = from_csv("0F0,0I0,0W0,0F1,0B1\n")
    assert render(program, Costs(1.0, 2.0, 1.0, 3.0)).splitlines()[1] == "Rank 0  0F0 0I0 = 0W0 0F1 0B1 = ="
    assert figures(build("zb-h1", 4, 8), Costs()) == (
        "Step 27, of which idle 11.1%; where steps flow into one another 27, idle 11.1%.\n"
        "Stages x microbatches in flight at most, by rank: 4 4 4 4."
    )


def test_pairs_read_back_and_problems_are_found_again() -> None:
    program = build("dualpipe-v", 2, 4, 2)
    assert from_csv(to_csv(program)) == program
    text = "# by hand\n0F0,,0B0\n1F0\n"
    with pytest.raises(ProgramError) as caught:
        validate(from_csv(text), stages=2, microbatches=1)
    problem = located(caught.value, text, "mine.csv")
    assert str(problem) == "mine.csv:3:1: cell 1: missing: 1B0"
