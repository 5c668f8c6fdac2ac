from __future__ import annotations

import pytest

from simtrain.errors import DoesNotFit, InputError, Problem, ProgramError, SimtrainError, did_you_mean


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("a.yaml", 3, 7, "model.layers", "too many"), "a.yaml:3:7: model.layers: too many"),
        (Problem("a.yaml", message="unreadable"), "a.yaml: unreadable"),
        (Problem(key="model.layers", message="too many"), "model.layers: too many"),
        (Problem(message="too many"), "too many"),
    ],
)
def test_a_problem_prints_what_it_knows(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_problems_are_sorted_by_place() -> None:
    error = InputError([Problem("b", 1, 1, "k", "m"), Problem("a", 10, 1, "k", "m"), Problem("a", 2, 5, "k", "m")])
    assert [(p.file, p.line) for p in error.problems] == [("a", 2), ("a", 10), ("b", 1)]
    assert str(error).splitlines()[0] == "a:2:5: k: m"


def test_plain_text_is_one_problem() -> None:
    assert InputError("no").problems == (Problem(message="no"),)


def test_exit_codes() -> None:
    codes = {error: error.exit_code for error in (SimtrainError, ProgramError, InputError, DoesNotFit)}
    assert codes == {SimtrainError: 1, ProgramError: 1, InputError: 2, DoesNotFit: 3}


def test_did_you_mean() -> None:
    assert did_you_mean("layrs", ["layers", "hidden"]) == " (did you mean 'layers'?)"
    assert did_you_mean("xyzzy", ["layers", "hidden"]) == ""
    assert did_you_mean("1F1B", ["gpipe", "1f1b"]) == " (did you mean '1f1b'?)"


def test_a_beginning_is_no_slip() -> None:
    """The nearest name to A100 is not A10G."""
    names = ["A10G", "A100-PCIE-40GB", "A100-SXM4-80GB", "T4"]
    assert did_you_mean("A100", names) == " (which of 'A100-PCIE-40GB', 'A100-SXM4-80GB'?)"
    assert did_you_mean("a100-s", names) == " (did you mean 'A100-SXM4-80GB'?)"
    assert did_you_mean("", names) == ""
