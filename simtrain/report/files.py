"""What a run leaves on disk. Equal inputs give equal bytes; either all files are written or none."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from simtrain.errors import InputError, Problem
from simtrain.report.figures import plain, png, svg
from simtrain.report.memory_curve import memory_curve
from simtrain.report.page import page
from simtrain.report.perfetto import perfetto
from simtrain.report.timeline import timeline
from simtrain.trace.memory import MemoryProfile
from simtrain.trace.spans import SCHEMA_VERSION, Trace
from simtrain.units import format_time

_MOST_DRAWN = 6000
"""Spans beyond which the page embeds pictures as pixels, because vectors would be larger."""


def write(
    directory: Path,
    *,
    summary: Mapping[str, Any],
    trace: Trace,
    memory: MemoryProfile,
    scenario_text: str,
    figures: bool = True,
) -> list[Path]:
    """Write the report of one run.

    Parameters
    ----------
    directory
        Made where it is missing; other files in it are left alone, files of an earlier run replaced.
    summary
        The run's summary.
    trace, memory
        One step and what it held.
    scenario_text
        The resolved scenario, YAML.
    figures
        Draw the pictures and the page, which take most of the time.

    Returns
    -------
    list of Path
        report.html, timeline.png, memory.png, trace.json.gz, spans.parquet, summary.json, scenario.resolved.yaml.

    Raises
    ------
    InputError
        If the folder cannot be written or the disk is full; then no file of it has changed.
    """
    name = str(summary["scenario"])
    contents = {
        "trace.json.gz": perfetto(trace, memory, name=name),
        "spans.parquet": parquet(trace),
        "summary.json": summary_json(summary).encode(),
        "scenario.resolved.yaml": scenario_text.encode(),
    }
    if figures:
        contents = _pictures(summary, trace, memory, scenario_text) | contents
    return place(directory, contents)


def _pictures(summary: Mapping[str, Any], trace: Trace, memory: MemoryProfile, scenario_text: str) -> dict[str, bytes]:
    name = str(summary["scenario"])
    rows = timeline(trace, title=name, subtitle=plain(headline(summary)))
    needed = [row["peak_bytes"] for row in summary["memory"]["by_stage"]]
    curve = memory_curve(memory, trace, title=name, needed=needed)
    pictures = png(rows), png(curve)
    drawings = pictures if len(trace.end) > _MOST_DRAWN else (svg(rows), svg(curve))
    html = page(summary, scenario_text=scenario_text, timeline=drawings[0], memory=drawings[1])
    return {"report.html": html.encode(), "timeline.png": pictures[0], "memory.png": pictures[1]}


def headline(summary: Mapping[str, Any]) -> str:
    """Devices and step time in one line."""
    devices = f"{summary['devices']:,} x {summary['accelerator']}"
    return f"{devices}  ·  step {format_time(summary['step_time_s'])}"


def summary_json(summary: Mapping[str, Any]) -> str:
    """The summary as JSON, keys sorted; floats keep all their digits."""
    return json.dumps(summary, sort_keys=True, indent=2, allow_nan=False) + "\n"


def parquet(trace: Trace) -> bytes:
    """The spans as Parquet; ``simtrain_schema_version`` is in the file's metadata."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    table = pa.Table.from_pandas(trace.frame(), preserve_index=False)
    table = table.replace_schema_metadata({"simtrain_schema_version": str(SCHEMA_VERSION)})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def place(directory: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files by name into a temporary folder inside ``directory``, then move them into place."""
    made = [parent for parent in (directory, *directory.parents) if not os.path.lexists(parent)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(prefix=".simtrain-", dir=directory))
        try:
            for name, content in contents.items():
                (hidden / name).write_bytes(content)
            targets = [directory / name for name in contents]
            if folder := next((target for target in targets if target.is_dir()), None):
                raise IsADirectoryError(0, f"{folder.name} is a folder")
            return [(hidden / target.name).replace(target) for target in targets]
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    except OSError as error:
        with suppress(OSError):  # others may have put something there meanwhile
            for folder in made:
                folder.rmdir()
        why = error.strerror or str(error)
        raise InputError([Problem(file=str(directory), message=f"cannot write the report here: {why}")]) from error
