"""Multiple-choice questions: the model's choice has the highest probability per letter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from twostroke.lab.measure.questions import Flips, likeliest_answers, questions


def test_each_question_has_four_different_answers():
    every = questions()
    assert len({question for question, _ in every}) == len(every) > 40
    assert all(len(set(answers)) == 4 and all(answers) for _, answers in every)


def model(preferred: int, margin: float = 3.0) -> Any:
    """Return a model over bytes that makes each letter of one answer likelier by `margin`."""
    preferences = {
        f"Question: {question}\nAnswer:": f" {answers[preferred]}"
        for question, answers in questions()
    }

    def score(tokens: list[int]) -> np.ndarray:
        text = bytes(tokens).decode()
        logits = np.zeros((len(tokens), 256), np.float32)
        question = text[: text.index("Answer:") + len("Answer:")]
        for row, letter in enumerate(preferences[question].encode(), len(question) - 1):
            if row < len(logits):
                logits[row, letter] = margin
        return logits

    return SimpleNamespace(score=score)


def test_the_likeliest_answer_is_chosen_and_changes_are_counted():
    tokenizer: Any = SimpleNamespace(encode=lambda text, add_special: list(text.encode()))
    right, other = (likeliest_answers(model(number), tokenizer) for number in (0, 2))
    assert (set(right), set(other)) == ({0}, {2})
    assert Flips.between(right, other) == Flips(len(right), len(right), 0, len(right))
    assert Flips.between([0, 1, 2, 0], [1, 0, 2, 0]) == Flips(4, 2, 2, 2)
