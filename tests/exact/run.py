"""`make test-speculation`: the same tokens with guesses as without, on real models.

Prompts of prose and code, some of which begin alike, are answered without guesses, without a prefix
cache and with room for all. Then they are answered again with each method: in batches of 1 to 16,
with a prefix cache, and with so few pages that requests lose theirs and compute their tokens again.
Some are drawn, some have penalties, log-probabilities or two choices. All of every answer must be
the same. A run in which nothing was guessed rightly, found in the cache or
preempted shows nothing, and fails, too.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke import LLM, SamplingParams
from twostroke.core.config import CacheOptions, ComputeOptions, EngineOptions, SpeculationOptions
from twostroke.measure.compare import held_out_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.engine.output import Completion

    Answer = list[tuple[object, ...]]

_PAGE_SIZE = 16
_SHARED = 4  # prompts begin as one of so many do
_MOST_TOGETHER = 16
_DRAFTS = 4  # always, so that much is guessed; "auto" guesses what pays


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked: token ids, and how they are answered."""

    prompts: list[list[int]]
    params: list[SamplingParams]


def main() -> int:
    """Compare, and return 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", nargs="+", default=["auto", "ngram", "lookahead"])
    parser.add_argument("--draft", help="adds the method draft")
    parser.add_argument("--heads", help="adds the method of these heads, eagle or medusa")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--prompt-tokens", type=int, default=100, help="at most")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    # As short as can be, for there to be pages for few requests.
    given.context = given.prompt_tokens + 3 * given.tokens
    with LLM(given.model, _options(SpeculationOptions("off"), None, given.context)) as llm:
        job = _job(llm, given)
        began = time.monotonic()
        expected = [
            _all_of(answer) for answer in llm.generate(job.prompts, job.params, speculate="off")
        ]
        _say(f"{given.model}: {len(expected)} answers without guesses", began)
        cost = llm.engine.card.cost
        pages = -(-given.context // _PAGE_SIZE)
        memory = pages * cost.program.page_bytes(_PAGE_SIZE, cost.cache)
    methods = [*given.methods, *(["draft"] if given.draft else [])]
    methods += ["heads"] if given.heads else []
    held = [_holds(method, job, expected, memory, given) for method in methods]
    return int(not all(held))


def _holds(
    method: str, job: Job, expected: list[Answer], memory: int, given: argparse.Namespace
) -> bool:
    """Answer with a method, compare, and say how it went."""
    count = None if method == "auto" else _DRAFTS
    named = {"draft": given.draft} if method in {"draft", "auto"} else {}
    if method == "heads" or (method == "auto" and given.heads):
        named |= {"heads": given.heads}
    guessing = SpeculationOptions("auto" if method == "heads" else method, count=count, **named)
    with LLM(given.model, _options(guessing, memory, given.context)) as llm:
        began = time.monotonic()
        rng = random.Random(given.seed)
        found, cached, first = [], 0, 0
        while first < len(job.prompts):
            last = first + rng.randint(1, _MOST_TOGETHER)
            for answer in llm.generate(job.prompts[first:last], job.params[first:last]):
                found.append(_all_of(answer))
                cached += answer[0].usage.cached_tokens
            first = last
        stats, guesses = (
            llm.engine.client.loop.snapshot().scheduler,
            llm.engine.client.loop.snapshot().speculation,
        )
    wrong = [i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
    proposed, accepted = guesses.proposed.total(), guesses.accepted.total()
    _say(
        f"{method}: {len(wrong)} of {len(found)} answers differ; {accepted} of {proposed} guesses "
        f"right, {cached} tokens from the cache, {stats.num_preemptions} preemptions",
        began,
    )
    for index in wrong[:3]:
        print(f"  prompt {index}: {expected[index]} became {found[index]}")
    if not (accepted or method == "auto") or not cached or not stats.num_preemptions:
        print("  too little happened for this to say anything: more prompts, or longer answers")
        return False
    return not wrong


def _all_of(answer: list[Completion]) -> Answer:
    """Return what must not change of an answer."""
    return [(one.token_ids, one.text, one.finish_reason.value, one.logprobs) for one in answer]


def _options(guessing: SpeculationOptions, memory: int | None, context: int) -> EngineOptions:
    cache = CacheOptions(
        memory_bytes=memory,
        context_length=context,
        page_size=_PAGE_SIZE,
        prefix_cache=memory is not None,
    )
    return EngineOptions(ComputeOptions(), cache, speculation=guessing)


def _job(llm: LLM, given: argparse.Namespace) -> Job:
    rng = random.Random(given.seed)
    prompts = list(_prompts(llm, rng, given))
    params = [
        SamplingParams(
            temperature=0.0 if number % 5 else 0.8,
            seed=number,
            max_tokens=rng.randint(given.tokens // 2, given.tokens * 3 // 2),
            logprobs=None if number % 6 else 2,
            frequency_penalty=0.0 if number % 7 else 0.5,
            n=1 if number % 35 else 2,
        )
        for number in range(given.prompts)
    ]
    return Job(prompts, params)


def _prompts(llm: LLM, rng: random.Random, given: argparse.Namespace) -> Iterator[list[int]]:
    """Yield stretches of prose and code, the first part of which several have in common."""
    text = llm.engine.card.tokenizer.encode(held_out_text())
    half = given.prompt_tokens // 2
    shared = [text[start : start + half] for start in rng.sample(range(len(text) - half), _SHARED)]
    for _ in range(given.prompts):
        count = rng.randint(4, half)
        start = rng.randrange(len(text) - count)
        own = text[start : start + count]
        yield [*rng.choice(shared), *own] if rng.random() < 0.6 else own


def _say(what: str, began: float) -> None:
    print(f"{what} ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
