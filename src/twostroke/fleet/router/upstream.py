"""Connections to replicas, and the pools that reuse them."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import masked_url
from twostroke.fleet.router.response import (
    CutOffError,
    FailedReplicaError,
    ReplicaError,
    ResponseReader,
)
from twostroke.server.http.write_coalescer import limit_read_size

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from twostroke.fleet.router.response import Head

    Headers = Sequence[tuple[bytes, bytes]]

_MAX_IDLE_S: Final = 30.0  # vLLM and llama-server close idle connections after 5 to 75 s
_MAX_UNREAD_BYTES: Final = 256 * 1024
_NOT_IN_HOST_NAMES: Final = re.compile(r"[\s@/?#\\]")
_CUT_OFF_ERRORS: Final = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}


class Address(Frozen):
    """The address of a replica, as parts of its URL.

    Attributes:
        url: the normalized URL.
        host, port: where to connect.
        is_tls: whether to use TLS.
        path: the prefix of all paths.
        netloc: the value of the header `Host`.
    """

    url: str
    host: str
    port: int
    is_tls: bool
    path: str
    netloc: bytes

    @classmethod
    def of(cls, url: str, field: str = "replicas") -> Address:
        """Parse the URL of a server.

        Raises:
            UsageError: the text is not the URL of a server; the error names the option `field`.
        """
        reason = "must be a URL such as http://host:8000, without a password, got {value}."
        shown_url = repr(masked_url(url))
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
            netloc = parts.netloc.lower()
            host_header = netloc.encode("ascii" if netloc.isascii() else "idna")
        except ValueError:
            raise UsageError(reason, field=field, value=shown_url) from None
        is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
        has_host = parts.hostname is not None and is_host_name(parts.hostname)
        has_host &= not netloc.endswith(":")  # the URL was http:/host:8000
        if parts.scheme not in {"http", "https"} or not has_host or not is_plain:
            raise UsageError(reason, field=field, value=shown_url)
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            url=f"{parts.scheme}://{netloc}{path}",
            host=parts.hostname or "",
            port=port,
            is_tls=parts.scheme == "https",
            path=path,
            netloc=host_header,
        )


class Timeouts(Frozen):
    """The times after which a connection is given up.

    Attributes:
        connect_s: seconds until it must be open.
        unacknowledged_ms: milliseconds without acknowledgement of sent bytes. Linux ends the
            connection at the next retransmission, some 0.4 s later.
    """

    connect_s: float = 1.5
    unacknowledged_ms: int = 800


class UpstreamConnection(asyncio.Protocol):
    """One connection to a replica, with at most one request at a time.

    Attributes:
        has_answered: whether a byte of the present response has come.
        sink: called with parts of the body that arrive while `read` waits. If it returns True, it
            has handled the part, and no task has to wake. The last part is always left to `read`.
        idle_since_s: when the connection was returned to the pool.
        num_requests: requests sent so far.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        """Create a connection that belongs to `pool`."""
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._reader = ResponseReader()
        self._body: list[bytes] = []  # parts that were not read yet
        self._num_unread_bytes = 0
        self._is_paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self.has_answered = False
        self.sink: Callable[[bytes], bool] | None = None
        self.idle_since_s = 0.0
        self.num_requests = 0

    @property
    def is_usable(self) -> bool:
        """Whether the connection to the replica is open and has not failed."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and self._error is None

    @property
    def is_read(self) -> bool:
        """Whether the replica's response was read to its end."""
        return self._reader.is_whole and not self._body

    @property
    def is_reusable(self) -> bool:
        """Whether the response was read, and the connection stays open for another request."""
        return self.is_read and not self._reader.is_last

    async def request(
        self, head: bytes, body: bytes | AsyncIterator[bytes] = b"", *, is_head: bool = False
    ) -> Head:
        """Send a request to the replica; return the head of the response when it has arrived.

        If `body` is an iterator, its parts are sent as they arrive. `is_head` says that the
        request's method is HEAD.

        Raises:
            ReplicaError: the connection ended before that, or the response is not HTTP.
        """
        assert self._transport is not None
        self._reader = ResponseReader(is_head=is_head)
        self.has_answered = False
        self.num_requests += 1
        self._raise()
        if isinstance(body, bytes):
            self._transport.writelines([head, body])
        else:
            self._transport.write(head)
            async for part in body:
                await self._write(part)
        while self._reader.head is None:
            self._raise()
            await self._wait()
        return self._reader.head

    async def read(self) -> bytes:
        """Return the next part of the response's body; empty at its end.

        Raises:
            ReplicaError: the connection ended too early, or the response is not HTTP.
        """
        while not self._body:
            if self._reader.is_whole:
                return b""
            self._raise()
            await self._wait()
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._num_unread_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        """End the request: return the connection to the pool, or close it if it is not reusable."""
        self.sink = None
        self._pool.take_back(self, is_reusable=self.is_reusable and self.is_usable)

    def fail(self, error: Exception) -> None:
        """Close the connection, and raise `error` in the task that waits for the response."""
        if self._error is None:
            self._error = error
        self.close()
        self._wake()

    def close(self) -> None:
        """Close the connection to the replica at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the new connection: a small read buffer, and a limit for lost packets.

        Linux closes the connection if the other machine acknowledges nothing within
        `Timeouts.unacknowledged_ms`.
        """
        self._transport = cast("asyncio.Transport", transport)
        limit_read_size(transport)
        option = getattr(socket, "TCP_USER_TIMEOUT", None)  # only Linux has it
        if option is not None:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, option, self._pool.timeouts.unacknowledged_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request when the connection ends.

        A body that lasts until the end of the connection is complete; other requests fail.
        """
        self._pool.forget(self)
        if (exc is not None or not self._reader.close()) and self._error is None:
            url = self._pool.address.url
            if isinstance(exc, OSError) and exc.errno in _CUT_OFF_ERRORS:
                self._error = CutOffError(f"{url} is cut off: its machine does not answer.")
            else:
                self._error = FailedReplicaError(f"{url} closed the connection.")
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._wake()

    def eof_received(self) -> bool:
        """Close the connection, since the replica has closed its side."""
        return False

    def pause_writing(self) -> None:
        """Make `write` wait, since the connection's send buffer is full."""
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """Let `write` continue, since the connection's send buffer has room."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def data_received(self, data: bytes) -> None:
        """Parse received bytes of the response, and pass its body to `sink` or `read`."""
        self.has_answered = True
        self._pool.has_heard()
        reader = self._reader
        if reader.is_whole or self._error is not None:  # bytes without a request
            reader.is_last = True
            self.close()
            return
        try:
            body = reader.feed(data)
        except ReplicaError as error:
            self.fail(error)
            return
        if body:
            if (
                self.sink is not None
                and self._is_waiting
                and not reader.is_whole
                and self.sink(body)
            ):
                return
            self._body.append(body)
            self._num_unread_bytes += len(body)
            if (
                self._num_unread_bytes > _MAX_UNREAD_BYTES
                and not self._is_paused
                and self._transport is not None
            ):
                self._is_paused = True
                self._transport.pause_reading()
        self._wake()

    async def _write(self, data: bytes) -> None:
        """Send a part of a request's body, and wait until there is room for the next part."""
        assert self._transport is not None
        self._raise()
        self._transport.write(data)
        if self._writable is not None:
            await self._writable
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def _is_waiting(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ConnectionPool:
    """The connections to one replica, busy and idle.

    Attributes:
        address: the replica's address.
        timeouts: the times after which its connections are given up.
        heard_s: when the last byte came from the replica, on the event loop's clock.
    """

    def __init__(
        self,
        address: Address,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - it is frozen
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create a pool without connections to the replica.

        `tls` checks the replica's certificate; by default the system's authorities are trusted.
        """
        self.address = address
        self.timeouts = timeouts
        self.heard_s = 0.0
        self._busy: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []
        self._tls = (tls or ssl.create_default_context()) if address.is_tls else None

    async def take(self, *, is_fresh: bool = False) -> UpstreamConnection:
        """Return an idle connection to the replica, or a new connection if all are busy.

        With `is_fresh` the connection is always new.

        Raises:
            ReplicaError: the replica cannot be reached.
        """
        now_s = asyncio.get_running_loop().time()
        while self._idle and not is_fresh:
            connection = self._idle.pop()
            if connection.is_usable and now_s - connection.idle_since_s < _MAX_IDLE_S:
                self._busy.add(connection)
                return connection
            connection.close()
        connection = await self._connect()
        self._busy.add(connection)
        return connection

    def take_back(self, connection: UpstreamConnection, *, is_reusable: bool) -> None:
        """Take back a connection after its request; close it unless it is reusable."""
        self._busy.discard(connection)
        if is_reusable:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.close()

    def forget(self, connection: UpstreamConnection) -> None:
        """Remove a connection that has ended from the pool."""
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def has_heard(self) -> None:
        """Set `heard_s` to the present time, since bytes have come from the replica."""
        self.heard_s = asyncio.get_running_loop().time()

    def fail(self, error: Exception) -> None:
        """End all requests to the replica with `error`, and close all connections.

        The health checker calls this for a replica that is silent or cut off.
        """
        for connection in list(self._busy):
            connection.fail(error)
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections to the replica that no request uses."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> UpstreamConnection:
        address = self.address
        loop = asyncio.get_running_loop()
        name = address.host if address.is_tls else None
        opening = loop.create_connection(
            lambda: UpstreamConnection(self),
            address.host,
            address.port,
            ssl=self._tls,
            server_hostname=name,
        )
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                _, connection = await opening
        except TimeoutError:
            raise CutOffError(f"{address.url} does not accept a connection.") from None
        except ssl.SSLCertVerificationError as error:
            reason = f"its certificate is not trusted ({error.verify_message})"
            raise ReplicaError(f"{address.url} cannot be reached: {reason}.") from None
        except ssl.SSLError as error:
            reason = f"TLS fails ({error.reason or error})"
            raise ReplicaError(f"{address.url} cannot be reached: {reason}.") from None
        except OSError as error:
            is_system = error.errno is not None and not isinstance(error, socket.gaierror)
            reason = os.strerror(error.errno or 0) if is_system else error.strerror or str(error)
            raise ReplicaError(f"{address.url} cannot be reached: {reason}.") from None
        return connection


def is_host_name(text: str) -> bool:
    """Return whether a text may be a DNS name or an IP address."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return bool(text) and not _NOT_IN_HOST_NAMES.search(text)


def request_head(
    address: Address, method: str, target: bytes, headers: Headers, length: int | None
) -> bytes:
    """Return the head of a request to a replica: request line and headers.

    `target` is the path with the query, which follows the path of the address. `length` is the size
    of the body in bytes; None if there is no `Content-Length`.
    """
    lines = [
        b"%s %s%s HTTP/1.1" % (method.encode(), address.path.encode(), target),
        b"host: " + address.netloc,
        *(b"%s: %s" % pair for pair in headers),
    ]
    if length is not None:
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"
