"""A client of a remote server for the command `batch`; it obeys the server's `Retry-After`."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import EngineStoppedError, UsageError
from twostroke.core.json_io import encode_json, escape_line_ends
from twostroke.core.urls import server_url
from twostroke.server.http.internal_requests import InternalResponse

if TYPE_CHECKING:
    from twostroke.server.batch.lines import BatchLine

_RETRY_STATUSES: Final = frozenset((408, 429, 503, 529))
_PROXY_STATUSES: Final = frozenset((502, 504))  # the server behind a proxy is missing or slow
_MAX_TRIES: Final = 10  # to send a request that the server does not answer
_MAX_PAUSE_S: Final = 60.0
_TIMEOUT_S: Final = 3600.0  # for an answer, which takes long on a busy server
_CONNECT_TIMEOUT_S: Final = 10.0
_MAX_SHOWN_BYTES: Final = 1000  # of a response body that is not JSON


class RemoteServer:
    """A connection to a server that runs the requests of an offline batch run."""

    def __init__(self, url: str, key: str | None, concurrency: int) -> None:
        """Prepare connections to the server at `url`, which may end with `/v1`.

        Args:
            url: the server's URL. The first request opens a connection.
            key: the API key; None for requests without a key.
            concurrency: the number of threads, each with its own connection.

        Raises:
            UsageError: `url` is not an http or https URL with a host.
        """
        parts = server_url(url, field="url")
        self._url = url
        self._host = parts.hostname or ""
        self._port = parts.port
        self._is_secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._local = threading.local()
        self._open: set[http.client.HTTPConnection] = set()
        self._threads = ThreadPoolExecutor(concurrency, "twostroke-remote")
        self._has_answered = False

    async def send(self, line: BatchLine) -> InternalResponse:
        """Send a batch request, and return the response; wait and retry while the server is busy.

        Raises:
            EngineStoppedError: the server cannot be reached.
            UsageError: the server refuses the key, or does not have OpenAI's API.
        """
        loop = asyncio.get_running_loop()
        num_tries = 0
        while True:
            try:
                answer = await loop.run_in_executor(self._threads, self._post, line)
            except (OSError, http.client.HTTPException) as error:
                num_tries += 1
                is_never_reached = not self._has_answered and isinstance(
                    error, ConnectionRefusedError
                )
                if (
                    is_never_reached
                    or num_tries == _MAX_TRIES
                    or isinstance(error, socket.gaierror)
                ):
                    reason = getattr(error, "strerror", None) or error
                    message = f"The server at {self._url} cannot be reached: {reason}."
                    raise EngineStoppedError(message) from None
                pause_s = 2.0**num_tries / 8
            else:
                self._has_answered = True
                is_from_proxy = answer.status in _PROXY_STATUSES
                num_tries = num_tries + 1 if is_from_proxy else 0  # else the server itself answered
                if num_tries == _MAX_TRIES or not (
                    is_from_proxy or answer.status in _RETRY_STATUSES
                ):
                    return self._checked(answer)
                pause_s = max(2.0**num_tries / 8, _seconds(answer.headers.get("retry-after", "")))
            await asyncio.sleep(min(pause_s, _MAX_PAUSE_S))

    def _checked(self, answer: InternalResponse) -> InternalResponse:
        """Return a copy of a response whose body is one line of JSON, as a result file needs it.

        A body that is not JSON, such as a proxy's error page, becomes the message of an error.

        Raises:
            UsageError: the server refuses the key, or does not have OpenAI's API.
        """
        if answer.status == HTTPStatus.UNAUTHORIZED:
            message = f"The server at {self._url} refuses the key: set TWOSTROKE_API_KEY."
            raise UsageError(message)
        try:
            body = escape_line_ends(msgspec.json.format(answer.body, indent=-1))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if answer.status < 400:
                message = f"{self._url} is no server of OpenAI's protocol: it does not answer JSON."
                raise UsageError(message) from None
            text = answer.body[:_MAX_SHOWN_BYTES].decode(errors="replace")
            body = encode_json({"error": {"message": text}})
        return replace(answer, body=body)

    def close(self) -> None:
        """Close all connections to the server; requests that wait for a response fail."""
        for connection in list(self._open):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(cancel_futures=True)
        for connection in self._open:
            connection.close()

    def _post(self, line: BatchLine) -> InternalResponse:
        connection = self._connection()
        try:
            connection.request("POST", self._path + line.url, line.body, self._headers)
            response = connection.getresponse()
            body = response.read()
        except BaseException:  # a connection with a half-read response cannot be used again
            self._drop(connection)
            raise
        headers = {name.lower(): value for name, value in response.getheaders()}
        headers.setdefault("x-request-id", "")
        return InternalResponse(response.status, headers, body)

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection_class = (
                http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
            )
            connection = connection_class(self._host, self._port, timeout=_CONNECT_TIMEOUT_S)
            connection.connect()
            connection.sock.settimeout(_TIMEOUT_S)
            self._local.connection = connection
            self._open.add(connection)
        return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        self._open.discard(connection)
        self._local.connection = None


def _seconds(text: str) -> float:
    """Return the seconds of a `Retry-After` header; 1 if it has a date or is missing."""
    return float(text) if text.isdecimal() and len(text) < 6 else 1.0
