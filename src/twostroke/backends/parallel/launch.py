"""Starts ranks on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

from twostroke.core.errors import BackendError
from twostroke.core.transport.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_ENTRY: Final = "twostroke.backends.parallel.worker"


class RankProcess(Protocol):
    """Another rank, wherever it runs."""

    channel: Channel

    def ended(self) -> str | None:
        """Return why it ended, such as "was killed by SIGKILL"; None if that is not known."""

    def kill(self) -> None:
        """End it now, if it is one of ours, and close its channel."""

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended, after it was asked to; kill it if it takes longer."""


class Launcher(Protocol):
    """Brings ranks, as often as they are needed."""

    def __call__(self, rank: int) -> RankProcess:
        """Return a process that is this rank."""

    def close(self) -> None:
        """Bring no more ranks."""


class LocalRank:
    """A process on this machine. It ends by itself once its channel is closed."""

    def __init__(self, rank: int, files: tuple[int, ...]) -> None:
        """Start it; it inherits the open `files`.

        A terminal's Ctrl-C does not reach it: rank 0 ends it.

        Raises:
            BackendError: the operating system refuses a process.
        """
        ours, theirs = socket.socketpair()
        number = theirs.fileno()
        command = [sys.executable, "-P", "-m", _ENTRY, "--rank", str(rank), "--channel"]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this package's own program
                [*command, str(number)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(number, *files),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            reason = f"The operating system refuses a process for rank {rank}: {error.strerror}."
            raise BackendError(reason) from None
        finally:
            theirs.close()
        self.channel = Channel(ours)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def ended(self) -> str | None:
        """Return why it ended."""
        with suppress(subprocess.TimeoutExpired):  # its channel ends a moment before it does
            code = self._process.wait(0.2)
            return f"was ended by {_name(-code)}" if code < 0 else f"ended with code {code}"
        return None

    def kill(self) -> None:
        """Kill the process and reap it."""
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def wait(self, timeout_s: float) -> None:
        """Wait for the process, or kill it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()


class LocalRanks:
    """A `Launcher` of ranks that inherit open files."""

    def __init__(self, *files: int) -> None:
        """Remember the files, and the cores that this process has."""
        self._files = files
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()

    def __call__(self, rank: int) -> LocalRank:
        """Start a rank, whose cores are not those of the thread that starts it."""
        with _on_all(self._cores):
            return LocalRank(rank, self._files)

    def close(self) -> None:
        """Do nothing: each rank is ended by itself."""


@contextmanager
def _on_all(cores: Collection[int]) -> Iterator[None]:
    """Let this thread run on all these cores, which a process that it starts inherits."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
