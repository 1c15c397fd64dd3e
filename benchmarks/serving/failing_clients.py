"""The clients of servers that fail, in their own process: an open loop over HTTP (see pipe.py).

Requests are OpenAI's streamed completions with token ids as prompt. A request that is refused, or
whose stream ends with an error, is recorded and not sent again. Only the standard library is
imported.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import TYPE_CHECKING, Any

from benchmarks.common.pipe import claim_output, serve
from benchmarks.serving.load_clients import body_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

_ID = re.compile(rb"(?i)\r\nx-request-id: ([^\r]+)\r")
_MIN_GAP_S = 0.08  # between two events of a stream, to be recorded
_MAX_REQUEST_S = 180.0


def main() -> None:
    """Answer questions of the parent."""
    serve({"replay": replay}, claim_output())


def replay(
    port: int,
    model: str,
    start_s: float,
    times_s: list[float],
    prompts: list[list[int]],
    num_tokens: list[int],
) -> dict[str, Any]:
    """Send each prompt at its time after `start_s` of the monotonic clock; return what came."""
    work = _replay(port, model, start_s, times_s, prompts, num_tokens)
    return {"requests": asyncio.run(work)}


async def _replay(
    port: int,
    model: str,
    start_s: float,
    times_s: list[float],
    prompts: list[list[int]],
    num_tokens: list[int],
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = [{} for _ in times_s]

    async def send_at(index: int) -> None:
        stream = _Stream(start_s)
        results[index] = stream.result
        try:
            async with asyncio.timeout(_MAX_REQUEST_S):
                await stream.read(port, model, prompts[index], num_tokens[index])
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            stream.result["error"] = f"{type(error).__name__}: {error}"

    async with asyncio.TaskGroup() as group:
        for index, due_s in enumerate(times_s):
            await asyncio.sleep(max(0.0, start_s + due_s - time.monotonic()))
            group.create_task(send_at(index))
    return results


class _Stream:
    """One request: `result` has its id, its times, its longer gaps, and its error, or ""."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self.result: dict[str, Any] = {
            "id": "",
            "sent_s": self._now_s(),
            "first_s": 0.0,
            "last_s": 0.0,
            "gaps": [],
            "error": "",
        }

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def read(self, port: int, model: str, prompt: Sequence[int], num_tokens: int) -> None:
        """Send the request, and read its stream to the end."""
        payload = {
            "model": model, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        body = json.dumps(payload).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            head = await reader.readuntil(b"\r\n\r\n")
            if match := _ID.search(head):
                self.result["id"] = match[1].decode()
            status = head.split(maxsplit=2)[1].decode()
            if status != "200":
                self.result["error"] = status
                return
            await self._read_events(reader, num_tokens)
        finally:
            writer.close()

    async def _read_events(self, reader: asyncio.StreamReader, num_tokens: int) -> None:
        result, num_written = self.result, 0
        async for line in body_lines(reader):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                result["error"] = f"event: {event['error'].get('message')}"
                return
            num_written = (event.get("usage") or {}).get("completion_tokens", num_written)
            if not (event.get("choices") and event["choices"][0].get("text")):
                continue
            now_s = self._now_s()
            if not result["first_s"]:
                result["first_s"] = now_s
            elif now_s - result["last_s"] > _MIN_GAP_S:
                result["gaps"].append((result["last_s"], now_s))
            result["last_s"] = now_s
        if num_written != num_tokens:
            result["error"] = f"{num_written} tokens, not {num_tokens}"


if __name__ == "__main__":
    main()
