"""Short versions of `make long SUITE=durable`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / script), *arguments]
    paths = {"PYTHONPATH": f"{FOLDER.parent}:{FOLDER.parents[1] / 'src'}"}
    ran = subprocess.run(
        command,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    return ran.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.rounds
def test_no_line_is_lost_or_doubled_where_the_disk_fails(rounds: int) -> None:
    assert " 0 cases failed" in run("disk.py", "--every", str(max(1, 29 // rounds)))


@pytest.mark.rounds
def test_damaged_records_are_refused_or_left_out(rounds: int) -> None:
    assert " 0 failed" in run("damage.py", "--cases", str(6 * rounds))


@pytest.mark.rounds
def test_damaged_files_are_named_or_made_again(rounds: int) -> None:
    assert " 0 failed" in run("stored_files.py", "--cases", str(3 * rounds))


@pytest.mark.slow
@pytest.mark.rounds
def test_no_line_is_lost_or_doubled_where_the_server_is_killed(rounds: int) -> None:
    assert "no result was lost" in run("kills.py", "--kills", str(rounds))
