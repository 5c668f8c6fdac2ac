from __future__ import annotations

import errno
import gzip
import io
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from simtrain.errors import InputError
from simtrain.report.files import place, write
from tests.unit.report.pipelines import pipeline
from tests.unit.report.summaries import summary, with_memory

NAMES = [
    "report.html",
    "timeline.png",
    "memory.png",
    "trace.json.gz",
    "spans.parquet",
    "summary.json",
    "scenario.resolved.yaml",
]
YAML = "name: <b>x</b>\nseed: 0\n"
ONE, HELD = with_memory(pipeline(2, 3, message=0.1, reduce=1.0))
SUMMARY = summary(ONE, HELD, warnings=["a < b & c"], stages=2)


def report(directory: Path, **changes: object) -> list[Path]:
    given = {"summary": SUMMARY, "trace": ONE, "memory": HELD, "scenario_text": YAML} | changes
    return write(directory, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("out") / "a" / "b"
    assert [path.name for path in report(where)] == NAMES
    return where


def test_all_files_and_nothing_else(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)


def test_same_run_same_bytes(folder, tmp_path):
    for path in report(tmp_path):
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name


def test_names_are_no_formulas_and_no_markup(tmp_path):
    """What a user called an accelerator or cites as a source goes into pictures and pages as it is."""
    odd = r"X$\frac{1$<script>alert(1)</script>"
    changed = {**SUMMARY, "accelerator": odd, "warnings": [odd], "model": odd}
    report(tmp_path, summary=changed)
    assert "<script>alert" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_without_figures(tmp_path):
    assert [path.name for path in report(tmp_path, figures=False)] == NAMES[3:]


def test_summary_reads_back(folder):
    text = (folder / "summary.json").read_text()
    assert json.loads(text) == SUMMARY
    assert text.index('"accelerator"') < text.index('"advice"') < text.index('"warnings"')


def test_resolved_scenario_is_written_as_given(folder):
    assert (folder / "scenario.resolved.yaml").read_text() == YAML


def test_parquet_is_the_frame_with_its_schema_version(folder):
    table = pq.read_table(io.BytesIO((folder / "spans.parquet").read_bytes()))
    assert table.schema.metadata[b"simtrain_schema_version"] == b"1"
    frame = ONE.frame()
    assert table.column_names == list(frame.columns)
    assert table.column("end").to_pylist() == frame["end"].tolist()
    assert table.column("kind").to_pylist() == [str(kind) for kind in frame["kind"]]


def events(folder: Path) -> list[dict]:
    return json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]


def test_perfetto_slices_of_a_thread_never_overlap(folder):
    slices = [event for event in events(folder) if event["ph"] == "X"]
    assert len(slices) == len(ONE.end)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in slices:
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        ordered = sorted(spans)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(ordered))
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(ONE.step_time * 1e6)


def test_perfetto_names_processes_and_threads(folder):
    named = {(e["pid"], e["tid"], e["name"]): e["args"].get("name") for e in events(folder) if e["ph"] == "M"}
    assert named[128, 0, "process_name"] == "stage 1 (ranks 128-255)"
    assert named[0, 0, "thread_name"] == "compute"
    assert named[0, 2, "thread_name"] == "recv 1"


def test_perfetto_arrows_join_each_send_to_its_receive(folder):
    arrows = {}
    for event in events(folder):
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    assert len(arrows) == 2 * 3
    for pair in arrows.values():
        assert {pair["s"]["pid"], pair["f"]["pid"]} == {0, 128}
        assert pair["s"]["ts"] == pair["f"]["ts"]


def test_perfetto_memory_counter_peaks_where_the_profile_does(folder):
    totals = [sum(e["args"].values()) for e in events(folder) if e["ph"] == "C" and e["pid"] == 0]
    assert max(totals) == HELD.peak(0)[1]


class Page(HTMLParser):
    """Collects tags and checks that they close in order."""

    void = ("meta", "br", "img", "path", "use", "rect", "polygon")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_is_self_contained_and_says_everything(folder):
    html = (folder / "report.html").read_text()
    page = Page(html)
    assert page.open == []
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert "<script" not in html
    assert not re.search(r"url\((?!#)|@import", html)
    for said in (
        "Narayanan 2021, Table 1",
        "a < b & c",
        "name: <b>x</b>",
        "MFU 43.9%",
        "naive",
        "training.micro_batch=2",
        "gradient reduction",
        "InfiniBand HDR",
        "to spare",
        "72 B s l h^2",
    ):
        assert said in page.text, said
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html


def test_long_traces_are_embedded_as_pixels(tmp_path):
    one, held = with_memory(pipeline(32, 64))
    report(tmp_path, trace=one, memory=held, summary=summary(one, held))
    assert "data:image/png;base64," in (tmp_path / "report.html").read_text()


def test_page_without_optional_parts(tmp_path):
    bare = {key: value for key, value in SUMMARY.items() if key not in ("advice", "measured")}
    report(tmp_path, summary=bare | {"communication": [], "measured": None})
    text = Page((tmp_path / "report.html").read_text()).text
    assert "None: one device works alone." in text
    assert "measured" not in text


def test_folder_below_a_file_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as caught:
        report(tmp_path / "file" / "out")
    (problem,) = caught.value.problems
    assert problem.file == str(tmp_path / "file" / "out")
    assert "cannot write the report here" in problem.message


def test_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "b").write_text("before")
    written = []

    def full(self, data):
        written.append(self.name)
        if self.name == "b":
            raise OSError(errno.ENOSPC, "No space left on device")
        with self.open("wb") as file:
            return file.write(data)

    monkeypatch.setattr(Path, "write_bytes", full)
    for where in (tmp_path / "old", tmp_path / "new" / "deep"):
        with pytest.raises(InputError, match="No space left on device"):
            place(where, {"a": b"1", "b": b"2"})
    assert written == ["a", "b"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["b"]
    assert (tmp_path / "old" / "b").read_text() == "before"


def test_target_that_is_a_folder_moves_nothing(tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match="b is a folder"):
        place(tmp_path, {"a": b"1", "b": b"2"})
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_other_files_stay_and_old_ones_are_replaced(tmp_path):
    (tmp_path / "mine").write_text("keep")
    (tmp_path / "a").write_text("old")
    place(tmp_path, {"a": b"new"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"mine": "keep", "a": "new"}


def test_a_failure_leaves_alone_what_others_wrote_meanwhile(tmp_path, monkeypatch):
    def full(self, data):
        (tmp_path / "new" / "other").mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="No space left on device"):
        place(tmp_path / "new" / "mine", {"a": b"1"})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["other"]
