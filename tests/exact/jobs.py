"""Prompts and parameters that the comparisons of this folder answer twice, and all of an answer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke import SamplingParams
from twostroke.lab.measure.compare import held_out_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke import LLM
    from twostroke.engine.output import Completion

    Answer = list[tuple[object, ...]]

SHARED = 4  # prompts begin as one of so many do
MOST_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked: token ids, and how they are answered."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    def batches(self, seed: int) -> Iterator[tuple[list[list[int]], list[SamplingParams]]]:
        """Yield the job in batches of 1 to `MOST_TOGETHER`."""
        rng, first = random.Random(seed), 0
        while first < len(self.prompts):
            last = first + rng.randint(1, MOST_TOGETHER)
            yield self.prompts[first:last], self.params[first:last]
            first = last


def make_job(
    llm: LLM,
    num_prompts: int,
    prompt_tokens: int,
    answer_tokens: int,
    seed: int,
    logprobs: Sequence[int | None] = (2, None, None, None, None, None),
) -> Job:
    """Return prompts of at most `prompt_tokens`, whose answers have half to 3/2 of `answer_tokens`.

    Some are drawn, some have penalties or two choices; log-probabilities are asked for in turn.
    """
    rng = random.Random(seed)
    prompts = list(_prompts(llm, rng, num_prompts, prompt_tokens))
    params = [
        SamplingParams(
            temperature=0.0 if number % 5 else 0.8,
            seed=number,
            max_tokens=rng.randint(answer_tokens // 2, answer_tokens * 3 // 2),
            logprobs=logprobs[number % len(logprobs)],
            frequency_penalty=0.0 if number % 7 else 0.5,
            n=1 if number % 35 else 2,
        )
        for number in range(num_prompts)
    ]
    return Job(prompts, params)


def all_of(answer: list[Completion]) -> Answer:
    """Return what must not change of an answer."""
    return [
        (completion.token_ids, completion.text, completion.finish_reason.value, completion.logprobs)
        for completion in answer
    ]


def _prompts(
    llm: LLM, rng: random.Random, num_prompts: int, prompt_tokens: int
) -> Iterator[list[int]]:
    """Yield stretches of prose and code, the first part of which several have in common."""
    text = llm.engine.card.tokenizer.encode(held_out_text())
    half = prompt_tokens // 2
    shared = [text[start : start + half] for start in rng.sample(range(len(text) - half), SHARED)]
    for _ in range(num_prompts):
        count = rng.randint(4, half)
        start = rng.randrange(len(text) - count)
        own_tokens = text[start : start + count]
        yield [*rng.choice(shared), *own_tokens] if rng.random() < 0.6 else own_tokens
