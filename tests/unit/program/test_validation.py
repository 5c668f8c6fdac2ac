from __future__ import annotations

import pytest

from simtrain.errors import InputError, ProgramError
from simtrain.program.grid import from_csv
from simtrain.program.schedules import SCHEDULES, build
from simtrain.program.timing import Costs, makespan, unit_times
from simtrain.program.validation import held_twice, validate

BAD = {
    "0F0 twice": ("0F0,0F0,0B0", ">0F0< >0F0<"),
    "missing: 0B0": ("0F0", ">0F0<"),
    "missing: 0W0": ("0F0,0I0", ">0I0<"),
    "missing: 0F0": ("0B0", ">0B0<"),
    "beside a split backward": ("0F0,0B0,0I0,0W0", ">0I0< >0W0<"),
    "0F1 out of range": ("0F0,0B0,0F1,0B1", ">0F1<"),
    "1F0 out of range": ("0F0,0B0,1F0,1B0", ">1F0<"),
    "0B0 before 0F0": ("0B0,0F0", ">0B0<"),
    "0W0 before 0I0": ("0F0,0W0,0I0", ">0W0<"),
    "stage 0 on rank 0 and on rank 1": ("0F0\n0B0", ">0B0<"),
}


@pytest.mark.parametrize("why", BAD)
def test_refuses_and_marks_the_place(why: str) -> None:
    text, mark = BAD[why]
    with pytest.raises(ProgramError) as caught:
        validate(from_csv(text), stages=1, microbatches=1)
    assert why in str(caught.value)
    assert mark in str(caught.value)


def test_deadlock_says_who_waits_for_what() -> None:
    program = from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    with pytest.raises(ProgramError) as caught:
        validate(program, stages=2, microbatches=2)
    assert "rank 0 at 0B0, which waits for 1B0" in str(caught.value)
    assert "rank 1 at 1F1, which waits for 0F1" in str(caught.value)
    assert ">0B0<" in str(caught.value)
    assert ">1F1<" in str(caught.value)
    with pytest.raises(ProgramError, match="deadlock: rank 0 waits at 0B0, rank 1 waits at 1F1"):
        unit_times(program)


def test_the_marked_grid_stays_narrow_around_the_place() -> None:
    program = build("gpipe", 2, 200)
    with pytest.raises(ProgramError) as caught:
        validate((program[0], (*program[1][:150], *program[1][151:])), stages=2, microbatches=200)
    assert "missing: 1F150" in str(caught.value)
    assert max(map(len, str(caught.value).splitlines())) < 120


def test_split_backward_is_valid_and_timed() -> None:
    program = from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    validate(program, stages=2, microbatches=2)
    # rank 0 with f = 1, b = 2: F0 F1 | I0 waits for 1I0 (ends at 3): I0 W0 4..5, I1 W1 5..7
    assert makespan(program) == 7.0


def test_numbers_that_a_schedule_cannot_run_with() -> None:
    with pytest.raises(InputError, match="did you mean '1f1b'"):
        build("1f1", 2, 2)
    with pytest.raises(InputError, match=r"one stage a rank, not 2 .*interleaved"):
        build("1f1b", 2, 2, 2)
    with pytest.raises(InputError, match=r"rounds of pp .*: 6 is no multiple of 4"):
        build("interleaved", 4, 6, 2)
    with pytest.raises(InputError, match="at least 1"):
        build("gpipe", 4, 0)


def test_table_is_keyed_by_name_and_says_where_each_comes_from() -> None:
    assert all(name == schedule.name and schedule.source for name, schedule in SCHEDULES.items())


def test_a_model_held_twice_is_valid_if_two_ranks_share_all_their_stages() -> None:
    program = build("dualpipe", 4, 8)
    assert held_twice(program)
    validate(program, stages=4, microbatches=8)
    assert not held_twice(build("zb-v", 4, 8, 2))
    elsewhere = from_csv("0F0,1F0,1B0,0B0,0F1,0B1\n1F1,1B1\n")
    with pytest.raises(ProgramError, match="stage 1 on rank 0 and on rank 1"):
        validate(elsewhere, stages=2, microbatches=2)


def test_a_deadlock_in_a_pair_names_both_inputs() -> None:
    program = from_csv("(0F0;0B1)OVERLAP_F_B,0F1,0B0\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ProgramError, match="rank 0: 0B1 before 0F1") as caught:
        validate(program, stages=2, microbatches=2)
    assert caught.value.places == ((0, 0),)


def test_a_pair_takes_the_sum_unless_told_otherwise() -> None:
    pair = from_csv("(0F3;0B2)OVERLAP_F_B")[0][0]
    assert Costs(1.0, 2.0, 3.0, 5.0).step(pair) == 6.0
    assert Costs(1.0, 2.0, 3.0, 5.0, pair=4.0).step(pair) == 4.0
