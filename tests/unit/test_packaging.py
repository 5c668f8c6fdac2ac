"""The wheel works from any folder, and the repository looks as the architecture says."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what pip would install of simtrain itself."""
    built = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(built), versions=["standard"])
    unpacked = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return unpacked


def run(installed: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "simtrain", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_top_level_is_exactly_the_agreed_one() -> None:
    tracked = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    expected = {"pyproject.toml", "README.md", "simtrain", "hardware_specs", "scenarios", "tests", "reports"}
    assert {name for name in top if not name.startswith(".")} == expected


@pytest.mark.parametrize("folder", ["hardware_specs", "scenarios"])
def test_data_folders_hold_data_only(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert files
    assert {path.suffix for path in files} <= {".yaml", ".json", ".csv"}


@pytest.mark.parametrize("folder", ["hardware_specs", "scenarios"])
def test_wheel_carries_every_data_file(installed: Path, folder: str) -> None:
    shipped = installed / "simtrain" / "_data" / folder
    here = ROOT / folder
    assert {p.relative_to(shipped) for p in shipped.rglob("*")} == {p.relative_to(here) for p in here.rglob("*")}


def test_wheel_holds_nothing_but_the_package(installed: Path) -> None:
    assert {path.name.split("-")[0] for path in installed.iterdir()} == {"simtrain"}
    assert not list(installed.rglob("*.pyc"))


def test_hardware_from_any_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "hardware", "H100-SXM5-80GB", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "H100-SXM5-80GB" in done.stdout


def test_demo_from_any_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "reports").glob("*/summary.json"))


def test_extras_are_the_agreed_ones(installed: Path) -> None:
    (metadata,) = installed.glob("simtrain-*.dist-info/METADATA")
    extras = {line.split()[1] for line in metadata.read_text().splitlines() if line.startswith("Provides-Extra:")}
    assert extras == {"torch", "plan", "calibrate", "notebooks", "test"}
