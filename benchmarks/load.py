"""The clients of a server, in a process of their own: a closed loop over HTTP (see pipe.py).

Requests are OpenAI's completions with token ids for a prompt, streamed. The client is written on
bare sockets, since it shares the cores with the server that it measures. Only the standard library
is used here.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import closed_loop
from pipe import claim_output, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_LIMIT_S = 600.0


def main() -> None:
    """Answer questions of the parent."""
    serve({"loop": loop}, claim_output())


def loop(
    port: int, model: str, prompts: list[list[int]], num_clients: int, num_tokens: int
) -> dict[str, Any]:
    """Run a closed loop against the server at a port of this machine."""
    ask = partial(_ask, port, model, num_tokens)
    work = closed_loop.run(ask, prompts, closed_loop.Loop(num_clients, num_tokens))
    return asyncio.run(asyncio.wait_for(work, _LIMIT_S)).as_json()


async def _ask(port: int, model: str, num_tokens: int, prompt: Sequence[int]) -> AsyncIterator[int]:
    """Stream one answer, and yield 1 for each piece of text; check that it had all its tokens.

    Raises:
        RuntimeError: the server refused, or wrote another number of tokens.
    """
    asked = {
        "model": model, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps(asked).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            said = (await reader.read()).decode(errors="replace")
            raise RuntimeError(f"the server refused: {said[:300]}")
        written = 0
        async for line in _lines(reader):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                written = event["usage"]["completion_tokens"]
            if event.get("choices") and event["choices"][0].get("text"):
                yield 1
        if written != num_tokens:
            raise RuntimeError(f"the server wrote {written} tokens, not {num_tokens}")
    finally:
        writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a body in chunked transfer encoding."""
    rest = b""
    while size := int((await reader.readline()).partition(b";")[0], 16):
        chunk = (await reader.readexactly(size + 2))[:-2]
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


if __name__ == "__main__":
    main()
