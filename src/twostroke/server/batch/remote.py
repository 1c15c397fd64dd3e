"""Sends the lines of a file to a server elsewhere, and obeys its `Retry-After`."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import EngineStoppedError, UsageError
from twostroke.core.json_io import encode_json, escape_line_ends
from twostroke.server.http.internal_requests import InternalResponse

if TYPE_CHECKING:
    from twostroke.server.batch.lines import Line

_LATER: Final = frozenset((408, 429, 503, 529))
_FROM_PROXIES: Final = frozenset((502, 504))  # which have no server now, or one that is slow
_MOST_TRIES: Final = 10  # that one line takes without an answer of the server
_MOST_PAUSE_S: Final = 60.0
_TIMEOUT_S: Final = 3600.0  # one answer may take long on a busy server
_CONNECT_S: Final = 10.0
_MOST_SHOWN: Final = 1000  # bytes of what is not JSON


class Remote:
    """A server, and connections to it, one for each thread."""

    def __init__(self, url: str, key: str | None, concurrency: int) -> None:
        """Send to the server at `url`, with or without `/v1` at its end; connects at first use.

        Raises:
            UsageError: `url` is not the address of a server.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in {"http", "https"} or not parts.hostname or port == -1:
            raise UsageError(f"must be like http://127.0.0.1:8000, got '{url}'.", field="url")
        self._url, self._host, self._port = url, parts.hostname, port
        self._is_secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._local = threading.local()
        self._open: set[http.client.HTTPConnection] = set()
        self._threads = ThreadPoolExecutor(concurrency, "twostroke-remote")
        self._has_answered = False

    async def send(self, line: Line) -> InternalResponse:
        """Return the response to a line; waits and tries again where the server asks for it.

        Raises:
            EngineStoppedError: the server cannot be reached.
            UsageError: it refuses the key, or is another kind of server.
        """
        loop = asyncio.get_running_loop()
        num_tries = 0
        while True:
            try:
                answer = await loop.run_in_executor(self._threads, self._post, line)
            except (OSError, http.client.HTTPException) as error:
                num_tries += 1
                is_wrong = not self._has_answered and isinstance(error, ConnectionRefusedError)
                if is_wrong or num_tries == _MOST_TRIES or isinstance(error, socket.gaierror):
                    why = getattr(error, "strerror", None) or error
                    message = f"The server at {self._url} cannot be reached: {why}."
                    raise EngineStoppedError(message) from None
                pause_s = 2.0**num_tries / 8
            else:
                self._has_answered = True
                is_from_proxy = answer.status in _FROM_PROXIES
                num_tries = num_tries + 1 if is_from_proxy else 0  # it is there
                if num_tries == _MOST_TRIES or not (is_from_proxy or answer.status in _LATER):
                    return self._checked(answer)
                pause_s = max(2.0**num_tries / 8, _seconds(answer.headers.get("retry-after", "")))
            await asyncio.sleep(min(pause_s, _MOST_PAUSE_S))

    def _checked(self, answer: InternalResponse) -> InternalResponse:
        """Return an answer whose body is one line of JSON, as a proxy's need not be."""
        if answer.status == HTTPStatus.UNAUTHORIZED:
            message = f"The server at {self._url} refuses the key: set TWOSTROKE_API_KEY."
            raise UsageError(message)
        try:
            body = escape_line_ends(msgspec.json.format(answer.body, indent=-1))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if answer.status < 400:
                message = f"{self._url} is no server of OpenAI's protocol: it does not answer JSON."
                raise UsageError(message) from None
            text = answer.body[:_MOST_SHOWN].decode(errors="replace")
            body = encode_json({"error": {"message": text}})
        return replace(answer, body=body)

    def close(self) -> None:
        """End all connections, also of requests that wait for an answer."""
        for connection in list(self._open):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(cancel_futures=True)
        for connection in self._open:
            connection.close()

    def _post(self, line: Line) -> InternalResponse:
        connection = self._connection()
        try:
            connection.request("POST", self._path + line.url, line.body, self._headers)
            response = connection.getresponse()
            body = response.read()
        except BaseException:
            self._drop(connection)
            raise
        headers = {name.lower(): value for name, value in response.getheaders()}
        headers.setdefault("x-request-id", "")
        return InternalResponse(response.status, headers, body)

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if found is None:
            kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
            found = kind(self._host, self._port, timeout=_CONNECT_S)
            found.connect()
            found.sock.settimeout(_TIMEOUT_S)
            self._local.connection = found
            self._open.add(found)
        return found

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        self._open.discard(connection)
        self._local.connection = None


def _seconds(text: str) -> float:
    """Return the seconds of a `Retry-After`; a second where it has a date or nothing."""
    return float(text) if text.isdecimal() and len(text) < 6 else 1.0
