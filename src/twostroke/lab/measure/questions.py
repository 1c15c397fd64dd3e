"""Asks choice questions: which of four answers a model finds likeliest, by the letter."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends.interface import Backend
    from twostroke.model.tokenizer import Tokenizer


class Flips(Frozen):
    """How many of `num_questions` a model answers in another way than its source; how many right.

    A model can answer as many questions rightly and still have flipped many.
    """

    num_questions: int
    num_flipped: int
    num_right: int
    source_right: int

    @classmethod
    def between(cls, source: Sequence[int], other: Sequence[int]) -> Flips:
        """Compare the choices of two models; 0 is the right one."""
        flipped = sum(one != two for one, two in zip(source, other, strict=True))
        return cls(len(source), flipped, other.count(0), source.count(0))


def questions() -> list[tuple[str, list[str]]]:
    """Return questions with four answers each, of which the first is right."""
    text = resources.files("twostroke.lab.measure").joinpath("questions.txt").read_text("utf-8")
    split = [[part.strip() for part in line.split("|")] for line in text.splitlines()]
    return [(question, answers) for question, *answers in split]


def choices(backend: Backend, tokenizer: Tokenizer) -> list[int]:
    """Return the number of the answer that a model prefers, for each question."""
    found = []
    for question, answers in questions():
        asked = f"Question: {question}\nAnswer:"
        begun = tokenizer.encode(asked, add_special=True)
        whole = [tokenizer.encode(f"{asked} {answer}", add_special=True) for answer in answers]
        nats = [_nats(backend, begun, tokens) for tokens in whole]
        lengths = [len(answer) for answer in answers]
        found.append(int(np.argmin(np.array(nats) / lengths)))
    return found


def _nats(backend: Backend, begun: Sequence[int], whole: Sequence[int]) -> float:
    """Return what the tokens take after those that `whole` shares with `begun`."""
    pairs = enumerate(zip(begun, whole, strict=False))
    num_shared = next((i for i, (one, two) in pairs if one != two), len(begun))
    logits = backend.score(whole)[num_shared - 1 : -1].astype(np.float64)
    top = logits.max(axis=1)
    totals = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
    return float(np.sum(totals - logits[np.arange(len(logits)), list(whole[num_shared:])]))
