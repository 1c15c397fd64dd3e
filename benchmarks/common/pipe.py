"""Processes that stay alive and answer one question at a time, as lines of JSON over pipes.

Only the standard library is imported: peers import this file in their own environments.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.common.quiet import Watch, family_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    Handler = Callable[..., "dict[str, Any]"]

_ANSWER_WITHIN_S = 1800.0
_IDLE_FOR_S = 0.1
_IDLE_WITHIN_S = 60.0  # packing a model of 8B and writing the packed file takes half a minute
_IDLE_SHARE = 0.15  # of one core: one tick of the kernel's clock in `_IDLE_FOR_S`


class WorkerError(Exception):
    """A worker died, failed, took too long, or does not come to rest."""


class Worker:
    """The parent's end of such a process; it may use the processor only while it is asked."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        """Start it; what it says besides answers goes to `log`."""
        self.name, self._log = name, log
        self.others_share = 0.0  # of the processor that others took during the last answer
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def call(self, command: str, **fields: object) -> dict[str, Any]:
        """Put a question, wait for its answer, then for the process to come to rest.

        Raises:
            WorkerError: it died, it failed, it took too long, or it does not come to rest.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"command": command, **fields})
        watch = Watch(self._process.pid)
        limit = threading.Timer(_ANSWER_WITHIN_S, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        finally:
            limit.cancel()
        if not reply:
            raise WorkerError(f"ended with code {self._process.wait()}: {self._last_words()}")
        self.others_share = watch.others_share()
        answer: dict[str, Any] = json.loads(reply)
        if "error" in answer:
            raise WorkerError(f"failed at '{command}': {answer['error']}")
        self._wait_until_idle()
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_idle(self) -> None:
        """Wait until it uses no processor time, so that the next one has the machine to itself."""
        deadline = time.monotonic() + _IDLE_WITHIN_S
        while time.monotonic() < deadline:
            before = family_s(self._process.pid)
            time.sleep(_IDLE_FOR_S)
            if family_s(self._process.pid) - before < _IDLE_SHARE * _IDLE_FOR_S:
                return
        raise WorkerError("does not rest between runs, so it would disturb the others")

    def _last_words(self) -> str:
        """Return the last line that it wrote into its log."""
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def claim_output() -> TextIO:
    """Return standard output for answers alone: what libraries print goes to standard error.

    A worker calls it before it loads a model.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(handlers: Mapping[str, Handler], answers: TextIO) -> None:
    """Answer questions from standard input on `answers` until it closes: the worker's end."""
    for line in sys.stdin:
        fields = json.loads(line)
        try:
            answer = handlers[fields.pop("command")](**fields)
        except Exception as error:  # noqa: BLE001 the outermost boundary: the parent must hear of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
