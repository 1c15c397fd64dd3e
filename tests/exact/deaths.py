"""Let engines and replicas die under load, and compare each stream with an undisturbed one.

Run it with `make long SUITE=deaths`.

A router stands before three `twostroke serve` processes with a tiny model, each of them behind a
gate that can fall silent. Clients stream answers of all protocols, with tools, schemas,
log-probabilities and several choices. Meanwhile engines and servers are killed and frozen,
connections are reset and fall silent, servers drain for an update and leave the fleet. Each stream
must have the events that it has without a death: none is lost, doubled or different.
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
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from exact.fleet import Gate, free_ports
from support.tiny import Tiny, write_tiny_gguf

_TESTS = Path(__file__).resolve().parent.parent
_NUM_SERVERS = 3
_EJECT_S = 2.0  # silence after which the router gives up a replica
_SILENT_S = 4.0  # longer than the router bears
_ENGINE_LIMIT_S = 5.0  # seconds after which a server ends an engine that hangs
_MAX_PAUSE_S = 0.5  # beyond detection and the time of computing prompt and tokens again
_PATIENCE_S = 90.0
_TINY = Tiny(num_layers=4, hidden_size=256, ffn_size=512, context_length=4096)
_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 60},
        "b": {"type": "string", "maxLength": 200},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
_DRAIN_S = 0.5
# Kinds of deaths, with the longest time until they are noticed. Kills and resets close connections.
DETECTION_S = {
    "engine kill": 0.0,
    "kill": 0.0,
    "reset": 0.0,
    "engine freeze": _ENGINE_LIMIT_S,
    "freeze": _EJECT_S,
    "silence": _EJECT_S,
    "drain": 0.0,
    "scale down": 0.0,
}
KINDS = tuple(DETECTION_S)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def requests(num_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of all protocols: a path and a body, whose streams have some hundred events.

    Equal requests have equal streams, since each has a seed.
    """
    tool = {"name": "look", "description": "Look.", "parameters": _SCHEMA}
    chat, sampled = "/v1/chat/completions", {"temperature": 1.3, "seed": 7}
    formatted = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
    length = {"max_tokens": num_tokens, "ignore_eos": True}
    return [
        (chat, {"messages": _user("one " * 50), **length, "temperature": 0}),
        (chat, {"messages": _user("two"), **length, **sampled, "n": 3, "logprobs": True,
                "top_logprobs": 3, "stream_options": {"include_usage": True}}),
        (chat, {"messages": _user("three"), "max_tokens": num_tokens, **sampled,
                "tools": [{"type": "function", "function": tool}], "tool_choice": "required"}),
        (chat, {"messages": _user("four"), "max_tokens": num_tokens, **sampled,
                "response_format": formatted}),
        (chat, {"messages": _user("five"), **length, **sampled, "frequency_penalty": 0.5,
                "repetition_penalty": 1.2, "stop": ["qqq", "zz zz"]}),
        ("/v1/completions", {"prompt": ["six", "seven"], **length, **sampled, "logprobs": 2}),
        ("/v1/responses", {"input": "eight", "max_output_tokens": num_tokens, **sampled}),
        ("/v1/responses", {"input": "nine", "max_output_tokens": num_tokens, **sampled,
                           "tools": [{"type": "function", **tool}], "tool_choice": "required"}),
        ("/v1/messages", {"messages": _user("ten"), "max_tokens": num_tokens, "temperature": 0}),
        ("/api/chat", {"messages": _user("eleven"),
                       "options": {"num_predict": num_tokens, "seed": 5, "temperature": 1.2}}),
        ("/api/generate", {"prompt": "twelve", "format": _SCHEMA,
                           "options": {"num_predict": num_tokens, "seed": 6}}),
        ("/completion", {"prompt": "thirteen", "n_predict": num_tokens, **sampled, "n_probs": 2,
                         "ignore_eos": True}),
    ]  # fmt: skip


_VARYING = re.compile(
    r'"(?:created|created_at|completed_at|[a-z_]*duration|[a-z_]*_ms|[a-z_]*per_second|timings|'
    r"cached_tokens|cache_read_input_tokens|input_tokens|cache_n|prompt_n|tokens_cached|"
    r'accepted_prediction_tokens|rejected_prediction_tokens|cache_creation_input_tokens)":'
    r'(?:"[^"]*"|[0-9.e+-]+)'
)
_ID = re.compile(r'"(?:id|item_id|call_id|tool_call_id)":"([a-z]+[_-])[^"]*"')
_CHOICE = re.compile(r'"choices":\[\{"index":([0-9]+)')


def normalized(lines: list[str]) -> list[str]:
    """Return the lines of a stream without ids, times and counts of cached tokens.

    The events of several choices alternate as time will have it, so they are sorted by choice.
    """
    kept = [line for line in lines if line and not line.startswith(":")]
    plain = [_ID.sub(r"\1", _VARYING.sub("", line)) for line in kept]
    numbers = [_CHOICE.search(line) for line in plain]
    keyed = [
        (int(match[1]) if match else 99, line) for match, line in zip(numbers, plain, strict=True)
    ]
    return [line for _, line in sorted(keyed, key=lambda pair: pair[0])]


def num_ids(lines: list[str]) -> int:
    """Return how many ids of responses a stream has."""
    return len(set(re.findall(r'"id":"((?:chatcmpl-|cmpl-|resp_)[^"]*)"', "\n".join(lines))))


class Member:
    """One server process, its engine process, and its gate."""

    def __init__(self, model: Path, port: int, log: Path) -> None:
        """Serve a model at a port."""
        self.port, self.gate, self.url = port, Gate(port), ""
        self._model, self._log = model, log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process, and wait until it serves."""
        if not self.url:
            self.url = await self.gate.start()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "twostroke", "serve", str(self._model), "--threads", "1"),
                "--no-coalesce",
                *("--name", "tiny", "--port", str(self.port), "--speculate", "off"),
                *(
                    "--drain",
                    str(_DRAIN_S),
                    "--kv-memory",
                    "64MB",
                    "--accept-quality",
                    "--no-access-log",
                ),
                env=os.environ | {"PYTHONPATH": str(_TESTS.parent / "src")},
                stdout=log,
                stderr=log,
            )
        async with httpx.AsyncClient(trust_env=False) as http:
            for _ in range(600):
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(f"http://127.0.0.1:{self.port}/health")).status_code == 200:
                        return
                await asyncio.sleep(0.1)
        raise RuntimeError("a server did not start")

    @property
    def engine_pid(self) -> int | None:
        """The process id of the engine's process; None while there is none."""
        assert self._process is not None
        pid = self._process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    def send(self, number: int, pid: int | None = None) -> None:
        """Send a signal to the server, or to the process with this id."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid or self._process.pid, number)

    async def end(self) -> None:
        """Wait for the end of the process."""
        assert self._process is not None
        await self._process.wait()


@dataclass
class Seen:
    """What clients saw."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)
    pauses_s: dict[str, list[float]] = field(default_factory=dict)
    recompute_s: float = 0.0  # of the longest prompt and its answer, undisturbed
    loaded_recompute_s: float = 0.0  # the same beside the streams of all clients


class Campaign:
    """A router, its members, clients, and deaths."""

    def __init__(
        self, members: list[Member], url: str, listing: Path, rng: random.Random, num_tokens: int
    ) -> None:
        """Use a router that runs, and reads its replicas from `listing`."""
        self.members, self.url, self.seen = members, url, Seen()
        self._listing = listing
        self._random = rng
        self._requests = requests(num_tokens)
        self._expected: list[list[str]] = []
        self._kinds, self._is_over = ["none"], False  # of all deaths so far

    async def run(self, num_deaths: int, kinds: list[str], num_clients: int) -> None:
        """Stream undisturbed once, then with deaths."""
        timeout = httpx.Timeout(_PATIENCE_S)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as http:
            self._http = http
            for number in range(len(self._requests)):
                lines, _ = await self._stream(number)
                self._expected.append(normalized(lines))
            self.seen.recompute_s = await self._recompute_s()
            clients = [asyncio.create_task(self._client()) for _ in range(num_clients)]
            self.seen.loaded_recompute_s = await self._recompute_s(is_loaded=True)
            for number in range(num_deaths):
                kind = kinds[number % len(kinds)]
                self._kinds.append(kind)
                print(f"\rdeath {number}: {kind}   ", end="", file=sys.stderr, flush=True)
                await asyncio.sleep(self._random.uniform(0.3, 1.5))
                await self._die(kind, self._random.choice(self.members))
                self.seen.deaths[kind] += 1
                await self._ready()
            self._is_over = True
            await asyncio.gather(*clients)

    async def _recompute_s(self, *, is_loaded: bool = False) -> float:
        """Return how long the prefill of the longest prompt and its tokens takes now."""
        times_s = []
        for number in range(5):
            digit = number if not is_loaded else number + 5  # so that no prefix is cached
            body = {"model": "tiny", "prompt": f"{digit} one " * 300, "max_tokens": 1}
            began_s = time.monotonic()
            answer = await self._http.post(f"{self.url}/v1/completions", json=body)
            answer.raise_for_status()
            times_s.append(time.monotonic() - began_s)
        return sorted(times_s)[len(times_s) // 2]

    async def _die(self, kind: str, member: Member) -> None:
        if kind == "reset":
            member.gate.reset()
        elif kind == "silence":
            member.gate.hush()
            await asyncio.sleep(_SILENT_S)
            member.gate.speak()
        elif kind.startswith("engine"):
            pid = member.engine_pid
            if pid is not None:
                member.send(signal.SIGKILL if kind == "engine kill" else signal.SIGSTOP, pid)
                while member.engine_pid == pid:  # noqa: ASYNC110 - another process tells nothing
                    await asyncio.sleep(0.1)
        elif kind == "freeze":
            member.send(signal.SIGSTOP)
            await asyncio.sleep(_SILENT_S)
            member.send(signal.SIGCONT)
        else:
            if kind == "scale down":
                self.list_members([other for other in self.members if other is not member])
                await asyncio.sleep(1.0)
            member.send(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            await member.end()
            await member.start()
            self.list_members(self.members)

    def list_members(self, members: list[Member]) -> None:
        """Write the file from which the router reads its replicas."""
        new = self._listing.with_suffix(".new")
        new.write_text("".join(f"{member.url}\n" for member in members))
        new.rename(self._listing)

    async def _ready(self) -> None:
        for _ in range(600):
            response = await self._http.get(f"{self.url}/health")
            if response.json()["ready"] == len(self.members):
                return
            await asyncio.sleep(0.1)
        self.seen.wrong.append(f"a replica did not come back after {self._kinds[-1]}")

    async def _client(self) -> None:
        while not self._is_over:
            number = self._random.randrange(len(self._requests))
            path = f"{number} {self._requests[number][0]}"
            num_kinds = len(self._kinds)
            try:
                lines, pause_s = await self._stream(number)
            except httpx.HTTPError as error:
                self._lose(path, f"{type(error).__name__} {error}")
                continue
            kinds = set(self._kinds[num_kinds - 1 :])  # a long stream may see several deaths
            result, expected = normalized(lines), self._expected[number]
            self.seen.pauses_s.setdefault(" / ".join(sorted(kinds)), []).append(pause_s)
            if result == expected and num_ids(lines) <= 1:
                self.seen.ends["whole"] += 1
                continue
            at = next((i for i, pair in enumerate(zip(result, expected, strict=False))
                       if pair[0] != pair[1]), min(len(result), len(expected)))  # fmt: skip
            shown = result[at][:300] if at < len(result) else "the end"
            self._lose(path, f"{len(result)} lines, not {len(expected)}; at {at}: {shown}")

    async def _stream(self, number: int) -> tuple[list[str], float]:
        """Return the lines of a stream, and the longest time between two lines."""
        path, fields = self._requests[number]
        body = {"model": "tiny", "stream": True} | fields
        lines: list[str] = []
        longest_s, last_s = 0.0, time.monotonic()
        async with self._http.stream("POST", f"{self.url}{path}", json=body) as answer:
            if answer.status_code != 200:
                return [f"{answer.status_code} {(await answer.aread())[:200]!r}"], 0.0
            async for line in answer.aiter_lines():
                lines.append(line)
                now_s = time.monotonic()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
        return lines, longest_s

    def _lose(self, path: str, how: str) -> None:
        self.seen.ends["wrong"] += 1
        self.seen.wrong.append(f"{path} ({self._kinds[-1]}): {how}")


async def campaign(
    num_deaths: int,
    *,
    seed: int = 0,
    kinds: list[str] | None = None,
    num_clients: int = 4,
    num_tokens: int = 250,
    logs: Path | None = None,
) -> tuple[Seen, str]:
    """Do the deaths in a folder that is removed; return what clients saw, and router's metrics."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_gguf(folder / "tiny.gguf", _TINY)
        *ports, router_port = free_ports(_NUM_SERVERS + 1)
        members = [Member(model, port, (logs or folder) / f"{port}.log") for port in ports]
        router: asyncio.subprocess.Process | None = None
        try:
            await asyncio.gather(*[member.start() for member in members])
            url, listing = f"http://127.0.0.1:{router_port}", folder / "replicas"
            deaths = Campaign(members, url, listing, random.Random(seed), num_tokens)
            deaths.list_members(members)
            with ((logs or folder) / "router.log").open("ab") as log:
                router = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "twostroke", "route", "--port", str(router_port)),
                    *("--replicas-file", str(listing), "--no-access-log", "--wait", "30"),
                    *("--eject-after", str(_EJECT_S)),
                    env=os.environ | {"PYTHONPATH": str(_TESTS.parent / "src")},
                    stderr=log,
                )
            async with httpx.AsyncClient(trust_env=False) as http:
                for _ in range(300):
                    with contextlib.suppress(httpx.HTTPError):
                        if (await http.get(f"{url}/health")).json().get("ready") == len(members):
                            break
                    await asyncio.sleep(0.1)
                await deaths.run(num_deaths, kinds or list(KINDS), num_clients)
                metrics = (await http.get(f"{url}/metrics")).text
        finally:
            if router is not None:
                router.kill()
                await router.wait()
            for member in members:
                member.send(signal.SIGCONT)
                member.send(signal.SIGKILL)
                await member.end()
                member.gate.close()
        return deaths.seen, metrics


def main() -> int:
    """Print what clients saw; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deaths", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--logs", type=Path, help="folder for the logs of all processes")
    args = parser.parse_args()
    seen, metrics = asyncio.run(
        campaign(
            args.deaths,
            seed=args.seed,
            kinds=args.kinds,
            num_clients=args.clients,
            logs=args.logs,
        )
    )
    print(f"\n{sum(seen.deaths.values())} deaths, {json.dumps(seen.deaths)}; {dict(seen.ends)}")
    for line in metrics.splitlines():
        if "continued" in line and not line.startswith("#"):
            print(f"  {line}")
    print(
        f"  computing prompt and tokens again takes {seen.recompute_s:.2f} s alone, and "
        f"{seen.loaded_recompute_s:.2f} s beside the clients' streams"
    )
    for kind, pauses_s in sorted(seen.pauses_s.items()):
        detection_s = max(DETECTION_S.get(part, 0.0) for part in kind.split(" / "))
        beyond_s = max(pauses_s) - detection_s - seen.loaded_recompute_s
        print(
            f"  longest pause, {kind}: {max(pauses_s):.2f} s of {len(pauses_s)} streams; beyond "
            f"detection ({detection_s:g} s) and computing again: {beyond_s:.2f} s "
            f"(asked: {_MAX_PAUSE_S:g} s)"
        )
    for text in seen.wrong[:20]:
        print(f"  WRONG: {text}")
    return 1 if seen.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
