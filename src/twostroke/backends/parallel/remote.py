"""Ranks that come to rank 0 by themselves, from this machine or others: a launcher started them."""

from __future__ import annotations

import logging
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Final

import msgspec

from twostroke.core.errors import BackendError, RanksLostError
from twostroke.core.frozen import Frozen
from twostroke.core.transport.channel import (
    Channel,
    ChannelClosedError,
    Listener,
    MessageType,
    connect,
)

_logger = logging.getLogger("twostroke.ranks")

ENTRY: Final = "twostroke.backends.parallel.worker"
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
