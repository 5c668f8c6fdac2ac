"""A program as text: the grid a reader sees, and PyTorch's CSV (a row a rank, a cell an action), which reads back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from simtrain.errors import InputError, Problem, ProgramError
from simtrain.program.actions import Program, Step, parse
from simtrain.program.limits import MAX_CELLS
from simtrain.program.timing import Costs, peak_in_flight, replay

IDLE, BUSY = ".", "="


def _table(rows: Sequence[Sequence[str]], *, first: int = 0) -> str:
    """Rank rows x columns, headed by column numbers from ``first``; short rows are filled up as idle."""
    columns = max(map(len, rows), default=0)
    head = [str(first + column) for column in range(columns)]
    filled = [list(row) + [IDLE] * (columns - len(row)) for row in rows]
    widths = [max(map(len, cells)) for cells in zip(head, *filled, strict=True)]
    labels = ["Step"] + [f"Rank {rank}" for rank in range(len(rows))]
    wide = max(map(len, labels))
    return "\n".join(
        f"{label:<{wide}}  " + " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        for label, cells in zip(labels, [head, *filled], strict=True)
    )


def render(program: Program, costs: Costs | None = None) -> str:
    """The grid in unit time steps: a row a rank, a column a step, ``.`` where the rank is idle.

    Without ``costs`` every step of a rank takes one column; messages take none. With whole-number ``costs`` a step
    fills as many columns as it takes, ``=`` from its second on. Steps that can never start are left out.

    >>> from simtrain.program.schedules import build
    >>> print(render(build("1f1b", 2, 3)))
    Step    0   1   2   3   4   5   6   7
    Rank 0  0F0 0F1 .   0B0 0F2 0B1 .   0B2
    Rank 1  .   1F0 1B0 1F1 1B1 1F2 1B2 .
    """
    times = replay(program, costs or Costs(b=1.0, pair=1.0)).times
    columns = round(max((done[-1][1] for done in times if done), default=0.0))
    if columns * len(program) > MAX_CELLS:
        raise InputError(
            f"a grid of {len(program)} ranks x {columns} steps is too large to print; -f csv has the lists"
        )
    rows = []
    for steps, done in zip(program, times, strict=True):
        row: list[str] = []
        for step, (start, end) in zip(steps, done, strict=False):
            row += [IDLE] * (round(start) - len(row)) + [str(step)] + [BUSY] * (round(end - start) - 1)
        rows.append(row)
    return _table(rows)


def figures(program: Program, costs: Costs) -> str:
    """How long the step takes, how much of it is idle, and what is in flight, communication free."""
    times = replay(program, costs).times
    spans = [(done[0][0], done[-1][1]) for done in times if done]
    busy = max(sum(end - start for start, end in done) for done in times)
    end, longest = max(end for _, end in spans), max(end - start for start, end in spans)
    held = " ".join(f"{count:g}" for count in peak_in_flight(program))
    return (
        f"Step {end:g}, of which idle {1 - busy / end:.1%}; where steps flow into one another {longest:g},"
        f" idle {1 - busy / longest:.1%}.\nStages x microbatches in flight at most, by rank: {held}."
    )


def marked(program: Program, places: Collection[tuple[int, int]], *, around: int = 6) -> str:
    """Each rank's list in issue order near ``places``, pairs (rank, index), each of which is shown as ``>2F0<``."""
    columns = [column for _, column in places] or [0]
    first, stop = max(0, min(columns) - around), max(columns) + around + 1
    rows = [
        [
            f">{action}<" if (rank, column) in places else str(action)
            for column, action in enumerate(actions[first:stop], first)
        ]
        + ([">end<"] if (rank, len(actions)) in places else [])
        for rank, actions in enumerate(program)
    ]
    return _table(rows, first=first)


def to_csv(program: Program) -> str:
    """PyTorch's compute-only CSV: a line a rank, its actions in issue order."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in program)


def from_csv(text: str, file: str = "schedule.csv") -> Program:
    """Read PyTorch's compute-only CSV.

    Empty cells (idle steps) and lines that are empty or start with ``#`` are skipped.

    Parameters
    ----------
    text
        What the file holds.
    file
        Its name, for messages.

    Raises
    ------
    InputError
        Lists every cell that is not an action, with its line and column, and the cell's number.
    """
    rows, problems = [], []
    for line in _cells(text):
        row: list[Step] = []
        for cell in line:
            try:
                row.append(parse(cell.text))
            except ProgramError as error:
                problems.append(Problem(file, cell.line, cell.column, f"cell {cell.number}", str(error)))
        rows.append(tuple(row))
    if not any(rows) and not problems:
        problems.append(Problem(file, message="no ranks: expected a line of actions for each"))
    if problems:
        raise InputError(problems)
    return tuple(rows)


class _Cell(NamedTuple):
    text: str
    line: int
    column: int
    number: int
    """Of the cell in its line, from 1."""


def _cells(text: str) -> Iterator[list[_Cell]]:
    """Cells of each rank, without the empty ones."""
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip() or content.lstrip().startswith("#"):
            continue
        found, column = [], 1
        for number, cell in enumerate(content.split(","), 1):
            if cell.strip():
                found.append(_Cell(cell, line, column, number))
            column += len(cell) + 1
        yield found


def located(error: ProgramError, text: str, file: str) -> Problem:
    """What is wrong with a program, at the cell of its CSV that the error names first."""
    why = str(error).splitlines()[0]
    ranks = list(_cells(text))
    for rank, index in error.places:
        if rank < len(ranks) and ranks[rank]:
            cell = ranks[rank][min(index, len(ranks[rank]) - 1)]
            return Problem(file, cell.line, cell.column, f"cell {cell.number}", why)
    return Problem(file, message=why)
