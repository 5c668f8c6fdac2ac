"""Our schedules give the order of actions that PyTorch's schedules of the same name execute."""

from __future__ import annotations

import pytest

from simtrain.program.grid import from_csv, to_csv
from simtrain.program.schedules import build
from tests.golden.schedules.torch_grids import CASES, grid, path

ALL = [(name, case) for name, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), ALL)
def test_same_order_as_recorded_from_torch(name: str, case: tuple[int, int, int]) -> None:
    assert from_csv(path(name, case).read_text()) == build(name, *case)


@pytest.mark.parametrize(("name", "case"), ALL)
def test_same_order_as_torch_now(name: str, case: tuple[int, int, int]) -> None:
    pytest.importorskip("torch", reason="torch is an optional extra")
    assert "".join(",".join(row) + "\n" for row in grid(name, case)) == to_csv(build(name, *case))
