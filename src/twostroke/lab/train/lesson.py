"""Divides recorded answers into batches for training draft heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from twostroke.core.frozen import Frozen
from twostroke.lab.train.unroll import TrainingBatch
from twostroke.model.families.heads import TABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.lab.train.record import RecordedAnswer
    from twostroke.model.families.spec import ModelSpec
    from twostroke.model.quant import QuantTensor

_HELD_OUT_INTERVAL = 25  # one answer of 25 is for tests
_MIN_ROWS = 8  # of a piece


class LabelledBatch(Frozen):
    """A batch for training draft heads, with the labels to be predicted.

    The labels are, for each row, the next token (`following`) and the target model's hidden state
    at that token (`states`).
    """

    batch: TrainingBatch
    following: Tensor
    states: Tensor


class Target:
    """The weights of the target model that draft heads use: embedding, last norm, output matrix."""

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, QuantTensor], token_ids: Sequence[int]
    ) -> None:
        """Load the target's embedding, and the output rows of `token_ids`."""
        self.spec = spec
        self.token_ids = torch.tensor(token_ids)
        self.table = torch.from_numpy(tensors[TABLE].dequantize())
        name = TABLE if spec.tied_embeddings else "output.weight"
        head = self.table if spec.tied_embeddings else torch.from_numpy(tensors[name].dequantize())
        self.head = head[self.token_ids].clone()
        self.norm = torch.from_numpy(tensors["output_norm.weight"].dequantize()) + spec.norm_offset

    def logits(self, states: Tensor) -> Tensor:
        """Return the target's logits of the tokens that heads can propose, from hidden states."""
        normed = functional.rms_norm(states, self.norm.shape, self.norm, self.spec.norm_epsilon)
        return functional.linear(normed, self.head)


class HeadTrainingData:
    """Recorded answers, divided into parts for training draft heads and parts for tests."""

    def __init__(self, answers: Sequence[RecordedAnswer], length: int) -> None:
        """Divide recorded answers into parts of at most `length` rows."""
        self._answers = answers
        self._length = length
        training = [index for index in range(len(answers)) if index % _HELD_OUT_INTERVAL]
        held_out = [index for index in range(len(answers)) if not index % _HELD_OUT_INTERVAL]
        self.pieces = self._divide(training)
        self.held_out = self._divide(held_out)

    def training_answers(self) -> list[RecordedAnswer]:
        """Return the recorded answers for training, without the held-out answers."""
        return [answer for index, answer in enumerate(self._answers) if index % _HELD_OUT_INTERVAL]

    def rows(self, pieces: Sequence[tuple[int, int]]) -> LabelledBatch:
        """Return a training batch from parts of recorded answers.

        Each of `pieces` is (the index of an answer, the part's first row).
        """
        width = self._answers[0].hidden.shape[1]
        shape = (len(pieces), min(self._length, max(self._count(*piece) for piece in pieces)))
        tokens, following = (np.zeros(shape, np.int64) for _ in range(2))
        hidden, states = (np.zeros((*shape, width), np.float32) for _ in range(2))
        valid = np.zeros(shape, bool)
        for row, (index, start) in enumerate(pieces):
            answer, count = self._answers[index], self._count(index, start)
            tokens[row, :count] = answer.tokens[start + 1 : start + 1 + count]
            following[row, :count] = answer.tokens[start + 2 : start + 2 + count]
            hidden[row, :count] = answer.hidden[start : start + count]
            states[row, :count] = answer.hidden[start + 1 : start + 1 + count]
            valid[row, :count] = True
        batch = TrainingBatch(*(torch.from_numpy(array) for array in (tokens, hidden, valid)))
        return LabelledBatch(batch, torch.from_numpy(following), torch.from_numpy(states))

    def _count(self, index: int, start: int) -> int:
        """Return the number of rows of an answer's part that begins at `start`.

        The last hidden state is no row, since each row also needs the state after it.
        """
        return min(self._length, len(self._answers[index]) - 1 - start)

    def _divide(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        return [
            (index, start)
            for index in indices
            for start in range(0, len(self._answers[index]), self._length)
            if self._count(index, start) >= min(_MIN_ROWS, len(self._answers[index]) - 1)
        ]


def frequent_tokens(
    answers: Sequence[RecordedAnswer], vocab_size: int, count: int
) -> tuple[int, ...]:
    """Return the `count` most frequent tokens of recorded answers, in ascending order.

    Draft heads propose only these tokens. If fewer different tokens occur, the lowest other token
    ids are added.
    """
    tokens: NDArray[np.int32] = np.concatenate([answer.tokens[1:] for answer in answers])
    counts = np.bincount(tokens, minlength=vocab_size)[:vocab_size]
    order = np.argsort(-counts, kind="stable")[: min(count, vocab_size)]
    return tuple(sorted(int(token) for token in order))
