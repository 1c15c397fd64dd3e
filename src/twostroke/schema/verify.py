"""Checks finished answers against their whole schemas, where grammars are known to be weaker.

jsonschema-rs does the work, in a process of its own: a hostile schema or answer can take long and
much memory, and the validator lets no other thread run meanwhile. The process is started by the
first check, and again after one that exceeded its limits.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Final

from twostroke.core.frozen import Frozen

_WORKER: Final = Path(__file__).with_name("verify_worker.py")
MAX_ANSWER: Final = 1 << 20  # characters


class Fault(Frozen):
    """What of a schema an answer does not keep to: a keyword, and its place as a JSON pointer."""

    keyword: str
    place: str = ""


class UncheckedError(ValueError):
    """An answer, or a schema, could not be checked; the sentence says why."""


class Verifier:
    """Checks answers, one at a time. Safe to use from several threads; each waits for its turn."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check_schema(self, schema: str) -> None:
        """Check that answers can be checked against a schema.

        Raises:
            UncheckedError: they cannot.
        """
        with self._lock:
            self._ask(schema, None)

    def fault(self, schema: str, answer: str) -> Fault | None:
        """Return why a text is not a valid value of a schema, or None if it is.

        Raises:
            UncheckedError: it took too long, or the schema cannot be used.
        """
        if len(answer) > MAX_ANSWER:
            raise UncheckedError(f"it has more than {MAX_ANSWER:,} characters")
        with self._lock:
            if self._ask(schema, answer)["is_valid"]:
                return None
            found = self._line()
        return Fault("unknown") if found is None else Fault(**found)

    def _ask(self, schema: str, answer: str | None) -> dict[str, Any]:
        if self._process is None:
            self._process = _start()
            weakref.finalize(self, _end, self._process)
        question = json.dumps([schema, answer]).encode()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question + b"\n")
            self._process.stdin.flush()
            found = self._line()
        except OSError:
            found = None
        if found is None:
            self._process = None
            raise UncheckedError("the check took too much time or memory")
        if "error" in found:
            raise UncheckedError(found["error"])
        return found

    def _line(self) -> dict[str, Any] | None:
        """Return a line of the process, or None if it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            found: dict[str, Any] = json.loads(line)
            return found
        self._process = None
        return None


def _start() -> subprocess.Popen[bytes]:
    """Start the process; `-P` keeps this folder's modules from shadowing Python's."""
    return subprocess.Popen(  # noqa: S603 - this file's own program
        [sys.executable, "-P", str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it still runs, and free its pipes."""
    process.kill()
    process.communicate()
