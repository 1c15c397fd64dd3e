"""Plants faults in copies of the sources, one at a time; the tests must catch each.

`python tests/mutants/run.py [NAME ...]` runs those of `faults.toml` whose file or title contains
one of the names. Each fault names the tests that have to fail with it; all of them are in
`make test`, so what they catch, it catches. Faults in `native/` are compiled for the best level of
this machine and for the portable one, the others run against the libraries of the tree. Without
a fault the same tests have to pass.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from twostroke.backends.cpu.library import choose_level

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("src", "tests", "benchmarks", "docs", "tools", "native", "pyproject.toml")
LIBRARIES = ROOT / "src" / "twostroke" / "backends" / "cpu" / "lib"
TIMEOUT_S = 300.0
TESTS_FAILED = 1  # of pytest's exit codes; any other means that the tests could not run

# An editable install would import the unchanged tree.
SITECUSTOMIZE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault: `old`, found once in `file`, becomes `new`; `tests` must then fail."""

    title: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def is_native(self) -> bool:
        """Whether the libraries have to be compiled anew."""
        return self.file.startswith("native/")

    def plant(self, root: Path) -> str:
        """Change the file under `root`; return what it was.

        Raises:
            ValueError: the text to change is not there exactly once.
        """
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.title}: found {text.count(self.old)} times in {self.file}.")
        path.write_text(text.replace(self.old, self.new))
        return text


def load_faults() -> list[Fault]:
    """Return the faults of `faults.toml`."""
    data = tomllib.loads((Path(__file__).parent / "faults.toml").read_text())
    return [Fault(**entry) for entry in data["fault"]]


class Copy:
    """A copy of the sources in which faults are planted one after another."""

    def __init__(self, folder: Path, levels: list[str]) -> None:
        """Copy the tree to `folder`; faults in native code are compiled for `levels`."""
        self._root = folder
        self._levels = levels
        self._libraries = folder / "build" / "native"
        self._passing: set[tuple[bool, str]] = set()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results")
                )
            else:
                shutil.copy(source, folder / name)
        (folder / "src" / "sitecustomize.py").write_text(SITECUSTOMIZE)
        environment = os.environ | {"PYTHONPATH": str(folder / "src")}
        which = [sys.executable, "-c", "import twostroke; print(twostroke.__file__)"]
        module_path = subprocess.check_output(which, env=environment, cwd=folder, text=True).strip()
        if not Path(module_path).is_relative_to(folder):
            raise SystemExit(f"The tests would import {module_path}, in which no fault is planted.")

    def judge(self, fault: Fault) -> tuple[bool, str]:
        """Return whether the fault's tests fail with it and only with it, and which test does."""
        test_set = fault.is_native, fault.tests
        if test_set not in self._passing:
            if fault.is_native:
                self._compile()
            try:
                done = self._test(fault)
            except subprocess.TimeoutExpired:
                return False, f"without the fault the tests take over {TIMEOUT_S:.0f} s"
            if done.returncode != 0:
                return False, f"fails without the fault: {_last_line(done)}"
            self._passing.add(test_set)
        text = fault.plant(self._root)
        try:
            if fault.is_native:
                self._compile()
            done = self._test(fault)
        except subprocess.TimeoutExpired:
            return True, f"the tests hang ({TIMEOUT_S:.0f} s)"
        finally:
            (self._root / fault.file).write_text(text)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if done.returncode == TESTS_FAILED and failed is not None:
            return True, failed[1]
        return False, _last_line(done)

    def _test(self, fault: Fault) -> subprocess.CompletedProcess[str]:
        libraries = self._libraries if fault.is_native else LIBRARIES
        environment = os.environ | {
            "PYTHONPATH": str(self._root / "src"),
            "TWOSTROKE_NATIVE_DIR": str(libraries),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        return subprocess.run(
            [*command, "-m", "not oracle and not models and not page", *fault.tests.split()],
            cwd=self._root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def _compile(self) -> None:
        """Compile the levels, what has changed of them.

        Raises:
            CalledProcessError: the fault does not compile.
        """
        tools = Path(sys.executable).parent
        cmake, libraries = str(tools / "cmake"), str(self._libraries)
        configure = [cmake, "-S", str(self._root / "native"), "-B", libraries]
        options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
        targets = [f"twostroke_{level}" for level in self._levels]
        build = [cmake, "--build", libraries, "--target", *targets]
        for command in ([*configure, *options], build):
            subprocess.run(command, capture_output=True, check=True)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def main() -> int:
    """Plant the faults that are asked for; return 1 if one is not caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of files or titles; without any, all")
    parser.add_argument("--jobs", type=int, default=2, help="copies that work side by side")
    options = parser.parse_args()
    faults = [
        fault
        for fault in load_faults()
        if not options.names or any(name in f"{fault.file} {fault.title}" for name in options.names)
    ]
    if not faults:
        parser.error("no fault has such a name.")
    levels = sorted({"portable", choose_level(None).level})
    with tempfile.TemporaryDirectory(prefix="twostroke-mutants-") as scratch:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for index in range(min(options.jobs, len(faults))):
            copies.put(Copy(Path(scratch) / str(index), levels))

        def judge(fault: Fault) -> bool:
            copy, began_s = copies.get(), time.monotonic()
            try:
                is_caught, where = copy.judge(fault)
            finally:
                copies.put(copy)
            verdict = "caught" if is_caught else "MISSED"
            taken_s = time.monotonic() - began_s
            print(
                f"{verdict} {taken_s:5.1f} s  {fault.file}: {fault.title}\n    {where}", flush=True
            )
            return is_caught

        with ThreadPoolExecutor(copies.qsize()) as pool:
            num_caught = sum(pool.map(judge, faults))
    print(f"{num_caught} of {len(faults)} planted faults were caught.")
    return 0 if num_caught == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
