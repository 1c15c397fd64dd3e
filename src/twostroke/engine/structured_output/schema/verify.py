"""Checks finished answers against their schemas, where the grammar does not enforce all keywords.

jsonschema-rs validates in a separate process: a hostile schema or answer can take much time and
memory, and the validator holds the GIL. The process is started at the first check, and again after
a check that exceeded its limits.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable

_WORKER: Final = Path(__file__).with_name("verify_worker.py")
MAX_ANSWER_CHARS: Final = 1 << 20
_CHECK_TIMEOUT_S: Final = 20.0  # the process ends itself after 2 s of processor time


class SchemaViolation(Frozen):
    """The rule of a JSON schema that a finished answer breaks, and where.

    Attributes:
        keyword: the schema's keyword; "repeated member" for a name that an object has twice.
        location: the JSON pointer of the keyword in the schema.
        path: the names and indices that lead to the wrong value in the answer.
        name: the name that an object has twice; empty for other rules.
    """

    keyword: str
    location: str = ""
    path: tuple[str | int, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        """Return the keyword with the JSON pointer of its schema: `uniqueItems (/items)`.

        `#` is the schema's root, as in errors about schemas.
        """
        schema_location = self.location.removesuffix(f"/{self.keyword}")
        detail = ascii(self.name) if self.name else schema_location or "#"
        return f"{self.keyword} ({detail})"


class UncheckedError(ValueError):
    """An answer could not be checked against its JSON schema; the message says why."""


class Verifier:
    """Checks finished answers against their JSON schemas, in a process that can be killed.

    Several threads may use it; checks run one after another.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._free: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def check_schema(self, schema: str) -> None:
        """Raise UncheckedError if the validator cannot check answers against a JSON schema.

        Called when a constraint with such a schema is compiled, before its first answer.
        """
        with self._lock:
            self._ask(schema, None)

    def fault(self, schema: str, answer: str) -> SchemaViolation | None:
        """Return the rule of a JSON schema that an answer breaks; None if the answer is valid.

        Raises:
            UncheckedError: the check took too long, or the schema cannot be used.
        """
        if len(answer) > MAX_ANSWER_CHARS:
            raise UncheckedError(f"it has more than {MAX_ANSWER_CHARS:,} characters")
        with self._lock:
            return self._ask(schema, answer)

    def _ask(self, schema: str, answer: str | None) -> SchemaViolation | None:
        process = self._running()
        limit = threading.Timer(_CHECK_TIMEOUT_S, process.kill)
        limit.daemon = True
        limit.start()
        verdict = reason = None
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps([schema, answer]).encode() + b"\n")
            process.stdin.flush()
            verdict = _line(process)
            if verdict is not None and not verdict.get("is_valid", True):
                reason = _line(process) or {"keyword": "unknown"}
        except OSError:  # the process has ended
            process.wait()
        finally:
            limit.cancel()
        if verdict is None:
            raise UncheckedError("the check took too much time or memory")
        if "error" in verdict:
            raise UncheckedError(verdict["error"])
        if reason is None:
            return None
        return SchemaViolation(**{**reason, "path": tuple(reason.get("path", ()))})

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process that checks answers, and start it if necessary."""
        if self._process is None or self._process.poll() is not None:
            self._free()
            self._process = _start()
            self._free = weakref.finalize(self, _end, self._process)
        return self._process


def _line(process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """Return the next line from the process that checks answers, decoded; None if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        process.wait()
        return None
    message: dict[str, Any] = json.loads(line)
    return message


def _start() -> subprocess.Popen[bytes]:
    """Start the process that checks answers.

    The option `-P` keeps this folder's modules from shadowing Python's.
    """
    return subprocess.Popen(  # noqa: S603 - this file's own program
        [sys.executable, "-P", str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process that checks answers, if it still runs, and close its pipes."""
    process.kill()
    process.communicate()
