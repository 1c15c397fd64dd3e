"""The environment that llama.cpp is measured in: made on first use, never the project's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from report import ROOT, note

if TYPE_CHECKING:
    from pathlib import Path

_FOLDER = ROOT / ".bench-peers" / "llama.cpp"
_PACKAGE = "llama-cpp-python"


def python_of(ready: Path | None) -> Path:
    """Return the Python of a `ready` environment, else of our own, which is made if need be.

    llama.cpp is built for this very processor, with clang 16: what GCC 12 makes of its AMX code
    crashes.

    Raises:
        SystemExit: there is no such environment, or no clang 16 to build one.
    """
    folder = ready or _FOLDER
    python = folder / "bin" / "python"
    if python.exists() and _has_llama(python):
        return python
    if ready is not None:
        raise SystemExit(f"{ready} is not a virtual environment with {_PACKAGE}.")
    if shutil.which("clang-16") is None:
        message = "llama.cpp is built with clang 16, which is not here: apt-get install clang-16"
        raise SystemExit(f"{message}, or name a ready environment with --llama-env.")
    _install(folder)
    return python


def _install(folder: Path) -> None:
    note(f"Building llama.cpp into {folder.relative_to(ROOT)} (some eight minutes, once)")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    build = {"CC": "clang-16", "CXX": "clang++-16", "CMAKE_ARGS": "-DGGML_NATIVE=ON"}
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir")
    subprocess.run(
        [*pip, "--no-binary", _PACKAGE, _PACKAGE], env={**os.environ, **build}, check=True
    )


def _has_llama(python: Path) -> bool:
    script = "import importlib.util, sys; sys.exit(importlib.util.find_spec('llama_cpp') is None)"
    return subprocess.run([python, "-c", script], check=False).returncode == 0
