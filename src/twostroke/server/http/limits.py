"""Limits for one client, and what checks headers and reads bodies within them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from starlette.requests import ClientDisconnect

from twostroke.core.frozen import Frozen
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

_PIECE_BYTES: Final = 1 << 16
_FROM_PROGRAMS: Final = ("", "application/x-www-form-urlencoded")
_FROM_BROWSERS: Final = ("origin", "sec-fetch-site")  # one of them comes with every POST


class RequestLimits(Frozen):
    """Limits for one client: sizes, and how slowly it may send and read.

    Attributes:
        max_body_bytes: a longer request body is refused (413).
        max_tenant_arriving_bytes: bodies of a tenant that arrive or wait to be read, together;
            the first 64 KiB of each do not count. More is refused (429).
        max_arriving_bytes: the same of all tenants (503).
        max_dropped_bytes: this much of a refused request's body is still read, so that clients that
            keep sending read the error.
        max_json_depth: lists and objects nested deeper are refused (400).
        max_header_bytes: request line and headers together.
        header_timeout_s: from the first byte of a request to the end of its headers.
        body_timeout_s: from the headers to the end of the body (408), also of a refused request.
        idle_timeout_s: how long a connection may stay open between two requests; longer than the
            timeouts of proxies (60 s is common), which otherwise meet closed connections.
        reader_timeout_s: how long a response may wait for a client that reads nothing.
        max_unread: how many outputs a stream may be behind the engine.
        max_choices: prompts times n of one request.
        max_inputs: texts to embed of one request.
        max_vector_values: of all vectors of a request for embeddings.
        max_file_bytes: an uploaded file.
        max_files: files of a tenant when another is uploaded.
        max_files_bytes: all files of a tenant together, uploads included.
        file_timeout_s: from the headers of an upload to its end.
        max_batch_lines: lines of a batch.
        max_open_batches: batches of a tenant that have not ended.
        max_batches: OpenAI's batches of a tenant, which it cannot delete; with one more, the oldest
            that has ended is forgotten, and its files stay.
        max_batch_bytes: the body of Anthropic's batches, which has all their requests.
        compile_timeout_s: for a new schema or grammar (400); one is compiled at a time, and the
            time of waiting does not count.
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


def check_headers(scope: Scope, limits: RequestLimits) -> None:
    """Check the size of the path and the headers, and that the body has one length.

    The HTTP parser only checks the size of headers that come in several pieces.

    Raises:
        HeaderSizeError: over the limit.
        FramingError: the body has a length, and is sent in chunks.
    """
    size = len(scope["path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > limits.max_header_bytes:
        message = f"Path and headers are larger than {limits.max_header_bytes} bytes."
        raise HeaderSizeError(message)
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        raise FramingError("Send Content-Length or Transfer-Encoding, not both.")


@asynccontextmanager
async def body_of(request: Request, limits: RequestLimits) -> AsyncIterator[bytes]:
    """Yield the request's body, which counts as arriving until the end of the block.

    A body from inside does not count: the server has it in memory anyhow.

    Raises:
        TenantBodiesError, BodiesError: too many bytes arrive.
        TwostrokeError: as `receive_json`.
    """
    body, num_counted, served = bytearray(), 0, served_of(request.scope)
    arriving, tenant = served.arriving, served.tenant

    async def take(chunk: bytes) -> None:
        nonlocal num_counted
        body.extend(chunk)
        more = max(0, len(body) - FREE_BYTES) - num_counted
        if arriving is not None and more:
            arriving.take(tenant, more)
            num_counted += more

    length = request.headers.get("content-length", "")[:20]
    if arriving is not None and length.isdecimal() and int(length) <= limits.max_body_bytes:
        arriving.check(tenant, max(0, int(length) - FREE_BYTES))
    try:
        await receive_json(request, take, limits.max_body_bytes, limits.body_timeout_s)
        whole = bytes(body)
        body.clear()  # it lives as long as the block, and counts once
        yield whole
    finally:
        if arriving is not None:
            arriving.give(tenant, num_counted)


async def read_json(request: Request, limits: RequestLimits) -> bytes:
    """Return the request's body; raises as `body_of`."""
    async with body_of(request, limits) as body:
        return body


class Spool:
    """Writes bytes in a thread, 64 KiB at a time, since a disk may be slow."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        """Write with `write`."""
        self._write, self._piece = write, bytearray()

    async def take(self, chunk: bytes) -> None:
        """Take the next bytes; raises what `write` raises."""
        self._piece += chunk
        if len(self._piece) >= _PIECE_BYTES:
            await self.end()

    async def end(self) -> None:
        """Write what is left."""
        piece, self._piece = bytes(self._piece), bytearray()
        await asyncio.to_thread(self._write, piece)


async def receive_json(
    request: Request, take: Callable[[bytes], Awaitable[None]], max_bytes: int, timeout_s: float
) -> None:
    """Give the request's body, whose Content-Type must be JSON, to `take`, piece by piece.

    Any web page can make a browser send a form or plain text to a server on this machine; JSON
    needs the server's permission first. `curl -d` calls JSON a form: programs may do that.

    Raises:
        ContentTypeError: the body is not JSON, or is compressed.
        BodySizeError: the body is too long, or its Content-Length is.
        BodyTimeoutError: the body came too slowly.
        ClientGoneError: the client left before the end.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not _is_program_with(media_type, request):
        got = f"'{media_type}'" if media_type else "none"
        raise ContentTypeError(f"The Content-Type must be application/json, got {got}.")
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        message = f"The body must not be compressed, got the Content-Encoding '{encoding}'."
        raise ContentTypeError(message)
    too_large = BodySizeError(f"The body is larger than {max_bytes} bytes.")
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
    """Whether a program, rather than a browser, sent a media type that programs use for JSON."""
    return media_type in _FROM_PROGRAMS and not any(map(request.headers.get, _FROM_BROWSERS))
