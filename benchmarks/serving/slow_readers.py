"""Measure how a thousand clients that hardly read slow down a client that reads.

Run it with `make bench WHAT=slow-readers`.

One client streams answers from our server, round by round: alone, among idle connections, and
among the same number of streams whose readers take 64 bytes per second. The engine has finished
the crowd's answers before the client begins, so the difference is the cost of the connections.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.footprint import memory
from benchmarks.common.goals import SMOLLM2
from benchmarks.common.pipe import Worker, WorkerError
from benchmarks.common.quiet import MAX_SHARE, Watch
from benchmarks.common.report import caption, machine_facts, note, positive, save, spread, table
from benchmarks.common.servers import MODEL_NAME, Server, our_command
from benchmarks.common.texts import FreshPrompts, heldout_tokens
from twostroke.model.loader import load

_ALONE, _IDLE, _SLOW = "alone", "idle connections", "slow streams"
_DONE_WITHIN_S = 600.0
_MB = 1e6


def main() -> None:
    """Measure, then print and keep the table."""
    args = _arguments()
    prompts = FreshPrompts(heldout_tokens(load(args.model)))
    runs: dict[str, list[dict[str, Any]]] = {_ALONE: [], _IDLE: [], _SLOW: []}
    with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
        workers = {}
        for name, script in (
            ("client", "benchmarks.serving.load_clients"),
            ("crowd", "benchmarks.serving.slow_reader_clients"),
        ):
            command = [sys.executable, "-m", script]
            workers[name] = Worker(name, command, Path(folder_name) / f"{name}.log")
            stack.callback(workers[name].close)
        ours = our_command(args.model, args.threads)
        server = Server("Twostroke", ours, Path(folder_name), stack)
        bench = _Bench(args, server, workers["client"], workers["crowd"], prompts)
        for number in range(args.rounds + 1):
            note(f"Round {number} of {args.rounds}" if number else "Warming up")
            for name, mine in runs.items():
                run = bench.run(name)
                if number:
                    mine.append(run)
    save("crowd", {**machine_facts(), "model": args.model, "runs": runs}, _text(args, runs))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2, help="a GGUF file or a catalogue name")
    for name, default, about in (
        ("crowd", 1000, "clients that hardly read"),
        ("crowd-tokens", 32, "of a slow client's answer"),
        ("requests", 4, "of the fast client that count"),
        ("tokens", 128, "of each of its answers"),
        ("rounds", 3, ""),
        ("threads", 2, ""),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=about)
    return parser.parse_args()


class _Bench:
    """One client's runs, each among another crowd."""

    def __init__(
        self,
        args: argparse.Namespace,
        server: Server,
        client: Worker,
        crowd: Worker,
        prompts: FreshPrompts,
    ) -> None:
        self._args, self._server, self._prompts = args, server, prompts
        self._client, self._crowd = client, crowd
        self._memory_before: int | None = None  # any crowd

    def run(self, name: str) -> dict[str, Any]:
        """Let the crowd come, measure the fast client, let the crowd go.

        Raises:
            SystemExit: a request failed.
        """
        args, port = self._args, self._server.port
        if self._memory_before is None and name != _ALONE:
            self._memory_before = memory(self._server.pid)["VmRSS"]
        try:
            if name == _IDLE:
                self._crowd.call("idle", port=port, count=args.crowd)
            elif name == _SLOW:
                fields = {"model": MODEL_NAME, "num_tokens": args.crowd_tokens}
                self._crowd.call("slow", port=port, count=args.crowd, **fields)
                self._wait_until_done()
            memory_bytes = memory(self._server.pid)["VmRSS"]
            grown = memory_bytes - (self._memory_before or memory_bytes)
            watch = Watch(self._server.pid, self._client.pid, self._crowd.pid)
            answer = self._client.call(
                "loop", port=port, model=MODEL_NAME, num_clients=1, num_tokens=args.tokens,
                prompts=[self._prompts.take(32) for _ in range(args.requests + 1)],
            )  # fmt: skip
            others = watch.others_share()
            left = self._crowd.call("leave")
        except WorkerError as error:
            raise SystemExit(f"{name}: {error}") from None
        return {**answer, "grown_bytes": grown, "others_share": others, **left}

    def _wait_until_done(self) -> None:
        """Wait until the engine has written every answer of the crowd."""
        deadline = time.monotonic() + _DONE_WITHIN_S
        while any(_engine_counts(self._server.port)):
            if time.monotonic() > deadline:
                raise SystemExit("The engine did not finish the crowd's answers in time.")
            time.sleep(0.5)


def _engine_counts(port: int) -> tuple[float, float]:
    """Return how many answers run and wait."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    names = ("twostroke_requests_running", "twostroke_requests_waiting")
    running, waiting = (re.search(rf"^{name} (\S+)$", text, re.MULTILINE) for name in names)
    assert running is not None
    assert waiting is not None
    return float(running[1]), float(waiting[1])


def _text(args: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> str:
    header = (
        f"one client, {args.tokens} tokens an answer, among {args.crowd:,}", "tokens/s",
        "share of alone", "ITL p95", "server's memory grew by", "cut off", "disturbed runs",
    )  # fmt: skip
    alone = median(run["tokens_per_s"] for run in runs[_ALONE])
    lines = []
    for name, mine in runs.items():
        rates = [run["tokens_per_s"] for run in mine]
        disturbed = sum(run["others_share"] > MAX_SHARE for run in mine)
        lines.append(
            (
                name,
                spread(rates),
                f"{median(rates) / alone:.1%}",
                f"{1000 * median(run['itl_p95_s'] for run in mine):.1f} ms",
                f"{max(run['grown_bytes'] for run in mine) / _MB:,.0f} MB",
                str(max(run["closed_by_server"] for run in mine)),
                f"{disturbed} of {len(mine)}",
            )
        )
    facts = caption(machine_facts(), args.model, f"{args.rounds} rounds")
    return "\n".join(["## Among clients that hardly read", "", table(header, lines), "", facts])


if __name__ == "__main__":
    main()
