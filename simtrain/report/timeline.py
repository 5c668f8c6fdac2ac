"""The timeline: rank x time, coloured by what each rank does; idle time is the background.

A box is one span of the compute stream (adjacent ones of one pass and microbatch share a label). The height of a colour
in a box is its share of the box's time, because a merged work holds many small collectives and recomputations.
Communication streams run in thin lanes below, or, where there are many ranks, behind the boxes: what is seen there is
exposed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from simtrain.program.lowered import PieceKind, SimRank, Stream
from simtrain.report.palette import BAND_COLOUR, EDGE, IDLE, INK, LIGHT, MUTED, PIECE_BAND, TIME_BAND, Band
from simtrain.trace.metrics import COMPUTE_STREAM, KINDS, span_kinds
from simtrain.trace.spans import STREAMS, Columns, Trace
from simtrain.units import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Floats = NDArray[np.floating[Any]]
BANDS = tuple(Band)
MOST_ROWS = 128
"""More simulated ranks than this are thinned out evenly."""
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 14.0, 1.75, 0.2, 0.78, 0.55
"""Inches: the figure's width and its margins."""
_LEGEND_LETTERS = 160
"""Letters of a legend, with 5 for the patch of an entry, that fit in one row of the figure; more take two."""
_SMALLEST = 4.5
"""Points: no text is smaller."""
_VISIBLE = 5e-4
"""Share of the time drawn from which on a colour is in the legend."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which simulated ranks are drawn, and how the height of a row (1 from the middle of one to the next) is used."""

    shown: NDArray[np.int64]
    """Indices of simulated ranks, top to bottom."""
    place: NDArray[np.int64]
    """Simulated rank -> row; -1 = not drawn."""
    lanes: tuple[tuple[Stream, ...], ...]
    """Communication lanes under each rank."""

    @property
    def crowded(self) -> bool:
        """Too many rows for lanes of their own."""
        return len(self.shown) > 32

    @property
    def compute_height(self) -> float:
        return 0.86 if self.crowded or not self.lanes else 0.62

    def lane(self, index: int) -> tuple[float, float]:
        """Top and height of a lane, below the row's top."""
        if self.crowded:
            return 0.0, self.compute_height
        height = (0.9 - self.compute_height - 0.04) / len(self.lanes)
        return self.compute_height + 0.04 + index * height, 0.92 * height


def timeline(trace: Trace, *, title: str = "", subtitle: str = "") -> Figure:
    """Draw who does what when.

    Parameters
    ----------
    trace
        One step.
    title
        Usually the scenario's name.
    subtitle
        One line below it; by default the step time and what is shown.

    Returns
    -------
    Figure
        One row a simulated rank (at most 128 of them), time in s, ms or us.
    """
    from matplotlib.figure import Figure

    columns = trace.columns
    rows = _rows(trace, columns)
    count = len(rows.shown)
    row_inches = min(0.62, max(0.115, 6.0 / count))
    height = _TOP + _BOTTOM + max(0.8, count * row_inches)
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    axes = figure.add_axes(
        (_LEFT / _WIDTH, _BOTTOM / height, 1 - (_LEFT + _RIGHT) / _WIDTH, 1 - (_TOP + _BOTTOM) / height)
    )
    pixels = (_WIDTH - _LEFT - _RIGHT) * 72 / (trace.extent or 1.0)
    _background(axes, trace, rows)
    used = _boxes(axes, trace, columns, rows)
    _lanes(axes, trace, columns, rows, used)
    _labels(axes, trace, columns, rows, points=pixels, row_points=row_inches * 72)
    _axes(axes, trace, rows, row_inches)
    note = "" if count == len(trace.lowered.ranks) else f"  ·  {count} of {len(trace.lowered.ranks)} simulated ranks"
    subtitle = subtitle or f"step {format_time(trace.step_time)}"
    figure.text(_LEFT / _WIDTH, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", color=INK)
    figure.text(1 - _RIGHT / _WIDTH, 1 - 0.3 / height, subtitle + note, fontsize=9.5, color=MUTED, ha="right")
    _legend(figure, used, height)
    return figure


def rank_label(rank: SimRank, stages: Iterable[int], contiguous: bool) -> tuple[str, str]:
    """What a reader calls a simulated rank: the stages it runs, and the real ranks it stands for."""
    numbers = sorted(stages)
    if not numbers:
        name = f"rank {rank.rank}"
    elif len(numbers) == 1:
        name = f"stage {numbers[0]}"
    else:
        name = f"stages {numbers[0]}, {numbers[1]}" + (", .." if len(numbers) > 2 else "")
    if rank.multiplicity == 1:
        return name, f"rank {rank.rank}"
    last = rank.rank + rank.multiplicity - 1
    return name, f"ranks {rank.rank}-{last}" if contiguous else f"rank {rank.rank} x {rank.multiplicity}"


def rank_labels(trace: Trace) -> list[tuple[str, str]]:
    """Label of every simulated rank; ranges of ranks where the representatives lie a multiplicity apart."""
    ranks, lowered = trace.lowered.ranks, trace.lowered
    order = sorted(ranks, key=lambda rank: rank.rank)
    contiguous = all(b.rank - a.rank == a.multiplicity for a, b in pairwise(order))
    stages = [
        {
            lowered.works[task.work].stage
            for task in one.tasks
            if task.microbatch >= 0 and one.streams[task.stream] is Stream.COMPUTE
        }
        for one in lowered.lists
    ]
    return [rank_label(rank, stages[rank.tasks], contiguous) for rank in ranks]


def _rows(trace: Trace, columns: Columns) -> _Rows:
    ranks = len(trace.lowered.ranks)
    shown = np.unique(np.linspace(0, ranks - 1, min(ranks, MOST_ROWS)).round().astype(np.int64))
    place = np.full(ranks, -1, dtype=np.int64)
    place[shown] = np.arange(len(shown))
    active = set(columns.stream[(trace.end > trace.start) & (columns.stream != COMPUTE_STREAM)].tolist())
    host = (Stream.TO_HOST, Stream.FROM_HOST, Stream.HOST)
    classes = [(Stream.GATHER,), (Stream.REDUCE,), (Stream.REPLICA,), (Stream.SEND, Stream.RECV), host]
    lanes = tuple(one for one in classes if any(STREAMS.index(stream) in active for stream in one))
    return _Rows(shown, place, lanes)


def _rectangles(left: _Floats, right: _Floats, top: _Floats, bottom: _Floats) -> NDArray[np.float64]:
    """Corners, n x 4 x 2."""
    x = np.stack([left, right, right, left], axis=1)
    y = np.stack([top, top, bottom, bottom], axis=1)
    return np.stack([x, y], axis=2)


def _add(axes: Axes, corners: NDArray[np.float64], colour: Any, **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    if len(corners):
        axes.add_collection(PolyCollection(cast(Any, corners), facecolors=colour, **style), autolim=False)


def _background(axes: Axes, trace: Trace, rows: _Rows) -> None:
    top = np.arange(len(rows.shown)) - 0.45
    zero = np.zeros(len(top))
    corners = _rectangles(zero, zero + trace.extent, top, top + rows.compute_height)
    _add(axes, corners, IDLE, edgecolors="none", zorder=1)


def _shares(trace: Trace) -> NDArray[np.float64]:
    """Work x band: what share of each work's time each band has."""
    shares = np.zeros((len(trace.demands), len(BANDS)))
    for work, demand in enumerate(trace.demands):
        main = _main_band(trace, work)
        for kind, seconds in demand.split:
            shares[work, BANDS.index(TIME_BAND.get(kind, main))] += seconds
        if not shares[work].any():
            shares[work, BANDS.index(main)] = 1.0
    shares /= shares.sum(axis=1, keepdims=True)
    return shares


def _main_band(trace: Trace, work: int) -> Band:
    """The pass that a work belongs to: of its first piece that is neither recomputation nor communication."""
    kinds = [piece.kind for piece in trace.lowered.works[work].pieces if piece.kind in PIECE_BAND]
    passes = [kind for kind in kinds if kind is not PieceKind.RECOMPUTE] or kinds
    return PIECE_BAND[passes[0]] if passes else Band.FORWARD


def _boxes(axes: Axes, trace: Trace, columns: Columns, rows: _Rows) -> set[Band]:
    """Draw the compute streams; a colour's height is its share. Returns the bands that occur."""
    row = rows.place[trace.sim_rank]
    ids = np.flatnonzero((columns.stream == COMPUTE_STREAM) & (row >= 0) & (trace.end > trace.start))
    demand = np.array([one.duration for one in trace.demands])[columns.work[ids]]
    slow = np.array([rank.slowdown for rank in trace.lowered.ranks])[trace.sim_rank[ids]]
    busy = trace.end[ids] - trace.start[ids]
    contended = np.maximum(0.0, 1.0 - demand * slow / busy)
    contended[contended < 1e-9] = 0.0
    shares = _shares(trace)[columns.work[ids]] * (1.0 - contended)[:, None]
    shares[:, BANDS.index(Band.CONTENTION)] += contended
    edge = np.cumsum(shares, axis=1) * rows.compute_height
    top = row[ids] - 0.45
    pale = _chunk(trace, columns)[ids]
    used: set[Band] = set()
    for index, band in enumerate(BANDS):
        for shade in np.unique(pale[shares[:, index] > 0]).tolist():
            on = (shares[:, index] > 0) & (pale == shade)
            before = edge[on, index] - shares[on, index] * rows.compute_height
            corners = _rectangles(trace.start[ids[on]], trace.end[ids[on]], top[on] + before, top[on] + edge[on, index])
            _add(axes, corners, _pale(band, shade), edgecolors="none", zorder=2)
        if busy @ shares[:, index] > _VISIBLE * busy.sum():
            used.add(band)
    outline = _rectangles(trace.start[ids], trace.end[ids], top, top + rows.compute_height)
    wide = busy > trace.step_time / 500
    _add(axes, outline[wide], "none", edgecolors=EDGE, linewidths=0.5, zorder=3)
    return used


def _chunk(trace: Trace, columns: Columns) -> NDArray[np.float64]:
    """How pale each span is drawn: 0 for a rank's first model chunk to 0.45 for its last (interleaved schedules)."""
    stage = np.array([work.stage for work in trace.lowered.works], dtype=np.int64)[columns.work]
    passes = (columns.microbatch >= 0) & (columns.stream == COMPUTE_STREAM)
    pale = np.zeros(len(stage))
    for index in range(len(trace.lowered.ranks)):
        mine = np.flatnonzero((trace.sim_rank == index) & passes)
        chunks, order = np.unique(stage[mine], return_inverse=True)
        if len(chunks) > 1:
            pale[mine] = 0.45 * order / (len(chunks) - 1)
    return pale


def _pale(band: Band, shade: float) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    if band not in (Band.FORWARD, Band.BACKWARD, Band.WEIGHT_GRAD):
        shade = 0.0
    red, green, blue = (part + (1 - part) * shade for part in to_rgb(BAND_COLOUR[band]))
    return red, green, blue


def _lanes(axes: Axes, trace: Trace, columns: Columns, rows: _Rows, used: set[Band]) -> None:
    row = rows.place[trace.sim_rank]
    kinds = span_kinds(trace, columns)
    for index, streams in enumerate(rows.lanes):
        codes = [STREAMS.index(stream) for stream in streams]
        chosen = np.isin(columns.stream, codes) & (row >= 0) & (trace.end > trace.start)
        offset, height = rows.lane(index)
        for kind in np.unique(kinds[chosen]).tolist():
            ids = np.flatnonzero(chosen & (kinds == kind))
            band = TIME_BAND.get(KINDS[kind], Band.PP)
            top = row[ids] - 0.45 + offset
            corners = _rectangles(trace.start[ids], trace.end[ids], top, top + height)
            _add(axes, corners, BAND_COLOUR[band], edgecolors=BAND_COLOUR[band], linewidths=0.3, zorder=1.5)
            used.add(band)


def _labels(axes: Axes, trace: Trace, columns: Columns, rows: _Rows, *, points: float, row_points: float) -> None:
    """Microbatch numbers, where they fit: once for each run of adjacent boxes of one pass and microbatch."""
    size = min(8.0, 0.6 * row_points * rows.compute_height)
    if size < _SMALLEST:
        return
    code = np.array([_pass(trace, work) for work in range(len(trace.demands))])[columns.work]
    ids = np.flatnonzero(
        (columns.stream == COMPUTE_STREAM) & (columns.microbatch >= 0) & (rows.place[trace.sim_rank] >= 0)
    )
    ids = ids[np.lexsort((trace.task[ids], trace.sim_rank[ids]))]
    if not len(ids):
        return
    known = np.maximum.accumulate(np.where(code[ids] >= 0, np.arange(len(ids)), 0))
    keys = np.stack([trace.sim_rank[ids], columns.microbatch[ids], code[ids[known]]], axis=1)
    first = np.flatnonzero(np.concatenate([[True], (keys[1:] != keys[:-1]).any(axis=1)]))
    last = np.concatenate([first[1:], [len(ids)]]) - 1
    start, end = trace.start[ids[first]], trace.end[ids[last]]
    width = (end - start) * points
    flat = width / (0.62 * len(str(keys[:, 1].max())) + 0.4)
    upright = flat >= min(size, 5.0)
    sizes = np.minimum(size, np.where(upright, flat, width / 0.9))
    shares = _shares(trace)
    for at in np.flatnonzero(sizes >= _SMALLEST).tolist():
        rank, microbatch, band = keys[first[at]].tolist()
        share = shares[columns.work[ids[first[at] : last[at] + 1]], band].mean()
        middle = rows.place[rank] - 0.45 + rows.compute_height * max(0.5 * share, 0.3)
        colour = INK if BANDS[band] in LIGHT else "white"
        x = (start[at] + end[at]) / 2
        turn = 0 if upright[at] else 90
        style = {"fontsize": sizes[at], "color": colour, "ha": "center", "va": "center", "rotation": turn, "zorder": 5}
        axes.text(x, middle, str(microbatch), **style)


def _pass(trace: Trace, work: int) -> int:
    """Index of the band that a work's microbatch number stands on; -1 = communication (the pass around it)."""
    if not any(piece.kind in PIECE_BAND for piece in trace.lowered.works[work].pieces):
        return -1
    band = _main_band(trace, work)
    return BANDS.index(Band.BACKWARD if band is Band.RECOMPUTE else band)


def _axes(axes: Axes, trace: Trace, rows: _Rows, row_inches: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    count = len(rows.shown)
    unit, scale = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if trace.extent >= pair[1]), ("us", 1e-6))
    axes.set_xlim(0, trace.extent or 1.0)
    axes.set_ylim(count - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g}"))
    axes.set_xlabel(f"time in {unit}", fontsize=9, color=INK)
    labels = [_two(label, row_inches) for label in rank_labels(trace)]
    longest = max(len(line) for label in labels for line in label.splitlines())
    size = min(9.0, max(5.0, min(row_inches * 72 * 0.75, (_LEFT - 0.1) * 72 / (0.6 * longest))))
    every = max(1, -(-int(size + 1) // max(1, int(row_inches * 72))))
    axes.set_yticks(range(0, count, every), [labels[rank] for rank in rows.shown.tolist()[::every]], fontsize=size)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.tick_params(axis="x", labelsize=8.5, labelcolor=INK, color=MUTED)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def _two(label: tuple[str, str], row_inches: float) -> str:
    return f"{label[0]}\n({label[1]})" if row_inches > 0.35 else f"{label[0]} ({label[1]})"


def _legend(figure: Figure, used: set[Band], height: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=BAND_COLOUR[band], label=band.value) for band in BANDS if band in used]
    handles.append(Patch(color=IDLE, label="waiting"))
    wide = sum(len(str(handle.get_label())) + 5 for handle in handles)
    legend = figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(_LEFT / _WIDTH, 1 - 0.4 / height),
        ncols=-(-len(handles) // (1 if wide <= _LEGEND_LETTERS else 2)),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1.1,
        handleheight=1.0,
        columnspacing=1.3,
        borderpad=0.2,
        borderaxespad=0.0,
    )
    legend.set_in_layout(False)
