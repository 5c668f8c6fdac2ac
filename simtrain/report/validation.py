"""Published runs beside their predictions: a table for the terminal, a page, a scatter plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simtrain.units import format_bytes, format_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEAD = "| {} | rows | mean absolute error | by source | median | 90 % | bias | naive |"
_RULE = "|---|---:|---:|---:|---:|---:|---:|---:|"
LIKE = {
    "allocated": "tensors of the allocator at their peak, without its reserve and without the runtime",
    "reserved": "what the allocator holds, without the runtime",
    "device": "nvidia-smi: allocator and runtime",
    "unstated": "the source does not say what it counts; compared with all that the device holds",
}
"""What a printed peak counts, and what it is compared with."""


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _line(name: str, found: Mapping[str, Any]) -> str:
    shares = (found[key] for key in ("micro", "macro_by_source", "median", "p90", "bias", "naive"))
    return f"| {name} | {found['count']} | " + " | ".join(_share(value) for value in shares) + " |"


def summary_lines(document: Mapping[str, Any]) -> list[str]:
    """Tables of errors by metric, kind of peak and source, and the verdicts, in Markdown."""
    lines = [_HEAD.format("metric"), _RULE, *(_line(name, found) for name, found in document["summary"].items())]
    peaks = document["groups"]["peak_memory"]
    if peaks:
        lines += ["", _HEAD.format("peak memory"), _RULE]
        lines += [_line(f"{kind}: {LIKE[kind]}", found) for kind, found in peaks.items()]
    lines += verdict_lines(document["verdicts"])
    for metric, sources in document["groups"]["source"].items():
        lines += ["", _HEAD.format(f"{metric.replace('_', ' ')} by source"), _RULE]
        lines += [_line(source, found) for source, found in sources.items()]
    return lines


def verdict_lines(verdicts: Mapping[str, Any]) -> list[str]:
    """Precision and recall of "fits" and of "out of memory"."""
    if not verdicts["count"]:
        return []
    lines = ["", "| verdict | rows | predicted | precision | recall |", "|---|---:|---:|---:|---:|"]
    for name, title in (("fits", "fits"), ("oom", "out of memory")):
        one = verdicts[name]
        shares = f"{_share(one['precision'])} | {_share(one['recall'])}"
        lines.append(f"| {title} | {one['count']} | {one['predicted']} | {shares} |")
    return lines


def _value(metric: str, value: float) -> str:
    if metric == "peak_memory":
        return format_bytes(value)
    return format_time(value) if metric == "step_time" else _share(value)


def page(document: Mapping[str, Any], *, title: str, figure: str = "") -> str:
    """The whole comparison as Markdown; ``figure`` is the file name of the scatter plot."""
    lines = [f"# {title}", ""]
    lines += [f"![measured against predicted]({figure})", ""] if figure else []
    lines += summary_lines(document)
    lines += ["", "| row | metric | measured | predicted | error | defaults |", "|---|---|---:|---:|---:|---|"]
    for row in document["rows"]:
        metric, kind = row["metric"], row["peak_kind"]
        values = " | ".join(_value(metric, row[key]) for key in ("measured", "predicted"))
        what = f"{metric.replace('_', ' ')}, {kind}" if kind else metric.replace("_", " ")
        lines.append(
            f"| {row['id']} | {what} | {values} | {100 * row['error']:+.1f} % | {', '.join(row['defaults'])} |"
        )
    if document["refused"]:
        lines += ["", "| refused row | why |", "|---|---|"]
        lines += [f"| {one['id']} | {' '.join(one['why'].split())} |" for one in document["refused"]]
    if document["skipped"]:
        lines += ["", "| skipped row | does not state |", "|---|---|"]
        lines += [f"| {one['id']} | {', '.join(one['missing'])} |" for one in document["skipped"]]
    return "\n".join(lines) + "\n"


def scatter(document: Mapping[str, Any], metric: str = "peak_memory") -> Figure:
    """Predicted over measured of one metric, logarithmic, one colour a kind of peak."""
    from matplotlib.figure import Figure as New

    from simtrain.report.palette import BAND_COLOUR, INK, Band

    hues = [BAND_COLOUR[band] for band in (Band.FORWARD, Band.DP_REDUCE, Band.BACKWARD, Band.DP_GATHER)]

    figure = New(figsize=(6.4, 6.0), layout="constrained")
    axes = figure.add_subplot()
    rows = [row for row in document["rows"] if row["metric"] == metric]
    scale = 2.0**30 if metric == "peak_memory" else 1.0
    kinds = sorted({row["peak_kind"] or metric for row in rows})
    for colour, kind in zip(hues, kinds, strict=False):
        points = [row for row in rows if (row["peak_kind"] or metric) == kind]
        measured, predicted = ([row[key] / scale for row in points] for key in ("measured", "predicted"))
        axes.scatter(measured, predicted, s=18, color=colour, label=f"{kind} ({len(points)})", alpha=0.8)
    values = [row[key] / scale for row in rows for key in ("measured", "predicted")]
    ends = (0.8 * min(values), 1.2 * max(values))
    axes.plot(ends, ends, color=INK, linewidth=1, label="equal")
    unit = "GiB" if metric == "peak_memory" else "s" if metric == "step_time" else "fraction"
    axes.set(
        xscale="log", yscale="log", xlabel=f"measured ({unit})", ylabel=f"predicted ({unit})", xlim=ends, ylim=ends
    )
    axes.set_title(metric.replace("_", " "))
    axes.legend(frameon=False)
    return figure


def write(document: Mapping[str, Any], path: Path, *, title: str) -> tuple[Path, ...]:
    """Write the page to ``path`` and, where there are rows, a plot of each metric beside it."""
    shown = path.with_suffix(".png")
    metric = "peak_memory" if "peak_memory" in document["summary"] else next(iter(document["summary"]), "")
    path.write_text(page(document, title=title, figure=shown.name if metric else ""), encoding="utf-8")
    if not metric:
        return (path,)
    scatter(document, metric).savefig(shown, dpi=120, metadata={"Software": None})
    return path, shown
