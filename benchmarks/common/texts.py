"""The held-out text as token ids: in pieces for quality, and as fresh prompts for speed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from twostroke.lab.measure.compare import held_out_text
from twostroke.model.loader import build_tokenizer

if TYPE_CHECKING:
    from benchmarks.common.workload import Work
    from twostroke.model.weights import LoadedModel


def heldout_tokens(loaded: LoadedModel) -> list[int]:
    """Return the held-out text by a model's own tokenizer."""
    return build_tokenizer(loaded).encode(held_out_text())


def pieces(tokens: list[int], length: int) -> list[list[int]]:
    """Cut tokens into pieces of `length`; the last may be shorter."""
    return [tokens[i : i + length] for i in range(0, len(tokens), length)]


class FreshPrompts:
    """Prompts that no cache can know: the text from anywhere on, behind a few random tokens."""

    def __init__(self, tokens: list[int], seed: int = 0) -> None:
        """Take prompts from `tokens`; the same seed gives the same prompts."""
        self._tokens = tokens
        self._random = random.Random(seed)
        self._kept_prompts: dict[tuple[int, int], list[int]] = {}

    def job(self, work: Work) -> list[list[int]]:
        """Return a prompt for each stream of a row, fresh from its `kept_length` on."""
        fresh = work.prompt_length - work.kept_length
        return [
            [*self._keep(stream, work.kept_length), *self.take(fresh)]
            for stream in range(work.num_streams)
        ]

    def take(self, length: int) -> list[int]:
        """Return a prompt of `length` tokens."""
        prompt = self._random.choices(self._tokens, k=4)
        start = self._random.randrange(len(self._tokens))
        while len(prompt) < length:
            prompt += self._tokens[start : start + length - len(prompt)]
            start = 0
        return prompt[:length]

    def _keep(self, stream: int, length: int) -> list[int]:
        """Return a stream's tokens that are the same in each round, and in no other stream."""
        if length and (stream, length) not in self._kept_prompts:
            self._kept_prompts[stream, length] = self.take(length)
        return self._kept_prompts.get((stream, length), [])
