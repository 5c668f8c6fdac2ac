"""Arguments and terminal output: the only place with any of either.

Nothing heavy is imported before a verb needs it, so that ``simtrain --help`` answers at once. Data goes to standard
output, chatter to standard error.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simtrain.errors import DoesNotFit, InputError, Problem, ProgramError, SimtrainError, did_you_mean
from simtrain.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from simtrain.program.actions import Program
    from simtrain.program.timing import Costs
    from simtrain.scenario.scenario import Scenario
    from simtrain.scenario.tables import Tables

app = typer.Typer(
    name="simtrain",
    help="How long a training step takes, what it waits for, whether it fits, what it costs.",
    epilog="Example: simtrain demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
export = typer.Typer(help="Write something for other tools.", no_args_is_help=True)
app.add_typer(export, name="export", epilog="Example: simtrain export schema > scenario.schema.json")

DEMO = "scenarios/llm/llama3-8b-fsdp-8xh100.yaml"
REPORT_WIDTH, TABLE_WIDTH = 100, 160
SLOW = 2.0
"""Seconds of a simulation beyond which a user hears how long the advice will take."""
LISTED = {
    "accelerators": ("bf16", "fp16", "fp8", "memory", "memory_bandwidth", "scale_up"),
    "networks": ("bandwidth", "efficiency", "latency"),
    "machines": ("accelerator", "devices", "scale_up", "network", "nics", "cores", "ram"),
    "storage": ("title", "capacity", "read_bandwidth"),
    "prices": ("on_demand", "spot"),
    "stacks": ("attention", "overlap_grad_reduce", "grad_bytes", "bucket_bytes"),
    "optimizers": ("state_bytes", "master_bytes", "read_write_bytes"),
}
"""Tables that ``simtrain hardware`` lists, and the fields that fit on a line."""
Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Table -> name -> field -> ``{value, source: [..], note, ...}``."""


class Format(StrEnum):
    """How a listing is written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    YAML = "yaml"


Specs = Annotated[
    list[Path] | None, typer.Option("--specs", metavar="DIR", readable=False, help="Folder of extra hardware rows.")
]
Listing = Annotated[Format, typer.Option("-f", "--format", help="How to write the listing.")]


def main() -> None:
    """Entry point: run a verb and turn what simtrain raises into messages and exit codes."""
    if sys.stdout is None:  # closed by the caller (>&-)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    code = _guarded()
    try:
        sys.stdout.flush()
    except OSError as error:  # nothing more can be said there, not even at interpreter exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not code and not isinstance(error, BrokenPipeError):  # a reader that has gone (| head) is no failure
            _say(f"simtrain: output: {error.strerror}")
            code = 1
    sys.exit(code)


def _guarded() -> int:
    try:
        app()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except InputError as error:
        for problem in error.problems:
            _say(" ".join(str(problem).split()))
        return error.exit_code
    except Exception as error:
        if os.environ.get("SIMTRAIN_DEBUG"):
            raise
        if isinstance(error, SimtrainError):
            _say(f"simtrain: {error}")
            return error.exit_code
        if isinstance(error, OSError):  # a full disk behind standard output, say: no defect
            _say(f"simtrain: {error.filename or 'output'}: {error.strerror}")
            return 1
        _say(f"simtrain: unforeseen {type(error).__name__}: {error} (SIMTRAIN_DEBUG=1 shows where)")
        return 1
    return 0


def _version(asked: bool) -> None:
    if asked:
        from simtrain import __version__

        typer.echo(f"simtrain {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """How long a training step takes, what it waits for, whether it fits, what it costs."""


@app.command(epilog="Example: simtrain run scenarios/llm/gpt3-175b-1024xa100.yaml -o training.micro_batch=2")
def run(
    scenario: Annotated[Path, typer.Argument(readable=False, help="Scenario file (YAML).")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", readable=False, help="Default: reports/<scenario name>.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON on standard output.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 where the model does not fit.")] = False,
    override: Annotated[list[str] | None, typer.Option("-o", metavar="KEY=VALUE", help="Change a key.")] = None,
    specs: Specs = None,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw pictures and the HTML page.")] = True,
    advice: Annotated[bool, typer.Option("--advice/--no-advice", help="Simulate changes that may help.")] = True,
) -> None:
    """Simulate one training step and report on it, in the terminal and as files."""
    from simtrain.scenario.files import load, spec_folders

    folders = spec_folders(scenario, tuple(specs or ()))
    loaded = load(scenario, specs=folders, overrides=tuple(override or ()))
    _report(
        loaded,
        directory=out or Path("reports") / loaded.name,
        specs=folders,
        as_json=as_json,
        figures=figures,
        with_advice=advice,
        strict=strict,
    )


@app.command(epilog="Example: simtrain demo")
def demo(
    path: Annotated[Path, typer.Argument(readable=False, help="Where the scenario goes.")] = Path("demo.yaml"),
) -> None:
    """Write a small scenario (Llama-3 8B on 8 H100) and simulate it: no file, accelerator or network needed."""
    from simtrain.scenario.files import load
    from simtrain.scenario.tables import shipped

    text = shipped(DEMO).read_text(encoding="utf-8")
    try:
        if path.exists() and not (path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text):
            raise InputError([Problem(file=str(path), message="exists already; name another file for the demo")])
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError([Problem(file=str(path), message=f"cannot be written: {error.strerror}")]) from error
    _say(f"wrote {path}; change it and run: simtrain run {path}")
    loaded = load(path)
    _report(loaded, directory=Path("reports") / loaded.name)


def _report(
    scenario: Scenario,
    *,
    directory: Path,
    specs: tuple[Path, ...] = (),
    as_json: bool = False,
    figures: bool = True,
    with_advice: bool = True,
    strict: bool = False,
) -> None:
    """Simulate, write the files, print the report."""
    from simtrain import simulate
    from simtrain.report.files import write
    from simtrain.report.terminal import render
    from simtrain.scenario.files import resolved_yaml
    from simtrain.study.advise import advise

    _make(directory)
    start = time.perf_counter()
    result = simulate(scenario)
    if with_advice and (took := time.perf_counter() - start) > SLOW:
        _say(f"simulated in {took:.0f} s; now up to 20 changes of much the same length (--no-advice leaves them out)")
    found = advise(scenario, result, specs=specs) if with_advice else ()
    summary = {**result.summary, "advice": [asdict(one) for one in found]}
    written = write(
        directory,
        summary=summary,
        trace=result.spans,
        memory=result.memory,
        scenario_text=resolved_yaml(scenario),
        figures=figures,
    )
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
        _say(f"wrote {directory}/")
    else:
        render(summary, _console(REPORT_WIDTH), written)
    if strict and not summary["fits"]:
        peak, capacity = (format_bytes(summary["memory"][key]) for key in ("peak_bytes", "capacity_bytes"))
        raise DoesNotFit(f"{scenario.name} does not fit: it needs {peak} of {capacity}")


def _make(directory: Path) -> None:
    """Fail before the work, not after it, where the results cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".simtrain-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        why = "it, or a folder it lies in, is a file" if isinstance(error, FileExistsError | NotADirectoryError) else ""
        message = f"cannot be written to: {why or error.strerror}"
        raise InputError([Problem(file=str(directory), message=message)]) from error


@app.command(epilog="Example: simtrain hardware H100-SXM5-80GB")
def hardware(
    name: Annotated[str | None, typer.Argument(help="Show one row, with the source of every number.")] = None,
    form: Listing = Format.TABLE,
    specs: Specs = None,
) -> None:
    """List accelerators, networks, machines, prices, software stacks and optimizers, or show one of them."""
    from simtrain.scenario.tables import load_tables

    tables = load_tables(tuple(specs or ()))
    kinds = LISTED if name is None else (*LISTED, "efficiencies")
    wanted = {kind: list(getattr(tables, kind)) for kind in kinds}
    if name is not None:
        known = [row for names in wanted.values() for row in names]
        full = tables.accelerators.resolve(name) or name
        wanted = {kind: [row] for kind in kinds if (row := getattr(tables, kind).resolve(full))}
        if not wanted:
            raise InputError(f"unknown hardware {name!r}{did_you_mean(name, known)}; see: simtrain hardware")
    _check_rows(tables, wanted, tuple(specs or ()))
    rows = {kind: {row: tables.raw(kind, row) for row in names} for kind, names in wanted.items()}
    if form in (Format.JSON, Format.YAML):
        _data(rows, form)
    elif form is Format.CSV:
        _csv(rows)
    elif name is None:
        _overview(rows)
    else:
        _details(rows)


def _check_rows(tables: Tables, wanted: Mapping[str, list[str]], folders: tuple[Path, ...]) -> None:
    """Raise everything that is wrong with the rows that a user wrote."""
    problems: list[Problem] = []
    for kind, names in wanted.items():
        table = getattr(tables, kind)
        for name in names:
            file = Path(table.rows[name].document.file)
            try:
                _ = table[name] if any(file.is_relative_to(folder) for folder in folders) else None
            except InputError as error:
                problems += error.problems
    if problems:
        raise InputError(set(problems))


@app.command(epilog="Example: simtrain schedule interleaved --stages 4 --microbatches 8 --virtual 2 -f csv")
def schedule(
    name: Annotated[str, typer.Argument(help="Name of a schedule, or a CSV file in PyTorch's format to check.")],
    stages: Annotated[int, typer.Option(min=1, help="Pipeline ranks (of a named schedule).")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches a step (of a named schedule).")] = 8,
    virtual: Annotated[int, typer.Option(min=1, help="Stages a rank (of a named schedule).")] = 1,
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="F,B,W", help="Columns of a forward, input gradient, weight gradient (full backward: B+W)."
        ),
    ] = None,
    form: Listing = Format.TABLE,
) -> None:
    """Print a pipeline schedule as a grid, or check one that was written by hand."""
    from simtrain.program import grid
    from simtrain.program.schedules import build

    durations = _costs(costs) if costs else None
    path = Path(name)
    program = _read_grid(path) if path.suffix == ".csv" else build(name, stages, microbatches, virtual)
    if form is Format.TABLE:
        typer.echo(grid.render(program, durations))
        if durations:
            typer.echo(grid.figures(program, durations))
    elif form is Format.CSV:
        typer.echo(grid.to_csv(program), nl=False)
    else:
        _data([[str(action) for action in rank] for rank in program], form)


def _costs(text: str) -> Costs:
    from simtrain.program.timing import Costs

    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if len(numbers) != 3 or not all(0 < number < 100 for number in numbers):
        raise InputError(f"--costs: must be three whole numbers from 1 to 99, such as 1,1,1, not {text!r}")
    f, i, w = map(float, numbers)
    return Costs(f, i, w, i + w)


def _read_grid(path: Path) -> Program:
    from simtrain.program import grid
    from simtrain.program.actions import flat
    from simtrain.program.validation import validate
    from simtrain.scenario.yamltext import read_text

    text = read_text(path)
    program = grid.from_csv(text, str(path))
    actions = [action for rank in program for action in flat(rank)]
    try:
        validate(program, 1 + max(one.stage for one in actions), 1 + max(one.microbatch for one in actions))
    except ProgramError as error:
        raise InputError([grid.located(error, text, str(path))]) from error
    return program


@app.command(epilog="Example: simtrain validate --report reports/memory.md")
def validate(
    tables: Annotated[
        list[Path] | None, typer.Argument(metavar="[TABLE...]", help="Default: the shipped ones.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON on standard output.")] = False,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page (Markdown) with a plot.")] = None,
    specs: Specs = None,
) -> None:
    """Simulate published runs and compare step time, MFU and peak memory with what was measured."""
    from simtrain.report import validation
    from simtrain.study.validate import tables as read_tables
    from simtrain.study.validate import validate as compare

    document = compare(read_tables(tables or ()), specs=tuple(specs or ())).document()
    if report:
        _make(report.parent)
        validation.write(document, report, title="Published runs beside their predictions")
        _say(f"wrote {report}")
    if as_json:
        _data(document, Format.JSON)
    else:
        typer.echo("\n".join(validation.summary_lines(document)))


@export.command(epilog="Example: simtrain export schema > scenario.schema.json")
def schema() -> None:
    """JSON Schema of scenario files, for editors that complete and check them."""
    from simtrain.scenario.files import json_schema

    _data(json_schema(), Format.JSON)


def _data(data: object, form: Format) -> None:
    """JSON or YAML on standard output."""
    if form is Format.JSON:
        typer.echo(json.dumps(data, indent=2, default=str))
    else:
        from simtrain.scenario.yamltext import dump

        typer.echo(dump(data), nl=False)


def _text(cell: Mapping[str, Any]) -> str:
    """What one field says, on a line; long measured tables by their length."""
    value = cell.get("value", "")
    if not isinstance(value, list):
        return str(value)
    plain = not any(isinstance(item, list | dict) for item in value)
    return ", ".join(map(str, value)) if plain else f"{len(value)} rows (-f json shows them)"


def _note(cell: Mapping[str, Any]) -> str:
    return ", ".join(str(cell[part]) for part in ("region", "date", "note") if part in cell)


def _csv(rows: Rows) -> None:
    """One line a number, so that tables with different fields fit into one file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("table", "name", "key", "value", "source", "note"))
    for kind, named in rows.items():
        for name, row in named.items():
            for key, cell in row.items():
                value = cell.get("value", "")
                plain = json.dumps(value) if isinstance(value, list | dict) else value
                writer.writerow((kind, name, key, plain, "; ".join(cell.get("source", ())), _note(cell)))
    typer.echo(text.getvalue(), nl=False)


def _overview(rows: Rows) -> None:
    for kind, fields in LISTED.items():
        table = _table(kind, "name", *(field.replace("_", " ") for field in fields))
        for name, row in rows[kind].items():
            table.add_row(name, *(_text(row.get(field, {})) for field in fields))
        _console(TABLE_WIDTH).print(table)


def _details(rows: Rows) -> None:
    """The row with numbers for its sources, and the sources below."""
    for kind, named in rows.items():
        for name, row in named.items():
            numbers: dict[str, int] = {}
            table = _table(f"{name} ({kind})", "key", "value", "source", "note")
            for key, cell in row.items():
                cited = [numbers.setdefault(source, len(numbers) + 1) for source in cell.get("source", ())]
                table.add_row(key, _text(cell), " ".join(f"[{one}]" for one in cited), _note(cell))
            _console(TABLE_WIDTH).print(table)
            for source, number in numbers.items():
                _console(TABLE_WIDTH).print(f"[{number}] {source}", markup=False)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console(piped: int) -> Console:
    """Standard output, ``piped`` columns wide where no terminal sets the width."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else piped, highlight=False)


def _say(text: str) -> None:
    typer.echo(text, err=True)
