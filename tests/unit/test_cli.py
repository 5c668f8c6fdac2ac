"""The command line: verbs, exit codes, what goes to which stream, and how fast ``--help`` answers."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from simtrain import cli
from simtrain.errors import ProgramError

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("numpy", "pandas", "matplotlib", "pyarrow", "pydantic", "yaml", "simpy", "scipy", "torch")
VERBS = ("run", "hardware", "schedule", "export", "demo")
SMALL = ROOT / cli.DEMO


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in a folder of its own, as an installed simtrain would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SIMTRAIN_DEBUG", raising=False)


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Exit code of a command line, run in this process."""
    monkeypatch.setattr(sys, "argv", ["simtrain", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def spawn(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    command = [sys.executable, "-m", "simtrain", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_help_names_every_verb_and_loads_nothing_heavy() -> None:
    code = f"""
import sys
sys.argv = ["simtrain", "--help"]
try:
    from simtrain.cli import main
    main()
finally:
    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert [verb for verb in VERBS if verb not in done.stdout] == []


@pytest.mark.parametrize("verb", [*VERBS[:3], "export schema", "demo"])
def test_every_verb_shows_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert call(monkeypatch, *verb.split(), "--help") == 0
    assert f"Example: simtrain {verb}" in " ".join(capsys.readouterr().out.split())


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    name, number = capsys.readouterr().out.split()
    assert name == "simtrain"
    assert f'version = "{number}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_shell_completion_lists_the_verbs() -> None:
    done = spawn(_SIMTRAIN_COMPLETE="complete_bash", COMP_WORDS="simtrain ", COMP_CWORD="1")
    assert set(VERBS) <= set(done.stdout.split())


def test_run_prints_a_report_and_writes_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "run", SMALL, "--out", tmp_path / "out") == 0
    shown = capsys.readouterr()
    for expected in ("MFU", "tokens/s", "GiB"):
        assert expected in shown.out
    assert "wrote" in shown.out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"summary.json", "scenario.resolved.yaml", "spans.parquet"} <= names
    assert any(name.endswith(".html") for name in names)
    assert any(name.endswith(".png") for name in names)


def test_run_json_is_data_only_and_has_the_agreed_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "run", SMALL, "--json", "--no-figures", "--out", tmp_path / "out") == 0
    summary = json.loads(capsys.readouterr().out)
    for key in ("step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu", "hfu", "fits", "warnings"):
        assert key in summary
    assert {"peak_bytes", "capacity_bytes", "by_category"} <= summary["memory"].keys()
    assert {"compute_s", "exposed_communication_s", "bubble_s", "input_stall_s"} <= summary["time"].keys()
    assert len(summary["advice"]) <= 3
    on_disk = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert on_disk["step_time_s"] == summary["step_time_s"]
    assert not list((tmp_path / "out").glob("*.png"))


def test_a_long_run_says_so_before_its_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "SLOW", 0.0)
    monkeypatch.setattr("simtrain.study.advise.MAX_CANDIDATES", 1)
    for words, said in (((), True), (("--no-advice",), False)):
        assert call(monkeypatch, "run", SMALL, "--no-figures", *words) == 0
        assert ("--no-advice leaves them out" in capsys.readouterr().err) is said


def test_a_run_goes_to_reports_in_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert call(monkeypatch, "run", SMALL, "--no-figures", "--no-advice") == 0
    (written,) = (tmp_path / "reports").iterdir()
    assert (written / "summary.json").is_file()


def test_the_resolved_scenario_runs_to_the_same_summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("--no-figures", "--no-advice", "--out")
    assert call(monkeypatch, "run", SMALL, "-o", "training.recompute=full", *words, tmp_path / "one") == 0
    assert call(monkeypatch, "run", tmp_path / "one/scenario.resolved.yaml", *words, tmp_path / "two") == 0
    for name in ("summary.json", "scenario.resolved.yaml"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_an_override_changes_the_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    for mode in ("none", "full"):
        words = ("run", SMALL, "--json", "--no-figures", "--no-advice", "-o", f"training.recompute={mode}")
        assert call(monkeypatch, *words) == 0
        times.append(json.loads(capsys.readouterr().out)["step_time_s"])
    assert times[0] < times[1]


@pytest.mark.parametrize("override", ["training.micro_batsh=2", "training.micro_batch=many", "training.micro_batch"])
def test_a_bad_override_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    assert call(monkeypatch, "run", SMALL, "-o", override) == 2
    shown = capsys.readouterr()
    assert override.split("=")[0] in shown.err
    assert "-o" in shown.err
    assert (shown.out, "Traceback" in shown.err) == ("", False)


def test_all_problems_are_shown_one_a_line_with_their_places(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\ncluster: {accelerator: H100-SXM5-80GB, devises: 8}\nmodel: llama3-8b\nsede: 1\n")
    assert call(monkeypatch, "run", bad) == 2
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert any(line.startswith(f"{bad}:2:") and "did you mean 'devices'" in line for line in lines)
    assert any(line.startswith(f"{bad}:4:") and "did you mean 'seed'" in line for line in lines)
    assert shown.out == ""


def test_a_missing_file_is_bad_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "run", "nowhere.yaml") == 2
    assert capsys.readouterr().err.startswith("nowhere.yaml: no such file")


def test_an_unwritable_folder_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert call(monkeypatch, "run", SMALL, "--out", tmp_path / "file" / "out") == 2
    shown = capsys.readouterr()
    assert "cannot be written to: it, or a folder it lies in, is a file" in shown.err
    assert shown.out == ""
    assert call(monkeypatch, "run", SMALL, "--out", tmp_path / "file") == 2


@pytest.mark.parametrize(("words", "code"), [((), 0), (("--strict",), 3)])
def test_not_fitting_is_a_result_unless_strict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int
) -> None:
    base = ("run", SMALL, "--json", "--no-figures", "--no-advice", "-o", "model=llama3-70b")
    assert call(monkeypatch, *base, *words) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["fits"] is False
    assert ("does not fit" in shown.err) == (code == 3)


def test_advice_for_what_does_not_fit_says_what_would(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("training.global_batch=16", "training.micro_batch=2", "training.recompute=none")
    words = [word for change in changes for word in ("-o", change)]
    assert call(monkeypatch, "run", SMALL, "--json", "--no-figures", *words) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["fits"] is False
    assert summary["advice"][0]["fits"] is True


def test_usage_errors_exit_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "run") == 2
    assert call(monkeypatch, "runn") == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("error", "said"), [(ProgramError("knot"), "knot"), (KeyError("gone"), "SIMTRAIN_DEBUG")])
def test_defects_exit_with_1_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("simtrain.program.schedules.build", fail)
    assert call(monkeypatch, "schedule", "1f1b") == 1
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    monkeypatch.setenv("SIMTRAIN_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["simtrain", "schedule", "1f1b"])
    if not isinstance(error, SystemExit):
        with pytest.raises(type(error)):
            cli.main()


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("simtrain.program.schedules.build", interrupt)
    assert call(monkeypatch, "schedule", "1f1b") == 128 + signal.SIGINT


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m simtrain schedule 1f1b --stages 64 --microbatches 512 | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Step")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("where", "code", "said"), [("&-", 0, ""), ("/dev/full", 1, "output: No space left on device")]
)
def test_output_that_nobody_can_read(where: str, code: int, said: str) -> None:
    """No traceback where standard output is closed or full, however much there is to say."""
    for verb in ("schedule 1f1b", "schedule 1f1b --stages 64 --microbatches 512 -f csv", "hardware T4"):
        command = f"{sys.executable} -m simtrain {verb} >{where}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert done.stderr.strip().removeprefix("simtrain: ") == said


OTHERS_READ = all(folder.stat().st_mode & 0o001 for folder in (ROOT, *ROOT.parents))


@pytest.mark.skipif(os.geteuid() != 0 or not OTHERS_READ, reason="needs to become somebody else who may read simtrain")
def test_what_may_not_be_read_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scenario, the folder it lies in, a folder of rows, a folder for the report: closed to who asks."""
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "mine.yaml").write_text(SMALL.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    (tmp_path / "mine.yaml").chmod(0o000)
    closed.chmod(0o000)
    for above in tmp_path.parents[:3]:
        above.chmod(above.stat().st_mode | 0o011)
    calls = [
        ("run", closed / "mine.yaml"),
        ("run", "mine.yaml"),
        ("run", SMALL, "--specs", closed),
        ("run", SMALL, "--out", closed / "x"),
        ("hardware", "--specs", closed),
        ("demo", closed / "x"),
    ]
    try:
        os.seteuid(65534)
        codes = [call(monkeypatch, *words) for words in calls]
    finally:
        os.seteuid(0)
        closed.chmod(0o700)
    assert codes == [2] * len(calls)


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_demo_takes_no_place_that_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    if kind == "folder":
        (tmp_path / "demo.yaml").mkdir()
    else:
        os.mkfifo(tmp_path / "demo.yaml")
    assert call(monkeypatch, "demo") == 2


def test_hardware_lists_and_shows_sources(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "hardware") == 0
    listed = capsys.readouterr().out
    for name in ("T4", "H100-SXM5-80GB", "TPU-v5e"):
        assert name in listed
    assert call(monkeypatch, "hardware", "H100-SXM5-80GB", "-f", "json") == 0
    row = json.loads(capsys.readouterr().out)["accelerators"]["H100-SXM5-80GB"]
    assert row["memory_bandwidth"]["value"] == "3350 GB/s"
    assert row["memory_bandwidth"]["source"]
    assert call(monkeypatch, "hardware", "H100-SXM5-80GB") == 0
    assert "3350 GB/s" in capsys.readouterr().out


def test_an_alias_shows_the_device_and_what_was_measured_on_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "hardware", "h100", "-f", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["accelerators"]) == list(found["efficiencies"]) == ["H100-SXM5-80GB"]
    assert not any(field.startswith("sources") for field in found["efficiencies"]["H100-SXM5-80GB"])


@pytest.mark.parametrize("form", ["json", "csv", "yaml"])
def test_hardware_listing_reads_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    assert call(monkeypatch, "hardware", "-f", form) == 0
    text = capsys.readouterr().out
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(text)))
        found = {row["value"] for row in rows if (row["name"], row["key"]) == ("A100-SXM4-80GB", "bf16")}
    else:
        if form == "json":
            data = json.loads(text)
        else:
            from simtrain.scenario.yamltext import parse

            data = parse(text).data
        found = {data["accelerators"]["A100-SXM4-80GB"]["bf16"]["value"]}
    assert found == {"312 TFLOP/s"}


def test_hardware_checks_the_rows_of_a_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "networks.yaml"
    path.write_text("mine: {source: me, bandwidth: -1 GB/s, efficiency: 90 %, latency: 1 us}\nyours: {source: me}\n")
    assert call(monkeypatch, "hardware", "--specs", tmp_path) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{path}:1:20: mine.bandwidth: must be above zero")
    assert len(lines) == 4
    assert call(monkeypatch, "hardware", "mine", "--specs", tmp_path) == 2
    assert call(monkeypatch, "hardware", "T4", "--specs", tmp_path) == 0


def test_unknown_hardware_gets_a_suggestion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "hardware", "H100-SXM5-80G") == 2
    assert "did you mean 'H100-SXM5-80GB'" in capsys.readouterr().err


def test_schedule_prints_and_reads_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("schedule", "interleaved", "--stages", "2", "--microbatches", "4", "--virtual", "2")
    assert call(monkeypatch, *words) == 0
    grid = capsys.readouterr().out
    assert call(monkeypatch, *words, "-f", "csv") == 0
    text = capsys.readouterr().out
    (tmp_path / "mine.csv").write_text(text)
    assert call(monkeypatch, "schedule", "mine.csv") == 0
    assert capsys.readouterr().out == grid
    assert call(monkeypatch, *words, "-f", "json") == 0
    assert json.loads(capsys.readouterr().out) == [line.split(",") for line in text.splitlines()]


def test_a_schedule_that_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0B0,0F1,0B1\n1B0,1F0,1F1,1B1\n")
    assert call(monkeypatch, "schedule", "mine.csv") == 2
    shown = capsys.readouterr().err
    assert shown.startswith("mine.csv")
    assert "mine.csv:2:1: cell 1: rank 1: 1B0 before 1F0" in shown
    assert call(monkeypatch, "schedule", "1f2b") == 2
    assert "did you mean '1f1b'" in capsys.readouterr().err


def test_schema_describes_every_section(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "export", "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"cluster", "model", "training", "parallelism", "input", "job", "measured"} <= schema["properties"].keys()


def test_demo_leaves_other_peoples_files_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "demo.yaml").write_text("mine")
    assert call(monkeypatch, "demo") == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "demo.yaml").read_text() == "mine"
