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

import msgspec

from twostroke.backends.parallel.division import LauncherEnv, launched
from twostroke.core import env
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.errors import BackendError, PortInUseError, RanksLostError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.transport.channel import (
    Channel,
    ChannelClosedError,
    Listener,
    MessageType,
    connect,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

ENTRY: Final = "twostroke.backends.parallel.worker"


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
        command = [sys.executable, "-P", "-m", ENTRY, "--rank", str(rank), "--channel"]
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


_logger = logging.getLogger("twostroke.ranks")

COME_S: Final = 60.0  # until a rank is there: its machine may start later, or be cut off
_END_S: Final = 5.0
_SAY_S: Final = 2.0
_LOOK_S: Final = 0.2
SILENCE_S: Final = 3  # of a host, until its connections count as ended


class RankArrival(Frozen):
    """The first message of a rank that comes to rank 0; `asked` is what it was to run, in words."""

    rank: int
    num_ranks: int
    asked: str = ""


class RemoteRank:
    """A rank that came; see `RankProcess`. Once its channel is cut, its own machine ends it."""

    def __init__(self, channel: Channel) -> None:
        """Take over its channel."""
        self.channel = channel

    def ended(self) -> str | None:
        """Return None: only its own machine knows."""
        return None

    def kill(self) -> None:
        """Cut its channel."""
        self.channel.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until it has closed its channel, after it was asked to end."""
        deadline = time.monotonic() + timeout_s
        while not self.channel.is_cut() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.channel.close()


class RemoteRanks:
    """A `Launcher` that waits for ranks to come, as often as one is needed."""

    def __init__(
        self, host: str, port: int, secret: bytes, num_ranks: int, asked: str = ""
    ) -> None:
        """Listen; `asked` is what this rank was to run, and the others will run.

        Raises:
            PortInUseError: the address is taken, or is not one of this machine.
        """
        self._listener = Listener(host, port, secret)
        self.host, self.port = host, self._listener.port
        self._num_ranks, self._asked = num_ranks, asked
        self._came: dict[int, Channel] = {}
        self._brought: set[int] = set()

    def __call__(self, rank: int) -> RemoteRank:
        """Return a rank's process, once it has come.

        Raises:
            RanksLostError: it does not come in time, or nobody waits any more.
            BackendError: at first, one of another number of ranks comes; later it is sent away.
        """
        deadline = time.monotonic() + COME_S
        while rank not in self._came:
            if not self._listener.is_open or time.monotonic() > deadline:
                raise RanksLostError(
                    f"Rank {rank} did not come to {self.host}:{self.port} within {COME_S:.0f} s."
                )
            if (channel := self._listener.accept(_LOOK_S)) is not None:
                self._take(channel)
        self._brought.add(rank)
        return RemoteRank(self._came.pop(rank))

    def close(self) -> None:
        """Take no more ranks."""
        self._listener.close()
        for channel in self._came.values():
            channel.close()

    def _take(self, channel: Channel) -> None:
        try:
            message = channel.receive(_SAY_S)
            arrival = msgspec.json.decode(message.body if message else b"", type=RankArrival)
        except (BackendError, msgspec.MsgspecError):
            channel.close()
            return
        if arrival.num_ranks != self._num_ranks or not 0 < arrival.rank < self._num_ranks:
            channel.close()
            reason = (
                f"A process came as rank {arrival.rank} of {arrival.num_ranks}, but rank 0 is one "
                f"of {self._num_ranks}: start all with the same number."
            )
            if len(self._brought) < self._num_ranks - 1:
                raise BackendError(reason)
            _logger.warning("%s", reason)  # a stray one must not end ranks that ran together
            return
        if arrival.asked != self._asked and arrival.asked and self._asked:
            _logger.warning(
                "Rank %d was started with %r, but follows rank 0, which has %r.",
                *(arrival.rank, arrival.asked, self._asked),
            )
        channel.notice_silence(SILENCE_S)
        if (earlier := self._came.pop(arrival.rank, None)) is not None:
            earlier.close()
        self._came[arrival.rank] = channel


def serve_rank(host: str, port: int, secret: bytes, arrival: RankArrival) -> None:
    """Be a rank, in a process that is started again if rank 0 loses it; returns in the end.

    Raises:
        ChannelClosedError: rank 0 does not answer.
    """
    rank, has_met = arrival.rank, False
    while True:
        channel = connect(host, port, secret, COME_S, has_listened=has_met)
        channel.notice_silence(SILENCE_S)
        channel.send(MessageType.HELLO, msgspec.json.encode(arrival))
        _say(f"Rank {rank} of {arrival.num_ranks} follows rank 0 at {host}:{port}.")
        if (code := _run(channel, rank)) == 0:
            return
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        _say(f"Rank {rank} was lost ({how}) and starts again.")
        has_met = True
        time.sleep(_LOOK_S)


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")


def _run(channel: Channel, rank: int) -> int:
    """Run a rank until it ends or its channel is cut; return its exit code."""
    number = channel.fileno()
    command = [sys.executable, "-P", "-m", ENTRY, "--rank", str(rank), "--channel", str(number)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(number,))  # noqa: S603 - this package's own program
    except OSError as error:
        channel.close()
        raise ChannelClosedError(f"Rank {rank} cannot start a process: {error}.") from None
    poll = select.poll()
    poll.register(number, select.POLLRDHUP)
    try:
        while process.poll() is None:
            if poll.poll(_LOOK_S * 1000):
                break
        try:
            return process.wait(_END_S)
        except subprocess.TimeoutExpired:  # frozen
            return -signal.SIGKILL
    except KeyboardInterrupt:  # else rank 0 would wait for it to return
        process.kill()
        process.wait()
        with suppress(ChannelClosedError):
            channel.send(MessageType.LEAVE)
        raise
    finally:
        process.kill()
        process.wait()
        channel.close()


def place_among(num_ranks: int) -> LauncherEnv | None:
    """Return this process's place if a launcher started it, None if this process starts the others.

    Raises:
        UsageError: the launcher has started another number of processes, or does not say where
            rank 0 is.
    """
    place = launched()
    if place is None or place.num_ranks == 1:
        return None
    if place.num_ranks != num_ranks:
        raise UsageError(
            f"The launcher has started {place.num_ranks} processes, but the options divide the "
            f"model over {num_ranks}: make both numbers the same."
        )
    if place.host is None:
        reason = "Set MASTER_ADDR to an address of rank 0's machine: this launcher does not say it."
        raise UsageError(reason)
    return place


def wait_for_ranks(place: LauncherEnv, asked: str = "") -> RemoteRanks:
    """Return the launcher of ranks that come by themselves, on rank 0, which was `asked` for this.

    Raises:
        PortInUseError: the address is taken, or is not one of this machine.
    """
    assert place.host is not None
    try:
        return RemoteRanks(place.host, place.port, env.rank_secret(), place.num_ranks, asked)
    except PortInUseError as error:
        knob = "Set MASTER_ADDR to an address of this machine and MASTER_PORT to a free port."
        raise PortInUseError(f"{error} {knob}") from None


def asked_of(model: str, parallel: ParallelOptions) -> str:
    """Return in words what a command is to run, to compare it with that of other ranks."""
    plain = ParallelOptions()
    names = [name for name in plain.__struct_fields__ if name != "launcher"]
    given = {name: getattr(parallel, name) for name in names}
    words = [f"{name} {given[name]}" for name in names if given[name] != getattr(plain, name)]
    return ", ".join([model, *words])


def follow_if_launched(model: str, parallel: ParallelOptions) -> None:
    """Be another rank than 0 until rank 0 ends, and exit, if a launcher has made this process one.

    Raises:
        UsageError: see `place_among`.
        ChannelClosedError: rank 0 does not answer.
        SystemExit: rank 0 has ended.
    """
    place = place_among(parallel.num_ranks)
    if place is not None and place.rank != 0:
        assert place.host is not None
        arrival = RankArrival(place.rank, place.num_ranks, asked_of(model, parallel))
        serve_rank(place.host, place.port, env.rank_secret(), arrival)
        raise SystemExit(0)
