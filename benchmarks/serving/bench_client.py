"""Measure the client of `twostroke bench` itself, against a server that does nothing.

Run it with `make bench WHAT=client`. The server is another process on another core. It answers each
request with the same bytes as soon as the request has come, so all time is the client's: how many
requests a second one core can send, and how late they are.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.common.report import positive
from twostroke.core.process_tuning import request_short_time_slices
from twostroke.lab.bench.benchmark import BenchLoad, Benchmark
from twostroke.lab.bench.request_form import RequestForm
from twostroke.lab.bench.runner import RunLimits
from twostroke.lab.measure.requests import Objectives
from twostroke.lab.simulator.load import SyntheticWorkload

if TYPE_CHECKING:
    from twostroke.lab.bench.benchmark import BenchResult

_LENGTH = re.compile(rb"(?i)content-length: (\d+)")
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_SHOWN_FUNCTIONS = 15


class _NothingServer(asyncio.Protocol):
    """A connection whose requests all get the same answer."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        assert self._transport is not None
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            match = _LENGTH.search(self._data, 0, end)
            whole = end + 4 + (int(match[1]) if match else 0)
            if len(self._data) < whole:
                return
            is_post = self._data.startswith(b"POST")
            self._data = self._data[whole:]
            self._transport.write(self._answer if is_post else _models())


def _models() -> bytes:
    output = json.dumps({"data": [{"id": "nothing"}]}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(output) + output


def _answer(num_tokens: int) -> bytes:
    """Return a whole response with a chunk for each token."""
    delta = {"choices": [{"index": 0, "delta": {"content": " word"}}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 64, "completion_tokens": num_tokens}}
    events = [json.dumps(event).encode() for event in [delta] * num_tokens + [end, usage]]
    chunks = [b"data: %b\n\n" % event for event in [*events, b"[DONE]"]]
    return _HEAD + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"


async def _serve(num_tokens: int) -> None:
    loop, answer = asyncio.get_running_loop(), _answer(num_tokens)
    server = await loop.create_server(lambda: _NothingServer(answer), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent closes it
    server.close()


def _run(port: int, load: BenchLoad) -> BenchResult:
    benchmark = Benchmark(f"http://127.0.0.1:{port}", RequestForm(), key=None)
    return asyncio.run(benchmark.run(load, Objectives()))


def _load(
    rate: float | None, clients: int, seconds: float, options: argparse.Namespace
) -> BenchLoad:
    count = round(seconds * (rate or options.most_rate))
    workload = SyntheticWorkload(
        rate or 1.0, count=count, prompt=options.prompt, output=max(options.tokens, 2)
    )
    limits = RunLimits(num_clients=None if rate else clients, duration_s=seconds)
    return BenchLoad(workload=workload.load(0), limits=limits)


def _show(name: str, result: BenchResult) -> None:
    run = result.report.run
    print(
        f"{name:>22} {run.requests_per_s:10,.0f} {run.lateness_p99_s * 1e3:12.2f} "
        f"{result.facts.client_share:6.0%} {_client_us(result):6.0f} "
        f"{run.num_requests - run.num_completed:7}"
    )


def _client_us(result: BenchResult) -> float:
    """Return the client's processor time for each request, in microseconds."""
    run = result.report.run
    return result.facts.client_share * run.duration_s / run.num_requests * 1e6


def main() -> None:
    """Run the loads that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=positive, nargs="*", default=[500, 1000, 2000, 3000])
    parser.add_argument("--clients", type=positive, nargs="*", default=[16])
    parser.add_argument("--seconds", type=positive, default=5)
    parser.add_argument("--tokens", type=positive, default=1, help="chunks of each answer")
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of each prompt")
    parser.add_argument("--most-rate", type=positive, default=6000, help="of closed loops")
    parser.add_argument("--profile", action="store_true", help="show where the client's time goes")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1] if options.serve else cores[0]})
    if options.serve:
        asyncio.run(_serve(options.tokens))
        return
    command = [sys.executable, "-m", "benchmarks.serving.bench_client", "--serve"]
    request_short_time_slices()
    with subprocess.Popen(
        [*command, "--tokens", str(options.tokens)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        headings = f"{'REQUESTS/S':>10} {'LATE P99 MS':>12} {'CORE':>6} {'CPU US':>6} {'FAILED':>7}"
        print(f"{'LOAD':>22} {headings}")
        loads = [(f"{rate} requests/s", float(rate), 0) for rate in options.rates]
        loads += [(f"{clients} clients", 0.0, clients) for clients in options.clients]
        profiler = cProfile.Profile() if options.profile else None
        for name, rate, clients in loads:
            load = _load(rate or None, clients, options.seconds, options)
            if profiler is not None:
                _show(name, profiler.runcall(_run, port, load))
            else:
                _show(name, _run(port, load))
        server.stdin.close()
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(_SHOWN_FUNCTIONS)


if __name__ == "__main__":
    main()
