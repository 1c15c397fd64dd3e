"""`make long SUITE=durable`: each write, sync, rename and truncation fails in turn, or loses power.

A case is a fresh folder, a batch, and one fault. After it the batch goes on, in the same process
or in the next, and must have one result for each line; no line runs again whose result was kept.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CRASHED = 99
FAULTS = {  # errno, 0 for a loss of power; seed of what is lost of the unsynced, 0 for all
    "EIO": (errno.EIO, 0),
    "ENOSPC": (errno.ENOSPC, 0),
    "power, all unsynced lost": (0, 0),
    "power, some lost": (0, 1),
    "power, others lost": (0, 2),
}


def main() -> int:
    """Run the cases and print how many of each kind held; return 0 if all did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1, help="the first operation to try")
    parser.add_argument("--every", type=int, default=1, help="try only every N-th operation")
    args = parser.parse_args()
    if "TWOSTROKE_DISK" not in os.environ:
        return _with_faults(sys.argv)
    import workload  # noqa: F401 so that each case has it at once

    faults = ctypes.CDLL(os.environ["TWOSTROKE_DISK"])
    total = _count(faults)
    passed_cases, failed, num_again = Counter[str](), 0, 0
    for name, (number, seed) in FAULTS.items():
        for at in range(args.first, total + 1, args.every):
            try:
                num_again += _case(faults, at, number, seed * at)
                passed_cases[name] += 1
            except AssertionError as error:
                failed += 1
                print(f"FAILED: {name} at operation {at}: {error}", flush=True)
    for name, num_held in passed_cases.items():
        print(f"{name:26} {num_held:4} cases held")
    print(f"{total} operations in a run; {num_again} lines ran again; {failed} cases failed")
    return int(bool(failed))


def _with_faults(arguments: list[str]) -> int:
    """Run this program again below a disk that can fail."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "faults.so"
        compile_ = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run([*compile_, str(FOLDER / "faults.cpp"), "-ldl"], check=True)
        paths = f"{FOLDER}:{FOLDER.parents[1] / 'src'}"
        environment = {"LD_PRELOAD": str(library), "TWOSTROKE_DISK": str(library)}
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **environment, "PYTHONPATH": paths},
            check=False,
        ).returncode


def _count(faults: ctypes.CDLL) -> int:
    """Return how many operations a run without faults has."""
    with tempfile.TemporaryDirectory() as folder:
        code, child_lines = _child(faults, Path(folder) / "records", {}, (-1, 0, 0))
        assert code == 0, child_lines
        return int(next(value for word, value in child_lines if word == "operations"))


def _case(faults: ctypes.CDLL, at: int, number: int, seed: int) -> int:
    """Run one case; return how many lines ran more than once."""
    ran, stored_results, assured = Counter[str](), set[str](), dict[str, str]()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "records"
        plan = (at, number, seed)
        for _ in range(3):
            code, child_lines = _child(faults, folder, assured, plan)
            for word, value in child_lines:
                if word == "ran":
                    assert value not in stored_results, (
                        f"line {value} ran again after its result was kept"
                    )
                    ran[value] += 1
                elif word == "kept":
                    stored_results.add(value)
                else:
                    assured[word] = value
            if code == 0:
                break
            assert code in {CRASHED, 1}, assured.get("error", f"it ended with {code}")
            plan = (-1, 0, 0)  # one fault a case
        assert code == 0, f"the batch does not go on: {child_lines[-1:]}"
        text = (folder / "files" / assured["output"]).read_text()
        counts = Counter(json.loads(line)["custom_id"] for line in text.splitlines())
        assert counts == Counter(ran.keys()), f"lines lost or doubled: {counts}"
        assert len(counts) == 12
    return sum(ran.values()) - len(ran)


def _child(
    faults: ctypes.CDLL, folder: Path, assured: dict[str, str], plan: tuple[int, int, int]
) -> tuple[int, list[tuple[str, str]]]:
    """Run the workload in a process of its own; return its exit code and what it reported."""
    import workload

    from twostroke.server.storage import RecordsError

    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        code = 0
        try:
            os.close(reading)
            at, number, seed = plan
            faults.plan_fault(str(folder).encode(), ctypes.c_long(at), number, seed)
            workload.run(folder, dict(assured), writing)
            os.write(writing, f"operations {faults.num_operations()}\n".encode())
        except RecordsError as error:  # it could not open them: one sentence, and the next start
            os.write(writing, f"sentence {error}\n".encode())
            code = 1
        except BaseException:  # noqa: BLE001 the parent reports it
            text = traceback.format_exc().replace("\n", " | ")
            os.write(writing, f"error {text}\n".encode())
            code = 2
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        child_lines = [
            (word, value) for word, _, value in (line.rstrip().partition(" ") for line in pipe)
        ]
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), child_lines


if __name__ == "__main__":
    sys.exit(main())
