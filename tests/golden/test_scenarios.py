"""Every shipped scenario runs; its headline figures are kept, so that a change of any shows in review.

After a change of the model that is meant: ``UPDATE_GOLDEN=1 pytest tests/golden/test_scenarios.py``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from simtrain.scenario.files import load, resolved_yaml
from simtrain.scenario.shipped import scenarios
from simtrain.simulate import simulate

GOLDEN = Path(__file__).parent / "scenarios.json"
SHIPPED = scenarios()


def headline(path: Path) -> dict[str, Any]:
    found = simulate(load(path)).summary
    return {
        "step_time_s": found["step_time_s"],
        "mfu": found["mfu"],
        "hfu": found["hfu"],
        "exposed_communication_s": found["time"]["exposed_communication_s"],
        "bubble_s": found["time"]["bubble_s"],
        "peak_bytes": found["memory"]["peak_bytes"],
        "fits": found["fits"],
    }


@pytest.mark.parametrize("name", SHIPPED)
def test_headline_figures(name: str) -> None:
    found = headline(SHIPPED[name])
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(dict(sorted((kept | {name: found}).items())), indent=1) + "\n")
        return
    assert found == pytest.approx(kept[name], rel=1e-6)


def test_nothing_kept_that_is_not_shipped() -> None:
    assert set(json.loads(GOLDEN.read_text())) == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_resolved_scenario_is_the_same_scenario(name: str, tmp_path: Path) -> None:
    made = load(SHIPPED[name])
    again = tmp_path / "scenario.resolved.yaml"
    again.write_text(resolved_yaml(made), encoding="utf-8")
    assert load(again) == made
