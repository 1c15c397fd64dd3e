"""`make bench-speculation`: what guessing ahead brings, on kinds of text and under load.

One engine answers the same prompts in turn without and with guesses; answers are compared token
by token, so the time is all that differs. Each run is a tenant of its own, or the second one would
know the answers from the first. With predictions that are wrong now and then the share of right
guesses is chosen, and the measured speed-up stands beside the one that the usual formula predicts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from curves import Curve, curves
from quiet import MAX_SHARE, Watch
from report import RESULTS, Spread, caption, machine_facts, note, save, table
from tasks import TASKS, Task
from twostroke.core.config import ComputeOptions, EngineOptions, SpeculationOptions
from twostroke.core.request import Hints
from twostroke.engine.build import build
from twostroke.engine.client import Caller

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.build import Engine

_STREAMS = (1, 4, 16, 32)
_LEAST = 0.98  # of the speed without guesses that `auto` may never be below
_RIGHT = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)  # of predicted tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One job: its answers, and its speed from the last stream's first token to the end."""

    answers: list[tuple[int, ...]]
    tokens_per_s: float
    accepted: int
    rejected: int
    others_share: float

    @property
    def is_disturbed(self) -> bool:
        """Whether others had much of the processor."""
        return self.others_share > MAX_SHARE


@dataclass(slots=True)
class Pair:
    """The same job without and with guesses, round by round."""

    task: str
    streams: int
    plain: list[Run]
    guessed: list[Run]

    @property
    def ratios(self) -> Spread:
        """How many times faster guesses make it, in the rounds that nobody disturbed, if any."""
        pairs = list(zip(self.plain, self.guessed, strict=True))
        calm = [pair for pair in pairs if not any(run.is_disturbed for run in pair)]
        return Spread.of(
            guessed.tokens_per_s / plain.tokens_per_s for plain, guessed in calm or pairs
        )

    @property
    def num_calm(self) -> int:
        """In how many rounds nobody disturbed either run."""
        pairs = zip(self.plain, self.guessed, strict=True)
        return sum(not any(run.is_disturbed for run in pair) for pair in pairs)

    @property
    def rates(self) -> tuple[Spread, Spread]:
        """Tokens a second without and with guesses."""
        both = (self.plain, self.guessed)
        plain, guessed = (Spread.of(run.tokens_per_s for run in runs) for runs in both)
        return plain, guessed

    @property
    def accepted(self) -> float:
        """The share of guesses that were right."""
        right = sum(run.accepted for run in self.guessed)
        tried = right + sum(run.rejected for run in self.guessed)
        return right / tried if tried else 0.0

    @property
    def per_pass(self) -> float:
        """How many tokens of one stream a step brought."""
        num_tokens = sum(len(answer) for run in self.guessed for answer in run.answers)
        return num_tokens / (num_tokens - sum(run.accepted for run in self.guessed))

    @property
    def disturbed(self) -> int:
        """How many runs others disturbed."""
        return sum(run.is_disturbed for run in (*self.plain, *self.guessed))


@dataclass(frozen=True, slots=True)
class Chosen:
    """Answers with a prediction of which a chosen share of the tokens is right."""

    share: float
    ratios: Spread
    accepted: float
    per_pass: float

    @property
    def predicted(self) -> float:
        """The formula's speed-up: tokens a step, if `share` of the guesses are right."""
        if self.share == 1:
            return 1 + self.per_pass
        return float((1 - self.share ** (self.per_pass + 1)) / (1 - self.share))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", help="a smaller model with the same vocabulary")
    parser.add_argument("--heads", help="a folder of heads trained for the model")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--drafts", type=int, help="so many always, instead of as many as pay")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--streams", nargs="*", type=int, default=list(_STREAMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--no-acceptance", action="store_true")
    parser.add_argument(
        "--as-it-is", action="store_true", help="do no round again that others disturbed"
    )
    given = parser.parse_args()
    guessing = SpeculationOptions(draft=given.draft, heads=given.heads, count=given.drafts)
    options = EngineOptions(ComputeOptions(num_threads=given.threads), speculation=guessing)
    with build(given.model, options) as engine:
        pairs = [
            measure(engine, TASKS[name], streams, given)
            for name in given.tasks
            for streams in given.streams
        ]
        chosen = [] if given.no_acceptance else measure_acceptance(engine, given)
    report(given, pairs, chosen)


def measure(engine: Engine, task: Task, streams: int, given: argparse.Namespace) -> Pair:
    """Answer a task's prompts in turn without and with guesses.

    Rounds that others disturbed are done again, up to as many as were asked for.
    """
    pair = Pair(task.name, streams, [], [])
    for number in range(2 * given.rounds + 1):
        if pair.num_calm == given.rounds or (number > given.rounds and given.as_it_is):
            break
        rng = random.Random(f"{task.name} {streams} {number}")
        prompts = [task.prompt(engine.card, rng) for _ in range(streams)]
        params = task.params(given.tokens)
        sides = [("off", pair.plain), (given.speculate, pair.guessed)]
        found = {}
        for method, runs in sides if number % 2 else reversed(sides):
            tenant = f"{task.name} {streams} {number} {method}"
            run = found[method] = answer(engine, prompts, params, tenant, Hints(method))
            if number:  # the first round warms up, and lets the engine learn its machine
                runs.append(run)
        if found["off"].answers != found[given.speculate].answers:
            raise SystemExit(f"{task.name}: guesses changed an answer")
    plain, guessed = pair.rates
    note(
        f"{task.name}, {streams} streams: {plain.median:,.0f} to {guessed.median:,.0f} tokens/s, "
        f"{pair.ratios.median:.2f} x, {pair.accepted:.0%} of guesses right"
    )
    return pair


def answer(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    tenant: str,
    hints: Hints,
) -> Run:
    """Answer all prompts together."""
    watch = Watch()
    answers, tokens_per_s, usages = asyncio.run(_answer(engine, prompts, params, tenant, hints))
    return Run(
        answers,
        tokens_per_s,
        sum(usage.accepted_tokens for usage in usages),
        sum(usage.rejected_tokens for usage in usages),
        watch.others_share(),
    )


async def _answer(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    tenant: str,
    hints: Hints,
) -> tuple[list[tuple[int, ...]], float, list[Any]]:
    generation = engine.client.generate_many_async(prompts, params, Caller(tenant=tenant), hints)
    tokens: list[list[int]] = [[] for _ in prompts]
    usages = []
    began, num_before = 0.0, 0
    async for output in generation:
        tokens[output.index] += output.token_ids
        if not began and all(tokens):
            began, num_before = time.monotonic(), sum(map(len, tokens))
        if output.usage is not None:
            usages.append(output.usage)
    seconds = time.monotonic() - began
    num_tokens = sum(map(len, tokens)) - num_before
    return [tuple(one) for one in tokens], num_tokens / seconds, usages


def measure_acceptance(engine: Engine, given: argparse.Namespace) -> list[Chosen]:
    """Answer with predictions of which a chosen share is right; one stream."""
    rng = random.Random(5)
    prompts = [TASKS["prose"].prompt(engine.card, rng) for _ in range(given.rounds)]
    params = TASKS["prose"].params(given.tokens)
    found = []
    for share in _RIGHT:
        ratios, right, tried, passes = [], 0, 0, 0
        for number, prompt in enumerate(prompts):
            plain = answer(engine, [prompt], params, f"plain {share} {number}", Hints("off"))
            expected = tuple(
                token if rng.random() < share else rng.randrange(token + 1)
                for token in plain.answers[0]
            )
            before = engine.client.loop.speculation.passes
            hints = Hints("ngram", expected)
            guessed = answer(engine, [prompt], params, f"guessed {share} {number}", hints)
            if guessed.answers != plain.answers:
                raise SystemExit("guesses changed an answer")
            passes += engine.client.loop.speculation.passes - before
            right, tried = right + guessed.accepted, tried + guessed.accepted + guessed.rejected
            ratios.append(guessed.tokens_per_s / plain.tokens_per_s)
        per_pass = tried / passes if passes else 0.0
        found.append(Chosen(share, Spread.of(ratios), right / tried if tried else 0.0, per_pass))
        note(f"{share:.0%} of the prediction right: {found[-1].ratios.median:.2f} x")
    return found


def report(given: argparse.Namespace, pairs: list[Pair], chosen: list[Chosen]) -> None:
    """Print and keep the figures, and draw them."""
    facts = machine_facts()
    disturbed = sum(pair.disturbed for pair in pairs)
    num_runs = sum(len(pair.plain) + len(pair.guessed) for pair in pairs)
    lowest = min(pair.ratios.median for pair in pairs)
    least = (
        f"The least is {lowest:.2f} x; `auto` is meant never to be below {_LEAST}. "
        f"Others disturbed {disturbed} of {num_runs} runs."
    )
    parts = [
        f"# Guessing ahead: {given.model}, {given.speculate}",
        _table(pairs),
        least,
    ]
    by_task: dict[str, list[tuple[float, float]]] = {}
    for pair in pairs:
        by_task.setdefault(pair.task, []).append((pair.streams, pair.ratios.median))
    lines = [Curve(name, points) for name, points in by_task.items()]
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = f"speculation-{given.model}-{given.speculate}"
    if given.drafts:
        name += f"-{given.drafts}"
    load = curves("Speed-up by streams", "streams", "times faster", lines)
    (RESULTS / f"{name}-load.svg").write_text(load)
    parts.append(f"![Speed-up by streams]({name}-load.svg)")
    if chosen:
        parts += _acceptance(name, chosen)
    parts.append(caption(facts, f"{given.rounds} rounds"))
    result = {
        "facts": facts,
        "model": given.model,
        "pairs": [
            {
                "task": pair.task,
                "streams": pair.streams,
                "plain": [run.tokens_per_s for run in pair.plain],
                "guessed": [run.tokens_per_s for run in pair.guessed],
                "accepted": pair.accepted,
                "per_pass": pair.per_pass,
            }
            for pair in pairs
        ],
        "acceptance": [
            {"right": one.share, "ratio": one.ratios.median, "accepted": one.accepted}
            for one in chosen
        ],
    }
    save(name, result, "\n\n".join(parts))


def _table(pairs: list[Pair]) -> str:
    """Return what guesses bring for each task and number of streams."""
    header = (
        *("task", "streams", "without, tokens/s", "with"),
        *("faster", "tokens a step", "guesses right"),
    )
    rows = [
        (
            pair.task,
            str(pair.streams),
            *(rate.text() for rate in pair.rates),
            pair.ratios.text(2, " x"),
            f"{pair.per_pass:.2f}",
            f"{pair.accepted:.0%}",
        )
        for pair in pairs
    ]
    return table(header, rows)


def _acceptance(name: str, chosen: list[Chosen]) -> list[str]:
    """Return the table of chosen shares, and draw it."""
    header = ("of the prediction right", "guesses right", "guesses a step", "faster", "predicted")
    rows = [
        (
            f"{one.share:.0%}",
            f"{one.accepted:.0%}",
            f"{one.per_pass:.1f}",
            one.ratios.text(2, " x"),
            f"{one.predicted:.2f} x",
        )
        for one in chosen
    ]
    measured = Curve("measured", [(one.share, one.ratios.median) for one in chosen])
    predicted = Curve(
        "if rows were free", [(one.share, one.predicted) for one in chosen], is_predicted=True
    )
    drawing = curves(
        "Speed-up by the share of the prediction that is right, one stream",
        "share right",
        "times faster",
        [measured, predicted],
    )
    (RESULTS / f"{name}-acceptance.svg").write_text(drawing)
    meaning = (
        "Predicted is (1 - a^(g + 1)) / (1 - a) for g guesses a step of which each is right with "
        "chance a: what there would be if the rows of guesses took no time."
    )
    return [
        table(header, rows),
        meaning,
        f"![Speed-up by acceptance]({name}-acceptance.svg)",
    ]


if __name__ == "__main__":
    main()
