"""An HTTP client of an endpoint that stamps every received part with its time.

In the router's connections, a body waits until a task reads it. A measurement needs the time at
which the bytes came, so the connections here call a receiver at once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from typing import TYPE_CHECKING, Final, Protocol, cast

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.fleet.router.response import ReplicaError, ResponseReader
from twostroke.fleet.router.upstream import request_head

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.fleet.router.response import Head
    from twostroke.fleet.router.upstream import Address

_CONNECT_TIMEOUT_S: Final = 10.0
_NO_FILES_LEFT: Final = {errno.EMFILE, errno.ENFILE}
TIMEOUT: Final = "timeout"


class ExchangeError(Exception):
    """A request that got no complete response.

    Attributes:
        kind: the reason in few words; failures are counted by it.
        detail: the rest of the reason, for a message.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail


class Receiver(Protocol):
    """Gets a response as it arrives."""

    def begin(self, head: Head) -> None:
        """Take the status and the headers."""

    def take(self, data: bytes, at_s: float) -> None:
        """Take a part of the body, which came at a time of the client's clock."""


class WholeBody:
    """A receiver that collects a short response, such as a list of models."""

    def __init__(self) -> None:
        """Create a receiver without a response."""
        self.status = 0
        self.body = b""

    def begin(self, head: Head) -> None:
        """Store the status of the response."""
        self.status = head.status

    def take(self, data: bytes, at_s: float) -> None:
        """Add a part to the body."""
        del at_s
        self.body += data


class TlsTrust(Frozen):
    """Which certificates of an endpoint are accepted.

    Attributes:
        ca_file: a file with certificates of authorities, in place of the system's.
        is_insecure: whether any certificate is accepted.
    """

    ca_file: Path | None = None
    is_insecure: bool = False

    def context(self) -> ssl.SSLContext:
        """Return the TLS context; raise UsageError if the file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except ssl.SSLError:
            reason = "has no certificate in PEM form: '{value}'."
            raise UsageError(reason, field="ca_file", value=self.ca_file) from None
        except OSError as error:
            reason = f"cannot be read: {error.strerror}."
            raise UsageError(reason, field="ca_file") from None
        if self.is_insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class EndpointClient:
    """Sends requests to one endpoint, over as many connections as there are requests in progress.

    Connections are kept open and used again.
    """

    def __init__(
        self,
        address: Address,
        key: str | None,
        *,
        now_s: Callable[[], float],
        timeout_s: float,
        trust: TlsTrust = TlsTrust(),  # noqa: B008 - it is frozen
    ) -> None:
        """Create a client without connections.

        Args:
            address: the endpoint's address.
            key: the API key; None if the endpoint needs none.
            now_s: returns the time, for the stamps of received bytes.
            timeout_s: the longest time of a request; then it fails.
            trust: which certificates of the endpoint are accepted.

        Raises:
            UsageError: the file of certificates cannot be used.
        """
        self.address = address
        self.now_s = now_s
        self._timeout_s = timeout_s
        self._tls = trust.context() if address.is_tls else None
        self._headers = [(b"content-type", b"application/json"), (b"accept", b"*/*")]
        if key is not None:
            self._headers.append((b"authorization", b"Bearer " + key.encode()))
        self._idle: list[EndpointConnection] = []
        self._all: set[EndpointConnection] = set()

    async def post(self, path: str, body: bytes, receiver: Receiver) -> None:
        """Send a request with a JSON body, and return when the whole response has come.

        Raises:
            ExchangeError: the endpoint cannot be reached, takes longer than the timeout, or its
                response is cut off or is not HTTP.
        """
        await self._exchange("POST", path, body, receiver)

    async def get(self, path: str) -> WholeBody:
        """Return the response to a request without a body; raise the errors of `post`."""
        receiver = WholeBody()
        await self._exchange("GET", path, None, receiver)
        return receiver

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._all):
            connection.close()
        self._idle.clear()

    def forget(self, connection: EndpointConnection) -> None:
        """Drop a connection that has ended."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _exchange(
        self, method: str, path: str, body: bytes | None, receiver: Receiver
    ) -> None:
        length = None if body is None else len(body)
        head = request_head(self.address, method, path.encode(), self._headers, length)
        data = head + (body or b"")
        try:
            async with asyncio.timeout(self._timeout_s):
                while not await self._try(data, receiver):
                    pass  # the endpoint had closed an idle connection
        except TimeoutError:
            raise ExchangeError(TIMEOUT, f"longer than {self._timeout_s:g} s") from None

    async def _try(self, data: bytes, receiver: Receiver) -> bool:
        """Send a request on one connection; return False if the endpoint has closed it meanwhile.

        Servers close idle connections. A client may notice that only when it sends the next
        request.
        """
        is_reused = bool(self._idle)
        connection = self._idle.pop() if is_reused else await self._connect()
        try:
            await connection.exchange(data, receiver)
        except BaseException as error:  # also a cancelled request closes its connection
            connection.close()
            if isinstance(error, ExchangeError) and is_reused and not connection.has_answered:
                return False
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return True

    async def _connect(self) -> EndpointConnection:
        address = self.address
        opening = asyncio.get_running_loop().create_connection(
            lambda: EndpointConnection(self),
            address.host,
            address.port,
            ssl=self._tls,
            server_hostname=address.host if address.is_tls else None,
        )
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, connection = await opening
        except TimeoutError:
            raise ExchangeError("no connection", "it does not accept a connection") from None
        except ssl.SSLCertVerificationError as error:
            detail = f"its certificate is not trusted ({error.verify_message})"
            raise ExchangeError("TLS error", detail) from None
        except ssl.SSLError as error:
            raise ExchangeError("TLS error", error.reason or str(error)) from None
        except OSError as error:
            kind = "no file left" if error.errno in _NO_FILES_LEFT else "no connection"
            is_name = isinstance(error, socket.gaierror)
            reason = os.strerror(error.errno) if error.errno and not is_name else error.strerror
            raise ExchangeError(kind, reason or str(error)) from None
        self._all.add(connection)
        return connection


class EndpointConnection(asyncio.Protocol):
    """One connection to an endpoint, with at most one request at a time.

    Attributes:
        has_answered: whether a byte of the present response has come.
    """

    def __init__(self, client: EndpointClient) -> None:
        """Create a connection of a client."""
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader()
        self._receiver: Receiver | None = None
        self._end: asyncio.Future[None] | None = None
        self.has_answered = False

    @property
    def is_reusable(self) -> bool:
        """Whether the endpoint keeps the connection for another request."""
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and self._reader.is_whole and not self._reader.is_last

    async def exchange(self, data: bytes, receiver: Receiver) -> None:
        """Send a request, and return when the receiver has got the whole response."""
        self.has_answered = False
        self._reader = ResponseReader()
        self._receiver = receiver
        if self._transport is None or self._transport.is_closing():
            raise ExchangeError("connection closed")
        self._end = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        await self._end

    def close(self) -> None:
        """Close the connection at once."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Stamp received bytes, and pass the body on."""
        at_s = self._client.now_s()
        receiver, reader = self._receiver, self._reader
        if receiver is None or reader.is_whole:  # bytes without a request
            self.close()
            return
        self.has_answered = True
        had_head = reader.head is not None
        try:
            body = reader.feed(data)
        except ReplicaError as error:
            self._fail(ExchangeError("no valid HTTP", str(error)))
            return
        if not had_head and reader.head is not None:
            receiver.begin(reader.head)
        if body:
            receiver.take(body, at_s)
        if reader.is_whole and self._end is not None and not self._end.done():
            self._end.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request: a body whose end is the connection's end is complete; others fail."""
        self._client.forget(self)
        if exc is None and self._reader.close():
            if self._end is not None and not self._end.done():
                self._end.set_result(None)
            return
        self._fail(ExchangeError("connection closed", str(exc) if exc else ""))

    def _fail(self, error: ExchangeError) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_exception(error)
