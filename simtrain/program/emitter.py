"""Appends tasks to one rank's list and numbers its streams, slots and works."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from simtrain.program.limits import bound_tasks
from simtrain.program.lowered import Piece, Stream, Task, TaskList, Work


class Slot(NamedTuple):
    """A use of a process group by one stream; both ends of a message name the same slot."""

    axis: str
    use: str
    """Stream, or direction of a message."""
    stage: int = -1
    """Sending stage of a message."""
    source: int = -1
    """Pipeline rank that sends it."""
    target: int = -1


Line = tuple[int, int, int]
"""Numbers of a stream, a work and a slot."""


@dataclass(slots=True)
class Emitter:
    """One list under construction; ``works`` is shared by all lists of a job."""

    works: dict[Work, int]
    tasks: list[Task] = field(default_factory=list)
    streams: dict[tuple[Stream, Slot | None], int] = field(default_factory=lambda: {(Stream.COMPUTE, None): 0})
    slots: dict[Slot, int] = field(default_factory=dict)

    def line(
        self,
        stream: Stream,
        pieces: tuple[Piece, ...],
        name: str,
        *,
        stage: int = -1,
        slot: Slot | None = None,
        beside: tuple[Piece, ...] = (),
    ) -> Line:
        """What a task is apart from when it runs; a message gets a stream of its own channel."""
        channel = slot if stream in (Stream.SEND, Stream.RECV) else None
        return (
            self.streams.setdefault((stream, channel), len(self.streams)),
            self.works.setdefault(Work(pieces, stage, name, beside), len(self.works)),
            -1 if slot is None else self.slots.setdefault(slot, len(self.slots)),
        )

    def emit(self, line: Line, microbatch: int = -1, deps: tuple[int, ...] = ()) -> int:
        """Append a task and return its index."""
        bound_tasks(len(self.tasks))
        stream, work, slot = line
        self.tasks.append(Task(stream, work, microbatch, deps, slot))
        return len(self.tasks) - 1

    def finish(self) -> tuple[TaskList, tuple[Slot, ...]]:
        """The list, and what each of its slots is used for."""
        return TaskList(tuple(self.tasks), tuple(stream for stream, _ in self.streams)), tuple(self.slots)
