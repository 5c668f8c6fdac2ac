"""What the README shows is what works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
BASH = [text for language, text in BLOCKS if language == "bash"]
SCENARIO = "scenarios/llm/gpt3-175b-1024xa100.yaml"


def steps(block: str) -> list[list[str]]:
    """The commands of a line joined by ``&&``."""
    return [shlex.split(step) for step in block.split("&&")]


def test_the_first_two_blocks_are_bash_and_one_line_each() -> None:
    assert [language for language, _ in BLOCKS[:2]] == ["bash", "bash"]
    assert [text.count("\n") for text in BASH[:2]] == [1, 1]


def test_first_block_installs_and_runs_the_main_example() -> None:
    make, install, run = steps(BASH[0])
    assert make == ["python3.11", "-m", "venv", ".venv"]
    assert install == [".venv/bin/pip", "install", "."]
    assert run == [".venv/bin/simtrain", "run", SCENARIO]
    assert (ROOT / SCENARIO).is_file()


def test_second_block_installs_the_test_extra_and_runs_all_but_the_slow_tests() -> None:
    make, install, test = steps(BASH[1])
    assert make == ["python3.11", "-m", "venv", ".venv"]
    assert install == [".venv/bin/pip", "install", ".[test]"]
    assert test == [".venv/bin/pytest", "-m", "not slow"]
    assert "test" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_ci_installs_and_tests_as_the_readme_says() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    _, install, test = (step.strip().removeprefix(".venv/bin/") for step in BASH[1].split("&&"))
    assert f'/bin/pip" {install.removeprefix("pip ")}\n' in script
    assert f"step {test}\n" in script


def test_readme_names_every_room() -> None:
    rooms = {path.stem for path in (ROOT / "simtrain").iterdir() if not path.name.startswith("_")}
    rows = "".join(line for line in README.splitlines() if line.startswith("|"))
    assert {room for room in rooms if not re.search(rf"`{room}/?`", rows)} == set()


def test_commands_shown_in_the_table_work(tmp_path: Path) -> None:
    """The cheap ones; ``run`` has tests of its own, and the slow test runs the first block."""
    shown = re.findall(r"^\| `(simtrain (?:hardware|schedule|export)[^`]*)` \|", README, flags=re.MULTILINE)
    assert len(shown) == 5
    for command in shown:
        words = [sys.executable, "-m", *shlex.split(command)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), command
        assert done.stdout.strip(), command


def test_python_block_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = (text for language, text in BLOCKS if language == "python")
    exec(compile(block, "README.md", "exec"), {})
    step_time, fits = capsys.readouterr().out.split()
    assert float(step_time) > 0
    assert fits in ("True", "False")


def test_terminal_output_is_the_real_one(tmp_path: Path) -> None:
    """Of the first block, installed or not. Run with UPDATE_GOLDEN=1 to show what simtrain prints now."""
    shown = subprocess.run(
        [sys.executable, "-m", "simtrain", "run", str(ROOT / SCENARIO)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    real = "".join(f"{line.rstrip()}\n" for line in shown.splitlines())
    (block,) = (text for language, text in BLOCKS if language == "text")
    if os.environ.get("UPDATE_GOLDEN"):
        (ROOT / "README.md").write_text(README.replace(block, real), encoding="utf-8")
    else:
        assert block == real


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_block_works_in_a_clean_clone(tmp_path: Path, number: int) -> None:
    """What is committed, in a new folder with a new virtual environment."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "VIRTUAL"))
    }
    environment |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], env=environment, check=True)
    done = subprocess.run(
        ["bash", "-c", BASH[number]], cwd=clone, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if number == 0:
        assert (clone / "reports/gpt3-175b-1024xa100/summary.json").is_file()
    else:
        assert re.search(r"\d+ passed", done.stdout)
