"""Where the step goes: one bar a kind of time, each beginning where the one above ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from simtrain.program.demand import TimeKind
from simtrain.report.palette import INK, MUTED, TIME_COLOUR
from simtrain.trace.metrics import NAMES
from simtrain.units import format_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDER = (
    TimeKind.COMPUTE,
    TimeKind.RECOMPUTE,
    TimeKind.OPTIMIZER,
    TimeKind.HOST,
    TimeKind.TP,
    TimeKind.CP,
    TimeKind.EP,
    TimeKind.PP,
    TimeKind.DP_REDUCE,
    TimeKind.DP_GATHER,
    TimeKind.CONTENTION,
    TimeKind.INPUT,
    TimeKind.OFFLOAD,
    TimeKind.BUBBLE,
)
"""What is useful first, what waits last."""


def parts(split: Mapping[TimeKind, float]) -> list[tuple[TimeKind, float]]:
    """The kinds that take time, in order of ``ORDER``."""
    return [(kind, split[kind]) for kind in ORDER if split.get(kind, 0.0) > 0.0]


def time_waterfall(split: Mapping[TimeKind, float]) -> Figure:
    """Draw a ``time_split`` (s by kind) as a waterfall; shares are of their sum."""
    from matplotlib.figure import Figure

    shown = parts(split)
    step = sum(seconds for _, seconds in shown) or 1.0
    height = 0.5 + 0.3 * max(1, len(shown))
    figure = Figure(figsize=(7.0, height), facecolor="white")
    axes = figure.add_axes((0.32, 0.25 / height, 0.48, 1 - 0.4 / height))
    begin = 0.0
    for row, (kind, seconds) in enumerate(shown):
        axes.barh(row, seconds, left=begin, height=0.72, color=TIME_COLOUR[kind], linewidth=0)
        begin += seconds
        text = f" {format_time(seconds)}  {seconds / step:.1%}"
        axes.text(begin, row, text, fontsize=9, color=INK, va="center", ha="left")
    axes.set_yticks(range(len(shown)), [NAMES[kind] for kind, _ in shown], fontsize=9)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, step)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(MUTED)
    return figure
