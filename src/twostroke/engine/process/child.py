"""The engine's process as its server sees it: started, spoken with, and ended."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import EngineStoppedError
from twostroke.core.transport.frames import Frames
from twostroke.engine.process import messages as wire
from twostroke.engine.process.launch import LaunchedProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CLOSE_S: Final = 5.0
_CHUNK: Final = 1 << 16  # larger ones are mapped by malloc for each read: 15 us


class EngineProcess:
    """One process with an engine, which a server starts and ends."""

    def __init__(self, load: wire.LoadModel, launched: LaunchedProcess | None = None) -> None:
        """Have a process load, the launched one or a new one.

        Raises:
            BackendError: the operating system refuses a process.
        """
        self.began_s = time.monotonic()
        launched = launched or LaunchedProcess()
        self.socket, self._process = launched.socket, launched.process
        self.frames = Frames(wire.answers)
        with suppress(OSError):  # it has died already, as the next `receive` says
            self.socket.sendall(wire.pack(load))

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def wait_ready(self, progress: Callable[[int, int], None]) -> wire.EngineReady:
        """Wait until the engine takes requests; errors as `build`.

        Raises:
            EngineStoppedError: the process died.
        """
        while True:
            messages = self.receive()
            if messages is None:
                raise EngineStoppedError(f"The engine did not start: {self.describe_end()}.")
            for message in messages:
                match message:
                    case wire.EngineReady():
                        return message
                    case wire.EngineFailed():
                        raise message.error
                    case wire.Loading():
                        progress(message.done, message.total)
                    case wire.Log():
                        log(message)

    def receive(self) -> Iterator[wire.Answer] | None:
        """Return the messages that have come; None if the process has closed its end.

        Raises:
            WireError: something else has come.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return iter(())
        except OSError:
            data = b""
        return self.frames.feed(data) if data else None

    def kill(self) -> None:
        """End it now; twice does no harm."""
        self._process.kill()

    def describe_end(self) -> str:
        """End it if it has not, and return how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self.kill()
        code = self._process.wait()
        if code >= 0:
            return f"its process ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:  # a real-time signal
            name = f"signal {-code}"
        return f"its process was ended by {name}"

    def close(self) -> None:
        """Let it end, or end it after some seconds."""
        with suppress(OSError):
            self.socket.settimeout(1.0)
            self.socket.sendall(wire.pack(wire.Close()))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self.kill()
        self._process.wait()
        self.socket.close()


def log(message: wire.Log) -> None:
    """Write a line of the engine's into this process's log."""
    logging.getLogger(message.logger).log(message.level, "%s", message.text)
