"""The clients of a server, in their own process: closed and open loops over HTTP (see pipe.py).

In a closed loop each client waits for its answer; in an open loop requests are sent when they
are due. Requests are OpenAI's streamed completions with token ids as prompt. The client uses
bare sockets, because it shares the cores with the server that it measures. Only the standard
library is imported.
"""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.common import closed_loop
from benchmarks.common.pipe import claim_output, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_LIMIT_S = 600.0
_LEAD_S = 0.5  # before the first request of a replay


def main() -> None:
    """Answer questions of the parent."""
    serve({"loop": loop, "replay": replay}, claim_output())


def loop(
    port: int, model: str, prompts: list[list[int]], num_clients: int, num_tokens: int
) -> dict[str, Any]:
    """Run a closed loop against the server at a port of this machine."""
    client = partial(send_request, port, model, num_tokens)
    work = closed_loop.run(client, prompts, closed_loop.Loop(num_clients, num_tokens))
    return asyncio.run(asyncio.wait_for(work, _LIMIT_S)).as_json()


def replay(
    port: int, model: str, times_s: list[float], prompts: list[list[int]], num_tokens: list[int]
) -> dict[str, Any]:
    """Send each prompt at its time; return when each was sent, begun and ended, and its hits."""
    work = _replay(port, model, times_s, prompts, num_tokens)
    limit_s = _LIMIT_S + 2 * times_s[-1]  # a slow machine has a low knee, and long runs
    return {"requests": asyncio.run(asyncio.wait_for(work, limit_s))}


async def _replay(
    port: int, model: str, times_s: list[float], prompts: list[list[int]], num_tokens: list[int]
) -> list[dict[str, float]]:
    start_s = time.monotonic() + _LEAD_S
    results: list[dict[str, float]] = [{} for _ in times_s]

    async def send_at(at: int) -> None:
        now_s, usage = time.monotonic() - start_s, dict[str, Any]()
        log = {"sent_s": now_s, "first_s": 0.0, "last_s": 0.0}
        async for _ in send_request(port, model, num_tokens[at], prompts[at], usage):
            log["last_s"] = time.monotonic() - start_s
            log["first_s"] = log["first_s"] or log["last_s"]
        log["num_cached"] = usage["prompt_tokens_details"]["cached_tokens"]
        results[at] = log

    async with asyncio.TaskGroup() as group:
        for at, due_s in enumerate(times_s):
            await asyncio.sleep(max(0.0, start_s + due_s - time.monotonic()))
            group.create_task(send_at(at))
    return results


async def send_request(
    port: int,
    model: str,
    num_tokens: int,
    prompt: Sequence[int],
    usage: dict[str, Any] | None = None,
) -> AsyncIterator[int]:
    """Stream one answer, and yield 1 for each piece of text; check that it had all its tokens.

    The server's count of tokens is put into `usage`.

    Raises:
        RuntimeError: the server refused, or wrote another number of tokens.
    """
    payload = {
        "model": model, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    usage = {} if usage is None else usage
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps(payload).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            output = (await reader.read()).decode(errors="replace")
            raise RuntimeError(f"the server refused: {output[:300]}")
        async for line in body_lines(reader):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage |= event.get("usage") or {}
            if event.get("choices") and event["choices"][0].get("text"):
                yield 1
        if (written := usage.get("completion_tokens", 0)) != num_tokens:
            raise RuntimeError(f"the server wrote {written} tokens, not {num_tokens}")
    finally:
        writer.close()


async def body_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
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
