"""Make replicas fail in several ways under load, and check what clients see.

Run it with `make long SUITE=fleet`.

A router stands before three servers of a tiny model, each of them behind a gate that can fall
silent. No request may be lost before its first byte. Others get an error within 2 s, or 10 s where
a replica is silent, and every answer has the tokens that it always has. In the end all replicas are
updated one after another, and no request may fail.

With the right to make a network namespace, packets of a replica are dropped, too: it is cut off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TESTS = Path(__file__).resolve().parent.parent
_TOLD_S = {"kill": 2.0, "reset": 2.0, "freeze": 10.0, "silence": 10.0, "cut": 2.0}
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_ANYWHERE = [kind for kind in _TOLD_S if kind != "cut"]
_PROMPTS = 10
_SILENT_S = 7.0  # longer than a router bears
_PATIENCE_S = 30.0


class Gate:
    """A port that passes on to a server, or nothing."""

    def __init__(self, port: int) -> None:
        """Pass on to a port."""
        self._to = port
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def start(self) -> str:
        """Listen; return the URL."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{self._port}"

    def hush(self) -> None:
        """Take all that is sent, and pass nothing on."""
        self._open.clear()

    def speak(self) -> None:
        """Pass on again, from new connections."""
        self.reset()
        self._open.set()

    def cut(self) -> None:
        """Drop all packets from and to it."""
        self._drop("-A")

    def mend(self) -> None:
        """Let packets through again."""
        self._drop("-D")

    def _drop(self, action: str) -> None:
        for side in ("--dport", "--sport"):
            rule = ("-p", "tcp", side, str(self._port), "-j", "DROP")
            subprocess.run(["iptables", "-w", action, "INPUT", *rule], check=True)

    def reset(self) -> None:
        """Reset all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    def close(self) -> None:
        """End."""
        self.reset()
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        await self._open.wait()
        try:
            other_reader, other = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(other)
        for source, to in ((reader, other), (other_reader, writer)):
            task = asyncio.create_task(self._copy(source, to, other if to is writer else writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._open.wait()
                to.write(data)
                await to.drain()
        for writer in (to, back):
            self._writers.discard(writer)
            writer.transport.abort()


class Member:
    """One server process, and its gate."""

    def __init__(
        self, folder: Path, port: int, *modes: str, variables: Mapping[str, str] | None = None
    ) -> None:
        """Serve at a port; `modes` are those of `serve_tiny.py`, `variables` its environment's."""
        self._variables = dict(variables or {})
        self._folder, self.port, self.gate, self.url = folder, port, Gate(port), ""
        self._modes = modes
        self._process: asyncio.subprocess.Process | None = None
        folder.mkdir()

    async def start(self) -> None:
        """Start the process, and wait until it serves."""
        if not self.url:
            self.url = await self.gate.start()
        paths = os.pathsep.join([str(_TESTS), str(_TESTS.parent / "src")])
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(_TESTS / "support/serve_tiny.py"), str(self._folder)),
            *(str(self.port), "20", "roomy", *self._modes),
            env=os.environ | {"PYTHONPATH": paths} | self._variables,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert (await self._process.stdout.readline()).startswith(b"http"), "it did not start"

    def send(self, number: int) -> None:
        """Send the process a signal."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self) -> None:
        """Wait for the end of the process."""
        assert self._process is not None
        await self._process.wait()


@dataclass(frozen=True)
class Load:
    """How much clients ask for, and whether times are judged."""

    num_clients: int = 6
    num_tokens: int = 120
    is_paced: bool = False  # whether replicas pause in each step, and leave the processor idle
    has_limits: bool = True  # whether errors must come in time


PACED_LOAD = Load(num_clients=4, num_tokens=24, is_paced=True, has_limits=False)


@dataclass
class Seen:
    """What clients saw: how requests ended, and what must not be."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    told_s: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    fault: tuple[str, float] = ("none", 0.0)  # the present one, and when it began


class Campaign:
    """A router and its members, clients, and faults."""

    def __init__(
        self, members: list[Member], url: str, seed: str, kinds: list[str], load: Load
    ) -> None:
        """Use a router that runs."""
        self.members, self.url, self.seen, self._kinds = members, url, Seen(), kinds
        self._load = load
        self._random = random.Random(seed)
        self._is_over = False
        self._requests: dict[int, asyncio.Task[None]] = {}  # those that run, by client

    async def run(self, faults: range) -> None:
        """Do the faults with these numbers, then a rolling update."""
        limits = httpx.Limits(max_connections=100)
        timeout = httpx.Timeout(_PATIENCE_S)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False, limits=limits) as http:
            self._http = http
            clients = [asyncio.create_task(self._client(i)) for i in range(self._load.num_clients)]
            await asyncio.sleep(1)
            for number in faults:
                print(f"\rfault {number}", end="", file=sys.stderr, flush=True)
                await self._fault(self._kinds[number % len(self._kinds)])
            await self._settle()
            self.seen.fault = ("update", time.monotonic())
            for member in self.members:
                await self._update(member)
            self._is_over = True
            await asyncio.gather(*clients)

    async def _fault(self, kind: str) -> None:
        member = self._random.choice(self.members)
        await asyncio.sleep(self._random.uniform(0.1, 0.6))
        self.seen.fault = (kind, time.monotonic())
        if kind == "reset":
            member.gate.reset()
            await asyncio.sleep(0.5)
        elif kind == "cut":
            member.gate.cut()
            await asyncio.sleep(_SILENT_S)
            member.gate.mend()
        elif kind == "silence":
            member.gate.hush()
            await asyncio.sleep(_SILENT_S)
            member.gate.speak()
        elif kind == "freeze":
            member.send(signal.SIGSTOP)
            await asyncio.sleep(_SILENT_S)
            member.send(signal.SIGCONT)
        else:
            member.send(signal.SIGKILL)
            await member.end()
            await member.start()
        await self._ready(len(self.members))

    async def _update(self, member: Member) -> None:
        member.send(signal.SIGTERM)
        await member.end()
        await member.start()
        await self._ready(len(self.members))

    async def _ready(self, count: int) -> None:
        for _ in range(300):
            response = await self._http.get(f"{self.url}/health")
            if response.json()["ready"] == count:
                return
            await asyncio.sleep(0.1)
        self.seen.wrong.append(f"a replica did not come back after {self.seen.fault[0]}")

    async def _settle(self) -> None:
        """Wait for the end of the requests that run now, whose errors are of earlier faults."""
        if self._requests:
            await asyncio.wait(list(self._requests.values()))

    async def _client(self, client: int) -> None:
        while not self._is_over:
            request = asyncio.create_task(self._request(self._random.randrange(_PROMPTS)))
            self._requests[client] = request
            await request

    async def _request(self, number: int) -> None:
        """Send one request, and judge how it ended."""
        body = {
            "messages": [{"role": "user", "content": f"hello {number} " * 40}],
            "max_tokens": self._load.num_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        seen, text, error, is_whole = self.seen, "", "", False
        try:
            url = f"{self.url}/v1/chat/completions"
            async with self._http.stream("POST", url, json=body) as answer:
                if answer.status_code != 200:
                    output = (await answer.aread())[:200]
                    self._lose(f"before its first byte: {answer.status_code} {output!r}")
                    return
                async for line in answer.aiter_lines():
                    piece, error, is_whole = _read(line)
                    text += piece
                    if error or is_whole:
                        break
        except httpx.HTTPError as failure:
            self._lose(f"without an answer: {type(failure).__name__}")
            return
        if error:
            kind, at_s = seen.fault
            told_s = time.monotonic() - at_s
            seen.ends["error"] += 1
            seen.told_s.setdefault(kind, []).append(told_s)
            if kind not in _TOLD_S or (self._load.has_limits and told_s > _TOLD_S[kind]):
                seen.wrong.append(f"told of {kind} after {told_s:.1f} s")
        elif not is_whole or seen.texts.setdefault(number, text) != text:
            self._lose("with other tokens" if is_whole else "without an end")
        else:
            seen.ends["answered"] += 1

    def _lose(self, how: str) -> None:
        self.seen.ends["lost"] += 1
        self.seen.wrong.append(f"a request was lost {how} ({self.seen.fault[0]})")


def _read(line: str) -> tuple[str, str, bool]:
    """Return the text, the error and whether it was the end, of a line of events."""
    if line == "data: [DONE]":
        return "", "", True
    if not line.startswith("data: "):
        return "", "", False
    body: dict[str, Any] = json.loads(line[6:])
    if "error" in body:
        return "", body["error"]["message"], False
    return body["choices"][0]["delta"].get("content") or "", "", False


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at."""
    import socket

    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]


async def campaign(
    num_faults: int,
    seed: int = 0,
    kinds: Iterable[str] = _ANYWHERE,
    first: int = 0,
    load: Load | None = None,
) -> Seen:
    """Do the faults from `first` on, in a folder that is removed; return what clients saw."""
    load = load or Load()
    modes = ["paced"] if load.is_paced else []
    with tempfile.TemporaryDirectory() as folder:
        *ports, router_port = free_ports(4)
        members = [Member(Path(folder, str(port)), port, *modes) for port in ports]
        await asyncio.gather(*[member.start() for member in members])
        named = [word for member in members for word in ("--replica", member.url)]
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "twostroke", "route", "--port", str(router_port), *named),
            "--no-access-log",
            env=os.environ | {"PYTHONPATH": str(_TESTS.parent / "src")},
            stderr=asyncio.subprocess.PIPE,
        )
        assert router.stderr is not None
        try:
            while b"routes requests" not in (await router.stderr.readline()):
                pass
            log = asyncio.create_task(router.stderr.read())
            url = f"http://127.0.0.1:{router_port}"
            fault_campaign = Campaign(members, url, f"{seed} {first}", list(kinds), load)
            await fault_campaign.run(range(first, num_faults))
            router.send_signal(signal.SIGTERM)
            if await router.wait():
                fault_campaign.seen.wrong.append("the router did not stop cleanly")
            await log
        finally:
            if router.returncode is None:
                router.kill()
            for member in members:
                member.send(signal.SIGKILL)
                await member.end()
                member.gate.close()
        return fault_campaign.seen


def main() -> int:
    """Print what clients saw; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="fault to begin with, to go on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=_TOLD_S, default=list(_TOLD_S))
    args = parser.parse_args()
    kinds = args.kinds
    if "cut" in kinds and not _leave_network():
        print("No packets are dropped: that needs Linux, root and iptables.")
        kinds.remove("cut")
    seen = asyncio.run(campaign(args.faults, args.seed, kinds, args.first))
    print(f"{args.faults - args.first} faults, then a rolling update: {dict(seen.ends)}")
    for kind, told_s in sorted(seen.told_s.items()):
        print(f"  {kind}: {len(told_s)} errors, the last after {max(told_s):.2f} s")
    for fault_text, count in Counter(seen.wrong).most_common(20):
        print(f"  WRONG, {count} times: {fault_text}")
    return 1 if seen.wrong else 0


def _leave_network() -> bool:
    """Move to a network namespace for itself; return whether that is possible."""
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    if unshare is None or not shutil.which("iptables") or unshare(_NEW_NETWORK):
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
