"""Let a model of a fleet scale to zero and back, and compare each answer with an undisturbed one.

Run it with `make long SUITE=from-zero`.

A manager, a router and servers run as processes of this machine, without Ray. Requests of all
protocols, streamed and not, come while the model has no replica, at every moment of the drain of
the last replica, and while the replica that starts is killed; spot machines get notice while they
stream, and clients leave while they wait. No request may be refused, lost or answered differently.

It prints the time from a request to its first token when the model has no replica, beside the time
in which a server alone loads the model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from exact.deaths import normalized, requests
from support.local_fleet import LocalFleet, free_port
from support.tiny import Tiny, write_tiny_gguf
from twostroke.fleet.cluster.process import ServerProcess
from twostroke.fleet.cluster.spec import FleetSpec, ReplicaPool, RouterSpec

_TINY = Tiny(num_layers=4, hidden_size=256, ffn_size=512, context_length=4096)
_NAME = "tiny"
_SCALE_DOWN_S = 1.0
_PATIENCE_S = 180.0
KINDS = ("start", "burst", "drain", "kill", "notice", "leave")
_TOKEN = re.compile(r'"(?:content|text|delta|response|arguments)":"[^"]')
_OPTIONS: dict[str, str | int | float | bool | list[str]] = {
    "threads": 1,
    "kv-memory": "64MB",
    "context-length": 2048,
    "speculate": "off",
    "accept-quality": True,
    "no-coalesce": True,
    "no-access-log": True,
    "drain": 0.3,
}


@dataclass
class Seen:
    """What clients saw.

    Attributes:
        ends: answers by how they ended.
        wrong: what was wrong.
        num_late_successors: replicas that started after one with notice had ended.
        rounds: rounds by kind.
        first_token_s: times from a request to its first token, of rounds of the kind `start`.
        load_s: times in which a server alone loads the model.
    """

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_late_successors: int = 0
    rounds: Counter[str] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)


class Campaign:
    """A fleet, its clients, and what happens to it."""

    def __init__(self, fleet: LocalFleet, model: Path, rng: random.Random, num_tokens: int) -> None:
        """Use a fleet that runs, and the path of its model."""
        self.fleet, self.seen = fleet, Seen()
        self._model = model
        self._random = rng
        self._requests = [(path, {"model": _NAME, "stream": True} | fields)
                          for path, fields in requests(num_tokens)]  # fmt: skip
        self._requests += [(path, _unstreamed(fields)) for path, fields in self._requests]
        self._expected: list[list[str]] = []
        self._http: httpx.AsyncClient

    async def run(self, num_rounds: int, kinds: tuple[str, ...]) -> None:
        """Ask undisturbed once, then in rounds."""
        timeout = httpx.Timeout(_PATIENCE_S)
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False, limits=limits) as self._http:
            await self._wait(self._is_up, "the router does not answer")
            for number in range(len(self._requests)):
                lines, _ = await self._ask(number)
                if not lines or lines[0].startswith("503 "):
                    raise RuntimeError(f"undisturbed request {number} failed: {lines}")
                self._expected.append(normalized(lines))
            for number in range(num_rounds):
                kind = kinds[number % len(kinds)]
                print(f"\rround {number}: {kind}   ", end="", file=sys.stderr, flush=True)
                await getattr(self, f"_{kind}")()
                self.seen.rounds[kind] += 1
            await self._wait(self._is_at_zero, "the model does not scale to zero")

    async def _start(self) -> None:
        """Send one request while there is no replica, and measure its first token.

        A server alone loads the model just before, so that both times meet the same load.
        """
        await self._wait(self._is_at_zero, "the model does not scale to zero")
        self.seen.load_s.append(await asyncio.to_thread(load_s, self._model))
        self.seen.first_token_s.append(await self._check(0))

    async def _burst(self) -> None:
        """Send requests of all kinds while there is no replica."""
        await self._wait(self._is_at_zero, "the model does not scale to zero")
        await asyncio.gather(*map(self._check, range(len(self._requests))))

    async def _drain(self) -> None:
        """Send requests at random moments around the drain of the last replica."""
        await self._check(0)

        async def ask() -> None:
            # A model counts as used for some seconds more than `scale_down_after`.
            await asyncio.sleep(self._random.uniform(4.0, 9.0) + _SCALE_DOWN_S)
            await self._check(self._random.randrange(len(self._requests)))

        for _ in range(2):
            await asyncio.gather(*[ask() for _ in range(2)])

    async def _kill(self) -> None:
        """Kill the replica that starts."""
        await self._wait(self._is_at_zero, "the model does not scale to zero")
        asking = asyncio.create_task(self._check(self._random.randrange(len(self._requests))))
        await self._wait(lambda: bool(self._pids()), "no replica starts")
        await asyncio.sleep(self._random.uniform(0, 0.5))
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asking

    async def _notice(self) -> None:
        """Give a replica notice while it streams; another one must start before it ends."""
        is_over = False

        async def ask_again() -> None:
            while not is_over:
                await self._check(self._random.randrange(len(self._requests)))

        asking = [asyncio.create_task(ask_again()) for _ in range(4)]
        await self._wait(lambda: bool(self._ready()), "no replica is ready")
        await asyncio.sleep(self._random.uniform(0, 0.5))
        name = self._random.choice(self._ready() or list(self.fleet.replicas()))
        before = set(self.fleet.replicas())
        self.fleet.cluster.give_notice(name)
        has_successor = False

        def has_ended() -> bool:
            nonlocal has_successor
            names = set(self.fleet.replicas())
            has_successor = has_successor or (name in names and bool(names - before))
            return name not in names

        await self._wait(has_ended, "a replica does not end after its notice")
        is_over = True
        await asyncio.gather(*asking)
        if not has_successor:  # on a busy machine a replica may end before the manager looks
            self.seen.num_late_successors += 1

    async def _leave(self) -> None:
        """Let clients leave while they wait, and another one stay."""
        await self._wait(self._is_at_zero, "the model does not scale to zero")
        leaving = [asyncio.create_task(self._ask(number)) for number in range(8)]
        await asyncio.sleep(0.1)
        staying = asyncio.create_task(self._check(0))
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await staying

    async def _check(self, number: int) -> float:
        """Send a request, compare its answer, and return the time to its first token."""
        path = f"{number} {self._requests[number][0]}"
        try:
            lines, first_s = await self._ask(number)
        except httpx.HTTPError as error:
            self._lose(f"{path}: {type(error).__name__} {error}")
            return 0.0
        result, expected = normalized(lines), self._expected[number]
        if result == expected:
            self.seen.ends["whole"] += 1
        else:
            at = next((i for i, pair in enumerate(zip(result, expected, strict=False))
                       if pair[0] != pair[1]), min(len(result), len(expected)))  # fmt: skip
            shown = result[at][:300] if at < len(result) else "the end"
            self._lose(f"{path}: {len(result)} lines, not {len(expected)}; at {at}: {shown}")
        return first_s

    async def _ask(self, number: int) -> tuple[list[str], float]:
        """Return the lines of an answer, and the time to its first token."""
        path, body = self._requests[number]
        lines: list[str] = []
        began_s, first_s = time.monotonic(), 0.0
        async with self._http.stream("POST", f"{self.fleet.url}{path}", json=body) as answer:
            if answer.status_code != 200:
                return [f"{answer.status_code} {(await answer.aread())[:200]!r}"], 0.0
            async for line in answer.aiter_lines():
                if not first_s and _TOKEN.search(line):
                    first_s = time.monotonic() - began_s
                lines.append(line)
        return lines, first_s

    def _lose(self, text: str) -> None:
        self.seen.ends["wrong"] += 1
        self.seen.wrong.append(text)

    async def _wait(self, condition: Any, fault: str) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise RuntimeError(fault)
            await asyncio.sleep(0.02)

    def _is_up(self) -> bool:
        return self.fleet.status.router.is_ready

    def _is_at_zero(self) -> bool:
        if self.fleet.replicas():
            return False
        with contextlib.suppress(httpx.HTTPError):
            return bool(httpx.get(f"{self.fleet.url}/health", trust_env=False).json()["ready"] == 0)
        return False

    def _pids(self) -> list[int]:
        """Return the processes of replicas that are not ready."""
        states = self.fleet.replicas().values()
        return [state.pid for state in states if state.pid and not state.is_ready]

    def _ready(self) -> list[str]:
        return [name for name, state in self.fleet.replicas().items() if state.is_ready]


def _unstreamed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request for the same answer as a whole."""
    return {key: value for key, value in fields.items() if key != "stream_options"} | {
        "stream": False
    }


def spec_of(model: Path, port: int) -> FleetSpec:
    """Return a fleet whose only model has no replica while it is not used."""
    pool = ReplicaPool(
        model=str(model),
        name=_NAME,
        min_replicas=0,
        max_replicas=2,
        scale_down_after=_SCALE_DOWN_S,
        options=_OPTIONS,
    )
    options: dict[str, Any] = {"no-access-log": True, "eject-after": 2}
    return FleetSpec(models=(pool,), router=RouterSpec(port=port, options=options))


def load_s(model: Path) -> float:
    """Return the time in which a server alone loads the model."""
    spec = spec_of(model, 1)
    began_s = time.monotonic()
    server = ServerProcess(spec.models[0].arguments, "127.0.0.1")
    try:
        while not server.state.is_ready:
            if server.state.trouble:
                raise RuntimeError(server.state.trouble)
            time.sleep(0.01)
        return time.monotonic() - began_s
    finally:
        server.close(5)


def campaign(
    num_rounds: int,
    *,
    seed: int = 0,
    kinds: tuple[str, ...] = KINDS,
    num_tokens: int = 300,
    model: Path | None = None,
) -> tuple[Seen, str]:
    """Do the rounds in a folder that is removed; return what clients saw, and router's metrics."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TWOSTROKE_CACHE"] = str(folder / "cache")
        model = model or write_tiny_gguf(folder / "tiny.gguf", _TINY)
        fleet = LocalFleet(spec_of(model, free_port()), folder)
        try:
            play = Campaign(fleet, model, random.Random(seed), num_tokens)
            asyncio.run(play.run(num_rounds, kinds))
            metrics = httpx.get(f"{fleet.url}/metrics", trust_env=False).text
        finally:
            fleet.close()
        return play.seen, metrics


def main() -> int:
    """Print what clients saw; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--model", type=Path, help="a model file instead of a tiny model")
    args = parser.parse_args()
    seen, metrics = campaign(args.rounds, seed=args.seed, kinds=tuple(args.kinds), model=args.model)
    print(f"\n{sum(seen.rounds.values())} rounds, {json.dumps(seen.rounds)}; {dict(seen.ends)}")
    for line in metrics.splitlines():
        if line.startswith(("twostroke_router_start", "twostroke_router_continued_requests")):
            print(f"  {line}")
    if seen.first_token_s:
        print(f"  a server alone loads the model in {_summary(seen.load_s)}")
        print(f"  first token without a replica after {_summary(seen.first_token_s)}")
        pairs = zip(seen.first_token_s, seen.load_s, strict=True)
        print(f"  difference of each pair {_summary([first - load for first, load in pairs])}")
    print(f"  replicas started only after one with notice had ended: {seen.num_late_successors}")
    for text in seen.wrong[:20]:
        print(f"  WRONG: {text}")
    return 1 if seen.wrong else 0


def _summary(values: list[float]) -> str:
    median = statistics.median(values)
    return f"{median:.2f} s (median of {len(values)}; {min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
