"""The memory curve: what the fullest rank holds over a step, and the peak of every rank beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simtrain.program.demand import Memory
from simtrain.report.palette import EDGE, INK, MEMORY_COLOUR, MUTED, OVER, words
from simtrain.report.timeline import rank_labels
from simtrain.trace.memory import MemoryProfile
from simtrain.trace.spans import Trace
from simtrain.units import format_bytes, format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2.0**30
STACK = (
    Memory.RUNTIME,
    Memory.BUFFERS,
    Memory.PARAMETERS,
    Memory.OPTIMIZER,
    Memory.GRADIENTS,
    Memory.ACTIVATIONS,
    Memory.LOGITS,
    Memory.GATHERED,
    Memory.WORKSPACE,
    Memory.RESERVE,
)
"""Bottom to top: what rests below what moves."""
_MOST_BARS = 32
_FAR = 0.4
"""Below this share of the capacity the picture shows what is used, and the capacity is out of it."""


def memory_curve(
    profile: MemoryProfile, trace: Trace, *, title: str = "", needed: Sequence[float] | None = None
) -> Figure:
    """Draw memory by category over time for the rank with the highest peak, and the peaks of all ranks.

    Parameters
    ----------
    profile
        Memory of every simulated rank.
    trace
        The step it belongs to: its length, and what the ranks are called.
    title
        Usually the scenario's name.
    needed
        byte by rank of the profile that the device must have: the peak and the allocator's reserve.

    Returns
    -------
    Figure
        GiB against s, ms or us; capacity and peak are marked.
    """
    from matplotlib.figure import Figure

    labels = rank_labels(trace)
    several = len(profile.ranks) > 1
    figure = Figure(figsize=(14.0, 4.6), facecolor="white")
    curve = figure.add_axes((0.055, 0.12, 0.62 if several else 0.925, 0.68))
    peaks = [profile.peak(index)[1] for index in range(len(profile.ranks))]
    needed = needed or peaks
    worst = int(np.argmax(needed))
    _stack(curve, profile, worst, trace.extent, needed[worst])
    name, who = labels[profile.ranks[worst]]
    figure.text(0.055, 0.935, title, fontsize=13, fontweight="bold", color=INK)
    curve.set_title(f"memory of {name} ({who}), the fullest", fontsize=9.5, color=MUTED, loc="left", pad=24)
    if several:
        bars = figure.add_axes((0.79, 0.12, 0.19, 0.68))
        _peaks(bars, profile, [labels[rank][0] for rank in profile.ranks], needed)
    _legend(curve, profile, reserved=sum(needed) > sum(peaks))
    return figure


def _stack(axes: Axes, profile: MemoryProfile, index: int, step_time: float, needed: float) -> None:
    unit, scale = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if step_time >= pair[1]), ("us", 1e-6))
    times = np.append(profile.times[index], max(step_time, profile.times[index][-1])) / scale
    below = np.zeros(len(times))
    for category in STACK:
        if category in profile.curves[index]:
            level = profile.curves[index][category] / GIB
            above = below + np.append(level, level[-1])
            axes.fill_between(times, below, above, step="post", color=MEMORY_COLOUR[category], linewidth=0)
            below = above
    at, peak, _ = profile.peak(index)
    far = needed < _FAR * profile.capacity
    limit = needed * 1.3 / GIB if far else max(profile.capacity, needed) / GIB * 1.12
    said = f"capacity {format_bytes(profile.capacity)}" + (", above" if far else "")
    _line(axes, limit * GIB * 0.93 if far else profile.capacity, said, OVER, dashes=not far)
    right = at > 0.6 * step_time
    if needed > peak:
        _line(axes, needed, f"with the allocator's reserve {format_bytes(needed)}", MUTED, left=right)
    axes.plot([at / scale], [peak / GIB], "o", color=INK, markersize=4, zorder=4)
    axes.annotate(
        f"peak {format_bytes(peak)} at {format_time(at)}",
        (at / scale, peak / GIB),
        xytext=(-8 if right else 8, 7),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=9,
        color=INK,
        bbox={"facecolor": EDGE, "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
    )
    axes.set_xlim(0, times[-1] or 1.0)
    axes.set_ylim(0, limit)
    axes.set_xlabel(f"time in {unit}", fontsize=9, color=INK)
    axes.set_ylabel("GiB", fontsize=9, color=INK)
    _plain(axes)


def _line(axes: Axes, level: float, said: str, colour: str, *, dashes: bool = True, left: bool = False) -> None:
    if dashes:
        axes.axhline(level / GIB, color=colour, linewidth=1.2, linestyle=(0, (5, 3)))
    place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "left" if left else "right", "va": "bottom"}
    axes.text(0.005 if left else 0.995, level / GIB, said, fontsize=8.5, color=colour, **place)


def _peaks(axes: Axes, profile: MemoryProfile, names: Sequence[str], needed: Sequence[float]) -> None:
    """Peak of every rank, stacked by category; thinned out where there are many."""
    count = len(profile.ranks)
    shown = np.unique(np.linspace(0, count - 1, min(count, _MOST_BARS)).round().astype(int)).tolist()
    peaks = [profile.peak(index)[2] for index in shown]
    rows = np.arange(len(shown))
    left = np.zeros(len(shown))
    for category in STACK:
        width = np.array([peak.get(category, 0.0) for peak in peaks]) / GIB
        axes.barh(rows, width, left=left, height=0.78, color=MEMORY_COLOUR[category], linewidth=0)
        left += width
    total = np.array([needed[index] for index in shown]) / GIB
    axes.barh(rows, total - left, left=left, height=0.78, color=MEMORY_COLOUR[Memory.RESERVE], linewidth=0)
    far = max(needed) < _FAR * profile.capacity
    if not far:
        axes.axvline(profile.capacity / GIB, color=OVER, linewidth=1.2, linestyle=(0, (5, 3)))
    size = 8.5 if len(shown) <= 16 else 6.0
    for row, end in zip(rows.tolist(), total.tolist(), strict=True):
        axes.text(end, row, f" {end:.3g}", fontsize=size, color=INK, va="center", ha="left")
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, max(0.0 if far else profile.capacity / GIB, total.max() * 1.2) * 1.04)
    axes.set_xlabel("peak in GiB", fontsize=9, color=INK)
    axes.set_title("peak by rank", fontsize=9.5, color=MUTED, loc="left", pad=6)
    _plain(axes)
    axes.set_yticks(rows, [names[index] for index in shown])
    axes.tick_params(axis="y", length=0, labelsize=size)


def _legend(axes: Axes, profile: MemoryProfile, reserved: bool) -> None:
    from matplotlib.patches import Patch

    used = {category for curves in profile.curves for category in curves}
    used |= {Memory.RESERVE} if reserved else set()
    handles = [Patch(color=MEMORY_COLOUR[one], label=words(one.value)) for one in STACK if one in used]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.0,
        borderaxespad=0.2,
    )


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=8.5, labelcolor=INK, color=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
