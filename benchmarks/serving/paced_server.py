"""A server without a model, which answers each request at a fixed pace.

Run it with `python -m benchmarks.serving.paced_server`. It prints its port, and ends when its
standard input does. The first token of an answer comes after a time, and each further one after a
shorter time, whatever the number of requests, so that every load generator should measure these.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys

FIRST_TOKEN_S = 0.1
STEP_S = 0.01
_LENGTH = re.compile(rb"(?i)content-length: (\d+)")
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_PROMPT_TOKENS = 64


def _event(fields: object) -> bytes:
    text = fields if isinstance(fields, str) else json.dumps(fields)
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunk(delta: dict[str, str], reason: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "paced", "object": "chat.completion.chunk", "model": "paced", "choices": [choice]}


class _PacedServer(asyncio.Protocol):
    """A connection, with one request at a time."""

    def __init__(self) -> None:
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        match = _LENGTH.search(self._data, 0, end) if end >= 0 else None
        whole = end + 4 + (int(match[1]) if match else 0)
        if end < 0 or len(self._data) < whole:
            return
        head, body = self._data[:end], self._data[end + 4 : whole]
        self._data = self._data[whole:]
        if head.startswith(b"POST") and b"/chat/completions" in head.split(b"\r\n")[0]:
            self._answer(json.loads(body))
        else:
            output = json.dumps({"object": "list", "data": [{"id": "paced", "object": "model"}]})
            self._write(_JSON_HEAD % len(output) + output.encode())

    def _answer(self, body: dict[str, object]) -> None:
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        assert isinstance(limit, int)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        role = _event(_chunk({"role": "assistant", "content": ""}))
        usage = {"prompt_tokens": _PROMPT_TOKENS, "completion_tokens": limit}
        usage["total_tokens"] = _PROMPT_TOKENS + limit
        end = _event(_chunk({}, "length")) + _event({"choices": [], "usage": usage})
        end += _event("[DONE]") + b"0\r\n\r\n"
        parts = [_event(_chunk({"content": " word"}))] * limit
        parts[0] = role + parts[0]
        parts[-1] += end
        self._write(_HEAD)
        for index, part in enumerate(parts):
            loop.call_at(start_s + FIRST_TOKEN_S + index * STEP_S, self._write, part)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_PacedServer, "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", choices=["127.0.0.1"], default="127.0.0.1")
    asyncio.run(_serve(parser.parse_args().port))
