from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from simtrain.program.demand import Memory, TimeKind
from simtrain.program.lowered import PieceKind, Stream, TaskList
from simtrain.report.figures import png, svg
from simtrain.report.memory_curve import memory_curve
from simtrain.report.palette import BAND_COLOUR, IDLE, Band
from simtrain.report.timeline import MOST_ROWS, _legend, rank_labels, timeline
from simtrain.report.waterfall import time_waterfall
from simtrain.trace.memory import profile
from simtrain.trace.metrics import time_split
from simtrain.trace.spans import Trace
from tests.unit.report.pipelines import pipeline
from tests.unit.report.summaries import GIB, with_memory


def area(figure: Figure, colour: str) -> float:
    """Seconds of compute stream drawn in a colour: area over the height of a compute row."""
    corners = [
        np.array([path.vertices[:4] for path in one.get_paths()])
        for one in figure.axes[0].collections
        if isinstance(one, PolyCollection) and [*map(tuple, one.get_facecolor())] == [to_rgba(colour)]
    ]
    boxes = np.concatenate(corners)
    return float(((boxes[:, 1, 0] - boxes[:, 0, 0]) * (boxes[:, 2, 1] - boxes[:, 0, 1])).sum())


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_areas_of_the_timeline_are_the_time_split():
    one = pipeline(4, 8)
    figure = timeline(one, title="x")
    split, height = time_split(one), 0.86
    assert area(figure, BAND_COLOUR[Band.TP]) / height / 4 == pytest.approx(split[TimeKind.TP], rel=1e-9)
    assert area(figure, BAND_COLOUR[Band.RECOMPUTE]) / height / 4 == pytest.approx(split[TimeKind.RECOMPUTE], rel=1e-9)
    drawn = area(figure, BAND_COLOUR[Band.FORWARD]) + area(figure, BAND_COLOUR[Band.BACKWARD])
    assert drawn / height / 4 == pytest.approx(split[TimeKind.COMPUTE], rel=1e-9)
    assert area(figure, IDLE) / height / 4 == pytest.approx(one.step_time, rel=1e-9)


def test_contention_is_drawn():
    one = pipeline(1, 2)
    last = one.lowered.lists[0].tasks[-1]
    slow = tuple(
        replace(demand, duration=0.25, split=((TimeKind.OPTIMIZER, 0.25),)) if work == last.work else demand
        for work, demand in enumerate(one.demands)
    )
    figure = timeline(replace(one, demands=slow))
    assert area(figure, BAND_COLOUR[Band.CONTENTION]) / 0.86 == pytest.approx(0.25)


def test_every_microbatch_is_numbered_at_8_stages_of_32():
    figure = timeline(pipeline(8, 32, message=0.05, reduce=3.0), title="gpt")
    numbers = texts(figure)
    assert {numbers.count(str(m)) for m in range(32)} == {16}
    assert figure.axes[0].get_yticklabels()[7].get_text() == "stage 7\n(ranks 896-1023)"
    assert figure.axes[0].get_xlabel() == "time in s"


def test_numbers_are_left_out_where_they_do_not_fit():
    assert texts(timeline(pipeline(64, 128))) == []


@pytest.mark.parametrize("kind", [PieceKind.FORWARD, PieceKind.ALL_REDUCE])
def test_one_number_for_a_pass_of_several_boxes(kind):
    """An unmerged pass: the forward of a microbatch runs as two tasks, the first of them perhaps a collective."""
    one = pipeline(1, 2)
    tasks = one.lowered.lists[0].tasks
    works = one.lowered.works
    works = (*works, works[0]._replace(pieces=(works[0].pieces[0]._replace(kind=kind),)))
    one = replace(one, lowered=replace(one.lowered, works=works), demands=(*one.demands, one.demands[0]))
    split = replace(
        one.lowered, lists=(TaskList((tasks[0], tasks[0]._replace(work=8), *tasks[1:]), one.lowered.lists[0].streams),)
    )
    start = np.concatenate([[0.0], one.start + 1.0])
    doubled = replace(
        one,
        lowered=split,
        sim_rank=np.zeros(len(start), dtype=np.int32),
        task=np.arange(len(start), dtype=np.int32),
        start=start,
        end=np.concatenate([[1.0], one.end + 1.0]),
        released_by=np.arange(len(start), dtype=np.int64) - 1,
    )
    assert texts(timeline(doubled)) == ["0", "0", "1", "1"]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (64, 4), (96, 8)])
def test_many_and_few_rows_have_readable_labels_that_do_not_overlap(stages, microbatches):
    figure = timeline(pipeline(stages, microbatches, message=0.1, reduce=1.0), title="x")
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert min(label.get_fontsize() for label in figure.axes[0].get_yticklabels()) >= 5.0
    assert all(below.y1 <= above.y0 + 1 for above, below in itertools.pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0
    assert figure.legends[0].get_window_extent().y0 > figure.axes[0].get_window_extent().y1


def test_thousands_of_ranks_are_thinned_out_and_said_so():
    one = pipeline(1, 1)
    ranks = tuple(replace(one.lowered.ranks[0], rank=r, multiplicity=1) for r in range(1000))
    count = len(one.end)
    many = replace(
        one,
        lowered=replace(one.lowered, ranks=ranks),
        sim_rank=np.repeat(np.arange(1000, dtype=np.int32), count),
        task=np.tile(one.task, 1000),
        start=np.tile(one.start, 1000),
        end=np.tile(one.end, 1000),
        released_by=np.full(1000 * count, -1, dtype=np.int64),
    )
    figure = timeline(many)
    assert area(figure, IDLE) / one.step_time == pytest.approx(0.86 * MOST_ROWS)
    assert any(f"{MOST_ROWS} of 1000 simulated ranks" in text.get_text() for text in figure.texts)


def test_labels_of_interleaved_and_scattered_ranks():
    one = pipeline(2, 2)
    works = tuple(
        work._replace(stage=work.stage + 2 * (number % 8) if number % 8 < 2 else 99)  # messages may be another stage's
        for number, work in enumerate(one.lowered.works)
    )
    ranks = (replace(one.lowered.ranks[0], rank=0), replace(one.lowered.ranks[1], rank=4))
    assert rank_labels(replace(one, lowered=replace(one.lowered, works=works, ranks=ranks))) == [
        ("stages 0, 2", "rank 0 x 128"),
        ("stages 1, 3", "rank 4 x 128"),
    ]


def test_labels_of_many_model_chunks_stay_in_the_picture():
    one = pipeline(40, 2)
    works = tuple(
        work._replace(stage=40 * (number % 2) + work.stage + 1000) for number, work in enumerate(one.lowered.works)
    )
    figure = timeline(replace(one, lowered=replace(one.lowered, works=works)))
    figure.canvas.draw()
    labels = figure.axes[0].get_yticklabels()
    assert labels[3].get_text() == "stages 1003, 1043 (ranks 384-511)"
    assert min(label.get_window_extent().x0 for label in labels) >= 0


def test_time_axis_follows_the_step():
    one = pipeline(2, 2)
    short = replace(one, start=one.start * 1e-5, end=one.end * 1e-5)
    assert timeline(short).axes[0].get_xlabel() == "time in us"


def test_memory_curve_marks_peak_capacity_and_reserve():
    one, held = with_memory(pipeline(4, 8, message=0.05, reduce=3.0))
    figure = memory_curve(held, one, title="x", needed=[1.04 * held.peak(rank)[1] for rank in held.ranks])
    curve, bars = figure.axes
    said = " ".join(text.get_text() for text in curve.texts)
    assert "capacity 80 GiB" in said
    assert "peak 57.5 GiB" in said
    assert "reserve 59.8 GiB" in said
    assert [text.get_text().strip() for text in bars.texts] == ["59.8", "52", "44.2", "36.4"]
    assert curve.get_ylim()[1] > 80
    top = max(path.vertices[:, 1].max() for one in curve.collections for path in one.get_paths())
    assert top == pytest.approx(57.5)


def test_memory_that_does_not_fit_stays_in_the_picture():
    one, _ = with_memory(pipeline(2, 4))
    held = profile(one, [{Memory.OPTIMIZER: 100 * GIB}] * 2, 16 * GIB)
    curve = memory_curve(held, one).axes[0]
    assert curve.get_ylim()[1] > held.peak(held.worst)[1] / GIB


def test_waterfall_bars_follow_each_other_and_end_at_the_step():
    one = pipeline(4, 8, message=0.05, reduce=3.0)
    bars = time_waterfall(time_split(one)).axes[0].patches
    for before, after in itertools.pairwise(bars):
        assert after.get_x() == pytest.approx(before.get_x() + before.get_width())
    assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(one.step_time)


def test_same_figure_same_bytes():
    def drawn() -> tuple[bytes, str]:
        figure = timeline(pipeline(2, 4, message=0.1, reduce=1.0), title="x")
        return png(figure), svg(figure)

    first, second = drawn(), drawn()
    assert first == second
    assert first[0].startswith(b"\x89PNG")
    assert b"tEXt" not in first[0]
    assert first[1].startswith("<svg")
    assert "dc:date" not in first[1]


def test_communication_lanes_show_the_messages():
    one = pipeline(4, 4, message=0.5)
    lanes = area(timeline(one), BAND_COLOUR[Band.PP])
    sent = sum(span_seconds(one, stream) for stream in (Stream.SEND, Stream.RECV))
    assert lanes == pytest.approx(sent * 0.92 * (0.9 - 0.62 - 0.04), rel=1e-9)


def span_seconds(one: Trace, stream: Stream) -> float:
    lists = [one.lowered.lists[rank.tasks] for rank in one.lowered.ranks]
    spans = zip(one.sim_rank.tolist(), one.task.tolist(), (one.end - one.start).tolist(), strict=True)
    return sum(t for r, task, t in spans if lists[r].streams[lists[r].tasks[task].stream] is stream)


def test_box_of_a_split_backward_has_its_own_colour():
    one = pipeline(1, 2)
    works = tuple(
        work._replace(pieces=tuple(piece._replace(kind=PieceKind.WEIGHT_GRAD) for piece in work.pieces[1:]))
        if work.name == "B"
        else work
        for work in one.lowered.works
    )
    figure = timeline(replace(one, lowered=replace(one.lowered, works=works)))
    assert area(figure, BAND_COLOUR[Band.WEIGHT_GRAD]) / 0.86 == pytest.approx(4.0)


@pytest.mark.parametrize("entries", range(1, len(Band) + 1))
def test_legend_of_any_kinds_stays_in_the_picture(entries):
    figure = Figure(figsize=(14.0, 5.0))
    longest = sorted(Band, key=lambda band: len(band.value), reverse=True)[:entries]
    _legend(figure, set(longest), 5.0)
    FigureCanvasAgg(figure).draw()
    box = figure.legends[0].get_window_extent()
    assert box.x1 <= figure.bbox.x1
    assert box.y0 >= figure.bbox.y1 - 0.8 * figure.dpi, "the boxes begin 0.78 inches below the top"
