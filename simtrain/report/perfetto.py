"""Chrome trace-event JSON, which Perfetto and chrome://tracing open: a process a rank, a thread a stream.

Times are microseconds from the start of the step, whole nanoseconds, so that slices of one thread never overlap. Flow
arrows join each send to its receive; counters carry the memory.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from simtrain.program.lowered import Stream
from simtrain.report.timeline import rank_labels
from simtrain.trace.memory import MemoryProfile
from simtrain.trace.spans import SCHEMA_VERSION, Trace

Event = dict[str, Any]


def perfetto(trace: Trace, memory: MemoryProfile | None = None, *, name: str = "") -> bytes:
    """The trace as gzipped JSON, the same bytes for the same trace.

    Parameters
    ----------
    trace
        One step.
    memory
        Adds a counter of bytes by category to every rank.
    name
        Of the scenario.
    """
    events = [*map(json.dumps, _names(trace)), *_slices(trace), *map(json.dumps, _flows(trace))]
    if memory:
        events += _counters(trace, memory)
    head = {
        "displayTimeUnit": "ms",
        "otherData": {"scenario": name, "schema_version": SCHEMA_VERSION, "tool": "simtrain"},
    }
    text = json.dumps(head)[:-1] + ', "traceEvents": [\n' + ",\n".join(events) + "\n]}\n"
    return gzip.compress(text.encode(), compresslevel=4, mtime=0)


def _names(trace: Trace) -> Iterator[Event]:
    for index, (rank, label) in enumerate(zip(trace.lowered.ranks, rank_labels(trace), strict=True)):
        pid = rank.rank
        yield _meta("process_name", pid, name=f"{label[0]} ({label[1]})")
        yield _meta("process_sort_index", pid, sort_index=index)
        streams = trace.lowered.lists[rank.tasks].streams
        total, seen = Counter(streams), Counter[Stream]()
        for tid, stream in enumerate(streams):
            seen[stream] += 1
            yield _meta("thread_name", pid, tid, name=f"{stream} {seen[stream]}" if total[stream] > 1 else str(stream))
            yield _meta("thread_sort_index", pid, tid, sort_index=tid)


def _meta(kind: str, pid: int, tid: int = 0, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slices(trace: Trace) -> Iterator[str]:
    """One event a span, as text: there may be hundreds of thousands."""
    lowered, columns = trace.lowered, trace.columns
    names = [json.dumps(work.name)[:-1] for work in lowered.works]
    constant = [
        f'"cat": "{work.kind}", "args": {{"stage": {work.stage}, '
        f'"bytes": {float(demand.wire_bytes)!r}, "flops": {float(demand.flops)!r}, '
        for work, demand in zip(lowered.works, trace.demands, strict=True)
    ]
    begin = np.rint(trace.start * 1e9)
    rows = zip(
        np.array([rank.rank for rank in lowered.ranks])[trace.sim_rank].tolist(),
        np.array([rank.multiplicity for rank in lowered.ranks])[trace.sim_rank].tolist(),
        columns.lane.tolist(),
        columns.work.tolist(),
        columns.microbatch.tolist(),
        (begin / 1e3).tolist(),
        ((np.rint(trace.end * 1e9) - begin) / 1e3).tolist(),
        trace.released_by.tolist(),
        strict=True,
    )
    for span, (rank, multiplicity, lane, work, microbatch, start, duration, released_by) in enumerate(rows):
        name = names[work] + (f' {microbatch}"' if microbatch >= 0 else '"')
        yield (
            f'{{"ph": "X", "name": {name}, "pid": {rank}, "tid": {lane}, "ts": {start!r}, "dur": {duration!r}, '
            f'{constant[work]}"id": {span}, "microbatch": {microbatch}, "released_by": {released_by}, '
            f'"multiplicity": {multiplicity}}}}}'
        )


def _flows(trace: Trace) -> Iterator[Event]:
    """Arrows from send to receive: the n-th of a channel on one rank meets the n-th on the other."""
    lowered = trace.lowered
    started = dict(
        zip(
            zip(trace.sim_rank.tolist(), trace.task.tolist(), strict=True),
            (np.rint(trace.start * 1e9) / 1e3).tolist(),
            strict=True,
        )
    )
    ends: dict[tuple[int, int], dict[Stream, Event]] = {}
    for index, rank in enumerate(lowered.ranks):
        one, counts = lowered.lists[rank.tasks], Counter[int]()
        for number, task in enumerate(one.tasks):
            stream = one.streams[task.stream]
            if task.slot < 0 or stream not in (Stream.SEND, Stream.RECV) or (index, number) not in started:
                continue
            counts[task.slot] += 1
            key = (rank.groups[task.slot], counts[task.slot])
            place = {"pid": rank.rank, "tid": task.stream, "ts": started[index, number]}
            ends.setdefault(key, {})[stream] = place
    for number, pair in enumerate(ends.values()):
        if len(pair) == 2:
            shared = {"name": "message", "cat": "message", "id": number}
            yield {"ph": "s", **shared, **pair[Stream.SEND]}
            yield {"ph": "f", "bp": "e", **shared, **pair[Stream.RECV]}


def _counters(trace: Trace, memory: MemoryProfile) -> Iterator[str]:
    for index, number in enumerate(memory.ranks):
        pid = trace.lowered.ranks[number].rank
        curves = memory.curves[index]
        form = ", ".join(f'"{category}": %r' for category in curves)
        times = (np.rint(memory.times[index] * 1e9) / 1e3).tolist()
        levels = zip(*(curve.tolist() for curve in curves.values()), strict=True)
        for time, level in zip(times, levels, strict=bool(curves)):
            args = form % level
            yield f'{{"ph": "C", "name": "memory (bytes)", "pid": {pid}, "tid": 0, "ts": {time!r}, "args": {{{args}}}}}'
