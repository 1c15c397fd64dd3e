"""How small and quick to start Twostroke is: a cold process, its memory, its install, its build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from report import ROOT, Spread

if TYPE_CHECKING:
    from collections.abc import Iterator

_BIN = Path(sys.executable).parent
_PROMPT = "Why is the sky blue?"
_INSTALLERS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")


def first_token_s(model: str, runs: int) -> Spread:
    """Return the seconds from starting `twostroke generate` to the first byte of its answer."""
    command = generate_command(model, "-p", _PROMPT, "--max-tokens", "2")
    times = []
    for _ in range(runs):
        began = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            times.append(time.monotonic() - began)
            process.stdout.read()
        _check(process)
    return Spread.of(times)


def peak_memory(model: str, context_length: int, kv_bytes: int) -> int:
    """Return the most bytes that `twostroke generate` held in memory at once.

    Its answer fills a key-value pool of `context_length` tokens, `kv_bytes` in size.
    """
    sizes = ("--context-length", str(context_length), "--kv-memory", str(kv_bytes))
    prompt = ("--raw", "-p", " ".join([_PROMPT] * (context_length // 10)))
    command = generate_command(model, "--ignore-eos", *sizes, *prompt)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _high_water(process.pid))
            time.sleep(0.002)
    _check(process)
    return peak


@dataclass(frozen=True, slots=True)
class InstalledSize:
    """Bytes on disk of a fresh environment after `pip install .`, and the seconds it took."""

    total: int
    without_pip: int
    install_s: float


def installed_size() -> InstalledSize:
    """Install Twostroke into a scratch environment and weigh it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        began = time.monotonic()
        subprocess.run([python, "-m", "pip", "install", "--quiet", str(ROOT)], check=True)
        install_s = time.monotonic() - began
        subprocess.run(
            [python.parent / "twostroke", "--version"], check=True, stdout=subprocess.DEVNULL
        )
        files = [path for path in Path(folder).rglob("*") if not path.is_symlink()]
        packages = next(Path(folder).glob("lib/python*/site-packages"))
        own = [path for path in files if not _is_installer(path, packages)]
        return InstalledSize(_disk_bytes(files), _disk_bytes(own), install_s)


def build_s() -> float:
    """Return the seconds that the native libraries take from nothing, on two cores."""
    ninja = shutil.which("ninja", path=f"{_BIN}:{os.defpath}") or "ninja"
    cmake = shutil.which("cmake", path=f"{_BIN}:{os.defpath}") or "cmake"
    with tempfile.TemporaryDirectory() as folder, _two_cores():
        configure = [cmake, "-S", str(ROOT / "native"), "-B", folder, "-G", "Ninja"]
        options = ("-DCMAKE_BUILD_TYPE=Release", "-DTS_EMULATED_TILES=OFF")
        began = time.monotonic()
        for command in (
            [*configure, *options, f"-DCMAKE_MAKE_PROGRAM={ninja}"],
            [ninja, "-C", folder, "-j", "2"],
        ):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - began


def generate_command(model: str, *more: str) -> list[str]:
    """Return the command that answers a prompt in a fresh process."""
    program = shutil.which("twostroke", path=str(_BIN))
    start = (
        [program] if program else [sys.executable, "-c", "from twostroke.cli import main; main()"]
    )
    return [*start, "generate", model, "--temperature", "0", "--quiet", *more]


def _check(process: subprocess.Popen[bytes]) -> None:
    if process.returncode:
        raise SystemExit(f"twostroke generate ended with code {process.returncode}.")


def _high_water(pid: int) -> int:
    """Return a process's VmHWM in bytes; 0 once it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def _is_installer(path: Path, packages: Path) -> bool:
    """Whether a file belongs to what every new environment brings along."""
    if path.is_relative_to(packages):
        return path.relative_to(packages).parts[:1] != () and path.relative_to(packages).parts[
            0
        ].startswith(_INSTALLERS)
    return path.parent.name == "bin" and path.name.startswith("pip")


def _disk_bytes(paths: list[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths)


@contextmanager
def _two_cores() -> Iterator[None]:
    """Keep what the block starts on two of the machine's cores."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(every)[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)
