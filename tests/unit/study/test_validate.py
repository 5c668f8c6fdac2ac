"""Errors and verdicts from rows with known answers; like compared with like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simtrain.errors import InputError
from simtrain.report.validation import page, write
from simtrain.scenario.files import from_mapping
from simtrain.simulate import simulate
from simtrain.study.rows import Metric, PeakKind, read
from simtrain.study.validate import Compared, Verdict, compare, tables, validate, verdict_scores

ROW: dict[str, Any] = {
    "id": "small",
    "source": {"title": "a page", "year": 2024},
    "cluster": {"accelerator": "A100-80GB", "devices": 1},
    "model": {"name": "gpt", "layers": 2, "hidden": 512, "heads": 8, "vocab": 1024},
    "training": {"framework": "torchtune", "seq_len": 128, "micro_batch": 1, "precision": "bf16"},
    "outcome": "fits",
    "peak_memory": 1.0,
    "peak_unit": "GB",
}


def test_like_is_compared_with_like() -> None:
    """Allocated: tensors. Reserved: with the allocator's reserve. Device and unstated: with the runtime as well."""
    predicted = {}
    for metric in ("max allocated", "max reserved", "nvidia-smi", "peak"):
        row = read(ROW | {"peak_metric": metric})
        (found,), verdict = compare(row, from_mapping(row.scenario))
        predicted[found.peak_kind] = found.predicted
        assert verdict == Verdict("small", "a page", True, True)
    summary = simulate(from_mapping(read(ROW).scenario)).summary["memory"]
    parts = summary["by_category"]
    assert predicted[PeakKind.DEVICE] == predicted[PeakKind.UNSTATED] == summary["peak_bytes"]
    assert predicted[PeakKind.RESERVED] == pytest.approx(summary["peak_bytes"] - parts["runtime"])
    assert predicted[PeakKind.ALLOCATED] == pytest.approx(predicted[PeakKind.RESERVED] - parts["allocator_reserve"])


def test_errors() -> None:
    def one(source: str, predicted: float) -> Compared:
        return Compared("x", source, Metric.STEP_TIME, 2.0, predicted, 4.0, ())

    from simtrain.study.validate import Validation

    rows = (one("a", 2.2), one("a", 1.8), one("b", 3.0))
    found = Validation(rows, (), {}, {}, 0).document()["summary"]["step_time"]
    assert found["count"] == 3
    assert found["micro"] == pytest.approx((0.1 + 0.1 + 0.5) / 3)
    assert found["macro_by_source"] == pytest.approx((0.1 + 0.5) / 2)
    assert found["bias"] == pytest.approx((0.1 - 0.1 + 0.5) / 3)
    assert (found["median"], found["p90"], found["naive"]) == pytest.approx((0.1, 0.5, 1.0))


def test_precision_and_recall() -> None:
    said = [(True, True), (True, True), (True, False), (False, True), (False, False)]
    scores = verdict_scores([Verdict("x", "s", fits, predicted) for fits, predicted in said])
    assert scores["fits"] == {"count": 3, "predicted": 3, "precision": 2 / 3, "recall": 2 / 3}
    assert scores["oom"] == {"count": 2, "predicted": 2, "precision": 1 / 2, "recall": 1 / 2}
    assert verdict_scores([])["oom"]["precision"] is None


def test_rows_that_cannot_run_are_named(tmp_path: Path) -> None:
    lacking = ROW | {"id": "lacking", "model": {"name": "gpt", "hidden": 512}}
    wrong = ROW | {"id": "wrong", "training": ROW["training"] | {"tp": 3}}
    silent = ROW | {"id": "silent", "peak_memory": None, "outcome": None}
    document = validate([ROW, lacking, wrong, silent]).document()
    assert [row["id"] for row in document["rows"]] == ["small"]
    assert document["skipped"] == [{"id": "lacking", "missing": ["layers"]}]
    assert [one["id"] for one in document["refused"]] == ["wrong"]
    assert "parallelism.tp" in document["refused"][0]["why"]
    json.dumps(document)
    text = page(document, title="T")
    assert "| small | peak memory, unstated |" in text
    assert "| lacking | layers |" in text
    written = write(document, tmp_path / "page.md", title="T")
    assert [path.name for path in written] == ["page.md", "page.png"]
    assert all(path.stat().st_size > 500 for path in written)


def test_a_table_is_a_list_of_rows(tmp_path: Path) -> None:
    table = tmp_path / "t.yaml"
    table.write_text("- id: a\n- id: b\n")
    assert [row["id"] for row in tables([table])] == ["a", "b"]
    for text in ("a: 1\n", "- 1\n"):
        table.write_text(text)
        with pytest.raises(InputError):
            tables([table])
    assert len(tables()) > 200
