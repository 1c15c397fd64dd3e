"""Reads `multipart/form-data` (RFC 7578) as it comes: one file and some short fields."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final

from starlette.requests import ClientDisconnect

from twostroke.core.errors import RequestError
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

_BOUNDARY: Final = re.compile(r"boundary=(?:\"([^\"]{1,70})\"|([^\s;\"]{1,70}))", re.IGNORECASE)
_NAME: Final = re.compile(r"[;\s]name=\"([^\"]*)\"")
_FILENAME: Final = re.compile(r"[;\s]filename=\"([^\"]*)\"")
_MAX_HEAD_BYTES: Final = 8192  # of one part
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
    """Return the fields, and the name of the file under `file_field`; `write` takes the file's
    bytes, in a thread.

    Raises:
        ContentTypeError: the body is not multipart/form-data.
        RequestError: the body is malformed, or it has two files or too many or too long fields.
        MissingFieldError: there is no file.
        BodySizeError: the file has more than `max_bytes`.
        BodyTimeoutError, ClientGoneError: as `read_json`.
    """
    kind = request.headers.get("content-type", "")
    boundary = _BOUNDARY.search(kind)
    if not kind.lower().startswith("multipart/form-data") or boundary is None:
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
    """The parts so far. Memory is bounded: the file is passed on, and all else is short."""

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
        self._rest = bytearray(b"\r\n")  # so that the first delimiter is like the others
        self._steps = self._parse()
        next(self._steps)

    def feed(self, chunk: bytes) -> None:
        self._rest += chunk
        next(self._steps)

    def finish(self) -> dict[str, str]:
        if not self._is_over:
            raise RequestError("The form is incomplete: its last boundary is missing.")
        if self._file_field not in self._fields:
            raise MissingFieldError("is missing.", field=self._file_field)
        return self._fields

    def _parse(self) -> Iterator[None]:
        """Take parts from the rest; yields where more bytes are needed."""
        rest, delimiter = self._rest, self._delimiter
        yield from self._skip_preamble()
        for _ in range(_MAX_PARTS):
            while len(rest) < 2:
                yield
            if rest[:2] == b"--":
                self._is_over = True
                while True:  # what follows is dropped
                    rest.clear()
                    yield
            while (end := rest.find(b"\r\n\r\n")) < 0:
                if len(rest) > _MAX_HEAD_BYTES:
                    raise RequestError("The form has a part with too long a head.")
                yield
            take = self._taker(rest[:end].decode("utf-8", "replace"))
            del rest[: end + 4]
            while (end := rest.find(delimiter)) < 0:
                ready = max(0, len(rest) - len(delimiter))
                take(bytes(rest[:ready]))
                del rest[:ready]
                yield
            take(bytes(rest[:end]))
            del rest[: end + len(delimiter)]
        raise RequestError(f"The form has more than {_MAX_PARTS - 1} parts.")

    def _skip_preamble(self) -> Iterator[None]:
        while (start := self._rest.find(self._delimiter)) < 0:
            if len(self._rest) > _MAX_HEAD_BYTES:
                raise RequestError("The form does not begin with its boundary.")
            yield
        del self._rest[: start + len(self._delimiter)]

    def _taker(self, head: str) -> Callable[[bytes], None]:
        """Return what takes the bytes of a part with this head."""
        named, file = _NAME.search(head), _FILENAME.search(head)
        name = named[1] if named is not None else ""
        if name in self._fields:
            raise RequestError("is sent twice.", field=name)
        if name == self._file_field:
            self._fields[name] = file[1] if file is not None else ""  # some clients name none
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
            raise BodySizeError(f"The file is larger than {self._max_bytes} bytes.")
        self._write(data)
