"""Measure the time that KV pages on disk save after a restart, and the cost of a slow disk.

Run it with `make bench WHAT=kv-offload`.

An engine in its own process prefills a long prompt and answers several questions about it. An
engine with a page cache does the same and ends. Then other engines, each in a new process, get
one question each: their times to the first token are compared, and all tokens must equal those
of the first engine.

Then a disk with 20 MB/s: prompts of several lengths with cached pages are sent in turn to an
engine with the slow disk and to one without. The disk is slow from the start, or becomes slow
just before each prompt, after an engine has measured it as fast.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.common.report import caption, machine_facts, note, positive, save, table
from twostroke.core.distributed_options import OffloadOptions
from twostroke.core.options import EngineOptions, SpeculationOptions
from twostroke.core.request import Hints
from twostroke.core.sampling import SamplingParams
from twostroke.engine.engine import build
from twostroke.engine.kv_offload import build as tiers
from twostroke.engine.kv_offload.disk import DiskTier

if TYPE_CHECKING:
    from twostroke.engine.engine import Engine

_OUTPUT = 16
_QUESTION = 24  # tokens after the system prompt
_BYTES_S = 20e6
_LEAST_FACTOR = 20.0
_MOST_LOSS = 0.05
_LENGTHS = (256, 1024)
_REMINDER = 320  # tokens that are read from the disk while it is fast
_OTHER = 50_000  # added to the seeds of these


class SlowDisk(DiskTier):
    """A disk that gives `_BYTES_S` bytes a second while `is_slow`."""

    is_slow = True

    def fetch(self, name: bytes, page: memoryview[Any]) -> bool:
        """Read a page, and take as long as the slow disk would."""
        began_s = time.perf_counter()
        was_there = super().fetch(name, page)
        if self.is_slow:
            time.sleep(max(0.0, len(page) / _BYTES_S - (time.perf_counter() - began_s)))
        return was_there

    def probe(self) -> float:
        """Return the seconds for a page."""
        return self._page_bytes / _BYTES_S if self.is_slow else super().probe()


def _options(folder: str | None) -> EngineOptions:
    return EngineOptions(speculation=SpeculationOptions("off"), offload=OffloadOptions(folder))


def _prompt(engine: Engine, seed: int, count: int) -> list[int]:
    """Return tokens that no other seed has, as a text of the model's own."""
    rng = random.Random(seed)
    return [rng.randrange(1000, engine.card.tokenizer.vocab_size - 100) for _ in range(count)]


def _answer_prompt(engine: Engine, prompt: list[int], hints: Hints = Hints()) -> dict[str, Any]:  # noqa: B008
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT, ignore_eos=True)
    output = engine.client.generate(prompt, params, hints=hints).wait()[0]
    assert output.timings is not None
    assert output.usage is not None
    return {
        "ttft_s": output.timings.ttft_s,
        "tokens": list(output.token_ids),
        "cached": output.usage.cached_tokens,
    }


def _worker(args: argparse.Namespace) -> None:
    """Ask one engine, in this process, and print what it said."""
    with build(args.model, _options(args.folder)) as engine:
        _answer_prompt(engine, _prompt(engine, 99, 300))  # the first steps find untouched memory
        max_tokens = engine.context_length - _OUTPUT - _QUESTION
        system = _prompt(engine, 1, min(args.tokens, max_tokens))
        results = []
        for question in args.questions:
            hints = Hints(keep_s=3600.0) if args.folder else Hints()
            prompt = system + _prompt(engine, 1000 + question, _QUESTION)
            results.append(_answer_prompt(engine, prompt, hints))
        if args.folder:
            engine.client.loop.pages.flush(60.0)
            (totals,) = engine.client.loop.snapshot().tiers
            print(json.dumps({"found": results, "tokens": len(system), "read_s": totals.read_s}))
        else:
            print(json.dumps({"found": results, "tokens": len(system)}))


def _in_a_process(args: argparse.Namespace, folder: str | None, *questions: int) -> Any:
    command = [
        sys.executable,
        "-m",
        "benchmarks.serving.kv_offload",
        "--worker",
        "--model",
        args.model,
    ]
    command += ["--tokens", str(args.tokens), "--questions", *map(str, questions)]
    command += ["--folder", folder] if folder else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _restart(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the first tokens' times: computed, and after each of some restarts."""
    questions = range(1, args.rounds + 1)
    note("An engine without a page cache reads the prompt")
    without = _in_a_process(args, None, *questions)
    note("An engine with a page cache reads it")
    first = _in_a_process(args, folder, 0)
    note(f"First token after {first['found'][0]['ttft_s']:.2f} s")
    warm, same = [], True
    for number in questions:
        note(f"Restart {number} of {args.rounds}")
        repeated = _in_a_process(args, folder, number)
        (warm_answer,) = repeated["found"]
        warm.append(warm_answer["ttft_s"])
        same &= warm_answer["tokens"] == without["found"][number - 1]["tokens"]
        note(f"First token after {warm_answer['ttft_s']:.3f} s")
    cold = [without["found"][0]["ttft_s"], first["found"][0]["ttft_s"]]
    return {
        "prompt_tokens": without["tokens"],
        "cached_tokens": warm_answer["cached"],
        "cold_s": cold,
        "warm_s": warm,
        "read_s": repeated["read_s"],
        "factor": median(cold) / median(warm),
        "same_tokens": same,
    }


def _slow(args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Return the first tokens' times with a slow disk and without any, by length and kind."""
    seeds = [(length, length + number) for length in _LENGTHS for number in range(args.pairs)]
    note("An engine stores the prompts")
    with build(args.model, _options(folder)) as engine:
        for length, seed in seeds:
            _answer_prompt(engine, _prompt(engine, seed, length), Hints(keep_s=3600.0))
            _answer_prompt(engine, _prompt(engine, _OTHER + seed, _REMINDER), Hints(keep_s=3600.0))
        engine.client.loop.pages.flush(60.0)
    rows = []
    vars(tiers)["DiskTier"] = SlowDisk
    try:
        for is_known in (True, False):
            rows += _pairs(args, folder, is_known=is_known)
    finally:
        vars(tiers)["DiskTier"] = DiskTier
    return rows


def _pairs(args: argparse.Namespace, folder: str, *, is_known: bool) -> list[dict[str, Any]]:
    """Return a row for each length, of a disk that is slow from the start or becomes slow."""
    rows = []
    SlowDisk.is_slow = is_known
    with build(args.model, _options(folder)) as slow, build(args.model, _options(None)) as plain:
        for engine in (slow, plain):
            for number in range(3):  # what steps take is known from then on
                _answer_prompt(engine, _prompt(engine, 7700 + number, 600))
        for length in _LENGTHS:
            note(f"A disk that {'is' if is_known else 'becomes'} slow: {length} tokens")
            times: dict[str, list[float]] = {"slow": [], "plain": []}
            for number in range(args.pairs):
                prompt = _prompt(plain, length + number, length)
                order = [("slow", slow), ("plain", plain)]
                for name, engine in order if number % 2 else order[::-1]:
                    if name == "slow" and not is_known:
                        SlowDisk.is_slow = False
                        _answer_prompt(slow, _prompt(slow, _OTHER + length + number, _REMINDER))
                        SlowDisk.is_slow = True
                    times[name].append(_answer_prompt(engine, prompt)["ttft_s"])
            worse = median(times["slow"]) / median(times["plain"]) - 1
            rows.append({"is_known": is_known, "length": length, **times, "worse": worse})
    return rows


def main() -> None:
    """Measure, then print and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=positive, default=8000, help="of the system prompt")
    parser.add_argument("--rounds", type=positive, default=3, help="of restarts")
    parser.add_argument("--pairs", type=positive, default=5, help="of prompts of each length")
    parser.add_argument("--only", choices=("restart", "slow"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--questions", type=int, nargs="*", default=(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _worker(args)
        return
    result: dict[str, Any] = dict(machine_facts())
    text: list[str] = []
    with tempfile.TemporaryDirectory() as folder_name:
        if args.only != "slow":
            outcome = result["restart"] = _restart(args, folder_name)
            cold_s, warm_s = median(outcome["cold_s"]), median(outcome["warm_s"])
            rows = [
                ("prompt, tokens", f"{outcome['prompt_tokens'] + _QUESTION:,}"),
                ("of these found on disk", f"{outcome['cached_tokens']:,}"),
                ("first token, without a page cache", f"{cold_s:.2f} s"),
                ("first token after a restart", f"{warm_s:.3f} s"),
                ("of this, pages are read for", f"{outcome['read_s']:.3f} s"),
                ("times shorter", f"{outcome['factor']:.1f}"),
                ("same tokens", "yes" if outcome["same_tokens"] else "NO"),
            ]
            header = (f"restart; asked at least {_LEAST_FACTOR:g} times shorter", "")
            text += ["## Pages on disk after a restart", "", table(header, rows), ""]
        if args.only != "restart":
            slow = result["slow"] = _slow(args, folder_name)
            lines = [
                (
                    "is slow" if row["is_known"] else "becomes slow",
                    f"{row['length']:,}",
                    f"{1e3 * median(row['plain']):.0f} ms",
                    f"{1e3 * median(row['slow']):.0f} ms",
                    f"{100 * row['worse']:+.1f}%",
                )
                for row in slow
            ]
            columns = ("the disk", "prompt", "without", "with", "difference")
            goal_text = (
                f"A disk of {_BYTES_S / 1e6:g} MB/s; asked: at most {100 * _MOST_LOSS:g}% worse"
            )
            text += ["## A slow disk", "", goal_text, "", table(columns, lines), ""]
    save("tiers", result, "\n".join([*text, caption(result)]))


if __name__ == "__main__":
    main()
