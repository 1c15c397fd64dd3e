"""Measure the speed-up of speculation, on different kinds of text and under load.

Run it with `make bench WHAT=speculation`.

One engine answers the same prompts in turn without and with drafts; tokens are compared, so that
only the time differs. The given number of streams runs all the time: when one ends, the next
prompt begins. Each run has its own tenant; otherwise the second run would find the first run's
answers in the cache. Because machines are shared, a second ratio replaces the time of each step
by the usual time of steps with as many rows. With predictions that are sometimes wrong, the
share of right drafts is chosen, and the measured speed-up is compared with the speed-up of the
usual formula.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from benchmarks.common.quiet import MAX_SHARE, Watch
from benchmarks.common.report import note, positive
from benchmarks.engine.speculation_results import (
    Line,
    PredictionResult,
    SpeculationResult,
    describe_smallest_gain,
    load_result,
)
from benchmarks.engine.tasks import TASKS, Task
from twostroke.core.options import ComputeOptions, EngineOptions, SpeculationOptions
from twostroke.core.request import Hints
from twostroke.engine.client import Caller
from twostroke.engine.engine import build

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.engine import Engine
    from twostroke.engine.output import Output
    from twostroke.engine.speculation import TimedStep

_STREAMS = (1, 4, 16, 32)
_ANSWERS = 2  # of a stream, one after the other
_OFTEN = 8  # times that a number of rows must have been seen
_RIGHT = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)  # of predicted tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One job: its answers, and the steps without prompts in which all streams ran."""

    answers: list[tuple[int, ...]]
    accepted: int
    rejected: int
    others_share: float
    steps: list[TimedStep]

    @property
    def tokens_per_s(self) -> float:
        """The speed of these steps."""
        seconds = sum(step.step_s + step.asking_s for step in self.steps)
        return sum(step.num_tokens for step in self.steps) / seconds

    @property
    def is_disturbed(self) -> bool:
        """Whether others had much of the processor."""
        return self.others_share > MAX_SHARE


@dataclass(slots=True)
class Pair:
    """The same job without and with speculation, round by round."""

    task: str
    streams: int
    plain: list[Run]
    speculative: list[Run]

    @property
    def ratios(self) -> list[float]:
        """The speed-up of each round by speculation."""
        pairs = zip(self.plain, self.speculative, strict=True)
        return [speculative.tokens_per_s / plain.tokens_per_s for plain, speculative in pairs]

    @property
    def accepted(self) -> float:
        """The share of drafts that were accepted."""
        right = sum(run.accepted for run in self.speculative)
        tried = right + sum(run.rejected for run in self.speculative)
        return right / tried if tried else 0.0

    @property
    def per_pass(self) -> float:
        """How many tokens of one stream a step brought."""
        num_tokens = sum(len(answer) for run in self.speculative for answer in run.answers)
        return num_tokens / (num_tokens - sum(run.accepted for run in self.speculative))

    @property
    def runs(self) -> list[Run]:
        """All of both kinds."""
        return [*self.plain, *self.speculative]

    def line(self, usual: Usual) -> Line:
        """Return the stored result of the pair; `usual` is how long steps take."""
        return Line(
            self.task,
            self.streams,
            self.ratios,
            usual.token_s(self.plain) / usual.token_s(self.speculative),
            [run.tokens_per_s for run in self.plain],
            [run.tokens_per_s for run in self.speculative],
            self.per_pass,
            self.accepted,
            sum(run.is_disturbed for run in self.runs),
        )


class Usual:
    """How long steps take that nobody disturbs, by their rows.

    A step's time is taken for the product of what its rows take and of how slow the machine was in
    its run. Both are fitted to the medians of each run's steps of each number of rows (least
    squares of their logarithms), so neither moments nor minutes in which others slowed a machine
    down show in times that are made of these. Of rare numbers of rows each step has its own time,
    as it would be had its run not been slow.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        """Learn from all runs of a benchmark."""
        cells: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        often = Counter[int]()
        for number, run in enumerate(runs):
            for step in run.steps:
                cells[step.num_rows, number].append(step.step_s)
                often[step.num_rows] += 1
        min_count = min(_OFTEN, max(often.values()))
        row_indices = {rows: i for i, rows in enumerate(r for r in often if often[r] >= min_count)}
        frequent_cells = [
            (row_indices[rows], number, t)
            for (rows, number), t in cells.items()
            if rows in row_indices
        ]
        weights = np.sqrt([len(times) for *_, times in frequent_cells])
        sums = np.zeros((len(frequent_cells), len(row_indices) + len(runs)))
        for equation, (row_index, number, _) in enumerate(frequent_cells):
            sums[equation, [row_index, len(row_indices) + number]] = weights[equation]
        medians = np.log([median(times) for *_, times in frequent_cells])
        fitted = np.exp(np.linalg.lstsq(sums, medians * weights)[0])
        self._times = {rows: float(fitted[row_index]) for rows, row_index in row_indices.items()}
        self._slow = {id(run): float(fitted[len(row_indices) + n]) for n, run in enumerate(runs)}

    def token_s(self, runs: Iterable[Run]) -> float:
        """Return the seconds of a token, had each step taken its usual time.

        Looking for drafts takes the share of a step that it was seen to take.
        """
        seconds, num_tokens = 0.0, 0
        for run in runs:
            for step in run.steps:
                usual_s = self._times.get(step.num_rows, step.step_s / self._slow[id(run)])
                seconds += usual_s * (1 + step.asking_s / step.step_s)
                num_tokens += step.num_tokens
        return seconds / num_tokens


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", help="a smaller model that proposes drafts")
    parser.add_argument("--heads", help="a folder of heads trained for the model")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--drafts", type=int, help="so many always, instead of as many as pay")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--streams", nargs="*", type=int, default=list(_STREAMS))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--activation-bits",
        type=lambda word: word if word == "auto" else int(word),
        default=ComputeOptions().activation_bits,
    )
    parser.add_argument("--temperature", type=float, help="of all tasks, instead of their own")
    parser.add_argument("--no-acceptance", action="store_true")
    parser.add_argument("--accept-quality", action="store_true", help="for small trained models")
    args = parser.parse_args()
    name = _name(args)
    load_result(name)
    speculation = SpeculationOptions(draft=args.draft, heads=args.heads, count=args.drafts)
    compute = ComputeOptions(num_threads=args.threads, activation_bits=args.activation_bits)
    options = EngineOptions(compute, speculation=speculation, accept_quality=args.accept_quality)
    with build(args.model, options) as engine:
        pairs = [
            measure(engine, TASKS[task], streams, args)
            for task in args.tasks
            for streams in args.streams
        ]
        predictions = [] if args.no_acceptance else measure_acceptance(engine, args)
    usual = Usual([run for pair in pairs for run in pair.runs])
    result = SpeculationResult(name, [pair.line(usual) for pair in pairs], predictions)
    result.save()
    print("\n".join([*result.parts(), describe_smallest_gain(result.lines)]))


def measure(engine: Engine, task: Task, streams: int, args: argparse.Namespace) -> Pair:
    """Answer a task's prompts in turn without and with speculation."""
    pair = Pair(task.name, streams, [], [])
    for number in range(args.rounds + 1):
        rng = random.Random(f"{task.name} {streams} {number}")
        prompts = [task.prompt(engine.card, rng) for _ in range(_ANSWERS * streams)]
        params = task.params(args.tokens)
        if args.temperature is not None:
            params = replace(params, temperature=args.temperature)
        sides = [("off", pair.plain), (args.speculate, pair.speculative)]
        results = {}
        for method, runs in sides if number % 2 else reversed(sides):
            caller = Caller(tenant=f"{task.name} {streams} {number} {method}")
            run = results[method] = answer(engine, prompts, streams, params, caller, Hints(method))
            if number:  # the first round warms up, and lets the engine learn its machine
                runs.append(run)
        if results["off"].answers != results[args.speculate].answers:
            raise SystemExit(f"{task.name}: speculation changed an answer")
    plain, speculative = (
        median(run.tokens_per_s for run in runs) for runs in (pair.plain, pair.speculative)
    )
    note(
        f"{task.name}, {streams} streams: {plain:,.0f} to {speculative:,.0f} tokens/s, "
        f"{median(pair.ratios):.2f} x, {pair.accepted:.0%} of drafts accepted"
    )
    return pair


def answer(
    engine: Engine,
    prompts: Sequence[list[int]],
    num_streams: int,
    params: SamplingParams,
    caller: Caller,
    hints: Hints,
) -> Run:
    """Answer all prompts, `num_streams` at a time."""
    watch, recent = Watch(), engine.client.loop.speculator.stats.recent
    recent.clear()
    outputs = asyncio.run(_answer(engine, prompts, num_streams, params, caller, hints))
    steps = [
        step
        for step in recent
        if step.num_rows == step.num_plain + step.num_drafts and step.num_plain == num_streams
    ]
    if not steps or len(recent) == recent.maxlen:
        raise SystemExit(
            f"{len(recent)} steps, and all of {num_streams} streams ran in {len(steps)}: "
            "take more --tokens or fewer --streams if there are none, fewer --tokens if there are "
            f"{recent.maxlen} steps, which is as many as are kept."
        )
    usages = [
        output.usage
        for outputs_of_request in outputs
        for output in outputs_of_request
        if output.usage is not None
    ]
    return Run(
        [
            tuple(token for output in outputs_of_request for token in output.token_ids)
            for outputs_of_request in outputs
        ],
        sum(usage.accepted_tokens for usage in usages),
        sum(usage.rejected_tokens for usage in usages),
        watch.others_share(),
        steps,
    )


async def _answer(
    engine: Engine,
    prompts: Sequence[list[int]],
    num_streams: int,
    params: SamplingParams,
    caller: Caller,
    hints: Hints,
) -> list[list[Output]]:
    outputs: list[list[Output]] = [[] for _ in prompts]
    waiting = iter(range(len(prompts)))

    async def stream() -> None:
        for index in waiting:
            generation = engine.client.generate_many_async([prompts[index]], params, caller, hints)
            outputs[index] = [output async for output in generation]

    await asyncio.gather(*[stream() for _ in range(num_streams)])
    return outputs


def measure_acceptance(engine: Engine, args: argparse.Namespace) -> list[PredictionResult]:
    """Answer with predictions of which a chosen share is right; one stream."""
    rng = random.Random(5)
    task = TASKS["random"]  # which does not repeat itself
    prompts = [task.prompt(engine.card, rng) for _ in range(args.rounds)]
    params = task.params(args.tokens)
    results = []
    for share in _RIGHT:
        ratios, right, tried, passes = [], 0, 0, 0
        for number, prompt in enumerate(prompts):
            caller = Caller(tenant=f"plain {share} {number}")
            plain = answer(engine, [prompt], 1, params, caller, Hints("off"))
            expected = tuple(
                token if rng.random() < share else rng.randrange(token + 1)
                for token in plain.answers[0]
            )
            before = engine.client.loop.snapshot().speculation.passes
            caller = Caller(tenant=f"guessed {share} {number}")
            speculative = answer(engine, [prompt], 1, params, caller, Hints("ngram", expected))
            if speculative.answers != plain.answers:
                raise SystemExit("speculation changed an answer")
            passes += engine.client.loop.snapshot().speculation.passes - before
            right, tried = (
                right + speculative.accepted,
                tried + speculative.accepted + speculative.rejected,
            )
            ratios.append(speculative.tokens_per_s / plain.tokens_per_s)
        per_pass = tried / passes if passes else 0.0
        results.append(PredictionResult(share, ratios, right / tried if tried else 0.0, per_pass))
        note(f"{share:.0%} of the prediction right: {median(ratios):.2f} x")
    return results


def _name(args: argparse.Namespace) -> str:
    """Return the name of the measured proposer of drafts."""
    draft = args.draft and Path(args.draft).name
    helpers = [name for name in (draft, args.heads and "heads") if name]
    name = ", ".join([args.model, args.speculate, *helpers])
    if args.activation_bits != ComputeOptions().activation_bits:
        name += f", {args.activation_bits}-bit activations"
    if args.temperature is not None:
        name += f", temperature {args.temperature:g}"
    return f"{name}, {args.drafts} drafts" if args.drafts else name


if __name__ == "__main__":
    main()
