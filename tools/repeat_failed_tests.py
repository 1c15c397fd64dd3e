"""Repeat the tests that failed in the last run of pytest, alone, for continuous integration.

A few tests start processes and race with clocks, and a machine that other work shares can make
one of some 14,000 miss its moment. Each failed test is repeated in three runs with nothing beside
it. A test that passes all of them is reported as unsteady, which is a fault to mend but no reason
to call the tree broken; one that fails again, or more than a few failures, fail the run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
_MOST_FAILURES = 5
_NUM_REPEATS = 3


def repeat(tests: list[str], pytest_args: list[str]) -> int:
    """Run `tests` several times in one process, and return the exit status for CI."""
    if not tests or len(tests) > _MOST_FAILURES:
        print(f"{len(tests)} failed tests: none is repeated (from 1 to {_MOST_FAILURES} would be)")
        return 1
    for attempt in range(1, _NUM_REPEATS + 1):
        print(f"repeating {len(tests)} failed tests alone, run {attempt} of {_NUM_REPEATS}")
        command = [sys.executable, "-m", "pytest", *pytest_args, "-p", "no:cacheprovider", *tests]
        if subprocess.run(command, check=False).returncode != 0:
            print("a test failed again: it is broken, not unsteady")
            return 1
    for test in tests:
        print(f"UNSTEADY: {test} failed beside other tests and passed {_NUM_REPEATS} times alone")
    return 0


def main() -> int:
    """Repeat what pytest's cache lists as failed."""
    tests = sorted(json.loads(_LAST_FAILED.read_text())) if _LAST_FAILED.exists() else []
    return repeat(tests, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
