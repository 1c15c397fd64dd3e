"""Compare disaggregated servers with mixed servers under load: decoding streams, and rule `auto`.

Used by disaggregation.py. Each server has one thread. In `streams`, four streams run while long
prompts arrive: first at a decode and a prefill engine, then at two mixed replicas. In `auto`,
Poisson arrivals of the same requests are sent to decode engines that differ only in their rule;
loads are shares of the capacity of one engine. The result is the mean time from a request's
scheduled time to its last token, because the rule minimizes the seconds of all requests.
`virtual` does the same under virtual time.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from benchmarks.common.report import note
from benchmarks.common.servers import MODEL_NAME, Server, free_port, our_command
from benchmarks.serving.load_clients import replay, send_request
from twostroke.core.distributed_options import DISAGGREGATE
from twostroke.core.options import CacheOptions
from twostroke.lab.planner import load_planned_model, this_machine
from twostroke.lab.planner.question import Question
from twostroke.lab.simulator import RequestArrival, SimulationSetup, Workload, simulate

if TYPE_CHECKING:
    import argparse

MIXES = {"long prompts": (600, 16), "balanced": (250, 60), "long answers": (60, 120)}
LOADS = (0.4, 0.8, 1.2)
RULES = ("never", "never again", "always", "auto")
_STREAMS = 4
_SHORT = 8  # tokens of a stream's prompt: less than a page
_ENDLESS = 3500  # tokens of a stream that is cut off
_ANSWER = 16  # tokens to a long prompt
_BURST = 6  # requests by which the capacity is measured
_MIN_REQUESTS = 6  # requests of a replay
_VIRTUAL = 60  # requests of a simulated replay, about
_SHARES = (0.3, 0.6)  # of arithmetic and bandwidth
_LINK = 2e9  # bytes/s of pages
_IN_TIME_S = 0.2  # gap of a stream, and
_MAX_WAIT_RATIO = 3  # times as long as alone, for the first token of a prompt


class Servers:
    """Starts servers that stop with the stack."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        """Serve a model."""
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._stack, self._peer = stack, f"127.0.0.1:{free_port()}"
        self._command = (
            *our_command(args.model, 1),
            "--no-access-log",
            "--context-length",
            "4096",
        )
        self._rng = random.Random(args.seed)

    def start(self, name: str, *words: str) -> int:
        """Start a server; return its port."""
        return Server(name, (*self._command, *words), self._folder, self._stack).port

    def prefill(self) -> int:
        """Start the prefill engine."""
        return self.start("prefill", "--role", "prefill", "--peer-address", self._peer)

    def decode(self, rule: str) -> int:
        """Start a decode engine."""
        words = ("--role", "decode", "--prefill-peer", self._peer, "--disaggregate", rule)
        return self.start(f"decode-{rule}", *words)

    def prompt(self, count: int) -> list[int]:
        """Return a prompt that nobody has seen."""
        return [self._rng.randrange(1000, 40000) for _ in range(count)]


async def _stamps(
    port: int,
    count: int,
    prompt: list[int],
    stamps: list[float],
    has_begun: asyncio.Event | None = None,
) -> None:
    """Note when tokens come; some have come once it `has_begun`."""
    async for _ in send_request(port, MODEL_NAME, count, prompt):
        stamps += [time.monotonic()]
        if has_begun is not None and len(stamps) == _SHORT:
            has_begun.set()


async def _load_beside(
    servers: Servers, ports: list[int], args: argparse.Namespace, every_s: float
) -> dict[str, Any]:
    """Let prompts arrive beside streams; both take the servers in turn."""
    streams: list[list[float]] = [[] for _ in range(_STREAMS)]
    begun = [asyncio.Event() for _ in streams]
    tasks = [
        asyncio.create_task(
            _stamps(ports[n % len(ports)], _ENDLESS, servers.prompt(_SHORT), stamps, has_begun)
        )
        for n, (stamps, has_begun) in enumerate(zip(streams, begun, strict=True))
    ]
    await asyncio.gather(*(process.wait() for process in begun))
    start_s, waits = time.monotonic(), list[float]()

    async def send_prompt(number: int) -> None:
        prompt, stamps = servers.prompt(args.tokens), list[float]()
        due_s = start_s + number * every_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await _stamps(ports[number % len(ports)], _ANSWER, prompt, stamps)
        waits.append(stamps[0] - due_s)

    await asyncio.gather(*map(send_prompt, range(args.prompts)))
    end_s = time.monotonic()
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    pairs = [pair for stream in streams for pair in pairwise(stream)]
    gaps = [after - before for before, after in pairs if start_s <= after <= end_s]
    in_time = sum(gap <= _IN_TIME_S for gap in gaps)
    return {
        "itl_p50_s": median(gaps),
        "itl_p99_s": quantiles(gaps, n=100, method="inclusive")[98],
        "num_gaps": len(gaps),
        "ttft_p50_s": median(waits),
        "ttft_s": waits,
        "goodput_per_min": 60
        * sum(w <= _MAX_WAIT_RATIO * every_s for w in waits)
        / (end_s - start_s),
        "stream_tokens_per_s": in_time / (end_s - start_s),
        "seconds": end_s - start_s,
    }


def streams(args: argparse.Namespace) -> dict[str, Any]:
    """Return latencies with roles (`apart`) and of two replicas (`mixed`).

    Prompts arrive as fast as one engine reads them while nothing else runs.
    """
    results: dict[str, Any] = {}
    for name in ("mixed", "apart"):
        with ExitStack() as stack:
            servers = Servers(args, stack)
            if name == "mixed":
                ports = [servers.start("first"), servers.start("second")]
                stamps: list[float] = []
                began_s = time.monotonic()
                asyncio.run(_stamps(ports[0], 1, servers.prompt(args.tokens), stamps))
                results["alone_s"] = stamps[0] - began_s
            else:
                servers.prefill()
                ports = [servers.decode("always")]
            note(f"Streams and prompts, {name}")
            results[name] = asyncio.run(_load_beside(servers, ports, args, results["alone_s"]))
    return results


def auto(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line for each mix and load, with the times of requests by rule, round by round.

    All rules of a round get the same arrivals, one rule after another; each round begins with
    another rule, since the machine's speed drifts. `never` is measured twice, by two engines that
    differ in nothing: what these differ in is what the figures cannot tell.
    """
    lines = []
    with ExitStack() as stack:
        servers = Servers(args, stack)
        servers.prefill()
        ports = {name: servers.decode(name.split()[0]) for name in RULES}
        for mix in args.mixes:
            lengths, answer = MIXES[mix]
            send = partial(_send, servers, lengths, answer)
            for port in ports.values():  # each learns the pace here and there
                send(port, [0.0, 0.1])
            alone_s = min(max(send(ports["never"], [0.0] * _BURST)) / _BURST for _ in range(2))
            for load in args.loads:
                seconds: dict[str, list[float]] = {name: [] for name in RULES}
                for turn in range(args.turns):
                    rng = random.Random(f"{args.seed} {mix} {load} {turn}")
                    times_s = arrivals(rng, alone_s / load, args.seconds)
                    first = turn % len(RULES)
                    for name in (*RULES[first:], *RULES[:first]):
                        note(f"Auto: {mix}, load {load:g}, {len(times_s)} requests, {name}")
                        seconds[name].append(fmean(send(ports[name], times_s)))
                line = {"mix": mix, "load": load, "alone_s": alone_s, "engines": 1}
                lines.append({**line, "round_s": seconds})
                note(f"{mix}, load {load:g}: {_means(seconds)}")
    return lines


def _means(seconds: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {fmean(times):.2f} s" for name, times in seconds.items())


def arrivals(rng: random.Random, every_s: float, until_s: float) -> list[float]:
    """Return Poisson arrivals from 0 on, at least a few."""
    times_s = [0.0]
    while times_s[-1] < until_s or len(times_s) < _MIN_REQUESTS:
        times_s.append(times_s[-1] + rng.expovariate(1 / every_s))
    return times_s


def virtual(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the same of simulated engines, whose rule is the same code: one or two beside one.

    Nothing disturbs these, so what the rule gains or loses is exact. Steps take what the model's
    operations need at shares of this machine's speed that a thread reaches (`_SHARES`).
    """
    model = load_planned_model(args.model)
    setup = SimulationSetup(
        model,
        this_machine(),
        Question(mfu=_SHARES[0], mbu=_SHARES[1]),
        CacheOptions(memory_bytes=400 << 20, context_length=4096),
        is_here=True,
        routing="least-work",
        link=_LINK,
    )
    lines = []
    for engines, mix, load in product((1, 2), args.mixes, args.loads):
        lengths, answer = MIXES[mix]
        burst = Workload("burst", (RequestArrival(0.0, lengths, answer),) * _BURST)
        alone_s = max(_times(setup, burst)) / _BURST
        seconds: dict[str, list[float]] = {name: [] for name in DISAGGREGATE}
        for turn in range(args.turns):
            rng = random.Random(f"{args.seed} {mix} {load} {turn}")
            until_s = _VIRTUAL * alone_s / load / engines
            times_s = arrivals(rng, alone_s / load / engines, until_s)
            sent = Workload(mix, tuple(RequestArrival(at_s, lengths, answer) for at_s in times_s))
            for rule in DISAGGREGATE:
                disaggregated = replace(
                    setup, replicas=engines + 1, prefill_replicas=1, disaggregate=rule
                )
                seconds[rule].append(fmean(_times(disaggregated, sent)))
        line = {"mix": mix, "load": load, "alone_s": alone_s, "engines": engines}
        lines.append({**line, "round_s": seconds})
        note(f"Virtual: {engines} engines, {mix}, load {load:g}: {_means(seconds)}")
    return lines


def _times(setup: SimulationSetup, load: Workload) -> list[float]:
    return [log.timings.last_token_s - log.sent_s for log in simulate(setup, load).logs]


def _send(
    servers: Servers, length: int, answer: int, port: int, times_s: list[float]
) -> list[float]:
    """Send requests at their times; return the seconds from there to their ends."""
    prompts = [servers.prompt(length) for _ in times_s]
    logs = replay(port, MODEL_NAME, times_s, prompts, [answer] * len(times_s))["requests"]
    return [log["last_s"] - due_s for log, due_s in zip(logs, times_s, strict=True)]
