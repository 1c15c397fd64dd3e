"""Measure the footprint: time and memory of a cold process, size of the install, time of the build.

Used by `make bench`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.quiet import Watch
from benchmarks.common.report import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPARSELY_S, OFTEN_S = 0.05, 0.005  # between looks at a process, which take processor time

_BIN = Path(sys.executable).parent
_LIMIT_S = 900.0
_INSTALLERS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")


@dataclass(frozen=True, slots=True)
class Life:
    """One process: when its first byte of output came, and its highest memory in bytes.

    `resident` includes the pages of the model's file that it has mapped, `anonymous` does not.
    `others_share` is the share of all cores that other processes took meanwhile.
    """

    first_s: float
    resident: int
    anonymous: int
    others_share: float


def live(command: Sequence[str], every_s: float = SPARSELY_S) -> Life:
    """Run a process to its end, and look at it every `every_s` seconds.

    Raises:
        SystemExit: it failed, wrote nothing, or took too long.
    """
    resident = anonymous = 0
    share = 0.0
    firsts: list[float] = []
    # Without this variable, bytecode is kept, as in an installed package.
    env = {key: os.environ[key] for key in os.environ if key != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as log:
        start_s = time.monotonic()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=env
        )
        limit = threading.Timer(_LIMIT_S, process.kill)
        limit.start()
        watch = Watch(process.pid)
        reader = threading.Thread(target=_drain, args=(process, start_s, firsts))
        reader.start()
        try:
            while process.poll() is None:
                now = memory(process.pid)
                resident = max(resident, now["VmHWM"])
                anonymous = max(anonymous, now["RssAnon"])
                share = watch.others_share() if now["VmRSS"] else share
                time.sleep(every_s)
        finally:
            limit.cancel()
            reader.join()
        if process.returncode or not firsts:
            log.seek(0)
            output = log.read()[-600:].decode(errors="replace")
            raise SystemExit(f"{command[0]} ended with code {process.returncode}: {output}")
    return Life(firsts[0], resident, anonymous, share)


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
        start_s = time.monotonic()
        subprocess.run([python, "-m", "pip", "install", "--quiet", str(ROOT)], check=True)
        install_s = time.monotonic() - start_s
        subprocess.run(
            [python.parent / "twostroke", "--version"], check=True, stdout=subprocess.DEVNULL
        )
        files = [path for path in Path(folder).rglob("*") if not path.is_symlink()]
        packages = next(Path(folder).glob("lib/python*/site-packages"))
        package_files = [path for path in files if not _is_installer(path, packages)]
        return InstalledSize(_disk_bytes(files), _disk_bytes(package_files), install_s)


def build_s() -> float:
    """Return the seconds that the native libraries take from nothing, on two cores."""
    ninja = shutil.which("ninja", path=f"{_BIN}:{os.defpath}") or "ninja"
    cmake = shutil.which("cmake", path=f"{_BIN}:{os.defpath}") or "cmake"
    with tempfile.TemporaryDirectory() as folder, _two_cores():
        configure = [cmake, "-S", str(ROOT / "native"), "-B", folder, "-G", "Ninja"]
        options = ("-DCMAKE_BUILD_TYPE=Release", "-DTS_EMULATED_TILES=OFF")
        start_s = time.monotonic()
        for command in (
            [*configure, *options, f"-DCMAKE_MAKE_PROGRAM={ninja}"],
            [ninja, "-C", folder, "-j", "2"],
        ):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - start_s


def generate_command(model: str, *more_options: str) -> list[str]:
    """Return the command that answers a prompt in a fresh process."""
    program = shutil.which("twostroke", path=str(_BIN))
    start = (
        [program] if program else [sys.executable, "-c", "from twostroke.cli import main; main()"]
    )
    return [*start, "generate", model, "--temperature", "0", "--quiet", *more_options]


def _drain(process: subprocess.Popen[bytes], start_s: float, firsts: list[float]) -> None:
    """Note when the first byte comes, and take the rest."""
    assert process.stdout is not None
    if process.stdout.read(1):
        firsts.append(time.monotonic() - start_s)
    process.stdout.read()


def memory(pid: int) -> Counter[str]:
    """Return a process's memory in bytes by the kernel's names, such as VmRSS; 0 once gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return Counter()
    fields = (line.split() for line in lines if line.endswith("kB"))
    return Counter({name.rstrip(":"): int(count) * 1024 for name, count, _ in fields})


def _is_installer(path: Path, packages: Path) -> bool:
    """Whether a file belongs to what every new environment brings along."""
    if path.is_relative_to(packages):
        return str(path.relative_to(packages)).startswith(_INSTALLERS)
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
