"""Run one job in turn on several engines (A B A B), with fresh prompts in each round."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.common.quiet import MAX_SHARE
from benchmarks.common.records import OURS, Entry, is_ours
from benchmarks.common.report import note
from benchmarks.common.workload import Timing, Work

if TYPE_CHECKING:
    from benchmarks.common.texts import FreshPrompts
    from benchmarks.peers.sides import Side

_ATTEMPTS = 3  # a run that others disturbed is repeated, and the least disturbed one counts,
_PATIENCE_S = 20.0  # but no longer than this
_TRIALS = 2  # rounds after which a way that
_MIN_RATE_RATIO = 0.85  # of its engine's best rate or less is left out


@dataclass
class Row:
    """All runs of one job: tokens/s by engine and way; `disturbed` runs were not alone."""

    work: Work
    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    first_tokens: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    timings: dict[str, list[Timing]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    disturbed: int = 0
    runs: int = 0

    def add(self, side: Side, way: str, timing: Timing, others_share: float) -> None:
        """Add a run."""
        key = side.name, way
        self.runs += 1
        self.disturbed += others_share > MAX_SHARE
        self.rates.setdefault(key, []).append(timing.tokens_per_s(self.work))
        self.first_tokens.setdefault(key, []).extend(timing.first_tokens)
        self.timings.setdefault(side.name, []).append(timing)

    def best(self, engine: str) -> tuple[str, list[float]]:
        """Return an engine's best way and its runs; none if it failed."""
        ways = {way: rates for (name, way), rates in self.rates.items() if name == engine}
        best = max(ways.items(), key=lambda item: median(item[1]), default=("", []))
        return best[0], best[1]

    def is_behind(self, engine: str, way: str) -> bool:
        """Whether another way of the engine has proved to be clearly faster."""
        rates = self.rates.get((engine, way), [])
        best = self.best(engine)[1]
        return len(rates) >= _TRIALS and (median(rates) <= _MIN_RATE_RATIO * median(best))

    def entries(self) -> list[Entry]:
        """Return the runs as a record keeps them."""
        return [Entry(name, way, runs) for (name, way), runs in self.rates.items()]

    def share(self, counted_field: str, limit: float | None, engine: str = OURS) -> float | None:
        """Return the median share of a limit that an engine of ours reached in `bytes`, `flops`."""
        timings = self.timings.get(engine)
        if not limit or not timings:
            return None
        seconds = "prefill_s" if self.work.is_prefill else "decode_s"
        rates = (getattr(timing, counted_field) / getattr(timing, seconds) for timing in timings)
        return float(median(rates)) / limit

    @property
    def same_first_tokens(self) -> float:
        """The share of prompts that all answered with the same first token, ours by default."""
        known_tokens = [
            tokens
            for (engine, _), tokens in self.first_tokens.items()
            if tokens and (engine == OURS or not is_ours(engine))
        ]
        longest = max(map(len, known_tokens), default=0)
        compared_tokens = [
            tokens for tokens in known_tokens if len(tokens) == longest
        ]  # no way that was left out
        # An engine that keeps one context for all streams is asked about the first stream alone.
        step = self.work.num_streams if self.work.kept_length else 1
        every = list(zip(*(tokens[::step] for tokens in compared_tokens), strict=True))
        return sum(len(set(tokens)) == 1 for tokens in every) / len(every) if every else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the work and all its runs."""
        rates = {f"{name}, {way}" if way else name: r for (name, way), r in self.rates.items()}
        return {
            "work": msgspec.to_builtins(self.work),
            "tokens_per_s": rates,
            "same_first_tokens": self.same_first_tokens,
            "failures": self.failures,
            "disturbed_runs": self.disturbed,
        }


def measure(work: Work, sides: list[Side], prompts: FreshPrompts, rounds: int) -> Row:
    """Run one job in turn on all engines: once to warm up, then `rounds` times."""
    row = Row(work)
    for number in range(rounds + 1):
        job = prompts.job(work)
        for side in sides:
            for way, options in side.ways.items():
                reason = side.failure or _reason(side, work)
                if reason:
                    row.failures[side.name] = reason
                elif row.is_behind(side.name, way):
                    continue
                elif (ran := _run(side, work, job, options)) and number:
                    row.add(side, way, *ran)
    for side in sides:
        if side.failure:
            row.failures[side.name] = side.failure
        else:
            side.call("forget")
    medians = ((name, row.best(name)[1]) for name in dict.fromkeys(name for name, _ in row.rates))
    rate_texts = (f"{name} {median(rates):,.0f}" for name, rates in medians)
    note(f"{work.name}: {', '.join(rate_texts)} tokens/s")
    return row


def _reason(side: Side, work: Work) -> str:
    return "keeps no context between rounds" if work.kept_length and not side.keeps else ""


def _run(
    side: Side, work: Work, job: list[list[int]], options: dict[str, Any]
) -> tuple[Timing, float] | None:
    """Return a job's timing and how much others disturbed it, from the calmest attempt."""
    attempts: list[tuple[float, Timing]] = []
    start_s, kept_length = time.monotonic(), work.kept_length
    while len(attempts) < _ATTEMPTS and time.monotonic() - start_s < _PATIENCE_S:
        turn = kept_length + len(attempts)  # another attempt must not find its own prompts cached
        prompts = [
            [*prompt[:kept_length], *prompt[turn:], *prompt[kept_length:turn]] for prompt in job
        ]
        answer = side.call(
            "run", prompts=prompts, num_tokens=work.num_tokens, num_kept=kept_length, **options
        )  # fmt: skip
        if answer is None:
            return None
        attempts.append((side.worker.others_share, Timing(**answer)))
        if side.worker.others_share <= MAX_SHARE:
            break
    share, timing = min(attempts, key=lambda attempt: attempt[0])
    return timing, share
