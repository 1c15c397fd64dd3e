"""Random responses have the same bytes, whether their writes are coalesced or not."""

from __future__ import annotations

import asyncio
import random
import socket
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.server import ServerState

from twostroke.server.http import connection
from twostroke.server.http.limits import RequestLimits
from twostroke.server.http.write_coalescer import WRITE_NOW, WriteCoalescer

if TYPE_CHECKING:
    import pytest
    from starlette.types import ASGIApp, Receive, Scope, Send

_LIMITS = RequestLimits()


class Direct(WriteCoalescer):
    """A transport that does not coalesce writes."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)


async def respond(scope: Scope, receive: Receive, send: Send) -> None:
    """Send a response that depends only on the path; some responses fail."""
    rng = random.Random(scope["path"])
    status = rng.choice((200, 200, 200, 404, 204, 304))
    sizes = [rng.choice((0, 1, 40, 3000, 70_000, 300_000)) for _ in range(rng.randrange(6))]
    chunks = [] if status in {204, 304} else [rng.randbytes(size) for size in sizes]
    fails_at = rng.choice((*range(-3, 0), *range(len(chunks) + 1))) if rng.random() < 0.2 else -1
    if rng.random() < 0.7:
        while (await receive()).get("more_body", False):
            pass
    if not fails_at:
        raise ValueError
    headers = [(b"x-path", scope["path"].encode())]
    if rng.random() < 0.4:
        headers.append((b"content-length", b"%d" % sum(map(len, chunks))))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for number, chunk in enumerate(chunks, 1):
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
        if number == fails_at:
            raise ValueError
        is_last = number == len(chunks) and rng.random() < 0.5
        if is_last or rng.random() < 0.5 or not scope["extensions"][WRITE_NOW](chunk):
            await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
        if is_last:
            return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def requests(rng: random.Random) -> bytes:
    """Return pipelined requests; the connection ends after the last, if not before."""
    data, count = b"", rng.randrange(1, 6)
    for number in range(count):
        method = rng.choice((b"GET", b"GET", b"HEAD", b"POST"))
        version = b"0" if rng.random() < 0.1 else b"1"
        head = b"%s /%d HTTP/1.%s\r\nhost: localhost\r\n" % (method, rng.getrandbits(40), version)
        body = rng.randbytes(rng.choice((0, 5, 2000))) if method == b"POST" else b""
        if method == b"POST":
            head += b"content-length: %d\r\n" % len(body)
            head += b"expect: 100-continue\r\n" if rng.random() < 0.3 else b""
        head += b"connection: close\r\n" if number == count - 1 else b""
        data += head + b"\r\n" + body
    return data


async def received(
    app: ASGIApp,
    sent: bytes,
    rng: random.Random,
    *,
    is_all: bool = False,
    limits: RequestLimits = _LIMITS,
    pause_s: float = 0.0,
) -> bytes:
    """Return the bytes that a client receives for `sent`.

    With `is_all` the client says that it sends nothing more. It pauses now and then; with
    `pause_s`, for this time after each 20 KB.
    """
    loop, ours = asyncio.get_running_loop(), socket.socketpair()
    ours[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # so that writers have to wait
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
    make = partial(
        connection.HttpConnection, config, ServerState(), {}, loop, limits=limits,
        is_draining=lambda: False, max_connections=10, idle_connections={},
    )  # fmt: skip
    reader, writer = await asyncio.open_connection(sock=ours[1], limit=4096)
    writer.write(sent)
    if is_all:
        writer.write_eof()
    await loop.connect_accepted_socket(make, ours[0])
    got = b""
    while chunk := await reader.read(rng.choice((100, 5000, 100_000))):
        got += chunk
        if pause_s and len(got) // 20_000 > (len(got) - len(chunk)) // 20_000:
            await asyncio.sleep(pause_s)
        elif rng.random() < 0.1:
            await asyncio.sleep(0.001)
    writer.close()
    return got


def test_coalesced_responses_equal_responses_written_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def both(seed: int) -> list[bytes]:
        results = []
        for kind in (WriteCoalescer, Direct):
            monkeypatch.setattr(connection, "WriteCoalescer", kind)
            rng = random.Random(seed)
            results.append(asyncio.run(received(respond, requests(rng), rng)))
        return results

    sizes = []
    for seed in range(60):
        gathered, direct = both(seed)
        assert gathered == direct, f"seed {seed}"
        sizes.append(len(direct))
    assert min(sizes) > 0
    assert max(sizes) > 500_000


def test_a_client_that_says_that_nothing_follows_gets_its_response() -> None:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"whole", "more_body": False})

    sent, rng = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", random.Random(1)
    got = asyncio.run(received(answer, sent, rng, is_all=True))
    assert got.startswith(b"HTTP/1.1 200")
    assert got.endswith(b"5\r\nwhole\r\n0\r\n\r\n")


def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(250_000), "more_body": True})
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    sent, rng = b"GET / HTTP/1.1\r\nconnection: close\r\nhost: a\r\n\r\n", random.Random(1)
    limits = RequestLimits(reader_timeout_s=0.6)
    got = asyncio.run(received(answer, sent, rng, limits=limits, pause_s=0.1))
    assert len(got) > 250_000
    assert got.endswith(b"3\r\nend\r\n0\r\n\r\n")
