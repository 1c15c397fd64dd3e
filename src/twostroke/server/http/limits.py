"""Limits for each client: checks of request headers, and readers of request bodies."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from starlette.requests import ClientDisconnect

from twostroke.core.files import BYTE_ORDER_MARK
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.server.http.body_limits import FREE_BYTES
from twostroke.server.http.errors import (
    BodySizeError,
    BodyTimeoutError,
    ClientGoneError,
    ContentTypeError,
    FramingError,
    HeaderSizeError,
)
from twostroke.server.http.request_context import served_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import Scope

_SPOOL_BYTES: Final = 1 << 16
_PROGRAM_MEDIA_TYPES: Final = ("", "application/x-www-form-urlencoded")  # for JSON, as by curl -d
_BROWSER_HEADERS: Final = ("origin", "sec-fetch-site")  # browsers send at least one of them


class RequestLimits(Frozen):
    """Limits for one client: sizes, and how slowly it may send and read.

    Attributes:
        max_body_bytes: the size of a request body (413).
        max_tenant_arriving_bytes: the total size of a tenant's bodies that arrive or wait for
            decoding (429); the first 64 KiB of each body do not count.
        max_arriving_bytes: the same for all tenants together (503).
        max_dropped_bytes: bytes to read and drop of a refused request's body, so that clients that
            keep sending can read the error.
        max_json_depth: the nesting depth of lists and objects (400).
        max_header_bytes: the size of the request line and the headers together (431).
        header_timeout_s: from the first byte of a request to the end of its headers.
        body_timeout_s: from the headers to the end of the body (408), also of a refused request.
        idle_timeout_s: how long a connection may stay open between two requests; longer than the
            timeouts of proxies (60 s is common), which otherwise use closed connections.
        reader_timeout_s: how long a response may wait for a client that reads nothing.
        max_unread: the number of outputs by which a stream may lag behind the engine.
        max_choices: prompts times n of one request.
        max_inputs: texts of one embedding request.
        max_vector_values: values of all vectors of one embedding request.
        max_file_bytes: the size of an uploaded file.
        max_files: the number of a tenant's files.
        max_files_bytes: the total size of a tenant's files, uploads included.
        file_timeout_s: from the headers of a file upload to its end.
        max_batch_lines: requests of one batch.
        max_open_batches: batches of a tenant that have not ended.
        max_batches: a tenant's batches in OpenAI's protocol, which cannot delete them; a new batch
            over the limit replaces the oldest ended batch, whose files stay.
        max_batch_bytes: the body of a batch in Anthropic's protocol, which has all its requests.
        compile_timeout_s: compilation of a new schema or grammar (400), without the time in the
            queue.
    """

    max_body_bytes: int = 8 * 1024 * 1024
    max_tenant_arriving_bytes: int = 64 * 1024 * 1024
    max_arriving_bytes: int = 256 * 1024 * 1024
    max_dropped_bytes: int = 64 * 1024 * 1024
    max_json_depth: int = 64
    max_header_bytes: int = 32 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    reader_timeout_s: float = 30.0
    max_unread: int = 4096
    max_choices: int = 1024
    max_inputs: int = 2048
    max_vector_values: int = 1 << 23  # 2,048 vectors of 4,096 values
    max_file_bytes: int = 200 * 1024 * 1024
    max_files: int = 100_000
    max_files_bytes: int = 10 * 1024**3
    file_timeout_s: float = 600.0
    max_batch_lines: int = 50_000
    max_open_batches: int = 100
    max_batches: int = 10_000
    max_batch_bytes: int = 64 * 1024 * 1024
    compile_timeout_s: float = 5.0


def check_headers(scope: Scope, limits: RequestLimits, *, path: str) -> None:
    """Check that a request's path and headers are not too large, and its framing is clear.

    `path` is the path as the client sent it.

    The HTTP parser checks the size only of headers that arrive in several pieces.

    Raises:
        HeaderSizeError: path and headers are over the limit.
        FramingError: the request has both Content-Length and Transfer-Encoding.
    """
    size = len(path) + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > limits.max_header_bytes:
        message = (
            f"Path and headers are larger than {counted_noun(limits.max_header_bytes, 'byte')}."
        )
        raise HeaderSizeError(message)
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        raise FramingError("Send Content-Length or Transfer-Encoding, not both.")


@asynccontextmanager
async def body_of(request: Request, limits: RequestLimits) -> AsyncIterator[bytes]:
    """Receive a request's JSON body, and yield it to a `with` block.

    The body's bytes count as body memory of the server until the block ends. The body of an
    internal request does not count, as it is in memory anyway.

    Raises:
        TenantBodiesError, BodiesError: the bodies in memory are over a limit.
        ContentTypeError: the body is not JSON, or is compressed.
        BodySizeError: the body is too long.
        BodyTimeoutError: the body arrived too slowly.
        ClientGoneError: the client disconnected before the end of the body.
    """
    body = bytearray()
    num_counted = 0
    served_request = served_of(request.scope)
    body_memory = served_request.body_memory
    tenant = served_request.tenant

    async def take(chunk: bytes) -> None:
        nonlocal num_counted
        body.extend(chunk)
        num_new = max(0, len(body) - FREE_BYTES) - num_counted
        if body_memory is not None and num_new:
            body_memory.take(tenant, num_new)
            num_counted += num_new

    length = request.headers.get("content-length", "")[:20]
    if body_memory is not None and length.isdecimal() and int(length) <= limits.max_body_bytes:
        body_memory.check(tenant, max(0, int(length) - FREE_BYTES))
    try:
        await receive_json(request, take, limits.max_body_bytes, limits.body_timeout_s)
        if body.startswith(BYTE_ORDER_MARK):  # clients on Windows write it
            del body[: len(BYTE_ORDER_MARK)]
        complete_body = bytes(body)
        body.clear()  # otherwise the block would hold the bytes twice
        yield complete_body
    finally:
        if body_memory is not None:
            body_memory.release(tenant, num_counted)


async def read_json(request: Request, limits: RequestLimits) -> bytes:
    """Receive a request's JSON body, and return its bytes; raises the errors of `body_of`."""
    async with body_of(request, limits) as body:
        return body


class Spool:
    """Buffers an arriving request body, and writes it to disk 64 KiB at a time in a thread.

    A slow disk then does not block the event loop.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        """Create an empty buffer; `write` is called in a thread with the bytes to write."""
        self._write = write
        self._buffer = bytearray()

    async def take(self, chunk: bytes) -> None:
        """Buffer the next bytes of the body, and write the buffer if it has 64 KiB.

        Raises the errors of `write`.
        """
        self._buffer += chunk
        if len(self._buffer) >= _SPOOL_BYTES:
            await self.end()

    async def end(self) -> None:
        """Write the bytes that are still buffered.

        Raises the errors of `write`.
        """
        chunk = bytes(self._buffer)
        self._buffer = bytearray()
        await asyncio.to_thread(self._write, chunk)


async def receive_json(
    request: Request, take: Callable[[bytes], Awaitable[None]], max_bytes: int, timeout_s: float
) -> None:
    """Receive a request's body, which must be JSON, and pass it to `take` chunk by chunk.

    The Content-Type must say that the body is JSON, because any web page can make a browser send a
    form or plain text to a server on this machine, while JSON needs the server's permission first.
    Programs may send JSON as a form, as `curl -d` does.

    Raises:
        ContentTypeError: the body is not JSON, or is compressed.
        BodySizeError: the body is too long, or its Content-Length is.
        BodyTimeoutError: the body arrived too slowly.
        ClientGoneError: the client disconnected before the end of the body.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not _is_program_with(media_type, request):
        received = f"'{media_type}'" if media_type else "none"
        raise ContentTypeError(f"The Content-Type must be application/json, got {received}.")
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        message = f"The body must not be compressed, got the Content-Encoding '{encoding}'."
        raise ContentTypeError(message)
    too_large = BodySizeError(f"The body is larger than {counted_noun(max_bytes, 'byte')}.")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise too_large
                await take(chunk)
    except TimeoutError:
        message = f"The body took longer than {timeout_s:g} s to arrive."
        raise BodyTimeoutError(message) from None
    except ClientDisconnect:
        raise ClientGoneError("The client left before its request was complete.") from None


def _is_program_with(media_type: str, request: Request) -> bool:
    """Return whether a program, not a browser, sent JSON under the media type of a form."""
    is_browser = any(map(request.headers.get, _BROWSER_HEADERS))
    return media_type in _PROGRAM_MEDIA_TYPES and not is_browser
