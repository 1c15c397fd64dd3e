"""Measure the router's own processor time for a request, and for a streamed token.

Used by router.py. A server that costs almost nothing replaces the engine: all its streams get a
token at the same time, like the streams of one step. The router's time is the time of its event
loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.servers import MODEL_NAME, Server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_STEP_S = 0.005
_STREAMS, _TOKENS, _REQUESTS = 16, 500, 800
_EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"bench","choices":'
    b'[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Be the server of a connection."""
    ends = (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError)
    with contextlib.suppress(*ends):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            match = re.search(rb"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(match[1]) if match else 0)
            path = head.split()[1]
            if path == b"/v1/completions":
                await _stream(writer, json.loads(body)["max_tokens"])
                continue
            rows: dict[str, Any] = {"status": "ok", "data": [{"id": MODEL_NAME}]}
            output = json.dumps(rows).encode()
            status = 404 if path == b"/api/load" else 200
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(output)) + output
            )
    writer.close()


async def _stream(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(_HEAD)
    for _ in range(num_tokens):
        await asyncio.sleep(_STEP_S - time.monotonic() % _STEP_S)
        writer.write(b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT))
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def _costs(
    folder: Path, stack: contextlib.ExitStack, send_request: Callable[..., Awaitable[Any]]
) -> dict[str, float]:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    code = "from twostroke.cli import main; main()"
    command = (sys.executable, "-c", code, "route", "--no-access-log", "--replica", url)
    router = await asyncio.to_thread(Server, "router", command, folder, stack)

    async def client(count: int, num_tokens: int) -> None:
        for _ in range(count):
            await send_request(
                router.port, {"prompt": "Why is the sky blue?", "max_tokens": num_tokens}
            )

    async def load(count: int, num_tokens: int) -> float:
        before_s = processor_s(router.pid)
        await asyncio.gather(*[client(count, num_tokens) for _ in range(_STREAMS)])
        return processor_s(router.pid) - before_s

    await load(5, 20)  # warms up
    request_s = await load(_REQUESTS // _STREAMS, 1) / _REQUESTS
    token_s = (await load(1, _TOKENS) - _STREAMS * request_s) / (_STREAMS * (_TOKENS - 1))
    server.close()
    return {"request": request_s, "streamed token": token_s}


def processor_s(pid: int) -> float:
    """Return the processor time of a process's first thread so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def router_costs(send_request: Callable[..., Awaitable[Any]]) -> dict[str, float]:
    """Return seconds of processor time; `ask` sends one completion to a port."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        return asyncio.run(_costs(Path(folder), stack, send_request))
