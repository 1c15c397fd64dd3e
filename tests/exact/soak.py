"""Send half an hour of mixed requests, cancel a third, kill the engine every 5 minutes.

Run it with `make long SUITE=soak`.

Streams, whole answers, schemas, embeddings and stored answers come from some clients at a time; a
third leaves early. The server's memory must not grow, and nothing may be left at the end. What the
engine's process keeps ends with it, so only the server's memory is judged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common.quiet import descendants
from benchmarks.common.servers import Server, our_command
from twostroke.server.http.limits import RequestLimits

_SETTLE_S = 300.0  # in which caches fill, before memory is judged; at most a third of the time
_LOOK_S = 10.0
_MOST_MB = 1.0  # of growth from the first to the last look, by the line through all
_LEAVE = 1 / 3
_WORDS = ("river", "engine", "paper", "winter", "number", "garden", "signal", "window")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_EXPECTED = {"engine_died", "overloaded", ""}


class Soak:
    """A server under load, and what its clients have seen."""

    def __init__(self, http: httpx.AsyncClient, server: Server, seed: int) -> None:
        """Take a server that answers."""
        self.http, self.server, self.rng = http, server, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.looks: list[tuple[float, float]] = []  # seconds, and the server's MB
        self.is_over = False

    async def client(self) -> None:
        """Ask one thing after another."""
        kinds = [self.stream, self.stream, self.whole_answer, self.schema, self.embed, self.store]
        while not self.is_over:
            leaves = self.rng.random() < _LEAVE
            work = asyncio.ensure_future(self.rng.choice(kinds)())
            try:
                error = await asyncio.wait_for(work, self.rng.uniform(0, 2) if leaves else None)
            except TimeoutError:
                self.counts["left early"] += 1
                continue
            self.counts[error or "answered"] += 1
            if error not in _EXPECTED:
                print(f"An unexpected error: {error}", flush=True)
            elif error:
                await asyncio.sleep(1.0)

    def prompt(self) -> str:
        """Return a prompt that begins like others, and goes on like none.

        New words would fill the tokenizer's cache of words for hours.
        """
        words = self.rng.choices(_WORDS, k=self.rng.randint(8, 60))
        return f"Tell me about these words: {' '.join(words)}."

    async def stream(self) -> str:
        """Stream a chat."""
        messages = [{"role": "user", "content": self.prompt()}]
        body = {"messages": messages, "max_tokens": self.rng.randint(1, 80), "stream": True}
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                return _code(await answer.aread())
            async for line in answer.aiter_lines():
                if line.startswith('data: {"error"'):
                    return _code(line[6:].encode())
        return ""

    async def whole_answer(self) -> str:
        """Ask for a whole answer of two choices."""
        return await self.post("/v1/completions", prompt=self.prompt(), max_tokens=24, n=2)

    async def schema(self) -> str:
        """Ask for an object of a schema that nobody asked for before."""
        schema = {**_SCHEMA, "title": str(self.rng.getrandbits(32))}
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        messages = [{"role": "user", "content": self.prompt()}]
        return await self.post(
            "/v1/chat/completions", messages=messages, response_format=form, max_tokens=40
        )

    async def embed(self) -> str:
        """Embed some texts."""
        return await self.post("/v1/embeddings", input=[self.prompt() for _ in range(3)])

    async def store(self) -> str:
        """Make a stored answer, which pushes out an older one."""
        return await self.post("/v1/responses", input=self.prompt(), max_output_tokens=16)

    async def post(self, path: str, **body: Any) -> str:
        """Return the error's code, or an empty text."""
        answer = await self.http.post(path, json=body)
        return "" if answer.status_code == 200 else _code(answer.content)

    async def watch(self, seconds: float, kill_s: float) -> None:
        """Look at the memory and kill the engine now and then, until the time is over."""
        began_s, killed_s = time.monotonic(), time.monotonic()
        while (now_s := time.monotonic()) - began_s < seconds:
            self.looks.append((now_s - began_s, _megabytes(self.server.pid)))
            if len(self.looks) % 6 == 1:
                at, size = self.looks[-1]
                print(f"{at:5.0f} s  {size:7.2f} MB  {_counts_text(self.counts)}", flush=True)
            if now_s - killed_s >= kill_s:
                killed_s = now_s
                self.counts["kills"] += 1
                for pid in descendants(self.server.pid):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_LOOK_S)
        self.is_over = True

    async def left(self, files: list[str]) -> list[str]:
        """Return what is left once everybody has gone."""
        await asyncio.sleep(3)
        state = (await self.http.get("/api/state")).json()
        results = []
        if state["pages"]["held"]:
            results.append(f"{state['pages']['held']} pages are held")
        if state["requests"]["running"] or state["requests"]["num_waiting"]:
            results.append(f"requests: {state['requests']}")
        # A client that is cut off as it connects may forget a connection, which the server then
        # closes as idle.
        end_s = time.monotonic() + RequestLimits().idle_timeout_s + 5
        now = _files(self.server.pid)
        while len(now) > len(files) and time.monotonic() < end_s:
            await asyncio.sleep(1)
            now = _files(self.server.pid)
        if len(now) > len(files):
            new_files = Counter(now) - Counter(files)
            results.append(
                f"{len(now) - len(files)} descriptors more than before: {dict(new_files)}"
            )
        if (count := len(descendants(self.server.pid))) != 1:
            results.append(f"{count} processes instead of one")
        return results

    def growth_mb(self, seconds: float) -> float:
        """Return by how much the memory grows along the line through all looks."""
        begin_s = min(_SETTLE_S, seconds / 3)
        times, sizes = np.array([look for look in self.looks if look[0] >= begin_s]).T
        slope, _ = np.polyfit(times, sizes, 1)
        return float(slope * (times[-1] - times[0]))


def _code(body: bytes) -> str:
    return str(httpx.Response(200, content=body).json()["error"]["code"])


def _megabytes(pid: int) -> float:
    """Return the memory that a process has for itself."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines[1:])
    private_kb = sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    return private_kb / 1024


def _files(pid: int) -> list[str]:
    """What the process's descriptors name, without the numbers of sockets and pipes."""
    results = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            results.append(str(path.readlink()).partition(":[")[0])
    return results


def _counts_text(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))


async def soak(args: argparse.Namespace, server: Server) -> int:
    """Run the load; return 0 if nothing was found."""
    limits = httpx.Limits(max_connections=args.clients + 4, max_keepalive_connections=0)
    url, seconds = f"http://127.0.0.1:{server.port}", args.minutes * 60
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as http:
        load = Soak(http, server, args.seed)
        for kind in (load.stream, load.whole_answer, load.schema, load.embed, load.store):
            await kind()  # files and caches that are opened when they are first needed
        await load.http.get("/api/state")
        await asyncio.sleep(1)
        files = _files(server.pid)
        clients = [load.client() for _ in range(args.clients)]
        await asyncio.gather(load.watch(seconds, args.kill_minutes * 60), *clients)
        left = await load.left(files)
    growth_mb = load.growth_mb(seconds)
    odd = load.counts.keys() - _EXPECTED - {"answered", "left early", "kills"}
    print(f"{_counts_text(load.counts)}")
    print(f"The server's memory grew by {growth_mb:.2f} MB (at most {_MOST_MB} MB).")
    print(f"Unexpected errors: {', '.join(odd) or 'none'}; left: {', '.join(left) or 'nothing'}.")
    return int(bool(growth_mb > _MOST_MB or odd or left))


def main() -> int:
    """Start a server, and let it soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    command = (*our_command(args.model, 2), "--dashboard", "--no-access-log")
    with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
        record_options = ("--records", f"{folder_name}/records", "--keep-responses", "100")
        server = Server("Twostroke", (*command, *record_options), Path(folder_name), stack)
        return asyncio.run(soak(args, server))


if __name__ == "__main__":
    sys.exit(main())
