from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from simtrain.report.terminal import render
from tests.unit.report.pipelines import pipeline
from tests.unit.report.summaries import summary, with_memory

ONE, HELD = with_memory(pipeline(8, 96, message=0.05, reduce=3.0))
SUMMARY = summary(ONE, HELD)
FILES = [Path("reports/x/report.html"), Path("reports/x/timeline.png")]


def screen(given, *, terminal=False, files=(), width=100) -> list[str]:
    out = io.StringIO()
    color = "truecolor" if terminal else None
    render(given, Console(file=out, width=width, force_terminal=terminal, color_system=color), files)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_piped_screen_is_plain_and_compact():
    lines = screen(SUMMARY, files=FILES)
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert not set(text) & set("█░■─")
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 38
    for said in (
        "gpt3-175b-1024xa100",
        "1,024 x A100-SXM4-80GB, 8 stages x 96 microbatches",
        "predicted -2.5%, Narayanan 2021, Table 1",
        "executed FLOPs / (devices x 0.45 peak)",
        "tokens/s a device",
        "72 B s l h^2",
        "pipeline bubble 7.8%",
        "fits, 20.26 GiB to spare (25%)",
        "activations 30.00",
        "InfiniBand HDR",
        "training.micro_batch=2",
        "reports/x/  report.html, timeline.png",
    ):
        assert said in text, said


def test_terminal_has_bars_of_80_cells():
    lines = screen(SUMMARY, terminal=True)
    bars = [sum(line.count(cell) for cell in "█░") for line in lines]
    assert [length for length in bars if length] == [80, 80]


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_bars_take_one_line_of_any_terminal(width):
    lines = screen(SUMMARY, terminal=True, width=width)
    bars = [sum(line.count(cell) for cell in "█░") for line in lines]
    assert [length for length in bars if length] == [min(80, width - 15)] * 2


def test_no_bars_without_colours(monkeypatch):
    """A bar of one colour says nothing (https://no-color.org)."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert not set("".join(screen(SUMMARY, terminal=True))) & set("█░■")


def test_shares_add_up_to_the_bar():
    (line,) = [line for line in screen(SUMMARY, terminal=True) if line.count("█") > 70]
    assert "░" not in line


def test_what_does_not_fit_says_so():
    memory = SUMMARY["memory"] | {"peak_bytes": 90 * 2.0**30, "margin_bytes": -10 * 2.0**30}
    text = "\n".join(screen(SUMMARY | {"fits": False, "memory": memory}))
    assert "does not fit: 10 GiB too much" in text
    assert "to make it fit" in text


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"step_time_s": None, "error": None, "tokens_per_s": 5600.0, "mfu": 0.43}, "5,600 tokens/s, MFU 43.0%"),
        ({"step_time_s": 2.0, "error": 0.1, "source": None}, "predicted +10.0%"),
        ({"step_time_s": None, "error": None, "peak_memory_bytes": 2.0**30}, "peak 1 GiB"),
    ],
)
def test_measured_of_any_kind_stands_beside(measured, said):
    (line,) = [line for line in screen(SUMMARY | {"measured": measured}) if line.strip().startswith("measured")]
    assert said in line


def test_nothing_optional():
    given = {key: value for key, value in SUMMARY.items() if key != "advice"}
    text = "\n".join(screen(given | {"measured": None, "communication": [], "warnings": []}))
    assert "measured" not in text
    assert "would help" not in text
    assert "communication  " not in text
    assert "warning" not in text


def test_square_brackets_in_a_name_are_no_markup():
    assert screen(SUMMARY | {"scenario": "a[bold]b"})[0].startswith("a[bold]b")


def test_narrow_console_keeps_every_figure():
    text = "".join("".join(screen(SUMMARY, width=60)).split())
    assert "activations30.00" in text
    assert "bubble7.8%" in text
