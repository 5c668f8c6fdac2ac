from __future__ import annotations

import pytest

from simtrain.errors import ProgramError
from simtrain.program.actions import Action, ActionKind, Pair, actions_of, flat, parse

FORWARD, BACKWARD = Action(0, ActionKind.FORWARD, 3), Action(1, ActionKind.BACKWARD, 2)


def test_a_pair_prints_as_pytorch_prints_it_and_parses_back() -> None:
    pair = Pair(FORWARD, BACKWARD)
    assert str(pair) == "(0F3;1B2)OVERLAP_F_B"
    assert parse(" (0F3;1B2)OVERLAP_F_B ") == pair
    assert parse("1B2") == BACKWARD
    assert actions_of(pair) == (FORWARD, BACKWARD)
    assert list(flat((FORWARD, pair, BACKWARD))) == [FORWARD, FORWARD, BACKWARD, BACKWARD]


@pytest.mark.parametrize(
    "text",
    ["(1B2;0F3)OVERLAP_F_B", "(0F3;1W2)OVERLAP_F_B", "(0F3;1B2)", "(0F3)OVERLAP_F_B", "(;)OVERLAP_F_B", "0SEND_F1"],
)
def test_what_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match="not a"):
        parse(text)
