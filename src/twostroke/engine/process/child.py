"""The server's handle of an engine process: starts it, receives its messages, and ends it."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import EngineStoppedError
from twostroke.core.transport.event_loop import EventLoopConnection
from twostroke.core.transport.frames import ConnectionLostError, InvalidMessageError
from twostroke.engine.process import messages as wire
from twostroke.engine.process.launch import LaunchedProcess

if TYPE_CHECKING:
    from collections.abc import Callable

_CLOSE_TIMEOUT_S: Final = 5.0
_CLOSE_MESSAGE_TIMEOUT_S: Final = 1.0


class EngineProcess:
    """A server's handle of its engine process: starts it, receives its messages, and ends it.

    Attributes:
        connection: the connection to the process.
        start_s: when the process was started, on the monotonic clock.
    """

    def __init__(self, load: wire.LoadModel, launched: LaunchedProcess | None = None) -> None:
        """Send the message `load` to an engine process that waits for it, or to a new process.

        Raises:
            BackendError: the operating system refuses a process.
        """
        self.start_s = time.monotonic()
        launched = launched or LaunchedProcess()
        self._process = launched.process
        self.connection = EventLoopConnection(launched.socket, wire.RECEIVED_BY_SERVER)
        with suppress(ConnectionLostError):  # the process has died; `receive_arrived` tells so
            self.connection.send(load)

    @property
    def pid(self) -> int:
        """The process id of the engine process."""
        return self._process.pid

    def wait_ready(self, progress: Callable[[int, int], None]) -> wire.EngineReady:
        """Wait until the engine process takes requests.

        `progress(done, total)` is called with bytes of weights loaded.

        Raises:
            EngineStoppedError: the process died.
            TwostrokeError: the engine could not be built; errors are as in `build`.
        """
        while True:
            try:
                message = self.connection.receive()
            except InvalidMessageError:
                raise
            except ConnectionLostError:
                reason = f"The engine did not start: {self.describe_end()}."
                raise EngineStoppedError(reason) from None
            match message:
                case wire.EngineReady():
                    return message
                case wire.EngineFailed():
                    raise message.error
                case wire.Loading():
                    progress(message.done, message.total)
                case wire.Log():
                    log(message)

    def kill(self) -> None:
        """Kill the engine process, which may be dead already."""
        self._process.kill()

    def describe_end(self) -> str:
        """Return a phrase that says how the engine process ended, such as by a signal.

        The process is killed if it does not end within a second.
        """
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
        """Ask the engine process to end, and kill it after some seconds."""
        self.connection.send_last(wire.Close(), _CLOSE_MESSAGE_TIMEOUT_S)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_TIMEOUT_S)
        self.kill()
        self._process.wait()
        self.connection.close()


def log(message: wire.Log) -> None:
    """Write a log record that the engine process has sent into this process's log."""
    logging.getLogger(message.logger).log(message.level, "%s", message.text)
