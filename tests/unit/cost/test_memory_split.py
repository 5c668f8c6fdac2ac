"""Backward in two halves: what stays between them (Qi et al. 2023, table 1)."""

from __future__ import annotations

from typing import Any

import pytest

from simtrain.cost.memory import piece_memory
from simtrain.program.demand import Memory
from simtrain.program.lowered import Piece, PieceKind
from simtrain.scenario.model import Part
from simtrain.scenario.scenario import Recompute
from simtrain.simulate import simulate
from tests.factories import scenario

K = PieceKind
LAYER = (Part.ATTENTION, Part.MLP)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])
def test_a_weight_gradient_needs_32_s_b_h_of_a_layer(recompute: Recompute) -> None:
    """Inputs of the four products 2 + 2 + 2 + 8, their output gradients 6 + 2 + 8 + 2; of 34 s b h + 5 a s^2 b."""
    held = scenario(recompute=recompute, dropout=True)
    unit = held.training.seq_len * held.training.micro_batch * held.model.hidden
    level = 0.0
    passes = [(K.FORWARD, LAYER), (K.INPUT_GRAD, LAYER[::-1]), (K.WEIGHT_GRAD, LAYER[::-1])]
    if recompute is Recompute.FULL:
        passes.insert(1, (K.RECOMPUTE, LAYER))
    after = []
    for kind, parts in passes:
        for part in parts:
            if kind is K.INPUT_GRAD and recompute is Recompute.SELECTIVE and part is Part.ATTENTION:
                level += sum(count for _, count in piece_memory(held, Piece(K.RECOMPUTE, Part.CORE, 0))[0])
            keeps, frees, _ = piece_memory(held, Piece(kind, part, 0))
            grown = [count for category, count in keeps if category is not Memory.GRADIENTS]
            level += sum(grown) - sum(count for _, count in frees)
        after.append(level)
    assert after[-2] == pytest.approx(32 * unit)
    assert after[-1] == pytest.approx(0.0)
    scores = 5 * held.model.heads * held.training.seq_len**2 * held.training.micro_batch
    if recompute is Recompute.NONE:
        assert after[0] == pytest.approx(34 * unit + scores)


def peaks(schedule: str, virtual: int = 1, **changes: Any) -> list[float]:
    """Activations and workspace at each rank's peak, in activations of one microbatch on one rank."""
    small = {"layers": 16, "vocab": 512, "tied_embeddings": False, "seq_len": 512, "dropout": True}
    made = scenario(pp=4, virtual_stages=virtual, schedule=schedule, microbatches=16, **small | changes)
    profile = simulate(made).memory
    one = 4 * made.training.seq_len * (34 * 1024 + 5 * 16 * 512)
    held = []
    for index in profile.ranks:
        curves = profile.curves[index]
        held.append(float((curves[Memory.ACTIVATIONS] + curves[Memory.WORKSPACE]).max()) / one)
    return held


def test_zero_bubble_schedules_hold_what_their_paper_says() -> None:
    """First rank: p, p, 2 p - 1 and p microbatches of all its layers; a backward's own workspace comes on top."""
    base = peaks("1f1b")
    assert base[0] == pytest.approx(4, abs=0.3)
    assert peaks("zb-h1")[0] == pytest.approx(base[0], abs=0.1)
    assert max(peaks("zb-h1")) == pytest.approx(base[0], abs=0.3)
    assert peaks("zb-h2")[0] == pytest.approx(7, abs=0.3)
    assert max(peaks("zb-v", 2)) == pytest.approx(base[0], abs=0.3)


def test_dualpipe_holds_the_model_twice_and_one_microbatch_more() -> None:
    """README of deepseek-ai/DualPipe: parameters 2x, activations PP + 1."""
    assert max(peaks("dualpipe")) == pytest.approx(5, abs=0.6)
    small = {"layers": 16, "vocab": 512, "tied_embeddings": False}
    once, twice = (
        simulate(scenario(pp=4, schedule=schedule, microbatches=8, **small)).memory for schedule in ("1f1b", "dualpipe")
    )
    held = [sum(float(memory.curves[index][Memory.PARAMETERS][0]) for index in range(4)) for memory in (once, twice)]
    assert held[1] == 2 * held[0]
