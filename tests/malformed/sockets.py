"""What no HTTP client sends: broken bytes on bare connections, and clients that behave badly."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

_READ_S = 45.0  # beyond the server's own limits for headers and bodies
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
_HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
_BODY = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
_STREAM = json.dumps({"prompt": "hello", "max_tokens": 60, "stream": True}).encode()
_LINES = (
    *(
        b"GET",
        b"GET /",
        b"GET / HTTP/9.9",
        b"GET / HTTP/1.1 x",
        b"\xff\xfe / HTTP/1.1",
        b" GET / HTTP/1.1",
    ),
    *(
        b"GET http://evil.example/health HTTP/1.1",
        b"GET /\0 HTTP/1.1",
        b"GET /a b HTTP/1.1",
        b"PRI * HTTP/2.0",
    ),
    *(
        b"GET /%s HTTP/1.1" % (b"a" * 70000),
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc",
        b"CONNECT a:1 HTTP/1.1",
    ),
    *(
        b"GET / HTTP/1.0",
        b"OPTIONS * HTTP/1.1",
        b"HTTP/1.1 200 OK",
        b"G\x80T / HTTP/1.1",
        b"\r\n\r\nGET / HTTP/1.1",
    ),
)
_FIELDS = (
    *(
        b"X: a\r\n b",
        b"X : a",
        b": a",
        b"X",
        b"X\0: a",
        b"X: \0",
        b"\xff: a",
        b"Host: a\r\nHost: b",
    ),
    *(b"Content-Length: -1", b"Content-Length: 1\r\nContent-Length: 2", b"Content-Length: 0x10"),
    *(b"Content-Length: " + b"9" * 30, b"Content-Length: +5", b"Transfer-Encoding: gzip"),
    *(
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding: \x0bchunked",
        b"Expect: 100-continue",
    ),
    *(
        b"Connection: upgrade\r\nUpgrade: websocket",
        b"Connection: close, keep-alive",
        b"X: " + b"a" * 70000,
    ),
    *(b"\r\n".join(b"X-%d: 1" % n for n in range(3000)), b"Upgrade: h2c\r\nHTTP2-Settings: AA"),
)
_SIZES = (
    *(
        b"-1",
        b"g",
        b"",
        b"ffffffffffffffff",
        b"0x5",
        b"5;" + b"a" * 20000,
        b"00000000000000000005",
        b"5 ",
    ),
    *(b"+5", b"\xff", b"5\n", b"7fffffff"),
)


class Raw(Frozen):
    """What a client does: sends pieces with pauses between, then ends.

    `end`: "half" ends its own side and reads on, "read" only reads, "reset" resets, "close" leaves.
    `max_responses`: of responses that may come, because so many requests were sent whole.
    """

    name: str
    chunks: list[bytes]
    pause_s: float = 0.0
    end: str = "half"
    max_responses: int = 1


def draw(rng: random.Random) -> Raw:
    """Return what one client does."""
    return rng.choice(_KINDS)(rng)


def _line(rng: random.Random) -> Raw:
    return Raw(
        "request line",
        [rng.choice(_LINES) + rng.choice((b"\r\n", b"\n", b"\r")) * 2],
        max_responses=2,
    )


def _fields(rng: random.Random) -> Raw:
    fields = b"\r\n".join(rng.choice(_FIELDS) for _ in range(rng.choice((1, 1, 2))))
    return Raw(
        "headers",
        [_HEAD + fields + b"\r\n\r\n" + rng.choice((_BODY, b"5\r\nhello\r\n0\r\n\r\n"))],
        max_responses=2,
    )


def _chunked(rng: random.Random) -> Raw:
    sizes = [b"%x" % len(_BODY), rng.choice(_SIZES)]
    rng.shuffle(sizes)
    data = b"".join(size + b"\r\n" + _BODY + rng.choice((b"\r\n", b"\n", b"")) for size in sizes)
    last = rng.choice(
        (b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\nContent-Length: 9\r\n\r\n", b"0\n\n", b"")
    )
    return Raw(
        "chunks", [_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + data + last], max_responses=3
    )


def _smuggled(rng: random.Random) -> Raw:
    """A request whose end two readers may see at different places; the second is never answered."""
    coding = rng.choice((b"chunked", b"Chunked", b" chunked", b"chunked "))
    lengths = [b"Content-Length: %d" % (5 + len(_HIDDEN)), b"Transfer-Encoding: " + coding]
    rng.shuffle(lengths)
    head = _HEAD + b"\r\n".join(lengths) + b"\r\n\r\n"
    return Raw("smuggled", [head + b"0\r\n\r\n" + _HIDDEN])


def _pipelined(rng: random.Random) -> Raw:
    request = _HEAD + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY
    count = rng.choice((2, 3, 20))
    parts = [rng.choice((_GET, request)) for _ in range(count)]
    if rng.random() < 0.5:
        parts.insert(rng.randrange(count), rng.choice(_LINES)[:300] + b"\r\n\r\n")
    return Raw(
        "pipelined", [b"".join(parts)], end=rng.choice(("half", "reset")), max_responses=count + 1
    )


def _cut(rng: random.Random) -> Raw:
    request = _HEAD + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY
    return Raw(
        "cut", [request[: rng.randrange(len(request))]], end=rng.choice(("half", "reset", "close"))
    )


def _disconnected(rng: random.Random) -> Raw:
    body = rng.choice((_BODY, _STREAM))
    request = _HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return Raw("gone", [request], rng.choice((0.0, 0.002, 0.02)), rng.choice(("reset", "close")))


def _slow(rng: random.Random) -> Raw:
    request = _HEAD + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY
    step = rng.choice((1, 7, 40))
    chunks = [request[at : at + step] for at in range(0, len(request), step)]
    return Raw("slow", chunks[: rng.randrange(1, len(chunks) + 1)], 0.001)


def _garbage(rng: random.Random) -> Raw:
    data = rng.randbytes(rng.choice((1, 30, 5000)))
    if rng.random() < 0.5:
        request = bytearray(_HEAD + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY)
        for _ in range(rng.randrange(1, 6)):
            request[rng.randrange(len(request))] = rng.randrange(256)
        data = bytes(request)
    return Raw("garbage", [data], max_responses=3)


_KINDS: tuple[Callable[[random.Random], Raw], ...] = (
    *(
        _line,
        _fields,
        _fields,
        _chunked,
        _chunked,
        _smuggled,
        _pipelined,
        _cut,
        _disconnected,
        _slow,
        _garbage,
    ),
)


async def act(raw: Raw, port: int) -> list[str]:
    """Do what the client does; return what is wrong with how the server answers.

    Raises:
        OSError: the server takes no connection.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    received = b""
    try:
        for chunk in raw.chunks:
            writer.write(chunk)
            if raw.pause_s:
                await asyncio.sleep(raw.pause_s)
        if raw.end == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return []
        if raw.end == "close":
            return []
        await writer.drain()
        if raw.end == "half":
            writer.write_eof()
        async with asyncio.timeout(_READ_S):
            received = await reader.read()
    except TimeoutError:
        return [f"{raw.name}: the connection stays open"]
    except OSError:  # it closed while we sent
        pass
    finally:
        writer.close()
    return judge(raw, received)


def judge(raw: Raw, received: bytes) -> list[str]:
    """Return what is wrong with what a client got."""
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]
    final = [status for status in statuses if status >= 200]
    sent = b"".join(raw.chunks)[:300]
    faults = []
    if received and not received.startswith(b"HTTP/1.1 "):
        faults.append(f"{raw.name}: {received[:80]!r} is no response to {sent!r}")
    if any(status >= 500 for status in final):
        faults.append(f"{raw.name}: {final} to {sent!r}")
    if len(final) > raw.max_responses:
        faults.append(f"{raw.name}: {len(final)} responses to {sent!r}")
    return faults
