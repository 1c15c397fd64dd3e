"""`Rendezvous`: exchanges addresses between the ranks of a link, and notices lost ranks."""

from __future__ import annotations

import secrets
import select
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar

from twostroke.backends.parallel.connection import (
    LOST_HOST_AFTER_S,
    connect_to_rank0,
    listen_for_ranks,
)
from twostroke.core.errors import RanksLostError
from twostroke.core.frozen import Frozen
from twostroke.core.transport.frames import ConnectionLostError, MessageFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.transport.connection import Connection
    from twostroke.core.transport.listener import Listener

T = TypeVar("T")

_TIMEOUT_S: Final = 60.0  # ranks open the model's file before they connect
_POLL_S: Final = 0.1


class LinkAddress(Frozen, array_like=True, tag=1):
    """A rank's message to rank 0: the bytes by which other ranks connect to it."""

    rank: int
    address: bytes


class LinkAddresses(Frozen, array_like=True, tag=2):
    """Rank 0's message to each rank: the addresses of all ranks, in order of ranks."""

    addresses: list[bytes]


_LinkMessage = LinkAddress | LinkAddresses
_LINK_FORMAT: Final[MessageFormat[_LinkMessage]] = MessageFormat(_LinkMessage)


class Rendezvous:
    """Connects each rank to rank 0, so that ranks exchange the addresses that their link needs.

    The connections stay open. When one connection ends, all end, and each rank calls `on_end`: so
    every rank notices a lost rank.
    """

    def __init__(self, rank: int, num_ranks: int, on_end: Callable[[], None]) -> None:
        """Prepare the rendezvous; rank 0 then calls `open`, and all ranks `enter` and `exchange`.

        `on_end`: called when a connection between ranks has ended.
        """
        self._rank, self._num_ranks, self._on_end = rank, num_ranks, on_end
        self._listener: Listener[_LinkMessage] | None = None
        self._connections: dict[int, Connection[_LinkMessage]] = {}
        self._has_ended = threading.Event()
        self._watcher: threading.Thread | None = None

    def open(self, host: str) -> str:
        """Listen for the other ranks, on rank 0; return the text by which they connect.

        Raises:
            PortInUseError: `host` is not an address of this machine.
        """
        secret = secrets.token_bytes(16)
        self._listener = listen_for_ranks(host, 0, secret, _LINK_FORMAT)
        return f"{self._listener.port} {secret.hex()} {host}"

    def enter(self, text: str) -> str:
        """Connect to rank 0 by the text that `open` returned; return this rank's own address.

        Raises:
            RanksLostError: rank 0 does not answer.
        """
        port, secret, host = text.split(" ", 2)
        if self._rank == 0:
            return host
        try:
            connection = connect_to_rank0(
                (host, int(port)), bytes.fromhex(secret), _LINK_FORMAT, _TIMEOUT_S
            )
        except ConnectionLostError as error:
            raise RanksLostError(f"Rank {self._rank} cannot come to the link. {error}") from None
        self._connections[0] = connection
        return connection.own_address()

    def exchange(self, own_bytes: bytes) -> list[bytes]:
        """Send this rank's bytes to all ranks; return the bytes of each rank, in order of ranks.

        Raises:
            RanksLostError: some ranks do not connect in time, or a connection ends.
        """
        try:
            all_bytes = (
                self._gather_from_ranks(own_bytes)
                if self._rank == 0
                else self._exchange_with_rank0(own_bytes)
            )
        except ConnectionLostError as error:
            raise RanksLostError(f"The ranks of a link could not meet. {error}") from None
        self._watcher = threading.Thread(target=self._watch, name="twostroke-link", daemon=True)
        self._watcher.start()
        return all_bytes

    @property
    def has_ended(self) -> bool:
        """Return whether the link has ended, by a lost rank or a call of `end`."""
        return self._has_ended.is_set()

    def end(self) -> None:
        """End the link between ranks for all of them; any thread may call this, more than once."""
        if not self._has_ended.is_set():
            self._has_ended.set()
            for connection in self._connections.values():
                connection.cut()

    def close(self) -> None:
        """End the link, and close the sockets; `on_end` is not called afterwards."""
        self.end()
        if self._watcher is not None:
            self._watcher.join()
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections.values():
            connection.close()

    def _gather_from_ranks(self, own_bytes: bytes) -> list[bytes]:
        assert self._listener is not None
        deadline = time.monotonic() + _TIMEOUT_S
        parts = {0: own_bytes}
        while len(parts) < self._num_ranks:
            connection = self._listener.accept(_POLL_S)
            if self._has_ended.is_set():
                raise RanksLostError("Some ranks ended before all had come to the link.")
            if connection is None and time.monotonic() < deadline:
                continue
            if connection is None:
                missing = sorted(set(range(self._num_ranks)) - set(parts))
                ranks = ", ".join(map(str, missing))
                raise RanksLostError(
                    f"Did not come to the link within {_TIMEOUT_S:.0f} s: ranks {ranks}."
                )
            message = _receive(connection, LinkAddress)
            rank, part = message.rank, message.address
            if rank in parts or not 0 < rank < self._num_ranks:
                connection.close()
                raise RanksLostError(f"Two processes say that they are rank {rank} of the link.")
            self._connections[rank], parts[rank] = connection, part
        all_bytes = [parts[rank] for rank in range(self._num_ranks)]
        for connection in self._connections.values():
            connection.send(LinkAddresses(all_bytes))
        return all_bytes

    def _exchange_with_rank0(self, own_bytes: bytes) -> list[bytes]:
        connection = self._connections[0]
        connection.send(LinkAddress(self._rank, own_bytes))
        return _receive(connection, LinkAddresses).addresses

    def _watch(self) -> None:
        """Wait until a connection between ranks ends, then end all connections."""
        poll = select.poll()
        for connection in self._connections.values():
            connection.detect_lost_host(LOST_HOST_AFTER_S)
            poll.register(connection, select.POLLRDHUP)
        while not self._has_ended.is_set() and not poll.poll(_POLL_S * 1000):
            pass
        self.end()
        self._on_end()


def _receive(connection: Connection[_LinkMessage], message_type: type[T]) -> T:
    """Return the next message of another rank, which must have this type."""
    message = connection.receive(_TIMEOUT_S)
    if message is None:
        raise ConnectionLostError(f"Rank 0 did not hear from all within {_TIMEOUT_S:.0f} s.")
    if not isinstance(message, message_type):
        raise ConnectionLostError("A rank sent an address at the wrong time.")
    return message
