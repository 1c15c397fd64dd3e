"""Time requests that equal another one: in flight together, and kept in the answer cache.

Run it with `make bench WHAT=equal-requests`.

One server answers directly and behind a router. Each round sends equal requests at the same time,
whose prompt is new, and then the same request again, one after another. The first should be
computed once, and the others read the answer that is kept. The same requests are sent through
another router to a server that answers at once, without a model: what those need is the router's
own time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.common.report import caption, machine_facts, note, positive, save, table
from benchmarks.common.servers import MODEL_NAME, Server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAX_S = 0.005  # that is asked: TTFT over the router's own time
_NUM_TOKENS = 32
_HEADER = b"twostroke-answer:"
_NOTHING = "router, without a model"


class TimedAnswer(NamedTuple):
    """What a client sees of one streamed answer.

    Attributes:
        ttft_s: from the request to the first event with text.
        source: "computed", "shared" or "stored", as the response's header says.
        text: the whole body, to compare answers.
    """

    ttft_s: float
    source: str
    text: str


async def send_request(port: int, prompt: str) -> TimedAnswer:
    """Send one streamed completion to a port of this machine, and time it."""
    fields = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": _NUM_TOKENS, "temperature": 0}
    body = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent_s = time.perf_counter()
    writer.write(head.encode() + body)
    ttft_s, source, texts = 0.0, "computed", []
    try:
        while line := await reader.readline():
            if line.lower().startswith(_HEADER):
                source = line.partition(b":")[2].strip().decode()
            elif line.startswith(b"data: {"):
                ttft_s = ttft_s or time.perf_counter() - sent_s
                choices = json.loads(line[6:]).get("choices") or [{}]
                texts.append(choices[0].get("text", ""))
            elif line.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
                rest = (await reader.read()).decode(errors="replace")
                raise SystemExit(f"The server refused a request: {rest[-300:]}")
            elif line.startswith(b"data: [DONE]"):
                break
    finally:
        writer.close()
    return TimedAnswer(ttft_s, source, "".join(texts))


class Round(NamedTuple):
    """The requests of one prompt: those at the same time, and those afterwards."""

    together: list[TimedAnswer]
    later: list[TimedAnswer]

    def num_computed(self) -> int:
        """Return how many of the answers the engine computed."""
        return sum(answer.source == "computed" for answer in self.together + self.later)

    def late_s(self) -> list[float]:
        """Return by how much the first token of each answer came after the very first one."""
        first_s = min(answer.ttft_s for answer in self.together)
        return [answer.ttft_s - first_s for answer in self.together]


async def send_round(port: int, prompt: str, args: argparse.Namespace) -> Round:
    """Send the requests of one prompt, and check that all have the same answer."""
    together = await asyncio.gather(*[send_request(port, prompt) for _ in range(args.requests)])
    later = [await send_request(port, prompt) for _ in range(args.later)]
    if len({answer.text for answer in [*together, *later]}) != 1:
        raise SystemExit(f"Equal requests got different answers: {prompt[:80]}")
    return Round(together, later)


class WayTimes(NamedTuple):
    """Times of one way to the server, in seconds; `num_computed` is the most of any round."""

    num_computed: int
    late_p50_s: float
    late_p99_s: float
    kept_p50_s: float
    kept_p99_s: float

    def cells(self, own: WayTimes | None) -> tuple[str, ...]:
        """Return the cells of the table; `own` has the router's own times."""
        late = f"{self.late_p50_s * 1e3:.1f} ms, {self.late_p99_s * 1e3:.1f} ms"
        kept = f"{self.kept_p50_s * 1e3:.1f} ms, {self.kept_p99_s * 1e3:.1f} ms"
        if own is None:
            return str(self.num_computed), late, kept, "", ""
        late_over_s = self.late_p99_s - own.late_p99_s
        kept_over_s = self.kept_p99_s - own.kept_p99_s
        return (
            *(str(self.num_computed), late, kept),
            *(f"{late_over_s * 1e3:.1f} ms", f"{kept_over_s * 1e3:.1f} ms"),
        )


def times_of(rounds: Sequence[Round]) -> WayTimes:
    """Return the times of one way to the server."""
    late_s = [value for one in rounds for value in one.late_s()]
    kept_s = [answer.ttft_s for one in rounds for answer in one.later]
    return WayTimes(
        num_computed=max(one.num_computed() for one in rounds),
        late_p50_s=float(np.quantile(late_s, 0.5)),
        late_p99_s=float(np.quantile(late_s, 0.99)),
        kept_p50_s=float(np.quantile(kept_s, 0.5)),
        kept_p99_s=float(np.quantile(kept_s, 0.99)),
    )


async def measure(ports: dict[str, int], args: argparse.Namespace) -> dict[str, WayTimes]:
    """Send rounds each way in turn; return the times of each way."""
    rounds: dict[str, list[Round]] = {way: [] for way in ports}
    for port in ports.values():
        await send_request(port, "warm up")
    for number in range(args.rounds):
        for way, port in ports.items():
            prompt = f"{way} {number}: " + "Why is the sky blue? " * args.repeats
            rounds[way].append(await send_round(port, prompt, args))
    return {way: times_of(of_way) for way, of_way in rounds.items()}


@contextlib.contextmanager
def _serve_nothing() -> Iterator[int]:
    """Run a server that answers at once, without a model; yield its port."""
    command = (sys.executable, "-m", "benchmarks.serving.bench_client", "--serve")
    with subprocess.Popen(
        [*command, "--tokens", str(_NUM_TOKENS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()


def main() -> None:
    """Measure both ways, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=positive, default=64, help="at the same time")
    parser.add_argument("--later", type=positive, default=50, help="one after another")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--repeats", type=positive, default=40, help="of a sentence in the prompt")
    args, result = parser.parse_args(), machine_facts()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        module = (sys.executable, "-m", "twostroke.fleet.cluster.process")
        options = ("--name", MODEL_NAME, "--speculate", "off", "--answer-cache", "64MB")
        server = Server("Twostroke", (*module, "serve", args.model, *options), folder, stack)
        nothing_port = stack.enter_context(_serve_nothing())
        routers = [
            Server(
                f"router {port}",
                (*module, "route", "--no-access-log", "--replica", f"http://127.0.0.1:{port}"),
                folder,
                stack,
            )
            for port in (server.port, nothing_port)
        ]
        note("Sending requests")
        ports = {"server": server.port, "router": routers[0].port, _NOTHING: routers[1].port}
        times = asyncio.run(measure(ports, args))
    header = (
        "way",
        f"computed of {args.requests + args.later}",
        "shared, after the first of all: TTFT p50, p99",
        "kept: TTFT p50, p99",
        f"shared over the router's own (asked: {_MAX_S * 1e3:.0f} ms)",
        f"kept over the router's own ({_MAX_S * 1e3:.0f} ms)",
    )
    rows = [
        (way, *one.cells(times[_NOTHING] if way == "router" else None))
        for way, one in times.items()
    ]
    text = f"{table(header, rows)}\n\n{caption(result, args.model)}"
    save("equal_requests", dict(result) | {way: one._asdict() for way, one in times.items()}, text)


if __name__ == "__main__":
    main()
