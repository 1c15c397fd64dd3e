"""Starts an engine process early: before the server has read its options.

In this way the engine process and the server's process import their modules at the same time. This
module imports little, so that the engine process starts as early as possible.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Final

from twostroke.core import env
from twostroke.core.errors import BackendError

_ENTRY_MODULE: Final = "twostroke.engine.process.main"


class LaunchedProcess:
    """An engine process that was started early, and waits for a `LoadModel` message.

    `socket` is the server's end of the connection, and `process` the process.
    """

    def __init__(self) -> None:
        """Start the engine process in its own session, so that Ctrl-C does not reach it.

        Raises:
            BackendError: the operating system refuses a process.
        """
        try:
            self.socket, child_socket = socket.socketpair()
        except OSError as error:
            raise _start_error(error) from None
        descriptor = child_socket.fileno()
        try:
            self.process = subprocess.Popen(  # noqa: S603 - this package's own program
                [sys.executable, "-P", "-m", _ENTRY_MODULE, str(descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                env=env.engine_environment(),
                start_new_session=True,
            )
        except OSError as error:
            self.socket.close()
            raise _start_error(error) from None
        finally:
            child_socket.close()

    def close(self) -> None:
        """Kill the engine process, and close the connection to it."""
        self.process.kill()
        self.process.wait()
        self.socket.close()


def _start_error(error: OSError) -> BackendError:
    reason = f"The operating system cannot start a process for the engine: {error.strerror}."
    return BackendError(reason)
