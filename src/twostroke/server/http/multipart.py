"""Reads `multipart/form-data` (RFC 7578) as it arrives: one file and some short fields."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final

from starlette.requests import ClientDisconnect

from twostroke.core.errors import RequestError
from twostroke.core.message_text import counted_noun
from twostroke.server.http.errors import (
    BodySizeError,
    BodyTimeoutError,
    ClientGoneError,
    ContentTypeError,
    MissingFieldError,
)
from twostroke.server.http.limits import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.requests import Request

_BOUNDARY_PARAMETER: Final = re.compile(
    r"boundary=(?:\"([^\"]{1,70})\"|([^\s;\"]{1,70}))", re.IGNORECASE
)
_NAME_PARAMETER: Final = re.compile(r"[;\s]name=\"([^\"]*)\"")
_FILENAME_PARAMETER: Final = re.compile(r"[;\s]filename=\"([^\"]*)\"")
_MAX_HEAD_BYTES: Final = 8192  # of one part's headers
_MAX_FIELD_BYTES: Final = 1024
_MAX_PARTS: Final = 16


async def read_form(
    request: Request,
    write: Callable[[bytes], None],
    max_bytes: int,
    timeout_s: float,
    *,
    file_field: str = "file",
) -> dict[str, str]:
    """Receive a `multipart/form-data` request with one file, and return its form fields.

    The value of `file_field` is the file's name. `write` is called in a thread with the file's
    bytes.

    Raises:
        ContentTypeError: the body is not multipart/form-data.
        RequestError: the body is malformed, or has two files, or too many or too long fields.
        MissingFieldError: the form has no file.
        BodySizeError: the file has more than `max_bytes`.
        BodyTimeoutError: the file arrived too slowly.
        ClientGoneError: the client disconnected before the end of the body.
    """
    content_type = request.headers.get("content-type", "")
    boundary = _BOUNDARY_PARAMETER.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or boundary is None:
        raise ContentTypeError("The Content-Type must be multipart/form-data with a boundary.")
    form = _Form(f"\r\n--{boundary[1] or boundary[2]}".encode(), write, max_bytes, file_field)
    spool = Spool(form.feed)
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                await spool.take(chunk)
            await spool.end()
    except TimeoutError:
        raise BodyTimeoutError(f"The file took longer than {timeout_s:g} s to arrive.") from None
    except ClientDisconnect:
        raise ClientGoneError("The client left before its request was complete.") from None
    return form.finish()


class _Form:
    """Parses a multipart form as it arrives, with a bounded amount of memory.

    The file's bytes are passed on at once; the values of other fields are kept and must be short.
    """

    def __init__(
        self,
        delimiter: bytes,
        write: Callable[[bytes], None],
        max_bytes: int,
        file_field: str = "file",
    ) -> None:
        self._file_field = file_field
        self._delimiter = delimiter
        self._write = write
        self._max_bytes = max_bytes
        self._fields: dict[str, str] = {}
        self._num_bytes = 0
        self._is_over = False
        self._buffer = bytearray(b"\r\n")  # so the first delimiter looks like the others
        self._parser = self._parse()
        next(self._parser)

    def feed(self, chunk: bytes) -> None:
        """Parse the next bytes of the request's body."""
        self._buffer += chunk
        next(self._parser)

    def finish(self) -> dict[str, str]:
        """Return the form's fields when the whole body has arrived.

        Raises:
            RequestError: the form is incomplete.
            MissingFieldError: the form has no file.
        """
        if not self._is_over:
            raise RequestError("The form is incomplete: its last boundary is missing.")
        if self._file_field not in self._fields:
            raise MissingFieldError("is missing.", field=self._file_field)
        return self._fields

    def _parse(self) -> Iterator[None]:
        """Parse the form from the buffer; yield whenever more bytes of the body are needed."""
        buffer, delimiter = self._buffer, self._delimiter
        yield from self._skip_preamble()
        for _ in range(_MAX_PARTS):
            while len(buffer) < 2:
                yield
            if buffer[:2] == b"--":
                self._is_over = True
                while True:  # drop bytes after the last boundary
                    buffer.clear()
                    yield
            while (end := buffer.find(b"\r\n\r\n")) < 0:
                if len(buffer) > _MAX_HEAD_BYTES:
                    raise RequestError(
                        f"A part of the form has headers larger than {_MAX_HEAD_BYTES} bytes."
                    )
                yield
            take = self._receiver_for(buffer[:end].decode("utf-8", "replace"))
            del buffer[: end + 4]
            while (end := buffer.find(delimiter)) < 0:
                ready = max(0, len(buffer) - len(delimiter))
                take(bytes(buffer[:ready]))
                del buffer[:ready]
                yield
            take(bytes(buffer[:end]))
            del buffer[: end + len(delimiter)]
        raise RequestError(f"The form has more than {_MAX_PARTS - 1} parts.")

    def _skip_preamble(self) -> Iterator[None]:
        while (start := self._buffer.find(self._delimiter)) < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise RequestError("The form does not begin with its boundary.")
            yield
        del self._buffer[: start + len(self._delimiter)]

    def _receiver_for(self, head: str) -> Callable[[bytes], None]:
        """Return the function that takes the content of the form's next part.

        `head` has the part's headers, which name its field.
        """
        name_match = _NAME_PARAMETER.search(head)
        filename_match = _FILENAME_PARAMETER.search(head)
        name = name_match[1] if name_match is not None else ""
        if name in self._fields:
            raise RequestError("is sent twice.", field=name)
        if name == self._file_field:
            # Some clients send no file name.
            self._fields[name] = filename_match[1] if filename_match is not None else ""
            return self._take_file
        self._fields[name] = ""

        def take(data: bytes) -> None:
            self._fields[name] += data.decode("utf-8", "replace")
            if len(self._fields[name]) > _MAX_FIELD_BYTES:
                raise RequestError(f"is longer than {_MAX_FIELD_BYTES} characters.", field=name)

        return take

    def _take_file(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise BodySizeError(f"The file is larger than {counted_noun(self._max_bytes, 'byte')}.")
        self._write(data)
