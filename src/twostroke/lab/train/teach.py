"""Training data of a student: sequences of its own tokens, and its teacher's distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from twostroke.backends.torch.operations import TorchStepState, apply
from twostroke.backends.torch.pages import WholeSequences
from twostroke.core.frozen import Frozen
from twostroke.model.families import build_program
from twostroke.model.families.heads import last_hidden

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.lab.train.record import RecordedAnswer
    from twostroke.model.tokenizer.translation import Translation
    from twostroke.model.weights import LoadedModel

_MIN_ROWS = 4  # shorter answers are left out


class TrainingExample(Frozen):
    """A token sequence for training a student, which learns the next tokens from row `first` on.

    `states`, float16 (rows from `first` on, width), are the teacher's hidden states for these rows;
    None if the teacher has another vocabulary.
    """

    tokens: NDArray[np.int32]
    first: int
    states: NDArray[np.float16] | None = None


class Teacher:
    """The part of a teacher model that computes logits from stored hidden states."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Load the teacher's weights of the last norm and of the output matrix."""
        program = build_program(loaded.spec)
        self._states = last_hidden(program)
        self.vocab_size = program.vocab_size
        begin = next(i for i, op in enumerate(program.ops) if op.output == self._states) + 1
        self._ops = program.ops[begin:]
        self._weights = {
            weight.name: torch.from_numpy(loaded.tensors[weight.name].dequantize())
            for op in self._ops
            for weight in op.weights
        }

    def logits(self, states: Tensor) -> Tensor:
        """Return the teacher's logits (rows, vocabulary) for hidden states (rows, width)."""
        indices = torch.arange(len(states))
        keeper = WholeSequences([len(states)], self._ops)
        step = TorchStepState(indices, indices, indices, self._weights, keeper)
        values = {self._states: states}
        for op in self._ops:
            values[op.output] = apply(op, values, step)
        return values[self._ops[-1].output]


def untranslated_examples(
    answers: Iterable[RecordedAnswer], length: int
) -> Iterator[TrainingExample]:
    """Yield recorded answers as training examples of a student with the teacher's vocabulary.

    An example has at most `length` tokens, and includes the end of the prompt.
    """
    for answer in answers:
        num_rows = min(len(answer), length - 1)
        prompt = answer.prompt[-(length - 1 - num_rows) :] if num_rows < length - 1 else ()
        tokens = np.array([*prompt, *answer.tokens[: num_rows + 1]], np.int32)
        if num_rows >= _MIN_ROWS:
            yield TrainingExample(tokens, len(prompt), answer.hidden[:num_rows])


def translated_examples(
    answers: Iterable[RecordedAnswer], translation: Translation, length: int
) -> Iterator[TrainingExample]:
    """Yield recorded answers as training examples of a student with another vocabulary.

    The tokens are translated in the same way as when the student drafts for this teacher.
    """
    for answer in answers:
        ids = [*answer.prompt, *map(int, answer.tokens)]
        begin = translation.end_offsets(ids)[len(answer.prompt)]
        translated = translation.translate(ids)
        first = max(0, sum(end <= begin for end in translated.ends) - 1)
        tokens = np.array(translated.tokens[:length], np.int32)
        if len(tokens) - 1 - first >= _MIN_ROWS:
            yield TrainingExample(tokens, first)
