"""`make long SUITE=malformed`: malformed requests and frames, in large numbers.

Requests go over HTTP, then raw bytes over bare connections, to `twostroke serve` with a tiny random
model (or `--model`), its engine in a process of its own; frames go to both ends of the wire between
the two. All of it follows from the seed. No answer may be a 5xx but a refusal of load; the good
requests in between get the same answer each time; afterwards both processes are the same ones,
nothing runs, no page is held, no descriptor is left open, and memory has grown little.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.quiet import descendants
from benchmarks.common.servers import Server, our_command
from malformed import sockets
from malformed.frames import REQUESTS, EngineEnd, ServerEnd, answers, damaged_frame
from malformed.raw_client import RawClient, Reply
from malformed.requests_of_schema import Case, Requests
from support.remote import options
from support.tiny import Tiny, write_tiny_gguf
from twostroke.engine.engine import build
from twostroke.engine.process.main import _ready

if TYPE_CHECKING:
    from collections.abc import Iterator

TINY = "tiny"
_ROUND = 250  # cases between two good requests
_CLIENTS = 8  # at a time
_WARM_UP = 4  # rounds after which memory is measured for the first time
_MOST_GROWTH_BYTES = 48 << 20
_IDLE_S = 60.0
_OPENED_LATE = 8  # files that are opened when they are first needed: databases, pipes of a helper
_MAX_SHOWN = 20  # faults that are printed
_LEAKS = re.compile(rb"Traceback|/site-packages/|/src/twostroke/|\bat 0x[0-9a-f]{6}")
_REFUSALS = frozenset((529,))  # Anthropic's word for a full queue
_LINES = 5  # of a batch
_ENDS = frozenset(("completed", "failed", "expired", "cancelled"))
_FAILED = re.compile(rb'.*"status_code": ?5.*')
_GOOD = {"prompt": "The sky is", "max_tokens": 8, "temperature": 0, "logprobs": 1}


class Campaign:
    """A server, and what is wrong with it so far."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.seed = server, seed
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self.sizes: list[list[int]] = []  # of the server and of its engine
        self._asker = RawClient(server.port)
        self._good: Any = None
        self.engines = self._engines()
        self.files = 0

    async def begin(self) -> None:
        """Note the good answer, and what is open while nothing happens."""
        self._good = await self._plain()
        self._asker.close()
        await asyncio.sleep(0.3)
        self.files = self._num_files()

    async def http(self, count: int) -> None:
        """Send malformed requests."""
        document = json.loads((await self._get("/openapi.json")).body)
        requests = [Requests(document, self.seed * 1000 + n) for n in range(_CLIENTS)]
        clients = [RawClient(self.server.port) for _ in requests]
        for done in range(0, count, _ROUND):
            share = -(-min(_ROUND, count - done) // _CLIENTS)
            works = zip(requests, clients, strict=True)
            await asyncio.gather(*(self._exchange(*work, share) for work in works))
            await self._batch(requests[0])
            await self._check(done // _ROUND)
        for client in clients:
            client.close()

    async def raw(self, count: int) -> None:
        """Let clients send what is not HTTP, or go away."""
        rngs = [random.Random(self.seed * 2000 + n) for n in range(_CLIENTS)]
        for done in range(0, count, _ROUND):
            share = -(-min(_ROUND, count - done) // _CLIENTS)
            await asyncio.gather(*(self._act(rng, share) for rng in rngs))
            await self._check(done // _ROUND)

    async def end(self) -> None:
        """Wait until nothing runs, and look at what is left."""
        deadline = time.monotonic() + _IDLE_S
        while (held_resources := await self._held_resources()) and time.monotonic() < deadline:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.2)
        self.faults += [f"still held: {held_resources}"] if held_resources else []
        self._asker.close()
        deadline = time.monotonic() + _IDLE_S  # which rests of bodies may take to be given up
        while self._num_files() > self.files + _OPENED_LATE and time.monotonic() < deadline:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.2)
        if (left := self._num_files() - self.files) > _OPENED_LATE:
            self.faults.append(f"{left} descriptors more than before")
        if self._engines() != self.engines:
            self.faults.append(f"the engine was {self.engines} and is {self._engines()}")

    @property
    def growth(self) -> list[list[int]]:
        """Bytes by which the two processes have grown since the warm-up, and since half-way."""
        settled = self.sizes[_WARM_UP:]
        if not settled:
            return [[0, 0], [0, 0]]
        firsts = settled[0], settled[len(settled) // 2]
        return [
            [now - then for now, then in zip(settled[-1], first_sizes, strict=True)]
            for first_sizes in firsts
        ]

    async def _exchange(self, requests: Requests, client: RawClient, count: int) -> None:
        for _ in range(count):
            case = requests.draw()
            self.counts["requests"] += 1
            try:
                reply = await client.exchange(case.method, case.data)
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                self.faults.append(
                    f"{case.name}: {error!r} instead of a response\n  {_case_text(case)}"
                )
                client.close()
                continue
            self.counts[f"{reply.status // 100}xx"] += 1
            self.faults += _judge(case, reply)

    async def _batch(self, requests: Requests) -> None:
        """Run a batch with odd lines to its end; no line may end with a 5xx."""
        file = json.loads((await self._asker.exchange("POST", requests.upload(_LINES))).body)
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        body["completion_window"] = "24h"
        batch = json.loads((await self._post("/v1/batches", body)).body)
        deadline = time.monotonic() + _IDLE_S
        while batch["status"] not in _ENDS and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            batch = json.loads((await self._get(f"/v1/batches/{batch['id']}")).body)
        self.counts[f"batch {batch['status']}"] += 1
        for name in filter(None, (batch.get("output_file_id"), batch.get("error_file_id"))):
            text = (await self._get(f"/v1/files/{name}/content")).body
            self.faults += [f"line of a batch: {failure!r}" for failure in _FAILED.findall(text)]

    async def _act(self, rng: random.Random, count: int) -> None:
        for _ in range(count):
            raw = sockets.draw(rng)
            self.counts["connections"] += 1
            try:
                self.faults += await sockets.act(raw, self.server.port)
            except OSError as error:
                self.faults.append(f"{raw.name}: {error!r}")

    async def _check(self, number: int) -> None:
        """Ask a good request."""
        if (output := await self._plain()) != self._good:
            self.faults.append(f"round {number}: the good answer is {output}, was {self._good}")
        self.counts["good"] += 1
        pids = [self.server.pid, *self.engines]
        with contextlib.suppress(FileNotFoundError):  # as `end` says
            self.sizes.append(list(map(_memory, pids)))

    async def _plain(self) -> Any:
        body = json.dumps(_GOOD).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        )
        kind = b"Content-Type: application/json\r\n\r\n"
        reply = await self._asker.exchange("POST", head.encode() + kind + body)
        return json.loads(reply.body).get("choices", reply.status)

    async def _post(self, path: str, value: Any) -> Reply:
        body = json.dumps(value).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        kind = b"Content-Type: application/json\r\n\r\n"
        return await self._asker.exchange("POST", head.encode() + kind + body)

    async def _get(self, path: str) -> Reply:
        data = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        return await self._asker.exchange("GET", data)

    async def _held_resources(self) -> dict[str, float]:
        text = (await self._get("/metrics")).body.decode()
        names = ("requests_running", "requests_waiting", "referenced_pages", "engine_deaths_total")
        results = {
            name: re.search(rf"^twostroke_{name} (\S+)$", text, re.MULTILINE) for name in names
        }
        values = {name: float(value[1]) if value else -1.0 for name, value in results.items()}
        return {name: value for name, value in values.items() if value}

    def _engines(self) -> list[int]:
        results = []
        for pid in descendants(self.server.pid):
            with contextlib.suppress(OSError):  # it has ended
                if b"twostroke.engine.process.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    results.append(pid)
        return results

    def _num_files(self) -> int:
        return len(list(Path(f"/proc/{self.server.pid}/fd").iterdir()))


def _judge(case: Case, reply: Reply) -> list[str]:
    """Return what is wrong with the response to a malformed request."""
    faults = []
    if reply.status >= 500 and reply.status not in _REFUSALS:
        faults.append(f"{case.name}: {reply.status} {reply.body[:300]!r}\n  {_case_text(case)}")
    if (
        reply.status >= 400
        and reply.headers.get("content-type") == "application/json"
        and reply.body
    ):
        try:
            json.loads(reply.body)
        except ValueError:
            faults.append(f"{case.name}: the error is not JSON: {reply.body[:200]!r}")
    if _LEAKS.search(reply.body):
        faults.append(f"{case.name}: shows its inside: {reply.body[:300]!r}")
    if "x-injected" in reply.headers:
        faults.append(f"{case.name}: a header was smuggled in")
    return faults


def _case_text(case: Case) -> str:
    return repr(case.data[:1500])


def _memory(pid: int) -> int:
    """Bytes of a process that are its own: what it shares with files does not leak."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(
        int(size_kb) << 10 for size_kb in re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE)
    )


async def frames(model: str, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Send half of the frames to each end; return how they ended, and what is wrong."""
    rng, outcomes, faults = random.Random(seed), Counter[str](), list[str]()
    with _silent(), build(model, options()) as engine:
        handler = EngineEnd(engine)
        for _ in range(count // 2):
            frame = damaged_frame(rng.choice(REQUESTS), rng)
            try:
                outcomes[f"engine: {handler.take(frame)}"] += 1
            except Exception as error:  # noqa: BLE001 - any kind is a fault
                faults.append(f"engine: {error!r} for {frame[:300]!r}")
        ready = _ready(engine)
        server = ServerEnd(model, engine.client.card, ready)
        kinds = len(answers(ready, (1, 2, 3)))
        for _ in range(count - count // 2):
            outcomes[f"server: {await server.take(rng.randrange(kinds), rng)}"] += 1
        faults += [f"server: {error}" for error in server.errors]
        engine.client.loop.flush()
        deadline = time.monotonic() + _IDLE_S
        while (stats := engine.client.loop.snapshot().scheduler).num_referenced_pages:
            if time.monotonic() > deadline:
                faults.append(f"the engine still holds {stats}")
                break
            await asyncio.sleep(0.05)
    return outcomes, faults


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop what the engine says of each frame."""
    logging.disable(1 << 70)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


async def requests(args: argparse.Namespace, server: Server) -> tuple[Campaign, float]:
    """Send requests and raw bytes."""
    campaign, began_s = Campaign(server, args.seed), time.monotonic()
    await campaign.begin()
    await campaign.http(args.http)
    await campaign.raw(args.raw)
    await campaign.end()
    return campaign, time.monotonic() - began_s


def run(args: argparse.Namespace, folder: Path) -> int:
    """Do what is asked for, print how it went, and return how many faults there are."""
    tiny = Tiny(context_length=128)
    model = args.model if args.model != TINY else str(write_tiny_gguf(folder / "tiny.gguf", tiny))
    faults: list[str] = []
    if args.http or args.raw:
        command = (*our_command(model, 1), "--accept-quality", "--no-access-log", "--dashboard")
        command += ("--records", str(folder / "records"), "--max-running", "32")
        command += ("--log-level", "error", "--max-waiting", "64", "--keep-responses", "100")
        with contextlib.ExitStack() as stack:
            server = Server("Twostroke", command, folder, stack)
            campaign, took_s = asyncio.run(requests(args, server))
        faults += campaign.faults
        if faults:
            print(f"The server's log ends with:\n{server.tail()}")
        print(f"{dict(sorted(campaign.counts.items()))} in {took_s:.0f} s")
        all_, late_growth = (
            [f"{num_bytes / 2**20:+.1f}" for num_bytes in part] for part in campaign.growth
        )
        print(
            f"memory after the warm-up: server {all_[0]}, engine {all_[1]} MiB; of it in the "
            f"second half of the time {late_growth[0]} and {late_growth[1]}"
        )
        if sum(campaign.growth[0]) > _MOST_GROWTH_BYTES:
            faults.append("memory has grown by more than it may")
    if args.frames:
        began_s = time.monotonic()
        ends, wrong = asyncio.run(frames(model, args.frames, args.seed))
        faults += wrong
        print(f"frames {dict(sorted(ends.items()))} in {time.monotonic() - began_s:.0f} s")
    for fault in faults[:_MAX_SHOWN]:
        print(fault)
    print(f"{len(faults)} faults")
    return len(faults)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=TINY, help="a model of the catalogue, or 'tiny'")
    parser.add_argument("--http", type=int, default=100_000, help="malformed requests")
    parser.add_argument("--raw", type=int, default=100_000, help="bare connections")
    parser.add_argument("--frames", type=int, default=100_000, help="frames, half to each end")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work_folder:
        sys.exit(min(1, run(parse(), Path(work_folder))))
