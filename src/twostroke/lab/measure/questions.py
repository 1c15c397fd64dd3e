"""Multiple-choice questions: finds the answer that a model considers most likely."""

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
    """How many multiple-choice answers of a quantized model differ from its source's answers.

    It also counts the right answers of both: a model with as many right answers as its source can
    still answer many questions differently.
    """

    num_questions: int
    num_flipped: int
    num_right: int
    source_right: int

    @classmethod
    def between(cls, source: Sequence[int], other: Sequence[int]) -> Flips:
        """Compare two models' answers to the same multiple-choice questions.

        Answers are indices; index 0 is the right answer to each question.
        """
        num_flipped = sum(a != b for a, b in zip(source, other, strict=True))
        return cls(len(source), num_flipped, num_right=other.count(0), source_right=source.count(0))


def questions() -> list[tuple[str, list[str]]]:
    """Return multiple-choice questions with four answers each; the first answer is right."""
    text = resources.files("twostroke.lab.measure").joinpath("questions.txt").read_text("utf-8")
    split = [[part.strip() for part in line.split("|")] for line in text.splitlines()]
    return [(question, answers) for question, *answers in split]


def likeliest_answers(backend: Backend, tokenizer: Tokenizer) -> list[int]:
    """Return, for each multiple-choice question, the index of the model's likeliest answer."""
    preferred = []
    for question, answers in questions():
        prompt = f"Question: {question}\nAnswer:"
        prompt_tokens = tokenizer.encode(prompt, add_special=True)
        sequences = [tokenizer.encode(f"{prompt} {answer}", add_special=True) for answer in answers]
        nats = [_answer_nats(backend, prompt_tokens, sequence) for sequence in sequences]
        lengths = [len(answer) for answer in answers]
        preferred.append(int(np.argmin(np.array(nats) / lengths)))
    return preferred


def _answer_nats(backend: Backend, prompt: Sequence[int], sequence: Sequence[int]) -> float:
    """Return the negative log-probability, in nats, of an answer's tokens.

    `sequence` is the prompt followed by the answer.

    The tokens of `sequence` count from the first that differs from the prompt's.
    """
    pairs = enumerate(zip(prompt, sequence, strict=False))
    num_shared = next((i for i, (a, b) in pairs if a != b), len(prompt))
    logits = backend.score(sequence)[num_shared - 1 : -1].astype(np.float64)
    top = logits.max(axis=1)
    totals = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
    return float(np.sum(totals - logits[np.arange(len(logits)), list(sequence[num_shared:])]))
