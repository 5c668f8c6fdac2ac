"""One self-contained HTML page of a run: no script, no network, light and dark, fit to print."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from simtrain.program.demand import TimeKind
from simtrain.report import text
from simtrain.report.figures import svg
from simtrain.report.palette import EDGE, IDLE, INK, MEMORY_COLOUR, MUTED, OVER, TIME_COLOUR
from simtrain.report.text import Summary
from simtrain.report.waterfall import time_waterfall
from simtrain.units import format_bytes, format_time

_VARIABLES = {
    INK: "currentColor",
    MUTED: "var(--muted)",
    IDLE: "var(--idle)",
    EDGE: "var(--ground)",
    OVER: "var(--bad)",
}

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --card: #f6f7f9; --ink: #1b1e24; --muted: #616874;
  --line: #dde1e6; --idle: #e9ebee; --good: #0a7d4f; --bad: #b3261e; --warn: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --card: #1c2027; --ink: #e6e8eb; --muted: #9aa3af;
  --line: #323842; --idle: #2a2f38; --good: #4cc38a; --bad: #ff8a80; --warn: #f0b95a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 28px 24px 48px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 36px 0 10px; }
p { margin: 6px 0; } .muted { color: var(--muted); } .good { color: var(--good); } .bad { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 12px; margin: 20px 0 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.card b { display: block; font-size: 23px; line-height: 1.3; } .card > span { color: var(--muted); font-size: 13px; }
.card small { display: block; font-size: 12.5px; color: var(--muted); overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } .figure svg, .figure img { width: 100%; height: auto; display: block; }
.figure { min-width: 760px; } .pixels { background: #ffffff; border-radius: 6px; padding: 4px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px 5px 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--muted); font-weight: 500; } td.n, th.n { text-align: right; }
.patch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 8px; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 0 36px; align-items: start; }
.warning { color: var(--warn); } pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px; overflow-x: auto; font-size: 13px; line-height: 1.45; }
@media print { :root { --ground: #ffffff; --card: #ffffff; --ink: #000000; --muted: #444444; --line: #bbbbbb;
  --idle: #e9ebee; --good: #0a7d4f; --bad: #b3261e; --warn: #8a5a00; } body { max-width: none; padding: 0;
  font-size: 11px; }
  .figure { min-width: 0; } .figure, .card, tr { break-inside: avoid; } h2 { break-after: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } pre { white-space: pre-wrap; } }
"""


def page(summary: Summary, *, scenario_text: str, timeline: str | bytes, memory: str | bytes) -> str:
    """Everything a run says, as one HTML document.

    Parameters
    ----------
    summary
        The run's summary.
    scenario_text
        The resolved scenario, YAML.
    timeline, memory
        The two figures: text of an SVG element (its greys follow the reader's colours), or bytes of a PNG.

    Returns
    -------
    str
        The same text for the same input.
    """
    name = escape(str(summary["scenario"]))
    sections = [
        f"<h1>{name}</h1>\n<p class=muted>{escape(text.shape(summary))}</p>",
        _cards(summary),
        *(f"<p class=warning>&#9888; {escape(warning)}</p>" for warning in summary["warnings"]),
        _section("Who does what when", _figure(timeline)),
        _time(summary),
        _section("Memory", _verdict(summary) + _figure(memory) + _memory(summary)),
        _section("Communication", _communication(summary)),
        _section("What would help" if summary["fits"] else "What would make it fit", _advice(summary)),
        _section("How the figures are defined", _formulas(summary)),
        _section("Resolved scenario", f"<pre>{escape(scenario_text)}</pre>"),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}: {escape(format_time(summary['step_time_s']))} a step</title>\n<style>{_STYLE}</style>\n"
        f"</head>\n<body>\n{chr(10).join(sections)}\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>"


def _cards(summary: Summary) -> str:
    memory = summary["memory"]
    beside = "<br>".join(escape(f"{what} {step}: {note}") for what, step, note in text.beside(summary))
    peak = f"{format_bytes(memory['peak_bytes'])} of {format_bytes(memory['capacity_bytes'])}"
    fits = f"<span class={'good' if summary['fits'] else 'bad'}>{escape(text.verdict(summary))}</span>"
    cards = (
        ("step time", format_time(summary["step_time_s"]), beside),
        (
            "throughput",
            f"{summary['tokens_per_s']:,.0f} tokens/s",
            f"{summary['tokens_per_s_per_device']:,.1f} tokens/s a device",
        ),
        (
            "model FLOPs utilization",
            f"MFU {summary['mfu']:.1%}",
            f"HFU {summary['hfu']:.1%}, which counts recomputation",
        ),
        ("memory", peak, f"{fits}<br>{escape(text.fullest(summary))}"),
    )
    inner = "\n".join(
        f"<div class=card><span>{label}</span><b>{value}</b><small>{note}</small></div>" for label, value, note in cards
    )
    host = f"<p><b>Host memory:</b> {escape(text.host(summary))}</p>" if text.host(summary) else ""
    return f"<div class=cards>\n{inner}\n</div>\n<p><b>Binds:</b> {escape(summary['binds']['text'])}.</p>{host}"


def _figure(drawing: str | bytes) -> str:
    if isinstance(drawing, bytes):
        data = base64.b64encode(drawing).decode()
        return (
            f'<div class=scroll><div class="figure pixels"><img alt="" src="data:image/png;base64,{data}"></div></div>'
        )
    for colour, variable in _VARIABLES.items():
        drawing = drawing.replace(colour, variable)
    return f"<div class=scroll><div class=figure>{drawing}</div></div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int]) -> str:
    """Cells are HTML; ``right`` lists columns of numbers."""
    numbers = set(right)

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=n' if i in numbers else ''}>{cell}</{tag}>" for i, cell in enumerate(row))

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{cells('th', head)}</tr></thead>\n<tbody>{body}</tbody></table></div>"


def _patch(colour: str, name: str) -> str:
    return f'<span class=patch style="background:{colour}"></span>{escape(name)}'


def _time(summary: Summary) -> str:
    rows = text.time_rows(summary)
    table = _table(
        ("kind", "time", "share"),
        [
            (_patch(TIME_COLOUR[kind], name), format_time(seconds), f"{share:.1%}")
            for kind, name, seconds, share in rows
        ],
        (1, 2),
    )
    waterfall = _figure(
        svg(time_waterfall({TimeKind(kind): spent for kind, spent in summary["time"]["by_kind"].items()}))
    )
    waterfall = waterfall.replace("<div class=figure>", '<div class=figure style="min-width:0">')
    note = "<p class=muted>Mean over all ranks; the parts add up to the step.</p>"
    return _section("Where the step goes", f"<div class=two><div>{table}{note}</div>{waterfall}</div>")


def _verdict(summary: Summary) -> str:
    style = "good" if summary["fits"] else "bad"
    verdict, where = escape(text.verdict(summary)), escape(text.fullest(summary))
    return f"<p><b class={style}>{verdict}</b> <span class=muted>on {where}, the fullest</span></p>"


def _memory(summary: Summary) -> str:
    rows = [
        (_patch(MEMORY_COLOUR[kind], name), f"{size / 2**30:,.3f}", f"{size / 1e9:,.3f}")
        for kind, name, size in text.memory_rows(summary["memory"]["by_category"])
    ]
    peak = summary["memory"]["peak_bytes"]
    rows.append(("<b>at the peak</b>", f"<b>{peak / 2**30:,.3f}</b>", f"<b>{peak / 1e9:,.3f}</b>"))
    fullest = _table(("category", "GiB", "GB"), rows, (1, 2))
    stages = summary["memory"]["by_stage"]
    if len(stages) < 2:
        return fullest
    several = _table(
        ("stage", "rank", "peak, GiB"),
        [(str(row["stage"]), str(row["rank"]), f"{row['peak_bytes'] / 2**30:,.3f}") for row in stages],
        (0, 1, 2),
    )
    return f"<div class=two><div>{fullest}</div><div>{several}</div></div>"


def _communication(summary: Summary) -> str:
    if not summary["communication"]:
        return "<p>None: one device works alone.</p>"
    head, *rows = text.communication_rows(summary)
    note = "<p class=muted>A rank and step, mean over all ranks. Exposed: the compute stream waits for it.</p>"
    return _table(head, [[escape(cell) for cell in row] for row in rows], range(2, 8)) + note


def _advice(summary: Summary) -> str:
    if not summary.get("advice"):
        return "<p>No change was found that helps, or none was asked for.</p>"
    head, *rows = text.advice_rows(summary, most=len(summary["advice"]))
    cells = [[f"<code>{escape(row[0])}</code>", *map(escape, row[1:])] for row in rows]
    return _table([*head[:-1], "fits?"], cells, (1, 2, 3)) + "<p class=muted>Each was simulated.</p>"


def _formulas(summary: Summary) -> str:
    rows = (
        ("MFU", summary["mfu_formula"]),
        ("HFU", summary["hfu_formula"]),
        ("naive step time", "executed FLOPs / (devices x 0.45 x dense peak)"),
        ("bubble", "time in which the compute stream waits for another rank"),
        ("exposed communication", "time in which the compute stream waits for a communication of its own rank"),
        ("GiB, GB", "2^30 and 10^9 bytes"),
    )
    return _table(("figure", "definition"), [(escape(a), escape(b)) for a, b in rows], ())
