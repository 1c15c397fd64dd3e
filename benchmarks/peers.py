"""`make bench-peers`: Twostroke beside llama.cpp in one interleaved run, quality beside speed.

Same weights, same token ids, greedy, ends ignored, the same number of threads; each engine in a
process of its own that stays alive, warm, and rests while the other runs. A round is one run of
each (A B A B); the tables give medians and ranges over the rounds, and ratios of medians.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llama_env import python_of
from pipe import Worker
from quality import Quality, engine_quality, reference_logits
from quiet import MAX_SHARE
from report import Spread, caption, machine_facts, note, save, table
from texts import FreshPrompts, heldout_tokens, pieces
from twostroke.backends.compare import compare
from twostroke.core.config import ComputeOptions
from twostroke.weights import load, resolve
from workload import WORKS, Timing, Work

_HERE = Path(__file__).parent
_DEFAULT_WORKS = ("decode-1", "prefill-512", "prefill-2048", "decode-8", "decode-16", "decode-32")
_ATTEMPTS = 3  # a run that others disturbed is repeated, and the least disturbed one counts,
_PATIENCE_S = 20.0  # but no longer than this


def main() -> None:
    """Measure, then print and keep the tables."""
    given = _arguments()
    python = python_of(given.llama_env)
    loaded = load(given.model)
    tokens = heldout_tokens(loaded)
    with tempfile.TemporaryDirectory() as folder:
        sides = _start(given, python, Path(folder))
        about = {side.name: side.worker.ask("about") for side in sides}
        prompts = FreshPrompts(tokens)
        rows = [_measure(WORKS[name], sides, prompts, given.rounds) for name in given.only]
        quality = [] if given.no_quality else _quality(given, sides, tokens, Path(folder))
        for side in sides:
            side.worker.close()
    result = {
        **machine_facts(),
        "model": given.model,
        "threads": given.threads,
        "rounds": given.rounds,
        "engines": about,
        "speed": [row.as_json() for row in rows],
        "quality": [asdict(line) for line in quality],
    }
    save("peers", result, _text(result, rows, quality))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a GGUF file or a catalogue name")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-env", type=Path, help="a virtual environment with llama.cpp")
    parser.add_argument("--backend", default="auto", help="of Twostroke")
    parser.add_argument("--no-quality", action="store_true", help="measure speed only")
    parser.add_argument(
        "--only", nargs="+", choices=list(WORKS), default=_DEFAULT_WORKS, metavar="ROW",
        help=f"rows of the table: {', '.join(WORKS)}",
    )  # fmt: skip
    return parser.parse_args()


@dataclass
class Side:
    """An engine's process, and the ways in which it may run a job: the best one counts."""

    name: str
    worker: Worker
    ways: dict[str, dict[str, Any]]


@dataclass
class Row:
    """All runs of one job: tokens/s by engine and way; `disturbed` runs were not alone."""

    work: Work
    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    first_tokens: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    disturbed: int = 0
    runs: int = 0

    def best(self, engine: str) -> tuple[str, list[float]]:
        """Return an engine's best way and its runs."""
        ways = {way: rates for (name, way), rates in self.rates.items() if name == engine}
        return max(ways.items(), key=lambda item: Spread.of(item[1]).median)

    @property
    def same_first_tokens(self) -> float:
        """The share of prompts that all answered with the same first token."""
        every = list(zip(*self.first_tokens.values(), strict=True))
        return sum(len(set(tokens)) == 1 for tokens in every) / len(every)

    def as_json(self) -> dict[str, Any]:
        """Return the work and all its runs."""
        rates = {f"{name}, {way}" if way else name: r for (name, way), r in self.rates.items()}
        return {
            "work": asdict(self.work),
            "tokens_per_s": rates,
            "same_first_tokens": self.same_first_tokens,
            "disturbed_runs": self.disturbed,
        }


def _start(given: argparse.Namespace, python: Path, folder: Path) -> list[Side]:
    """Start both engines, one after the other."""
    threads = ["--threads", str(given.threads)]
    ours = [sys.executable, str(_HERE / "worker_twostroke.py"), given.model, *threads]
    theirs = [str(python), str(_HERE / "worker_llama.py"), str(resolve(given.model)), *threads]
    flash = {f"flash attention {'on' if on else 'off'}": on for on in (False, True)}
    return [
        Side(
            "Twostroke",
            Worker("Twostroke", [*ours, "--backend", given.backend], folder / "twostroke.log"),
            {"": {}},
        ),
        Side(
            "llama.cpp",
            Worker("llama.cpp", theirs, folder / "llama.log"),
            {way: {"flash_attention": on} for way, on in flash.items()},
        ),
    ]


def _measure(work: Work, sides: list[Side], prompts: FreshPrompts, rounds: int) -> Row:
    """Run one job in turn on all engines: once to warm up, then `rounds` times."""
    row = Row(work)
    for number in range(rounds + 1):
        job = [prompts.take(work.prompt_length) for _ in range(work.num_streams)]
        for side in sides:
            for way, options in side.ways.items():
                timing, share = _run(side.worker, job, work.num_tokens, options)
                if number == 0:
                    continue
                key = side.name, way
                row.runs += 1
                row.disturbed += share > MAX_SHARE
                row.rates.setdefault(key, []).append(timing.tokens_per_s(work))
                row.first_tokens.setdefault(key, []).extend(timing.first_tokens)
    shown = (f"{side.name} {Spread.of(row.best(side.name)[1]).median:,.0f}" for side in sides)
    note(f"{work.name}: {', '.join(shown)} tokens/s")
    return row


def _run(
    worker: Worker, job: list[list[int]], num_tokens: int, options: dict[str, Any]
) -> tuple[Timing, float]:
    """Return a job's timing and how much others disturbed it, from the calmest attempt."""
    attempts: list[tuple[float, Timing]] = []
    began = time.monotonic()
    while len(attempts) < _ATTEMPTS and time.monotonic() - began < _PATIENCE_S:
        prompts = [[*prompt[len(attempts) :], *prompt[: len(attempts)]] for prompt in job]
        answer = worker.ask("run", prompts=prompts, num_tokens=num_tokens, **options)
        attempts.append((worker.others_share, Timing(**answer)))
        if worker.others_share <= MAX_SHARE:
            break
    share, timing = min(attempts, key=lambda attempt: attempt[0])
    return timing, share


def _quality(
    given: argparse.Namespace, sides: list[Side], tokens: list[int], folder: Path
) -> list[Quality]:
    """Compare every engine's logits on the held-out text with the reference's."""
    import numpy as np

    note("Comparing logits on the held-out text")
    parts = pieces(tokens, 512)
    loaded = load(given.model)
    right = reference_logits(loaded, parts)
    compute = ComputeOptions(given.backend, given.threads)
    lines = engine_quality(loaded, right, parts, compute)
    llama = next(side for side in sides if side.name == "llama.cpp")
    for way, options in llama.ways.items():
        paths = [folder / f"{i}.npy" for i in range(len(parts))]
        for part, path in zip(parts, paths, strict=True):
            llama.worker.ask("score", tokens=part, path=str(path), **options)
        others = (np.load(path, allow_pickle=False) for path in paths)
        comparison = compare(list(zip(right, others, parts, strict=True)))
        lines.append(Quality(f"llama.cpp, {way}", asdict(comparison)))
    return lines


def _text(result: dict[str, Any], rows: list[Row], quality: list[Quality]) -> str:
    """Return the report."""
    lines = []
    for row in rows:
        ours, (way, theirs) = row.best("Twostroke")[1], row.best("llama.cpp")
        ratio = Spread.of(ours).median / Spread.of(theirs).median
        disturbed = f"{row.disturbed} of {row.runs}"
        their_text = f"{Spread.of(theirs).text()}, {way.rpartition(' ')[2]}"
        lines.append((row.work.name, Spread.of(ours).text(), their_text, f"{ratio:.2f}", disturbed))
    header = ("tokens/s: median (lowest to highest)", "Twostroke", "llama.cpp, flash attention")
    parts = ["## Beside llama.cpp", "", table([*header, "ratio", "disturbed runs"], lines), ""]
    if quality:
        parts += [table(Quality.header(), [line.cells() for line in quality]), ""]
    engines = result["engines"]
    about = (
        f"Twostroke on {engines['Twostroke']['detail']}; llama-cpp-python"
        f" {engines['llama.cpp']['version']} ({engines['llama.cpp']['system_info']})"
    )
    facts = caption(result, result["model"], f"{result['rounds']} rounds")
    return "\n".join([*parts, about, "", facts])


if __name__ == "__main__":
    main()
