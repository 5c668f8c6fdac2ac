"""What is too large to simulate is refused at once, and says what to change."""

from __future__ import annotations

import numpy as np
import pytest

from simtrain.errors import InputError
from simtrain.program import emitter, grid, limits, lowering, schedules
from simtrain.scenario.hardware import Jitter
from simtrain.scenario.layout import Layout
from simtrain.scenario.scenario import Zero
from tests.factories import TORCH, scenario


@pytest.mark.parametrize("sizes", [(4, 10**6, 1), (1000, 1000, 1), (10, 10_000, 50)])
def test_schedules_of_millions_of_passes_are_refused_before_they_are_made(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="more than 500,000 forward passes; take fewer"):
        schedules.build("interleaved", *sizes)


def test_a_grid_that_fills_no_screen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = schedules.build("1f1b", 4, 8)
    assert grid.render(program)
    monkeypatch.setattr(grid, "MAX_CELLS", 4 * 22 - 1)
    with pytest.raises(InputError, match="4 ranks x 22 steps is too large to print"):
        grid.render(program)


@pytest.mark.parametrize("at", ["one list", "all ranks"])
def test_too_many_tasks(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """The bound is checked while a list grows, and over the ranks that share a list."""
    made = scenario(stack=TORCH, dp=2, zero=Zero.PARAMETERS)
    tasks = len(lowering.lower(made).lists[0].tasks)
    monkeypatch.setattr(limits, "MAX_TASKS", tasks - 2 if at == "one list" else tasks + 1)
    if at == "one list":
        monkeypatch.setattr(lowering, "bound_tasks", lambda _: None)
    else:
        monkeypatch.setattr(emitter, "bound_tasks", lambda _: None)
        assert lowering.lower(made)
    with pytest.raises(InputError, match=r"^training\.global_batch: more than \d+ pieces of work") as caught:
        lowering.lower(made, fold=at == "one list")
    assert "micro_batch" in str(caught.value)


def test_too_many_unlike_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scenario(dp=8, pp=2, jitter=Jitter(0.1))
    assert len(lowering.lower(made).ranks) == 16
    monkeypatch.setattr(limits, "MAX_RANKS", 15)
    with pytest.raises(InputError, match=r"^cluster\.devices: 16 ranks that are not alike.*no jitter"):
        lowering.lower(made)


def test_a_million_unlike_ranks_are_refused_before_they_are_made() -> None:
    cluster = scenario(dp=2).cluster
    with pytest.raises(InputError, match="not alike"):
        lowering.place(Layout(dp=2**16, pp=2), cluster, fold=False, slowdowns=np.ones(2**17))
