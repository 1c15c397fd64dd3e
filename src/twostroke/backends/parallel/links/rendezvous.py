"""Where the ends of a link find each other, and how all learn that one is gone."""

from __future__ import annotations

import secrets
import select
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from twostroke.core.errors import RanksLostError
from twostroke.core.transport.channel import ChannelClosedError, Listener, MessageType, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.transport.channel import Channel

T = TypeVar("T")

_TIMEOUT_S: Final = 60.0  # ranks open the model's file before they come
_LOOK_S: Final = 0.1
_SILENCE_S: Final = 3  # of the other host, until its connection counts as ended


class Rendezvous:
    """Each rank's connection to rank 0, at which they exchange what their engines need.

    The connections stay open: when one ends, all do, and each rank calls `on_end`.
    """

    def __init__(self, rank: int, num_ranks: int, on_end: Callable[[], None]) -> None:
        """Prepare to meet; rank 0 calls `open`, all call `enter` and `exchange`."""
        self._rank, self._num_ranks, self._on_end = rank, num_ranks, on_end
        self._listener: Listener | None = None
        self._channels: dict[int, Channel] = {}
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    def open(self, host: str) -> str:
        """Return the text with which other ranks find this one, which is rank 0.

        Raises:
            PortInUseError: `host` is not an address of this machine.
        """
        secret = secrets.token_bytes(16)
        self._listener = Listener(host, 0, secret)
        return f"{self._listener.port} {secret.hex()} {host}"

    def enter(self, text: str) -> str:
        """Connect to rank 0, by the text of its `open`; return this rank's own address.

        Raises:
            RanksLostError: rank 0 does not answer.
        """
        port, secret, host = text.split(" ", 2)
        if self._rank == 0:
            return host
        try:
            channel = connect(host, int(port), bytes.fromhex(secret), _TIMEOUT_S)
        except ChannelClosedError as error:
            raise RanksLostError(f"Rank {self._rank} cannot come to the link. {error}") from None
        self._channels[0] = channel
        return channel.own_address()

    def exchange(self, own: bytes) -> list[bytes]:
        """Give this rank's bytes and return those of all ranks, in their order.

        Raises:
            RanksLostError: some ranks do not come in time, or a connection ends.
        """
        try:
            everybody = self._gather(own) if self._rank == 0 else self._hear(own)
        except ChannelClosedError as error:
            raise RanksLostError(f"The ranks of a link could not meet. {error}") from None
        self._watcher = threading.Thread(target=self._watch, name="twostroke-link", daemon=True)
        self._watcher.start()
        return everybody

    @property
    def has_ended(self) -> bool:
        """Whether the link has ended for all."""
        return self._ended.is_set()

    def end(self) -> None:
        """Let all ranks know that the link has ended. Any thread may call it, more than once."""
        if not self._ended.is_set():
            self._ended.set()
            for channel in self._channels.values():
                channel.cut()

    def close(self) -> None:
        """End, and give the sockets back; `on_end` is not called any more."""
        self.end()
        if self._watcher is not None:
            self._watcher.join()
        if self._listener is not None:
            self._listener.close()
        for channel in self._channels.values():
            channel.close()

    def _gather(self, own: bytes) -> list[bytes]:
        assert self._listener is not None
        deadline = time.monotonic() + _TIMEOUT_S
        parts = {0: own}
        while len(parts) < self._num_ranks:
            channel = self._listener.accept(_LOOK_S)
            if self._ended.is_set():
                raise RanksLostError("Some ranks ended before all had come to the link.")
            if channel is None and time.monotonic() < deadline:
                continue
            if channel is None:
                missing = sorted(set(range(self._num_ranks)) - set(parts))
                ranks = ", ".join(map(str, missing))
                raise RanksLostError(
                    f"Did not come to the link within {_TIMEOUT_S:.0f} s: ranks {ranks}."
                )
            rank, part = _decode(_next(channel), tuple[int, bytes])
            if rank in parts or not 0 < rank < self._num_ranks:
                channel.close()
                raise RanksLostError(f"Two processes say that they are rank {rank} of the link.")
            self._channels[rank], parts[rank] = channel, part
        everybody = [parts[rank] for rank in range(self._num_ranks)]
        for channel in self._channels.values():
            channel.send(MessageType.HELLO, msgspec.msgpack.encode(everybody))
        return everybody

    def _hear(self, own: bytes) -> list[bytes]:
        channel = self._channels[0]
        channel.send(MessageType.HELLO, msgspec.msgpack.encode((self._rank, own)))
        return _decode(_next(channel), list[bytes])

    def _watch(self) -> None:
        """Wait until a connection ends, then end all others."""
        poll = select.poll()
        for channel in self._channels.values():
            channel.notice_silence(_SILENCE_S)
            poll.register(channel, select.POLLRDHUP)
        while not self._ended.is_set() and not poll.poll(_LOOK_S * 1000):
            pass
        self.end()
        self._on_end()


def _next(channel: Channel) -> bytes:
    message = channel.receive(_TIMEOUT_S)
    if message is None:
        raise ChannelClosedError(f"Rank 0 did not hear from all within {_TIMEOUT_S:.0f} s.")
    return message.body


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ChannelClosedError(f"What a rank said at the link cannot be read: {error}.") from None
