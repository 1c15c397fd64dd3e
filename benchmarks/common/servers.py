"""Start a server in its own process at a free port, for the lifetime of an `ExitStack`."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

from benchmarks.common.report import note

if TYPE_CHECKING:
    import contextlib
    from pathlib import Path

MODEL_NAME = "bench"
_READY_WITHIN_S = 120.0


def our_command(model: str, num_threads: int) -> tuple[str, ...]:
    """Return what serves a model as `MODEL_NAME`, so that every run computes alike.

    It does without speculation, and computes each request by itself.

    It stops when its standard input ends, so it needs one.
    """
    return (
        *(sys.executable, "-m", "twostroke.fleet.cluster.process"),
        *("serve", model, "--name", MODEL_NAME),
        *("--speculate", "off", "--threads", str(num_threads), "--no-coalesce"),
    )


class Server:
    """A server's process at a free port of this machine; ended when the stack is left.

    Its standard input is a pipe that ends with this process, however that ends.

    Attributes:
        port: where it listens.
        pid: its process, which may have others below it.
        ready_s: how long it took until it was healthy.
    """

    def __init__(
        self, name: str, command: tuple[str, ...], folder: Path, stack: contextlib.ExitStack
    ) -> None:
        """Start it and wait until it is healthy.

        Raises:
            SystemExit: it ends, or is not healthy in time.
        """
        note(f"Starting {name}")
        self.port, self._log = free_port(), folder / f"{name}.log"
        with self._log.open("wb") as output:
            where = ("--host", "127.0.0.1", "--port", str(self.port))
            process = subprocess.Popen(
                [*command, *where], stdin=subprocess.PIPE, stdout=output, stderr=output
            )
        stack.callback(_end, process)
        self.pid = process.pid
        deadline = (began_s := time.monotonic()) + _READY_WITHIN_S
        while not _is_healthy(self.port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not get ready; the end of its log:\n{self.tail()}")
            time.sleep(0.02)
        self.ready_s = time.monotonic() - began_s

    def tail(self) -> str:
        """Return the end of what it has said."""
        return self._log.read_text(errors="replace")[-1000:]


def free_port() -> int:
    """Return a port at which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()  # only now: its end is a second signal, which cuts answers off
