"""Rows that a user adds or overrides with ``--specs``: merged row by row, errors with file, line and column."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from simtrain.errors import InputError, Problem
from simtrain.scenario import tables
from simtrain.scenario.hardware import Link
from simtrain.scenario.tables import load_tables

T = load_tables()


def user(folder: Path, text: str, name: str = "networks.yaml") -> tables.Tables:
    """Tables with a user's file on top."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return load_tables((folder,))


MINE = "mine:\n  source: our cluster\n  bandwidth: 40 GB/s\n  efficiency: 90 %\n  latency: 3 us\n"


def test_user_rows_join_and_override_row_by_row(tmp_path: Path) -> None:
    ours = user(tmp_path, MINE + MINE.replace("mine", "ib_hdr"))
    assert ours.networks["mine"] == Link("mine", 40e9, 0.9, 3e-6)
    assert ours.networks["ib_hdr"].bandwidth == 40e9
    assert ours.networks["ib_ndr"] == T.networks["ib_ndr"]
    assert T.networks["ib_hdr"].bandwidth == 25e9
    assert ours.raw("networks", "mine")["bandwidth"]["source"] == ["our cluster"]
    nearer = tmp_path / "nearer"
    nearer.mkdir()
    (nearer / "networks.yaml").write_text(MINE.replace("40", "50"), encoding="utf-8")
    assert load_tables((tmp_path, nearer)).networks["mine"].bandwidth == 50e9


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    assert user(tmp_path, MINE).networks["mine"].bandwidth == 40e9
    (tmp_path / "networks.yaml").unlink()
    time.sleep(0.01)
    assert user(tmp_path, MINE.replace("40", "41")).networks["mine"].bandwidth == 41e9


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "words"),
    [
        ("bandwidth: 40", "bandwith: 40", 3, 3, "unknown field (did you mean 'bandwidth'?)"),
        ("bandwidth: 40 GB/s", "bandwidth: 40e9", 3, 3, "needs a unit"),
        ("bandwidth: 40 GB/s", "bandwidth: 40 GB", 3, 3, "measures amount of data"),
        ("bandwidth: 40", "bandwidth: -40", 3, 3, "must be above zero"),
        ("bandwidth: 40", "bandwidth: 0", 3, 3, "must be above zero"),
        ("efficiency: 90 %", "efficiency: 0.9", 4, 3, "must be a percentage"),
        ("efficiency: 90 %", "efficiency: 150 %", 4, 3, "more than its wire rate"),
        ("  latency: 3 us\n", "", 1, 1, "mine.latency: missing"),
        ("  source: our cluster\n", "", 2, 3, "has no source"),
        (
            "bandwidth: 40 GB/s",
            "bandwidth: {value: 40 GB/s, src: [mlee]}",
            4,
            3,
            "unknown source 'mlee' (did you mean 'mle'?)",
        ),
        ("mine:\n", "sources: {mle: {title: t}}\nmine: 3\nyours:\n", 2, 1, "a row must be a mapping"),
    ],
)
def test_wrong_rows_are_named_with_their_place(
    tmp_path: Path, old: str, new: str, line: int, column: int, words: str
) -> None:
    assert old in MINE
    text = MINE.replace(old, new)
    text = text if "mlee" not in text else "sources: {mle: {title: t}}\n" + text
    with pytest.raises(InputError) as caught:
        _ = user(tmp_path, text).networks["mine"]
    problems: tuple[Problem, ...] = caught.value.problems
    assert any(words in str(one) and (one.line, one.column) == (line, column) for one in problems), str(caught.value)
    assert all(one.file == str(tmp_path / "networks.yaml") for one in problems)


def test_all_problems_of_a_row_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        _ = user(tmp_path, MINE.replace("40 GB/s", "40").replace("3 us", "3 GB")).networks["mine"]
    assert len(caught.value.problems) == 2


def test_references_to_rows_that_are_not_there(tmp_path: Path) -> None:
    machine = (
        "box:\n  source: ours\n  accelerator: H100-SXM5-80GP\n  devices: 8 devices\n  scale_up: nvswitch_gen3\n"
        "  network: ib_hrd\n  nics: 8 NICs\n  cores: 64 cores\n  ram: 1 TB\n"
    )
    with pytest.raises(InputError) as caught:
        _ = user(tmp_path, machine, "machines.yaml").machines["box"]
    assert [(one.line, one.message.split(";")[0]) for one in caught.value.problems] == [
        (3, "unknown 'H100-SXM5-80GP' (did you mean 'H100-SXM5-80GB'?)"),
        (6, "unknown 'ib_hrd' (did you mean 'ib_hdr'?)"),
    ]


def test_efficiency_files_are_as_strict(tmp_path: Path) -> None:
    text = "gemm:\n  - precision: bf17\n    src: [x]\n    unit: TFLOP\n    points: {1024x1024: 10}\n    nte: ''\n"
    with pytest.raises(InputError) as caught:
        _ = user(tmp_path, text, "efficiencies/T4.yaml").accelerators["T4"]
    for words in ("must be one of fp32", "not a compute rate: unknown unit 'TFLOP'", "unknown field"):
        assert words in str(caught.value)


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        load_tables((tmp_path / "none",))
    with pytest.raises(InputError, match=r"is no table \(did you mean 'networks.yaml'\?\)"):
        user(tmp_path, MINE, "network.yaml")


BROKEN_TABLES = {
    "text as aliases": (MINE + "  aliases: mine2\n", "networks.yaml", "mine.aliases: must be a list of names"),
    "a number as aliases": (MINE + "  aliases: 3\n", "networks.yaml", "mine.aliases: must be a list of names"),
    "a number as source": (MINE.replace("40 GB/s", "{value: 40 GB/s, src: 3}"), "networks.yaml", ""),
    "an unhashable source": (
        "sources: {a: b}\n" + MINE.replace("40 GB/s", "{value: 40 GB/s, src: [[a]]}"),
        "networks.yaml",
        "mine.bandwidth: unknown source",
    ),
    "a constant that is none": ("constants: 3\n", "efficiencies/T4.yaml", "constants: must be a mapping"),
    "no number": ("source: s\nconstants: {sustained: .nan}\n", "efficiencies/T4.yaml", "sustained: must be a number"),
    "no length": (
        "attention: [{kernel: k, pass: forward, causal: true, head_dim: 64, unit: TFLOP/s, src: a, points: {x: 1}}]\n",
        "efficiencies/T4.yaml",
        "'x' is no sequence length",
    ),
    "its own twin": ("same_as: T4\n", "efficiencies/T4.yaml", "same_as: 'T4' is no accelerator with measurements"),
    "no twin": ("same_as: T5\n", "efficiencies/T4.yaml", "same_as: 'T5' is no accelerator with measurements"),
}


@pytest.mark.parametrize(("text", "name", "said"), BROKEN_TABLES.values(), ids=BROKEN_TABLES)
def test_odd_tables_are_refused_with_their_place(tmp_path: Path, text: str, name: str, said: str) -> None:
    (tmp_path / "sp").mkdir()
    ours = user(tmp_path / "sp", text, name)
    if said:
        table, row = (ours.accelerators, "T4") if "T4" in name else (ours.networks, "mine")
        with pytest.raises(InputError) as caught:
            table.find(row)
        assert said in str(caught.value)
        assert f"{name}:" in str(caught.value)
    else:
        assert ours.networks["mine"].bandwidth == 40e9
    for kind in ("networks", "efficiencies"):
        for row in getattr(ours, kind):
            assert ours.raw(kind, row)


@pytest.mark.parametrize("kind", ["link to nothing", "folder", "fifo"])
def test_a_table_that_is_no_file_is_not_passed_over(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "accelerators.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    with pytest.raises(InputError, match=r"accelerators\.yaml"):
        load_tables((tmp_path,)).accelerators.find("T4")
