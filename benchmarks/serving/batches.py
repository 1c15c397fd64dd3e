"""Measure a batch file beside the bare engine, and a client beside a full batch.

Run it with `make bench WHAT=batches`.

`twostroke batch` and the engine answer the same prompts in turn, each in a newly started
process. Then a client sends requests to our server from time to time: alone, and while a batch
uses all remaining capacity.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.common.goals import SMOLLM2
from benchmarks.common.quiet import MAX_SHARE, Watch, busy_s
from benchmarks.common.records import Entry, Record, keep
from benchmarks.common.report import caption, machine_facts, note, positive, save, spread, table
from benchmarks.common.servers import MODEL_NAME, Server, our_command
from benchmarks.common.texts import FreshPrompts, heldout_tokens
from twostroke.core.options import ComputeOptions, EngineOptions
from twostroke.core.sampling import SamplingParams
from twostroke.engine.counters import TimedRows
from twostroke.engine.llm import LLM
from twostroke.model.loader import build_tokenizer, load

if TYPE_CHECKING:
    from collections.abc import Sequence

_FILE, _ENGINE = "twostroke batch", "engine"
_ALONE, _WITH_BATCH = "alone", "beside a full batch"
_MIN_TOKEN_SHARE = 0.97  # of the engine's tokens
_PROMPT, _ANSWER = 100, 6  # tokens of the client
_PAUSE_S = 0.3  # between its requests, at most
_SUMMARY = re.compile(r"lines in ([\d.]+) s: (\d+) tokens")


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second of one run, and the others' share of the processor meanwhile."""

    tokens_per_s: float
    others_share: float


def main() -> None:
    """Measure, then print and keep the tables."""
    args = _arguments()
    if args.engine is not None:
        _answer(args)
        return
    loaded = load(args.model)
    prompts = FreshPrompts(heldout_tokens(loaded))
    tokenizer = build_tokenizer(loaded)
    rates: dict[str, list[Rate]] = {_FILE: [], _ENGINE: []}
    waits: dict[str, list[dict[str, Any]]] = {_ALONE: [], _WITH_BATCH: []}
    with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
        folder = Path(folder_name)
        if "file" in args.parts:
            for number in range(args.rounds):
                note(f"Round {number + 1} of {args.rounds} of the file")
                texts = [tokenizer.decode(prompts.take(_PROMPT)) for _ in range(args.lines)]
                path = _write(folder / f"{number}.jsonl", texts, args.tokens)
                for name in (_FILE, _ENGINE) if number % 2 else (_ENGINE, _FILE):
                    rates[name].append(_rate(name, path, args))
                    note(f"{name}: {rates[name][-1]}")
        if "client" in args.parts:
            bench = _Bench(args, folder, prompts, stack)
            for number in range(args.rounds + 1):
                note(f"Round {number} of {args.rounds} of the client" if number else "Warming up")
                runs = {name: bench.run(name) for name in waits}
                for name in waits if number else ():
                    waits[name].append(runs[name])
    result = {**machine_facts(), "model": args.model, "waits": waits}
    result["rates"] = {name: [asdict(run) for run in mine] for name, mine in rates.items()}
    for record in _records(args, rates, waits):
        keep(record)
    save("batch", result, _text(args, rates, waits))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2, help="a GGUF file or a catalogue name")
    for name, default, about in (
        ("lines", 64, "of the file"),
        ("tokens", 32, "of each answer to a line"),
        ("requests", 40, "of the client in a round"),
        ("rounds", 5, ""),
        ("threads", 2, ""),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=about)
    parts = ("file", "client")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _write(path: Path, texts: Sequence[str], num_tokens: int) -> Path:
    """Write the lines of a batch."""
    lines = []
    for number, text in enumerate(texts):
        body = {"prompt": text, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions"}
        lines.append(json.dumps({**line, "body": {"model": MODEL_NAME, **body}}))
    path.write_text("\n".join(lines))
    return path


def _rate(name: str, path: Path, args: argparse.Namespace) -> Rate:
    """Return how fast a file is answered, from the loaded model on; raises SystemExit if not."""
    threads = ("--threads", str(args.threads))
    command = [sys.executable, "-m", "twostroke", "batch", str(path), "--speculate", "off"]
    command += ["-o", str(path.with_suffix(".out")), "--model", args.model, *threads]
    if name == _ENGINE:
        command = [
            sys.executable,
            "-m",
            "benchmarks.serving.batches",
            "--engine",
            str(path),
            "--model",
            args.model,
        ]
        command += [*threads, "--tokens", str(args.tokens)]
    began_s, others_s = time.monotonic(), busy_s() - _own_s()
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    others_s = busy_s() - _own_s() - others_s
    share = others_s / (time.monotonic() - began_s) / (os.cpu_count() or 1)
    match = _SUMMARY.search(ran.stderr)
    if ran.returncode or match is None:
        raise SystemExit(f"{name} failed: {ran.stderr[-1000:]}")
    path.with_suffix(".out").unlink(missing_ok=True)
    return Rate(float(match[2]) / float(match[1]), share)


def _own_s() -> float:
    """Return the processor seconds of this process, and of those that it started and that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _answer(args: argparse.Namespace) -> None:
    """Answer the prompts of a file with the engine alone, and say so as `twostroke batch` does."""
    prompts = [json.loads(line)["body"]["prompt"] for line in args.engine.open()]
    params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
    options = EngineOptions(ComputeOptions(num_threads=args.threads))
    with LLM(args.model, options) as llm:
        began_s = time.monotonic()
        answers = llm.generate(prompts, params, speculate="off")
        elapsed_s = time.monotonic() - began_s
    num_tokens = sum(len(output.token_ids) for answer in answers for output in answer)
    print(f"{len(prompts)} lines in {elapsed_s:.4f} s: {num_tokens} tokens", file=sys.stderr)


class _Bench:
    """A server with records, and a client that asks it, one request after the other."""

    def __init__(
        self,
        args: argparse.Namespace,
        folder: Path,
        prompts: FreshPrompts,
        stack: contextlib.ExitStack,
    ) -> None:
        self._args, self._folder, self._prompts = args, folder, prompts
        self._random = random.Random(7)
        ours = (*our_command(args.model, args.threads), "--records", str(folder / "records"))
        self._server = Server("Twostroke", ours, folder, stack)

    def run(self, name: str) -> dict[str, Any]:
        """Let the client ask; return its waits for first tokens, and its time between tokens."""
        batch = self._begin() if name == _WITH_BATCH else None
        full_s = self._steps_s() if batch is not None else []
        watch = Watch(self._server.pid)
        waits = [self._ask() for _ in range(self._args.requests)]
        others_share = watch.others_share()
        if batch is not None:
            self._end(batch)
        ttfts_s, steps_s = zip(*waits, strict=True)
        results = {"ttft_s": ttfts_s, "step_s": steps_s, "full_s": full_s}
        return {**results, "others_share": others_share}

    def _ask(self) -> tuple[float, float]:
        """Ask at any moment of a step; return the time to the first token, and to the next ones."""
        time.sleep(self._random.uniform(0.0, _PAUSE_S))
        body = {"model": MODEL_NAME, "prompt": self._prompts.take(_PROMPT), "max_tokens": _ANSWER}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        url = f"http://127.0.0.1:{self._server.port}/v1/completions"
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        began_s, stamps = time.monotonic(), list[float]()
        with urllib.request.urlopen(request, timeout=60) as answer:
            stamps.extend(
                time.monotonic()
                for line in answer
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]
            )
        return stamps[0] - began_s, (stamps[-1] - stamps[0]) / (_ANSWER - 1)

    def _begin(self) -> str:
        """Begin a batch that lasts longer than the client, and wait until the engine is full."""
        args, requests = self._args, []
        for number in range(20 * args.requests):
            content = " ".join(map(str, self._prompts.take(_PROMPT // 2)))
            params = {"model": MODEL_NAME, "max_tokens": 4 * args.tokens}
            params["messages"] = [{"role": "user", "content": content}]
            requests.append({"custom_id": f"{number}", "params": params})
        batch: str = self._post("", {"requests": requests})["id"]
        time.sleep(5.0)
        return batch

    def _steps_s(self) -> list[float]:
        """Return the times of the steps that the batch has for itself."""
        url = f"http://127.0.0.1:{self._server.port}/api/state"
        with urllib.request.urlopen(url, timeout=60) as answer:
            steps = json.load(answer)["steps"][-10:]
        return [TimedRows(*step).step_s for step in steps]

    def _end(self, batch: str) -> None:
        result = self._post(f"/{batch}/cancel", {})
        if result["request_counts"]["processing"] < 100:
            raise SystemExit("The batch was over before the client was: give more lines.")
        time.sleep(2.0)

    def _post(self, path: str, body: object) -> Any:
        url = f"http://127.0.0.1:{self._server.port}/v1/messages/batches{path}"
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def _num_disturbed(rates: dict[str, list[Rate]]) -> int:
    return sum(run.others_share > MAX_SHARE for mine in rates.values() for run in mine)


def _pooled(runs: list[dict[str, Any]], name: str) -> list[float]:
    return [1000 * value for run in runs for value in run[name]]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def _records(
    args: argparse.Namespace, rates: dict[str, list[Rate]], waits: dict[str, list[Any]]
) -> list[Record]:
    results = []
    command = f'make bench WHAT=batches ARGS="--model {args.model}"'
    if rates[_FILE]:
        results.append(
            Record(
                row="batch-file",
                name=f"{args.lines} lines of {_PROMPT} tokens in, {args.tokens} out, from a file",
                model=args.model,
                unit="tokens/s",
                entries=[Entry("Twostroke", "", [run.tokens_per_s for run in rates[_FILE]])],
                command=command,
                disturbed_runs=_num_disturbed(rates),
                num_runs=2 * len(rates[_FILE]),
                others={"engine_tokens_per_s": [run.tokens_per_s for run in rates[_ENGINE]]},
            )
        )
    if waits[_ALONE]:
        runs = waits[_ALONE] + waits[_WITH_BATCH]
        times = {name: _pooled(mine, "ttft_s") for name, mine in waits.items()}
        results.append(
            Record(
                row="batch-client",
                name="first token of a client beside a full batch, p99 of each round",
                model=args.model,
                unit="ms",
                entries=[
                    Entry(
                        "Twostroke", "", [_p99(_pooled([r], "ttft_s")) for r in waits[_WITH_BATCH]]
                    )
                ],
                command=command,
                lower_is_better=True,
                disturbed_runs=sum(run["others_share"] > MAX_SHARE for run in runs),
                num_runs=len(runs),
                others={
                    **{f"p99 {name}": _p99(mine) for name, mine in times.items()},
                    **{f"p50 {name}": median(mine) for name, mine in times.items()},
                    "step_ms": median(_pooled(waits[_WITH_BATCH], "full_s")),
                    "next_token_ms": median(_pooled(waits[_WITH_BATCH], "step_s")),
                },
            )
        )
    return results


def _text(
    args: argparse.Namespace, rates: dict[str, list[Rate]], waits: dict[str, list[Any]]
) -> str:
    parts = []
    if rates[_FILE]:
        shares = [
            mine.tokens_per_s / bare.tokens_per_s
            for mine, bare in zip(rates[_FILE], rates[_ENGINE], strict=True)
        ]
        title = f"{args.lines} lines, {_PROMPT} tokens in, {args.tokens} out"
        rows = [(name, spread(run.tokens_per_s for run in mine)) for name, mine in rates.items()]
        parts.append(table((title, "tokens/s"), rows))
        share = spread([100 * share for share in shares], 1, "%")
        parts.append(
            f"The file has {share} of the engine's tokens; asked are {_MIN_TOKEN_SHARE:.0%}. "
            f"{_num_disturbed(rates)} of {2 * len(shares)} runs were disturbed."
        )
    if waits[_ALONE]:
        times = {name: _pooled(mine, "ttft_s") for name, mine in waits.items()}
        steps = {name: median(_pooled(mine, "step_s")) for name, mine in waits.items()}
        cells = [
            (name, *(f"{time_ms:,.1f} ms" for time_ms in (median(mine), _p99(mine), steps[name])))
            for name, mine in times.items()
        ]
        header = (f"client, {_PROMPT} tokens in", "TTFT p50", "TTFT p99", "between its tokens")
        parts.append(table(header, cells))
        step = median(_pooled(waits[_WITH_BATCH], "full_s"))
        added_steps = (_p99(times[_WITH_BATCH]) - _p99(times[_ALONE])) / step
        runs = waits[_ALONE] + waits[_WITH_BATCH]
        disturbed = sum(run["others_share"] > MAX_SHARE for run in runs)
        parts.append(
            f"Beside the batch p99 is {added_steps:.2f} of its own steps ({step:.0f} ms) later; "
            f"asked is at most 1. "
            f"{disturbed} of {len(runs)} runs were disturbed."
        )
    facts = caption(machine_facts(), args.model, f"{args.rounds} rounds")
    return "\n\n".join([*parts, facts])


if __name__ == "__main__":
    main()
