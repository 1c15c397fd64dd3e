"""Kill routers that share keys, limits and usage, and compare the usage with what clients got.

Run it with `make long SUITE=routers`.

Two `twostroke route` processes share a Redis server, before two servers of a tiny model. Clients
use both routers, in several protocols, each client with a key of its own. One router after another
is ended by SIGKILL: at any time, or at the moment in which it counts an answer.

An answer that a client has received to its end counts exactly once, with the numbers that the
client was told. A request whose router was killed before counts in full if the router had counted
it, so that only the last bytes were missing, and otherwise not at all. Only requests at the killed
router break, and each succeeds when the client sends it to the other router.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from exact.fleet import Member, free_ports
from support.stores import Store, store
from twostroke.fleet.shared_records import stored
from twostroke.fleet.shared_records.script import PREFIX
from twostroke.server.http.api_key import KeyLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_TESTS = Path(__file__).resolve().parent.parent
_SECRET = {"TWOSTROKE_REPLICA_KEY": "secret-of-the-campaign"}
_PARALLEL = 4  # requests of one key at the same time
_MAX_ATTEMPTS = 4  # of a request, at both routers in turn
_LEASE_S = 4.0  # after which a dead router holds nothing
_PATIENCE_S = 60.0
KINDS = ("any time", "at a count")


@dataclass(frozen=True)
class Usage:
    """Requests, prompt tokens and output tokens."""

    requests: int = 0
    prompt: int = 0
    output: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.requests + other.requests, self.prompt + other.prompt, self.output + other.output
        )


def bodies(num_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of several protocols: paths and bodies."""
    messages = [{"role": "user", "content": "Why is the sky blue? " * 4}]
    length = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return [
        ("/v1/chat/completions", {"messages": messages, **length, **options}),
        ("/v1/chat/completions", {"messages": messages, **length}),
        ("/v1/completions", {"prompt": "once", **length, "max_tokens": 2, **options}),
        ("/v1/completions", {"prompt": ["two", "prompts"], **length, "max_tokens": 3}),
        ("/v1/messages", {"messages": messages, **length, "max_tokens": 4, "stream": True}),
    ]


class RouterProcess:
    """A `twostroke route` process, which is started again after each kill."""

    def __init__(self, port: int, command: list[str], log: Path) -> None:
        """Prepare a router at a port; its log lines are appended to `log`."""
        self.url = f"http://127.0.0.1:{port}"
        self.is_up = False
        self.num_kills = 0
        self._command = [*command, "--port", str(port)]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, http: httpx.AsyncClient) -> None:
        """Start the process, and wait until it has replicas."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=os.environ | {"PYTHONPATH": str(_TESTS.parent / "src")} | _SECRET,
                stderr=log,
            )
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                response = await http.get(f"{self.url}/health")
                if response.json()["ready"] == 2:
                    self.is_up = True
                    return
            await asyncio.sleep(0.05)
        raise AssertionError("a router does not become ready")

    def kill(self) -> None:
        """End the process at once."""
        assert self._process is not None
        self.is_up = False
        self.num_kills += 1
        self._process.kill()

    async def end(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> int:
        """Stop the process as an operator does, and return its exit code."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        return await self.end()


@dataclass
class Client:
    """A client with a key: what it was told, and what broken requests have counted."""

    key_id: str
    key: str
    told: Usage = field(default_factory=Usage)
    counted_broken: Usage = field(default_factory=Usage)


@dataclass
class Seen:
    """What clients saw, and what must not be."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    told: Usage = field(default_factory=Usage)
    counted_broken: Usage = field(default_factory=Usage)
    stored: Usage = field(default_factory=Usage)


class Campaign:
    """Two routers, clients, and kills."""

    def __init__(
        self, redis: Store, routers: list[RouterProcess], num_clients: int, num_tokens: int
    ) -> None:
        """Use a store and routers that run."""
        self.seen = Seen()
        self._redis, self._routers = redis, routers
        self._random = random.Random(0)
        self._bodies = bodies(num_tokens)
        self._usages: list[Usage] = []  # of each body
        self._is_over = False
        self._is_counting = asyncio.Event()
        limits = KeyLimits(requests_per_minute=10**6, tokens_per_minute=10**9, parallel=_PARALLEL)
        connection = redis.client(socket_timeout=_PATIENCE_S)
        keys = [
            stored.add(connection, f"client-{number}", "anna", limits=limits)
            for number in range(num_clients)
        ]
        connection.close()
        self._clients = [Client(key.id, text) for key, text in keys]

    async def run(self, num_kills: int, kinds: list[str], http: httpx.AsyncClient) -> None:
        """Kill routers under load; then stop them, and compare the usage in the store."""
        self._http = http
        for number in range(len(self._bodies)):
            usage, how = await self._send(self._routers[0], self._clients[0], number)
            assert usage is not None, how
            self._usages.append(usage)
            self._clients[0].told += usage
        watcher = asyncio.create_task(self._watch_counts())
        tasks = [asyncio.create_task(self._use(client)) for client in self._clients]
        for number in range(num_kills):
            print(f"\rkill {number + 1}", end="", file=sys.stderr, flush=True)
            await self._kill(self._routers[number % 2], kinds[number % len(kinds)])
        self._is_over = True
        await asyncio.gather(*tasks)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await asyncio.sleep(_LEASE_S)
        await asyncio.gather(*(self._use_all_turns(client) for client in self._clients))
        for router in self._routers:
            if await router.stop():
                self._note_fault("a router did not stop cleanly")
        self._compare()

    async def _kill(self, router: RouterProcess, kind: str) -> None:
        await asyncio.sleep(self._random.uniform(0.1, 0.8))
        if kind == "at a count":
            self._is_counting.clear()
            await self._is_counting.wait()
        router.kill()
        await router.end()
        await asyncio.sleep(self._random.uniform(0.0, 0.5))
        await router.start(self._http)

    async def _watch_counts(self) -> None:
        """Set an event whenever usage is added in the store."""
        from redis.asyncio import Redis

        client = Redis(port=self._redis.port)
        await client.config_set("notify-keyspace-events", "Kh")
        async with client.pubsub() as events:
            await events.psubscribe(f"__keyspace@0__:{PREFIX}usage:*")
            async for _ in events.listen():
                self._is_counting.set()

    async def _use(self, client: Client) -> None:
        while not self._is_over:
            number = self._random.randrange(len(self._bodies))
            routers = self._random.sample(self._routers, 2)
            for attempt in range(_MAX_ATTEMPTS):
                if await self._try(routers[attempt % 2], client, number):
                    self.seen.ends[f"answered at attempt {attempt + 1}"] += 1
                    break
            else:
                self._note_fault(f"{_MAX_ATTEMPTS} attempts broke")

    async def _try(self, router: RouterProcess, client: Client, number: int) -> bool:
        """Send a request, and return whether it was answered; only a killed router may break it."""
        num_kills, was_up = router.num_kills, router.is_up
        usage, how = await self._send(router, client, number)
        if usage is not None:
            self._take(client, number, usage)
            return True
        self.seen.ends["broken by a kill" if was_up else "sent to a dead router"] += 1
        if was_up and router.num_kills == num_kills:
            self._note_fault(f"a request broke at a living router: {how}")
        await self._settle(client, number)
        return False

    def _take(self, client: Client, number: int, usage: Usage) -> None:
        client.told += usage
        if usage != self._usages[number]:
            self._note_fault(f"an answer used {usage}, not {self._usages[number]}")

    async def _settle(self, client: Client, number: int) -> None:
        """Look whether a broken request has counted: in full, or not at all."""
        await asyncio.sleep(0.2)  # what the dead router has sent arrives
        counted = await asyncio.to_thread(self._stored, client)
        expected = client.told + client.counted_broken
        if counted == expected:
            return
        if counted == expected + self._usages[number]:
            self.seen.ends["counted without its end"] += 1
            client.counted_broken += self._usages[number]
            return
        self._note_fault(f"after a broken request {counted} is stored, not {expected}")
        client.counted_broken = Usage(
            counted.requests - client.told.requests,
            counted.prompt - client.told.prompt,
            counted.output - client.told.output,
        )

    async def _use_all_turns(self, client: Client) -> None:
        """Use as many turns as the key has; dead routers must not hold one."""
        answers = await asyncio.gather(
            *(self._send(self._routers[turn % 2], client, 0) for turn in range(_PARALLEL))
        )
        for usage, how in answers:
            if usage is None:
                self._note_fault(f"a turn is held after the kills: {how}")
            else:
                self._take(client, 0, usage)

    def _note_fault(self, text: str) -> None:
        print(f"\n{text}", file=sys.stderr, flush=True)
        self.seen.wrong.append(text)

    def _stored(self, client: Client) -> Usage:
        connection = self._redis.client(socket_timeout=_PATIENCE_S)
        amounts = stored.amounts(connection, "0000", "9999")
        connection.close()
        return sum(
            (
                Usage(amount.requests, amount.input, amount.output)
                for amount in amounts
                if amount.owner.key == client.key_id
            ),
            Usage(),
        )

    def _compare(self) -> None:
        for client in self._clients:
            counted, expected = self._stored(client), client.told + client.counted_broken
            if counted != expected:
                self._note_fault(f"{counted} is stored, and clients got {expected}")
            self.seen.told += client.told
            self.seen.counted_broken += client.counted_broken
            self.seen.stored += counted

    async def _send(
        self, router: RouterProcess, client: Client, number: int
    ) -> tuple[Usage | None, str]:
        """Send a request; return what the client was told that it used, or why it broke."""
        path, body = self._bodies[number]
        headers = {"x-api-key": client.key}
        try:
            async with self._http.stream(
                "POST", router.url + path, json={"model": "tiny", **body}, headers=headers
            ) as response:
                if response.status_code != 200:
                    return None, f"{response.status_code} {(await response.aread())[:200]!r}"
                if not body.get("stream"):
                    return _usage(json.loads(await response.aread())), ""
                return await _read_stream(response)
        except httpx.HTTPError as error:
            return None, type(error).__name__


async def _read_stream(response: httpx.Response) -> tuple[Usage | None, str]:
    """Return the usage that a stream has reported, once its end has come."""
    usage = Usage(1)
    async for line in response.aiter_lines():
        if line in {"data: [DONE]", "event: message_stop"}:
            return usage, ""
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return None, str(event["error"])
        reported = _usage(event)
        message = event.get("message")
        if isinstance(message, dict):
            reported = _usage(message)
        usage = Usage(1, max(usage.prompt, reported.prompt), max(usage.output, reported.output))
    return None, "the stream has no end"


def _usage(body: dict[str, Any]) -> Usage:
    counts = body.get("usage") or {}
    cached = counts.get("cache_read_input_tokens", 0) + counts.get("cache_creation_input_tokens", 0)
    prompt = counts.get("prompt_tokens", counts.get("input_tokens", 0)) + cached
    return Usage(1, prompt, counts.get("completion_tokens", counts.get("output_tokens", 0)))


@contextlib.asynccontextmanager
async def _fleet(
    folder: Path, redis: Store, modes: list[str]
) -> AsyncIterator[list[RouterProcess]]:
    """Yield two routers before two servers; none of them runs after the block."""
    *ports, first, second = free_ports(4)
    members = [Member(folder / str(port), port, *modes, variables=_SECRET) for port in ports]
    await asyncio.gather(*[member.start() for member in members])
    named = [word for member in members for word in ("--replica", member.url)]
    command = [sys.executable, "-m", "twostroke", "route", "--no-access-log"]
    # However busy this machine is, routers wait for the store, and never count alone.
    command += ["--store", redis.url, "--store-wait", "30", *named]
    routers = [RouterProcess(port, command, folder / f"{port}.log") for port in (first, second)]
    try:
        yield routers
    finally:
        for router in routers:
            with contextlib.suppress(AssertionError, ProcessLookupError):
                router.kill()
                await router.end()
        for member in members:
            member.send(signal.SIGKILL)
            await member.end()
            member.gate.close()


async def campaign(
    num_kills: int,
    kinds: tuple[str, ...] = KINDS,
    *,
    num_clients: int = 6,
    num_tokens: int = 24,
    is_paced: bool = True,
) -> Seen:
    """Kill routers in turn, in a folder that is removed; return what clients saw."""
    timeout = httpx.Timeout(_PATIENCE_S)
    modes = ["paced"] if is_paced else []
    with tempfile.TemporaryDirectory() as folder, store(Path(folder)) as redis:
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=False) as http,
            _fleet(Path(folder), redis, modes) as routers,
        ):
            fault_campaign = Campaign(redis, routers, num_clients, num_tokens)
            await asyncio.gather(*[router.start(http) for router in routers])
            await fault_campaign.run(num_kills, list(kinds), http)
        return fault_campaign.seen


def main() -> int:
    """Print what clients saw; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    began_s = time.monotonic()
    seen = asyncio.run(campaign(args.kills, tuple(args.kinds)))
    print(f"\n{args.kills} kills in {time.monotonic() - began_s:.0f} s: {dict(seen.ends)}")
    print(f"  told to clients:        {seen.told}")
    print(f"  counted without an end: {seen.counted_broken}")
    print(f"  in the store:           {seen.stored}")
    for fault_text, count in Counter(seen.wrong).most_common(20):
        print(f"  WRONG, {count} times: {fault_text}")
    return 1 if seen.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
