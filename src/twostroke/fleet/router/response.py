"""Reads HTTP/1.1 responses from bytes: strict, and as thin as a streamed token needs it.

Framing that another reader might understand otherwise, such as two lengths, is an error.
"""

from __future__ import annotations

import re
from typing import Final

from twostroke.core.errors import TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.server.auth.usage_header import media_type
from twostroke.server.http.errors import GatewayError

_MAX_HEAD: Final = 64 * 1024
_MAX_LINE: Final = 4096  # of a chunk's size with its extensions
_MAX_TRAILER: Final = 16 * 1024
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\x00]*?)[ \t]*")
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")
_UNTIL_CLOSED: Final = -1  # the length of a body that the end of its connection ends


class ReplicaError(TwostrokeError):
    """A replica did not answer, or not as HTTP wants it. The sentence is for the log."""


class CutOffError(ReplicaError):
    """A replica's machine does not acknowledge what is sent: its process may be well."""


class FailedReplicaError(ReplicaError):
    """A replica ended the connection of a request, or failed: the request may be the reason."""


class LostError(GatewayError):
    """A replica has lost a request."""

    http_status = 502
    code = "replica_failed"


class Head(Frozen):
    """The head of a response; names of headers are in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def value(self, name: bytes) -> bytes:
        """Return a header's first value; empty without."""
        return next((value for key, value in self.headers if key == name), b"")

    @property
    def media_type(self) -> bytes:
        """The Content-Type in lower case, without parameters."""
        return media_type(self.headers)


class ResponseReader:
    """Reads one response.

    Attributes:
        head: None until it has come.
        is_whole: whether the response has ended.
        is_last: whether the connection cannot be used for another request.
    """

    __slots__ = ("_buffer", "_ends_chunk", "_is_chunked", "_is_head", "_left", "head", "is_last",
                 "is_whole")  # fmt: skip

    def __init__(self, *, is_head: bool = False) -> None:
        """Begin; `is_head` if the method of the request was HEAD."""
        self.head: Head | None = None
        self.is_whole = self.is_last = False
        self._buffer = b""  # what is not understood before more comes
        self._left = 0  # bytes of the body or of the chunk
        self._is_chunked = self._ends_chunk = False
        self._is_head = is_head

    def feed(self, data: bytes) -> bytes:
        """Take in bytes, and return those of the body.

        Raises:
            ReplicaError: they are not HTTP; says why.
        """
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        while self.head is None:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MAX_HEAD:
                    raise _broken("its headers are too long")
                self._buffer = data
                return b""
            self._read_head(data[:end])
            data = data[end + 4 :]
        if self._is_chunked:
            return self._chunks(data)
        if self._left == _UNTIL_CLOSED:
            return data
        body = data[: self._left]
        self._left -= len(body)
        self.is_whole = not self._left
        self.is_last |= len(body) < len(data)
        return body

    def close(self) -> bool:
        """Take in the end of the connection; return whether it ends the response."""
        if self.head is not None and self._left == _UNTIL_CLOSED and not self._is_chunked:
            self.is_whole = True
        return self.is_whole

    def _chunks(self, data: bytes) -> bytes:
        """Return the bytes of chunks; what is incomplete of a frame waits in the buffer."""
        parts, at, size = [], 0, len(data)
        while at < size and not self.is_whole:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                self._ends_chunk = not self._left
            elif self._ends_chunk:
                if size - at < 2:
                    break
                if data[at : at + 2] != b"\r\n":
                    raise _broken("a chunk does not end with a line break")
                at, self._ends_chunk = at + 2, False
            else:
                next_at = self._chunk_size(data, at)
                if next_at == at:
                    break
                at = next_at
        if self.is_whole:
            self.is_last |= at < size
        else:
            self._buffer = data[at:]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _chunk_size(self, data: bytes, at: int) -> int:
        """Read the size of a chunk, or the end; return where it ends, `at` if it is incomplete."""
        end = data.find(b"\r\n", at)
        if end < 0:
            if len(data) - at > _MAX_LINE:
                raise _broken("the size of a chunk is too long")
            return at
        found = _SIZE.fullmatch(data, at, end)
        if found is None:
            raise _broken("a chunk has no size")
        self._left = int(found[1], 16)
        if self._left:
            return end + 2
        stop = data.find(b"\r\n\r\n", end)  # fields may follow the last chunk
        if stop < 0:
            if len(data) - at > _MAX_TRAILER:
                raise _broken("its trailer is too long")
            return at
        self.is_whole = True
        return stop + 4

    def _read_head(self, text: bytes) -> None:
        first, *lines = text.split(b"\r\n")
        found = _STATUS.fullmatch(first)
        if found is None:
            raise _broken("it is not HTTP/1.1")
        status = int(found[2])
        if status == 101:
            raise _broken("it changes the protocol")
        if status < 200:  # an interim response: another follows
            return
        headers: list[tuple[bytes, bytes]] = []
        for line in lines:
            field = _FIELD.fullmatch(line)
            if field is None:
                raise _broken("a header is malformed")
            headers.append((field[1].lower(), field[2]))
        self._frame(Head(status, headers), is_old=found[1] == b"0")

    def _frame(self, head: Head, *, is_old: bool) -> None:
        """Find out where the body ends."""
        lengths = {value for name, value in head.headers if name == b"content-length"}
        codings = [value.lower() for name, value in head.headers if name == b"transfer-encoding"]
        tokens = b",".join(v for n, v in head.headers if n == b"connection").lower()
        self.is_last = b"close" in tokens or (is_old and b"keep-alive" not in tokens)
        if codings and (lengths or codings != [b"chunked"] or is_old):
            raise _broken("its body has two lengths, or an unknown coding")
        if len(lengths) > 1 or not all(one.isdigit() and len(one) < 16 for one in lengths):
            raise _broken("its Content-Length is not a number")
        if self._is_head or head.status in {204, 304}:
            self.is_whole = True
        elif codings:
            self._is_chunked = True
        elif lengths:
            self._left = int(lengths.pop())
            self.is_whole = not self._left
        else:
            self._left, self.is_last = _UNTIL_CLOSED, True
        self.head = head


def _broken(why: str) -> ReplicaError:
    return ReplicaError(f"The replica's response is not valid: {why}.")
