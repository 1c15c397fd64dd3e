"""A strict and fast reader of HTTP/1.1 responses.

Ambiguous framing, such as two lengths, is an error, because another reader might understand it in
another way.
"""

from __future__ import annotations

import re
from typing import Final

from twostroke.core.errors import TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.server.auth.usage_header import media_type
from twostroke.server.http.errors import GatewayError

_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_SIZE_LINE_BYTES: Final = 4096  # a chunk's size with its extensions
_MAX_TRAILER_BYTES: Final = 16 * 1024
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\x00]*?)[ \t]*")
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")
_UNTIL_CLOSED: Final = -1  # the length of a body that lasts until the end of its connection


class ReplicaError(TwostrokeError):
    """A replica cannot be reached, or its answer is not valid HTTP. The message is for the log."""


class CutOffError(ReplicaError):
    """A replica's machine does not acknowledge packets; its process may be healthy."""


class FailedReplicaError(ReplicaError):
    """A replica failed, or closed a connection, while it computed a request.

    The request may be the cause, so the failure counts against its content.
    """


class LostError(GatewayError):
    """The error that a client gets for a request that replicas have lost; names no address."""

    http_status = 502
    code = "replica_failed"


class Head(Frozen):
    """The status and headers of a replica's response; header names are in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def value(self, name: bytes) -> bytes:
        """Return the first value of a response header; empty if it is missing."""
        return next((value for key, value in self.headers if key == name), b"")

    @property
    def media_type(self) -> bytes:
        """The response's Content-Type in lower case, without parameters."""
        return media_type(self.headers)


class ResponseReader:
    """Parses one HTTP/1.1 response of a replica as its bytes arrive.

    Attributes:
        head: the head of the response; None until it has come.
        is_whole: whether the response has ended.
        is_last: whether the connection cannot be used for another request.
    """

    __slots__ = ("_buffer", "_ends_chunk", "_is_chunked", "_is_head", "_num_left", "head",
    "is_last",
                 "is_whole")  # fmt: skip

    def __init__(self, *, is_head: bool = False) -> None:
        """Start to parse a response; `is_head` says that the request's method was HEAD."""
        self.head: Head | None = None
        self.is_whole = False
        self.is_last = False
        self._buffer = b""  # the beginning of an incomplete head, size or trailer
        self._num_left = 0  # bytes left of the body or of the chunk
        self._is_chunked = False
        self._ends_chunk = False  # the next bytes are the line break after a chunk
        self._is_head = is_head

    def feed(self, data: bytes) -> bytes:
        """Parse received bytes of the response, and return the bytes of its body.

        Raises:
            ReplicaError: the bytes are not valid HTTP.
        """
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        while self.head is None:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MAX_HEAD_BYTES:
                    raise _invalid("its headers are too long")
                self._buffer = data
                return b""
            self._read_head(data[:end])
            data = data[end + 4 :]
        if self._is_chunked:
            return self._chunks(data)
        if self._num_left == _UNTIL_CLOSED:
            return data
        body = data[: self._num_left]
        self._num_left -= len(body)
        self.is_whole = not self._num_left
        self.is_last |= len(body) < len(data)
        return body

    def close(self) -> bool:
        """Record that the connection has ended; return whether the whole response has come."""
        if self.head is not None and self._num_left == _UNTIL_CLOSED and not self._is_chunked:
            self.is_whole = True
        return self.is_whole

    def _chunks(self, data: bytes) -> bytes:
        """Return the data in received bytes of a chunked body.

        An incomplete size or line break at the end is kept for the next bytes.
        """
        parts: list[bytes] = []
        position, end = 0, len(data)
        while position < end and not self.is_whole:
            if self._num_left:
                part = data[position : position + self._num_left]
                parts.append(part)
                position += len(part)
                self._num_left -= len(part)
                self._ends_chunk = not self._num_left
            elif self._ends_chunk:
                if end - position < 2:
                    break
                if data[position : position + 2] != b"\r\n":
                    raise _invalid("a chunk does not end with a line break")
                position += 2
                self._ends_chunk = False
            else:
                next_position = self._chunk_size(data, position)
                if next_position == position:
                    break
                position = next_position
        if self.is_whole:
            self.is_last |= position < end
        else:
            self._buffer = data[position:]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _chunk_size(self, data: bytes, position: int) -> int:
        """Parse the size of a chunk of the body, and the trailer after the last chunk.

        Returns the position after them; `position` if they are incomplete.
        """
        end = data.find(b"\r\n", position)
        if end < 0:
            if len(data) - position > _MAX_SIZE_LINE_BYTES:
                raise _invalid("the size of a chunk is too long")
            return position
        match = _SIZE.fullmatch(data, position, end)
        if match is None:
            raise _invalid("a chunk has no size")
        self._num_left = int(match[1], 16)
        if self._num_left:
            return end + 2
        trailer_end = data.find(b"\r\n\r\n", end)
        if trailer_end < 0:
            if len(data) - position > _MAX_TRAILER_BYTES:
                raise _invalid("its trailer is too long")
            return position
        self.is_whole = True
        return trailer_end + 4

    def _read_head(self, text: bytes) -> None:
        first, *lines = text.split(b"\r\n")
        match = _STATUS.fullmatch(first)
        if match is None:
            raise _invalid("it is not HTTP/1.1")
        status = int(match[2])
        if status == 101:
            raise _invalid("it changes the protocol")
        if status < 200:  # an interim response, which another response follows
            return
        headers: list[tuple[bytes, bytes]] = []
        for line in lines:
            field = _FIELD.fullmatch(line)
            if field is None:
                raise _invalid("a header is malformed")
            headers.append((field[1].lower(), field[2]))
        self._set_framing(Head(status, headers), is_old=match[1] == b"0")

    def _set_framing(self, head: Head, *, is_old: bool) -> None:
        """Determine from a response's headers where its body ends.

        `is_old` says that the response is HTTP/1.0.
        """
        lengths = {value for name, value in head.headers if name == b"content-length"}
        codings = [value.lower() for name, value in head.headers if name == b"transfer-encoding"]
        connections = [value for name, value in head.headers if name == b"connection"]
        tokens = b",".join(connections).lower()
        self.is_last = b"close" in tokens or (is_old and b"keep-alive" not in tokens)
        if codings and (lengths or codings != [b"chunked"] or is_old):
            raise _invalid("its body has two lengths, or an unknown coding")
        if len(lengths) > 1 or not all(length.isdigit() and len(length) < 16 for length in lengths):
            raise _invalid("its Content-Length is not a number")
        if self._is_head or head.status in {204, 304}:
            self.is_whole = True
        elif codings:
            self._is_chunked = True
        elif lengths:
            self._num_left = int(lengths.pop())
            self.is_whole = not self._num_left
        else:
            self._num_left = _UNTIL_CLOSED
            self.is_last = True
        self.head = head


def _invalid(reason: str) -> ReplicaError:
    return ReplicaError(f"The replica's response is not valid: {reason}.")
