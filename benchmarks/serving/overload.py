"""Measure a server under far more load than it can serve.

Run it with `make bench WHAT=overload`.

A server with a short queue gets 20 times the load that it can serve: first from clients that do
not retry, then from clients that obey `Retry-After`. Then one tenant floods it while another
sends few requests, and two tenants with weights 1 and 3 keep it busy. The clients are one
process that shares the cores with the server; its processor time is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.goals import SMOLLM2
from benchmarks.common.pipe import Worker, WorkerError
from benchmarks.common.quiet import Watch
from benchmarks.common.report import caption, machine_facts, note, positive, save, table
from benchmarks.common.servers import MODEL_NAME, Server, our_command
from benchmarks.common.texts import FreshPrompts, heldout_tokens
from twostroke.model.loader import load

if TYPE_CHECKING:
    from collections.abc import Iterable

_WEIGHTS = {"light": 1, "heavy": 3, "trickle": 1, "flood": 1}
_PARTS = ("load", "trickle", "shares")
_LOAD = 20  # times what fits
_PROMPT, _ANSWER = 128, 32  # tokens
_TRICKLE_PROMPT, _TRICKLE_ANSWER = 512, 4
_BETWEEN_S = 2.4  # requests of the trickle
_WARM_S = 5.0
_BURST_S = 1.0  # of the clients that come back


def main() -> None:
    """Measure, then print and keep the table."""
    args = _arguments()
    prompts = FreshPrompts(heldout_tokens(load(args.model)))
    result: dict[str, Any] = {**machine_facts(), "model": args.model}
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
        folder = Path(folder_name)
        keys = {name: _key(folder, name, weight) for name, weight in _WEIGHTS.items()}
        command = [sys.executable, "-m", "benchmarks.serving.overload_clients"]
        worker = Worker("clients", command, folder / "clients.log")
        stack.callback(worker.close)
        ours = our_command(args.model, args.threads)
        limits = ("--max-running", str(args.running), "--max-waiting", str(args.waiting))
        records = ("--records", str(folder / "records"))
        server = Server("Twostroke", (*ours, *limits, *records), folder, stack)
        bench = _Bench(args, server, worker, prompts, keys)
        watch = Watch(server.pid, worker.pid)
        for part in args.parts:
            note(f"Measuring {part}")
            rows += getattr(bench, part)(result)
        result["others_share"] = watch.others_share()
    save("overload", result, _text(args, rows, result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2, help="a GGUF file or a catalogue name")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    for name, default, about in (
        ("running", 8, "most requests that run at once"),
        ("waiting", 16, "most requests in the queue"),
        ("seconds", 60, "of the two tenants with weights"),
        ("threads", 2, ""),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=about)
    return parser.parse_args()


def _key(folder: Path, name: str, weight: int) -> str:
    code = "from twostroke.cli import main; main()"
    add = ("keys", "add", name, "--records", str(folder / "records"), "--weight", str(weight))
    done = subprocess.run(
        [sys.executable, "-c", code, *add], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[0]


class _Bench:
    """The parts, each of which adds to the result and returns its rows."""

    def __init__(
        self,
        args: argparse.Namespace,
        server: Server,
        worker: Worker,
        prompts: FreshPrompts,
        keys: dict[str, str],
    ) -> None:
        self._args, self._port, self._worker = args, server.port, worker
        self._prompts, self._keys = prompts, keys

    def load(self, result: dict[str, Any]) -> list[tuple[str, ...]]:
        """Find what fits, then send 20 times as much."""
        peak = self._run(_WARM_S + 12, loops=[self._loop("light", self._args.running + 8)])
        fits = sum(peak["tokens"][1][int(_WARM_S) :]) / 12 / (_PROMPT + _ANSWER)
        rate, seconds = _LOAD * fits, 20.0
        flood = self._run(seconds, [self._request(i / rate) for i in range(int(rate * seconds))])
        tries = [tries[0] for tries in flood["requests"]]
        refused = [
            1000 * (attempt["end_s"] - attempt["sent_s"])
            for attempt in tries
            if attempt["status"] != 200
        ]
        begun = int(_WARM_S)  # the queue is full then
        answered = sum(flood["tokens"][0][begun:]) / (_PROMPT + _ANSWER)
        goodput = answered / (seconds - begun)
        crowd = [self._request(i / rate, tries=8) for i in range(int(rate * _BURST_S))]
        obeying = self._run(1.0, crowd)["requests"]
        soon = sum(len(tries) <= 2 and tries[-1]["status"] == 200 for tries in obeying)
        all_s = max(tries[-1]["end_s"] for tries in obeying)
        result["load"] = {
            "fits_per_s": fits, "refused": len(refused), "refusal_p50_ms": _percentile(refused, 50),
            "refusal_p99_ms": _percentile(refused, 99), "goodput_per_s": goodput,
            "client_share": flood["client_s"] / seconds / 2, "crowd": len(obeying),
            "first_or_second_try": soon / len(obeying),
            "tries": [len(attempts) for attempts in obeying],
            "all_answered_s": all_s,
        }  # fmt: skip
        statuses = {attempt["status"] for attempt in tries} | {
            t["status"] for o in obeying for t in o
        }
        result["load"]["statuses"] = sorted(statuses)
        first = sum(len(tries) == 1 for tries in obeying)
        fit = f"{_LOAD} times what fits ({fits:.1f} a second)"
        refusals = f"{_percentile(refused, 50):.0f} / {_percentile(refused, 99):.0f} ms"
        at_once = f"{soon / len(obeying):.0%} ({first / len(obeying):.0%} at the first)"
        client_s = f"{flood['client_s'] / seconds:.2f} cores"
        took_s = f"{all_s:.0f} s for {len(obeying) / fits:.0f} s of work"
        return [
            (f"{fit}: refusals, p50 / p99", refusals, "100 ms"),
            ("the same: goodput, of what fits", f"{goodput / fits:.0%}", "90%"),
            ("the same: processor time that the clients took", client_s, "–"),
            (
                f"{len(obeying)} at that rate, which obey `Retry-After`: first or second try",
                at_once,
                "90%",
            ),
            ("the same: until all were answered", took_s, "–"),
        ]

    def trickle(self, result: dict[str, Any]) -> list[tuple[str, ...]]:
        """Let one tenant trickle, alone and while another floods."""
        rows: list[tuple[str, ...]] = []
        for length in (_TRICKLE_PROMPT, _PROMPT):
            alone = self._ttfts(length, 12, [])
            flooded = self._ttfts(length, 24, [self._loop("flood", 4 * self._args.running)])
            p99s = [_percentile(ttfts, 99) for ttfts in (alone, flooded)]
            result[f"trickle-{length}"] = {"alone_s": alone, "flooded_s": flooded}
            title = f"TTFT p99 of a trickle, {length} tokens each ({len(flooded)} requests)"
            outcome = f"{1000 * p99s[0]:.0f} / {1000 * p99s[1]:.0f} ms, x {p99s[1] / p99s[0]:.1f}"
            rows.append((f"{title}: alone / beside a flood", outcome, "x 2"))
        return rows

    def _ttfts(self, length: int, seconds: float, loops: list[dict[str, Any]]) -> list[float]:
        warm_s = _WARM_S if loops else 0.0
        requests = [
            self._request(warm_s + _BETWEEN_S * i, length=length, key="trickle")
            for i in range(int(seconds / _BETWEEN_S))
        ]
        for request in requests:
            request["num_tokens"] = _TRICKLE_ANSWER
        result = self._run(warm_s + seconds, requests, loops)["requests"]
        answered = [tries[0] for tries in result if tries[0]["status"] == 200]
        if len(answered) < len(result):
            note(f"{len(result) - len(answered)} of {len(result)} requests were refused")
        return [attempt["first_s"] - attempt["sent_s"] for attempt in answered]

    def shares(self, result: dict[str, Any]) -> list[tuple[str, ...]]:
        """Let two tenants with weights 1 and 3 keep the server busy."""
        seconds = self._args.seconds
        loops = [self._loop(name, self._args.running + 8) for name in ("light", "heavy")]
        tokens = self._run(_WARM_S + seconds, loops=loops)["tokens"]
        _, light, heavy = (sum(token[int(_WARM_S) :]) for token in tokens)
        share, num_tokens = heavy / (light + heavy), light + heavy
        result["shares"] = {"light": light, "heavy": heavy, "seconds": seconds}
        title = (
            f"tenants of weights 1 and 3, {num_tokens:,} tokens in {seconds} s: share of the second"
        )
        return [(title, f"{share:.1%} ({share / 0.75 - 1:+.1%})", "75% ± 5%")]

    def _request(
        self, at_s: float, *, tries: int = 1, length: int = _PROMPT, key: str = "light"
    ) -> dict[str, Any]:
        prompt = self._prompts.take(length)
        return {
            "at_s": at_s, "prompt": prompt, "num_tokens": _ANSWER, "key": self._keys[key],
            "tries": tries,
        }  # fmt: skip

    def _loop(self, key: str, clients: int) -> dict[str, Any]:
        prompts = [self._prompts.take(_PROMPT) for _ in range(600)]
        return {
            "key": self._keys[key], "clients": clients, "prompts": prompts, "num_tokens": _ANSWER,
        }  # fmt: skip

    def _run(
        self,
        seconds: float,
        requests: list[dict[str, Any]] | None = None,
        loops: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        try:
            return self._worker.call(
                "run", port=self._port, model=MODEL_NAME, seconds=seconds, requests=requests,
                loops=loops,
            )  # fmt: skip
        except WorkerError as error:
            raise SystemExit(str(error)) from None


def _percentile(values: Iterable[float], percent: float) -> float:
    """Return the nearest-rank percentile."""
    every = sorted(values)
    return every[max(0, math.ceil(len(every) * percent / 100) - 1)] if every else math.nan


def _text(args: argparse.Namespace, rows: list[tuple[str, ...]], result: dict[str, Any]) -> str:
    header = ("", "measured", "asked")
    set_up = (
        f"prompts of {_PROMPT} tokens, answers of {_ANSWER}",
        f"--max-running {args.running} --max-waiting {args.waiting}",
        f"{result['others_share']:.1%} of the processor taken by others",
    )
    facts = caption(machine_facts(), args.model, *set_up)
    return "\n".join(["## Overload and fairness", "", table(header, rows), "", facts])


if __name__ == "__main__":
    main()
