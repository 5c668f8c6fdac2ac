"""Phrases of a summary that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simtrain.program.demand import Memory, TimeKind
from simtrain.report.memory_curve import STACK
from simtrain.report.palette import words
from simtrain.report.waterfall import ORDER
from simtrain.trace.metrics import NAMES
from simtrain.units import format_bytes, format_time

GIB = 2.0**30
Summary = Mapping[str, Any]


def shape(summary: Summary) -> str:
    """``1,024 x A100-SXM4-80GB, 8 stages x 96 microbatches``."""
    stages, microbatches = summary["stages"], summary["microbatches"]
    parts = [f"{summary['devices']:,} x {summary['accelerator']}"]
    parts += [f"{stages} stages x {microbatches} microbatches" if stages > 1 else count(microbatches, "microbatch")]
    return ", ".join(parts)


def count(number: int, noun: str) -> str:
    """``1 microbatch``, ``4 microbatches``."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def beside(summary: Summary) -> list[tuple[str, str, str]]:
    """(what, step time, note): the published step time, where there is one, and the naive one beside ours."""
    rows = []
    published = summary.get("measured") or {}
    source = published.get("source") or ""
    if published.get("step_time_s"):
        note = f"predicted {published['error']:+.1%}"
        rows.append(("measured", format_time(published["step_time_s"]), ", ".join(filter(None, (note, source)))))
    elif said := _other_measures(published):
        rows.append(("measured", said, source))
    naive = "executed FLOPs / (devices x 0.45 peak)"
    return [*rows, ("naive", format_time(summary["naive_step_time_s"]), naive)]


def _other_measures(published: Mapping[str, Any]) -> str:
    """What was published instead of a step time."""
    found = []
    if published.get("tokens_per_s"):
        found.append(f"{published['tokens_per_s']:,.0f} tokens/s")
    if published.get("mfu"):
        found.append(f"MFU {published['mfu']:.1%}")
    if published.get("peak_memory_bytes"):
        found.append(f"peak {format_bytes(published['peak_memory_bytes'])}")
    return ", ".join(found)


def verdict(summary: Summary) -> str:
    """Whether the job fits, and by how much."""
    memory = summary["memory"]
    margin, capacity = memory["margin_bytes"], memory["capacity_bytes"]
    if margin >= 0:
        return f"fits, {format_bytes(margin)} to spare ({margin / capacity:.0%})"
    return f"does not fit: {format_bytes(-margin)} too much"


def fullest(summary: Summary) -> str:
    """Which rank and stage needs most."""
    memory = summary["memory"]
    return f"rank {memory['peak_rank']}" + (f", stage {memory['peak_stage']}" if summary["stages"] > 1 else "")


def host(summary: Summary) -> str:
    """RAM that offloading needs of a machine, and by what; empty where nothing leaves the device."""
    found = summary.get("host_memory")
    if not found:
        return ""
    parts = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in found["by_category"].items() if size)
    drives = f", {format_bytes(found['nvme_bytes'])} on drives" if found["nvme_bytes"] else ""
    verdict = "fits" if found["fits"] else "does not fit"
    amount = f"{format_bytes(found['needed_bytes'])} of {format_bytes(found['capacity_bytes'])}"
    return f"{amount}  {verdict}{drives}  ({found['machine']}: {parts} GiB)"


def time_rows(summary: Summary) -> list[tuple[TimeKind, str, float, float]]:
    """(kind, name, seconds, share of the step) of what takes time, useful first."""
    by_kind, step = summary["time"]["by_kind"], summary["step_time_s"] or 1.0
    spent = [(kind, by_kind.get(kind.value, 0.0)) for kind in ORDER]
    return [(kind, NAMES[kind], seconds, seconds / step) for kind, seconds in spent if seconds > 0]


def memory_rows(by_category: Mapping[str, float]) -> list[tuple[Memory, str, float]]:
    """(category, name, bytes) of what takes memory, resting first."""
    held = [(category, by_category.get(category.value, 0.0)) for category in STACK]
    return [(category, words(category.value), size) for category, size in held if size > 0]


def communication_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Cells of the communication table; the first row is its head."""
    head = ("group", "collective", "ranks", "machines", "calls", "sent", "in flight", "exposed", "over")
    rows = [
        (
            row["axis"],
            words(row["kind"]),
            str(row["group_size"] or ""),
            str(row["machines"] or ""),
            f"{row['calls']:,.4g}" if row["calls"] < 1e4 else f"{row['calls']:,.0f}",
            format_bytes(row["bytes"]) if row["bytes"] else "0",
            format_time(row["seconds"]) if row["seconds"] else "0",
            format_time(row["exposed_seconds"]) if row["exposed_seconds"] else "0",
            row["network"],
        )
        for row in summary["communication"]
    ]
    return [head, *rows]


def advice_rows(summary: Summary, most: int = 3) -> list[tuple[str, ...]]:
    """Cells of the best changes; the first row is its head. ``auto`` follows from the rest and is left out."""
    head = ("change", "step time", "gain", "peak memory", "")
    rows = [
        (
            " ".join(word for word in row["change"].split() if not word.endswith("=auto")),
            format_time(row["step_time_s"]),
            f"{row['gain']:+.1%}",
            format_bytes(row["peak_bytes"]),
            "fits" if row["fits"] else "does not fit",
        )
        for row in summary.get("advice", ())[:most]
    ]
    return [head, *rows]
