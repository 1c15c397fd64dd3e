"""The clients of an overloaded server, in their own process (see pipe.py).

Used by overload.py. Some arrive at given times and may be refused; others loop, each with one
request at a time. All obey `Retry-After`. The clients use bare sockets, because they share the
cores with the server that they measure. Only the standard library is imported.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import TYPE_CHECKING, Any, cast

from benchmarks.common.pipe import claim_output, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_LIMIT_S = 300.0
_LEAD_S = 0.5  # before the first request


def main() -> None:
    """Answer questions of the parent."""
    serve({"run": run}, claim_output())


def run(
    port: int,
    model: str,
    seconds: float,
    requests: list[dict[str, Any]] | None = None,
    loops: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Send `requests` when they are due while `loops` run for `seconds`; return what came.

    A request has `at_s`, `prompt`, `num_tokens`, `key` and `tries`, a loop `clients`, `prompts`,
    `num_tokens` and `key`. Each try of a request is reported, and the tokens that were computed in
    each second, a prompt's when its answer begins: of all requests, then of each loop.
    """
    crowd = _Crowd(port, model, seconds)
    work = crowd.run(requests or [], loops or [])
    return asyncio.run(asyncio.wait_for(work, _LIMIT_S))


class _Crowd:
    def __init__(self, port: int, model: str, seconds: float) -> None:
        self._port, self._model, self._seconds = port, model, seconds
        self._start_s = 0.0
        self._tokens = [0] * int(seconds)  # of requests, computed in each second

    async def run(
        self, requests: list[dict[str, Any]], loops: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Do all of it."""
        began_s = time.process_time()
        self._start_s = time.monotonic() + _LEAD_S
        every = [self._loop(loop_fields) for loop_fields in loops]
        looping = asyncio.gather(*every)
        tries = await asyncio.gather(*map(self._request, requests))
        tokens = await looping
        used_s = time.process_time() - began_s
        return {"requests": tries, "tokens": [self._tokens, *tokens], "client_s": used_s}

    async def _request(self, request: dict[str, Any]) -> list[dict[str, float]]:
        """Send a request when it is due, and again when it is told to, at most `tries` times."""
        await self._until(request["at_s"])
        tries: list[dict[str, float]] = []
        while True:
            attempt = await self._try(request)
            tries.append(attempt)
            if attempt["status"] == 200 or len(tries) == request["tries"]:
                return tries
            await asyncio.sleep(attempt["retry_s"])

    async def _try(self, request: dict[str, Any]) -> dict[str, float]:
        sent_s = self._now_s()
        results = {"sent_s": sent_s, "status": 0, "first_s": 0.0, "end_s": 0.0, "retry_s": 1.0}
        async for kind, value in self._ask(
            request["prompt"], request["num_tokens"], request["key"]
        ):
            if kind == "token":
                self._count(self._tokens, request["prompt"], is_first=not results["first_s"])
                results["first_s"] = results["first_s"] or self._now_s()
            else:
                results[kind] = value
        results["end_s"] = self._now_s()
        return results

    async def _loop(self, loop_fields: dict[str, Any]) -> list[int]:
        """Let clients ask until the time is over; return the tokens computed in each second."""
        seconds = [0] * int(self._seconds)
        prompts = itertools.cycle(loop_fields["prompts"])

        async def client() -> None:
            await self._until(0.0)
            while self._now_s() < self._seconds:
                prompt, is_first, retry_s = next(prompts), True, 0.0
                async for kind, value in self._ask(
                    prompt, loop_fields["num_tokens"], loop_fields["key"]
                ):
                    if kind == "token":
                        self._count(seconds, prompt, is_first=is_first)
                        is_first = False
                    retry_s = value if kind == "retry_s" else retry_s
                await asyncio.sleep(retry_s)

        clients = [asyncio.create_task(client()) for _ in range(loop_fields["clients"])]
        await self._until(self._seconds)
        for client_task in clients:
            client_task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return seconds

    def _count(self, seconds: list[int], prompt: list[int], *, is_first: bool) -> None:
        """Count a token of an answer, and with the first one its prompt."""
        if (second := int(self._now_s())) < len(seconds):
            seconds[second] += 1 + len(prompt) * is_first

    async def _ask(
        self, prompt: list[int], num_tokens: int, key: str
    ) -> AsyncIterator[tuple[str, float]]:
        """Yield the `status`, what `retry-after` says, and one `token` for each piece of text."""
        body = json.dumps(
            {
                "model": self._model, "prompt": prompt, "max_tokens": num_tokens,
                "temperature": 0, "ignore_eos": True, "stream": True,
            }
        ).encode()  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                b"Authorization: Bearer %b\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (key.encode(), len(body), body)
            )
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            status = int(head.split(b" ", 2)[1])
            yield "status", status
            if status != 200:
                _, is_told, rest = head.partition(b"\r\nretry-after: ")
                yield "retry_s", float(rest.partition(b"\r\n")[0]) if is_told else 1.0
                await reader.read()
                return
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    choices = cast("dict[str, Any]", json.loads(line[6:]))["choices"]
                    if choices and choices[0].get("text"):
                        yield "token", 1.0
        finally:
            writer.close()

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._now_s()))

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s


if __name__ == "__main__":
    main()
