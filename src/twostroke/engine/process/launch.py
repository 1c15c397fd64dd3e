"""Starts the process of an engine, before what it shall load is known.

It imports what it needs at once, while the server's process imports what that needs.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Final

from twostroke.core import env
from twostroke.core.errors import BackendError

_ENTRY: Final = "twostroke.engine.process.main"


class LaunchedProcess:
    """A process that waits for a `wire.Load` at the other end of `socket`."""

    def __init__(self) -> None:
        """Start it; a terminal's Ctrl-C does not reach it.

        Raises:
            BackendError: the operating system refuses a process.
        """
        try:
            self.socket, theirs = socket.socketpair()
        except OSError as error:
            raise _refused(error) from None
        number = theirs.fileno()
        try:
            self.process = subprocess.Popen(  # noqa: S603 - this package's own program
                [sys.executable, "-P", "-m", _ENTRY, str(number)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(number,),
                env=env.engine_environment(),
                start_new_session=True,
            )
        except OSError as error:
            self.socket.close()
            raise _refused(error) from None
        finally:
            theirs.close()

    def close(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.wait()
        self.socket.close()


def _refused(error: OSError) -> BackendError:
    reason = f"The operating system refuses a process for the engine: {error.strerror}."
    return BackendError(reason)
