"""What continuous integration does with tests that fail once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[1] / "tools/repeat_failed_tests.py"

_TESTS = """
from pathlib import Path

def test_unsteady() -> None:
    with Path("runs").open("a") as runs:
        runs.write("run ")

def test_broken() -> None:
    assert False

def test_broken_at_times() -> None:
    assert len(Path("runs").read_text().split()) < 3
"""


def repeat(folder: Path, failed: list[str]) -> subprocess.CompletedProcess[str]:
    """Repeat tests of a small project whose last run recorded `failed`."""
    (folder / "test_project.py").write_text(_TESTS)
    cache = folder / ".pytest_cache/v/cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
    command = [sys.executable, str(_SCRIPT), "-q"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_test_that_passes_all_repeats_is_named(tmp_path: Path) -> None:
    done = repeat(tmp_path, ["test_project.py::test_unsteady"])
    assert done.returncode == 0, done.stdout
    assert "UNSTEADY: test_project.py::test_unsteady" in done.stdout
    assert len((tmp_path / "runs").read_text().split()) == 3


@pytest.mark.parametrize("broken", ["test_broken", "test_broken_at_times"])
def test_a_test_that_fails_again_fails_the_run(tmp_path: Path, broken: str) -> None:
    failed = ["test_project.py::test_unsteady", f"test_project.py::{broken}"]
    done = repeat(tmp_path, failed)
    assert done.returncode == 1
    assert "UNSTEADY" not in done.stdout


@pytest.mark.parametrize("failed", [[], [f"test_project.py::test_{i}" for i in range(6)]])
def test_no_failures_or_many_are_not_repeated(tmp_path: Path, failed: list[str]) -> None:
    done = repeat(tmp_path, failed)
    assert done.returncode == 1
    assert "none is repeated" in done.stdout
