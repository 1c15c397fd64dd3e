"""Starts ranks on this machine, or waits for ranks that torchrun, mpirun or srun started.

`LocalRanks` starts processes here. `RemoteRanks` listens on rank 0 until ranks connect; the other
side is `serve_rank`, which a process of such a launcher runs.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

from twostroke.backends.division import LauncherEnv, read_launcher_env
from twostroke.backends.parallel.connection import (
    LOST_HOST_AFTER_S,
    connect_to_rank0,
    listen_for_ranks,
    open_connection,
)
from twostroke.backends.parallel.rank_messages import RECEIVED_BY_RANKS, RankArrival, RankLeaves
from twostroke.core import env
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.errors import BackendError, PortInUseError, RanksLostError, UsageError
from twostroke.core.message_text import counted_noun
from twostroke.core.transport.frames import ConnectionLostError, InvalidMessageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from twostroke.backends.parallel.connection import RankConnection

ENTRY: Final = "twostroke.backends.parallel.worker"


class RankProcess(Protocol):
    """The process of a rank other than 0, on this machine or another one."""

    connection: RankConnection

    @property
    def local_pid(self) -> int | None:
        """The id of the rank's process if it runs on this machine."""

    def exit_reason(self) -> str | None:
        """Return why the rank's process ended, such as "was ended by SIGKILL"; None if unknown."""

    def kill(self) -> None:
        """Kill the rank's process if it runs on this machine, and close the connection to it."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the rank's process has ended; kill it after the timeout."""


class Launcher(Protocol):
    """Starts the processes of ranks or waits for them to connect, also to replace lost ranks."""

    def __call__(self, rank: int) -> RankProcess:
        """Start rank number `rank`, or wait until it connects, and return its process."""

    def close(self) -> None:
        """Start or accept no more rank processes."""


class LocalRank:
    """A rank's process on this machine, which ends by itself when its connection is closed."""

    def __init__(self, rank: int, files: tuple[int, ...]) -> None:
        """Start the process of a rank, which inherits the open `files`.

        Ctrl-C in the terminal does not reach the process; rank 0 ends it.

        Raises:
            BackendError: the operating system refuses a process.
        """
        ours, theirs = socket.socketpair()
        number = theirs.fileno()
        command = [sys.executable, "-P", "-m", ENTRY, "--rank", str(rank), "--connection"]
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
        self.connection = open_connection(ours)

    @property
    def local_pid(self) -> int:
        """Return the process id of the rank."""
        return self._process.pid

    def exit_reason(self) -> str | None:
        """Return why the rank's process ended."""
        with suppress(
            subprocess.TimeoutExpired
        ):  # the connection closes just before the process ends
            code = self._process.wait(0.2)
            return f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        return None

    def kill(self) -> None:
        """Kill the rank's process and reap it."""
        self._process.kill()
        self._process.wait()
        self.connection.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until the rank's process has ended; kill it after the timeout."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()


class LocalRanks:
    """A `Launcher` that starts the processes of ranks on this machine."""

    def __init__(self, *files: int) -> None:
        """Set the open files that new ranks inherit, and note this process's CPU cores."""
        self._files = files
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()

    def __call__(self, rank: int) -> LocalRank:
        """Start a rank's process on all cores of this process, even if this thread has fewer."""
        with _on_cores(self._cores):
            return LocalRank(rank, self._files)

    def close(self) -> None:
        """Do nothing, because each rank's process is ended separately."""


@contextmanager
def _on_cores(cores: Collection[int]) -> Iterator[None]:
    """Run this thread, and processes that it starts, on these CPU cores within the `with` block."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_logger = logging.getLogger("twostroke.ranks")

ARRIVAL_TIMEOUT_S: Final = 60.0  # a rank's machine may start later, or be cut off for a while
_END_S: Final = 5.0
_ARRIVAL_MESSAGE_S: Final = 2.0
_POLL_S: Final = 0.2


class RemoteRank:
    """A rank's process that a launcher started; it ends when its connection to rank 0 is cut."""

    def __init__(self, connection: RankConnection) -> None:
        """Take ownership of the connection to the rank."""
        self.connection = connection

    @property
    def local_pid(self) -> None:
        """Return None: the process may run on another machine."""
        return None

    def exit_reason(self) -> str | None:
        """Return None, because only the rank's machine knows why the rank's process ended."""
        return None

    def kill(self) -> None:
        """Cut the connection to the rank, which ends the rank's process."""
        self.connection.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until the rank has closed its connection; close the connection after the timeout."""
        deadline = time.monotonic() + timeout_s
        while not self.connection.is_cut() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.connection.close()


class RemoteRanks:
    """A `Launcher` that waits until ranks connect to this process, which is rank 0."""

    def __init__(
        self, host: str, port: int, secret: bytes, num_ranks: int, command: str = ""
    ) -> None:
        """Listen for ranks on rank 0; `command`: rank 0's command, to compare with other ranks.

        Raises:
            PortInUseError: the address is taken, or is not an address of this machine.
        """
        self._listener = listen_for_ranks(host, port, secret, RECEIVED_BY_RANKS)
        self.host, self.port = host, self._listener.port
        self._num_ranks, self._command = num_ranks, command
        self._arrived: dict[int, RankConnection] = {}
        self._returned: set[int] = set()

    def __call__(self, rank: int) -> RemoteRank:
        """Wait until rank number `rank` has connected, and return its process.

        Raises:
            RanksLostError: the rank does not connect in time, or this launcher was closed.
            BackendError: a process connects that was started for another number of ranks, before
                all ranks have connected once; later, such a process is only refused.
        """
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while rank not in self._arrived:
            if not self._listener.is_open or time.monotonic() > deadline:
                raise RanksLostError(
                    f"Rank {rank} did not come to {self.host}:{self.port} within "
                    f"{ARRIVAL_TIMEOUT_S:.0f} s."
                )
            if (connection := self._listener.accept(_POLL_S)) is not None:
                self._admit(connection)
        self._returned.add(rank)
        return RemoteRank(self._arrived.pop(rank))

    def close(self) -> None:
        """Accept no more ranks, and make a waiting call for a rank fail."""
        self._listener.close()
        for connection in self._arrived.values():
            connection.close()

    def _admit(self, connection: RankConnection) -> None:
        try:
            arrival = connection.receive(_ARRIVAL_MESSAGE_S)
        except ConnectionLostError as error:
            arrival = None
            if isinstance(error, InvalidMessageError):
                _logger.warning(
                    "A process that is no rank of this version of Twostroke was refused: install "
                    "the same version on all machines."
                )
        if not isinstance(arrival, RankArrival):
            connection.close()
            return
        if arrival.num_ranks != self._num_ranks or not 0 < arrival.rank < self._num_ranks:
            connection.close()
            reason = (
                f"A process came as rank {arrival.rank} of {arrival.num_ranks}, but rank 0 is one "
                f"of {self._num_ranks}: start all with the same number."
            )
            if len(self._returned) < self._num_ranks - 1:
                raise BackendError(reason)
            _logger.warning("%s", reason)  # must not end the ranks that run already
            return
        if arrival.command != self._command and arrival.command and self._command:
            _logger.warning(
                "Rank %d was started with %r, but follows rank 0, which has %r.",
                arrival.rank,
                arrival.command,
                self._command,
            )
        connection.detect_lost_host(LOST_HOST_AFTER_S)
        if (earlier := self._arrived.pop(arrival.rank, None)) is not None:
            earlier.close()
        self._arrived[arrival.rank] = connection


def serve_rank(host: str, port: int, secret: bytes, arrival: RankArrival) -> None:
    """Connect to rank 0 and run a rank in a child process, until rank 0 ends.

    If rank 0 loses the rank, the process is started again. `arrival`: the first message to rank 0,
    with the number of the rank.

    Raises:
        ConnectionLostError: rank 0 does not answer.
    """
    rank, has_connected = arrival.rank, False
    while True:
        connection = connect_to_rank0(
            (host, port), secret, RECEIVED_BY_RANKS, ARRIVAL_TIMEOUT_S, has_listened=has_connected
        )
        connection.detect_lost_host(LOST_HOST_AFTER_S)
        connection.send(arrival)
        _print(f"Rank {rank} of {arrival.num_ranks} follows rank 0 at {host}:{port}.")
        if (code := _run(connection, rank)) == 0:
            return
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        _print(f"Rank {rank} was lost ({how}) and starts again.")
        has_connected = True
        time.sleep(_POLL_S)


def _print(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")


def _run(connection: RankConnection, rank: int) -> int:
    """Start a process that runs a rank over this connection, and wait until it ends.

    Returns the exit code of the process.
    """
    number = connection.fileno()
    command = [sys.executable, "-P", "-m", ENTRY, "--rank", str(rank), "--connection", str(number)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(number,))  # noqa: S603 - this package's own program
    except OSError as error:
        connection.close()
        raise ConnectionLostError(f"Rank {rank} cannot start a process: {error}.") from None
    poll = select.poll()
    poll.register(number, select.POLLRDHUP)
    try:
        while process.poll() is None:
            if poll.poll(_POLL_S * 1000):
                break
        try:
            return process.wait(_END_S)
        except subprocess.TimeoutExpired:  # the process is frozen
            return -signal.SIGKILL
    except KeyboardInterrupt:  # tells rank 0, which would wait for the rank's return
        process.kill()
        process.wait()
        with suppress(ConnectionLostError):
            connection.send(RankLeaves())
        raise
    finally:
        process.kill()
        process.wait()
        connection.close()


def assigned_rank(num_ranks: int) -> LauncherEnv | None:
    """Return the rank that a launcher gave this process; None without a launcher.

    Raises:
        UsageError: the launcher has started another number of processes, or does not set the
            address of rank 0.
    """
    launcher_env = read_launcher_env()
    if launcher_env is None or launcher_env.num_ranks == 1:
        return None
    if launcher_env.num_ranks != num_ranks:
        raise UsageError(
            f"The launcher has started {counted_noun(launcher_env.num_ranks, 'process')}, but the "
            f"options divide the model over {num_ranks}: make both numbers the same."
        )
    if launcher_env.host is None:
        reason = "Set MASTER_ADDR to an address of rank 0's machine: this launcher does not say it."
        raise UsageError(reason)
    return launcher_env


def wait_for_ranks(launcher_env: LauncherEnv, command: str = "") -> RemoteRanks:
    """Return a launcher that waits until the other ranks connect; only called on rank 0.

    Raises:
        PortInUseError: the address is taken, or is not an address of this machine.
    """
    assert launcher_env.host is not None
    try:
        return RemoteRanks(
            launcher_env.host, launcher_env.port, env.rank_secret(), launcher_env.num_ranks, command
        )
    except PortInUseError as error:
        knob = "Set MASTER_ADDR to an address of this machine and MASTER_PORT to a free port."
        raise PortInUseError(f"{error} {knob}") from None


def describe_command(model: str, parallel: ParallelOptions) -> str:
    """Return a text with the model and the parallel options, which must agree on all ranks."""
    defaults = ParallelOptions()
    names = [name for name in defaults.__struct_fields__ if name != "launcher"]
    values = {name: getattr(parallel, name) for name in names}
    words = [f"{name} {values[name]}" for name in names if values[name] != getattr(defaults, name)]
    return ", ".join([model, *words])


def follow_if_launched(model: str, parallel: ParallelOptions) -> None:
    """If torchrun or mpirun made this process a rank other than 0, run the rank, then exit.

    Raises:
        UsageError: the launcher has started another number of processes, or does not set the
            address of rank 0.
        ConnectionLostError: rank 0 does not answer.
        SystemExit: rank 0 has ended.
    """
    launcher_env = assigned_rank(parallel.num_ranks)
    if launcher_env is not None and launcher_env.rank != 0:
        assert launcher_env.host is not None
        arrival = RankArrival(
            launcher_env.rank, launcher_env.num_ranks, describe_command(model, parallel)
        )
        serve_rank(launcher_env.host, launcher_env.port, env.rank_secret(), arrival)
        raise SystemExit(0)
