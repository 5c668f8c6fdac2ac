"""The first screen: what a run says in the terminal, in 100 columns; plain text where it is piped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from simtrain.report import text
from simtrain.report.palette import MEMORY_COLOUR, TIME_COLOUR
from simtrain.report.text import Summary
from simtrain.units import format_bytes, format_time

_BAR = 80
_LABEL = 13


def render(summary: Summary, console: Console, files: Sequence[Path] = ()) -> None:
    """Print the summary of one run.

    Parameters
    ----------
    summary
        As ``simulate`` returns it.
    console
        Where to; colours and bars only where it is a terminal that has them.
    files
        What was written.
    """
    console.print(Group(*_screen(summary, console, files)), soft_wrap=False)


def _screen(summary: Summary, console: Console, files: Sequence[Path]) -> Iterable[RenderableType]:
    bars = console.is_terminal and console.color_system is not None and not console.no_color
    yield (
        Rule(Text(summary["scenario"], style="bold"), style="dim", align="left") if bars else Text(summary["scenario"])
    )
    yield _headline(summary)
    yield Text()
    yield from _time(summary, console.width, bars)
    yield from _memory(summary, console.width, bars)
    if text.host(summary):
        yield _line("host memory", Text(text.host(summary)))
    yield _line("binds", Text(summary["binds"]["text"]))
    if summary["communication"]:
        yield Text()
        yield _table("communication", text.communication_rows(summary), right=(2, 3, 4, 5, 6, 7))
    if summary.get("advice"):
        yield Text()
        yield _table("would help" if summary["fits"] else "to make it fit", text.advice_rows(summary), right=(1, 2, 3))
    if summary["warnings"]:
        yield Text()
    for warning in summary["warnings"]:
        yield _line("warning", Text(warning), style="yellow")
    if files:
        yield Text()
        folder, names = files[0].parent, ", ".join(path.name for path in files)
        yield _line("wrote", Text.assemble(f"{folder}/  ", (names, "dim")))


def _line(label: str, content: RenderableType, style: str = "bold") -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL, style=style)
    table.add_column(overflow="fold")
    table.add_row(label, content)
    return table


def _headline(summary: Summary) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(width=_LABEL - 1, style="bold")
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("step time", format_time(summary["step_time_s"]), Text(text.shape(summary)))
    for what, step, note in text.beside(summary):
        table.add_row(Text(f"  {what}", style="not bold"), Text(step, style="not bold"), Text(note, style="dim"))
    per_device = f"{summary['tokens_per_s_per_device']:,.1f} tokens/s a device"
    table.add_row("throughput", f"{summary['tokens_per_s']:,.0f} tokens/s", per_device)
    table.add_row("MFU", f"{summary['mfu']:.1%}", Text(summary["mfu_formula"], style="dim"))
    table.add_row("HFU", f"{summary['hfu']:.1%}", Text(summary["hfu_formula"], style="dim"))
    return table


def _time(summary: Summary, width: int, bars: bool) -> Iterable[RenderableType]:
    rows = text.time_rows(summary)
    if bars:
        yield _line("time", _bar([(TIME_COLOUR[kind], share) for kind, _, _, share in rows], width))
    keys = [(TIME_COLOUR[kind], f"{name} {share:.1%}") for kind, name, _, share in rows if share >= 5e-4]
    yield _line("" if bars else "time", _keys(keys, width, bars))


def _memory(summary: Summary, width: int, bars: bool) -> Iterable[RenderableType]:
    memory = summary["memory"]
    rows = text.memory_rows(memory["by_category"])
    peak, capacity = memory["peak_bytes"], memory["capacity_bytes"]
    if bars:
        whole = max(peak, capacity)
        yield _line("memory", _bar([(MEMORY_COLOUR[kind], size / whole) for kind, _, size in rows], width))
    amount = f"{format_bytes(peak)} of {format_bytes(capacity)}"
    style = "green" if summary["fits"] else "bold red"
    said = Text.assemble((amount, "bold"), "  ", (text.verdict(summary), style), f"  ({text.fullest(summary)})")
    yield _line("" if bars else "memory", said)
    keys = [(MEMORY_COLOUR[kind], f"{name} {size / text.GIB:.2f}") for kind, name, size in rows]
    yield _line("", Text.assemble(_keys(keys, width - 4, bars), (" GiB", "dim")))


def _bar(parts: Sequence[tuple[str, float]], width: int) -> Text:
    """Blocks in proportion, on one line; boundaries are rounded, not lengths, so that errors do not add up."""
    bar, total, drawn = Text(), 0.0, 0
    long = max(1, min(_BAR, width - _LABEL - 2))
    for colour, share in parts:
        total += share
        reach = min(long, round(total * long))
        bar.append("█" * (reach - drawn), style=colour)
        drawn = reach
    return bar.append("░" * (long - drawn), style="bright_black")


def _keys(parts: Sequence[tuple[str, str]], width: int, bars: bool) -> Text:
    """Names and figures behind a patch of their colour, in lines that break between them."""
    lines, room = [Text()], width - _LABEL - 2
    for colour, said in parts:
        part = Text.assemble(("■ ", colour) if bars else "", said)
        if lines[-1].cell_len and lines[-1].cell_len + 2 + part.cell_len > room:
            lines.append(Text())
        lines[-1].append_text(Text("  " if bars else ", ") if lines[-1].cell_len else Text()).append_text(part)
    return Text("\n" if bars else ",\n").join(lines)


def _table(label: str, rows: Sequence[tuple[str, ...]], right: Sequence[int]) -> Table:
    """The first row is the head; ``label`` stands in place of its first cell."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim", show_edge=False)
    table.add_column(label, min_width=_LABEL, header_style="not dim bold", overflow="fold")
    for index, head in enumerate(rows[0][1:], start=1):
        table.add_column(head, justify="right" if index in right else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    return table
