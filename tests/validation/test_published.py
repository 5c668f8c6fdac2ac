"""Published runs that nothing was fitted on: the whole simulation against the printed step time."""

from __future__ import annotations

import pytest

from simtrain.cost.pricing import Pricer
from simtrain.program.lowered import Span
from simtrain.program.recipe import Recipe
from simtrain.scenario.files import load
from simtrain.scenario.shipped import scenarios
from simtrain.simulate import simulate

SETS = {"korthikanti": 8, "sc21": 10}


@pytest.mark.parametrize(("source", "count"), SETS.items())
def test_step_times(source: str, count: int) -> None:
    """Mean absolute error at most 7 %, no row above 13 %, and better than the naive baseline."""
    rows = {name: load(path) for name, path in scenarios().items() if name.startswith(f"published/{source}/")}
    assert len(rows) == count
    measured = {name: float(held.measured["step_time"]) for name, held in rows.items()}
    summaries = {name: simulate(held).summary for name, held in rows.items()}
    errors = {name: found["step_time_s"] / measured[name] - 1 for name, found in summaries.items()}
    naive = [abs(found["naive_step_time_s"] / measured[name] - 1) for name, found in summaries.items()]
    mean = sum(map(abs, errors.values())) / count
    assert max(map(abs, errors.values())) <= 0.13, errors
    assert mean <= 0.07, errors
    assert mean < sum(naive) / count


def test_zero_bubble() -> None:
    """Step times within 10 %, peak memory within 12 %, and the schedules in their measured order.

    The authors searched the schedules of the ZB rows; ours are the hand-made ones with the same memory limits.
    """
    rows = {name: load(path) for name, path in scenarios().items() if name.startswith("published/zerobubble/")}
    found = {name: simulate(held).summary for name, held in rows.items()}
    for summary in found.values():
        assert abs(summary["measured"]["error"]) <= 0.10
        assert abs(summary["memory"]["peak_bytes"] / summary["measured"]["peak_memory_bytes"] - 1) <= 0.12
    for key in ("step_time", "peak_memory"):
        measured = sorted(found, key=lambda name: rows[name].measured[key])
        simulated = {"step_time": lambda name: found[name]["step_time_s"]}.get(
            key, lambda name: found[name]["memory"]["peak_bytes"]
        )
        assert sorted(found, key=simulated) == measured
    assert len(rows) == 3


def test_zero3_of_2021() -> None:
    """SC21, table 2: DeepSpeed's ZeRO-3 of that spring, from what its code does. All short, what remains is not known.

    Host work that grows with the ranks of the group sets the pace at one sequence a device, as measured: the step is as
    long on 1,536 devices as on 768.
    """
    rows = {name: load(path) for name, path in scenarios().items() if name.startswith("published/sc21-zero3/")}
    summaries = {name: simulate(held).summary for name, held in rows.items()}
    measured = {name: float(held.measured["step_time"]) for name, held in rows.items()}
    errors = [found["step_time_s"] / measured[name] - 1 for name, found in summaries.items()]
    naive = [abs(found["naive_step_time_s"] / measured[name] - 1) for name, found in summaries.items()]
    assert len(rows) == 6
    assert all(-0.45 < error < 0 for error in errors)
    assert sum(map(abs, errors)) < 0.32 * len(rows)
    assert sum(map(abs, errors)) < sum(naive)
    few, many = (summaries[f"published/sc21-zero3/174.6b-{devices}"]["step_time_s"] for devices in (768, 1536))
    assert many == pytest.approx(few, rel=0.1)


TABLE_4 = {
    # Korthikanti 2022, table 4: one layer of the 22B model, ms forward and backward (recomputation included)
    "22b-full": (7.7, 19.5),
    "22b-seqsel": (7.2, 13.1),
}


@pytest.mark.parametrize(("name", "measured"), TABLE_4.items())
def test_layer_times(name: str, measured: tuple[float, float]) -> None:
    held = load(scenarios()[f"published/korthikanti/{name}"])
    recipe, pricer = Recipe(held, Span(8, 1, 8)), Pricer(held)
    for pieces, expected in zip((recipe.forward(0), recipe.backward(0)), measured, strict=True):
        layer = pricer.price([piece for piece in pieces if piece.layer == 0])
        assert layer.duration * 1e3 == pytest.approx(expected, rel=0.07)


BANDS = {
    # model FLOPs utilisation of published runs of the same kind
    "llm/llama3-8b-fsdp-8xh100": (0.35, 0.60),  # torchtitan 0.39 (500 W part) to NeMo 0.62 (DGX Cloud, Llama 3.1 8B)
    "llm/llama2-7b-tpu-v5e": (0.45, 0.65),  # MaxText 16B on 256 v5e with full recomputation: 0.61
    "llm/bert-large-t4": (0.20, 0.45),  # no published row; BERT-large on V100 with AMP: 0.43 at sequence 128
}


@pytest.mark.parametrize(("name", "band"), BANDS.items())
def test_utilisation_is_that_of_its_kind(name: str, band: tuple[float, float]) -> None:
    held = load(scenarios()[name])
    assert band[0] < simulate(held).summary["mfu"] < band[1]
