"""Trains a whole model to predict the tokens that another model samples."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from twostroke.backends.torch.operations import TorchStepState
from twostroke.backends.torch.pages import WholeSequences
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from twostroke.backends.torch import TorchModel
    from twostroke.lab.train.descent import Descent
    from twostroke.lab.train.teach import Teacher, TrainingExample

_HELD_OUT_INTERVAL = 25  # one example of 25 is for tests
_MAX_TESTS = 64
_BATCH_ROWS = 512
_MIN_BFLOAT16_SPEEDUP = 1.3  # bfloat16 rounds more: it must be this much faster than float32
_NUM_TIMED_PRODUCTS = 10


def training_examples(examples: Sequence[TrainingExample]) -> list[TrainingExample]:
    """Return the examples that are not held out for tests; UsageError if there are none."""
    if len(examples) < 2:
        raise UsageError("There are too few answers to learn from: raise --tokens.")
    return [example for index, example in enumerate(examples) if index % _HELD_OUT_INTERVAL]


def fast_products() -> torch.autocast:
    """Return a PyTorch context in which matrix products run in bfloat16, if that is faster here."""
    seconds = {dtype: _product_s(dtype) for dtype in (torch.float32, torch.bfloat16)}
    is_faster = seconds[torch.float32] > _MIN_BFLOAT16_SPEEDUP * seconds[torch.bfloat16]
    return torch.autocast("cpu", torch.bfloat16, enabled=is_faster)


def _product_s(dtype: torch.dtype) -> float:
    """Return the seconds of a 512 x 512 matrix product of this type, as the fastest of several."""
    rows, weight = (torch.ones(512, 512, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(_NUM_TIMED_PRODUCTS):
        start_s = time.perf_counter()
        _ = rows @ weight
        times.append(time.perf_counter() - start_s)
    return min(times)


class StudentScore(Frozen):
    """How well a student model predicts held-out answers of its teacher.

    `loss` is a mean in nats: the KL divergence from the teacher; or, if the teacher's distributions
    are not available, the cross-entropy of the tokens. `right` is the share of rows whose most
    likely token is the teacher's token.
    """

    loss: float
    right: float


@dataclass(slots=True)
class StudentTrainer:
    """Trains a student model to predict its teacher's tokens.

    Attributes:
        model: the student.
        weights: returns the current weights of the student's Program.
        descent: the optimizer.
        teacher: gives the distributions to imitate; None if the teacher has another vocabulary.
        examples: training sequences; some are held out for tests.
        seed: seed of the batches.
    """

    model: TorchModel
    weights: Callable[[], Mapping[str, Tensor]]
    descent: Descent
    teacher: Teacher | None
    examples: Sequence[TrainingExample]
    seed: int
    _fast: torch.autocast = field(init=False, default_factory=fast_products)
    _examples: list[TrainingExample] = field(init=False)
    _held_out: list[TrainingExample] = field(init=False)

    def __post_init__(self) -> None:
        """Hold some examples out for tests; raise UsageError if none remain for training."""
        self._examples = training_examples(self.examples)
        self._held_out = list(self.examples[::_HELD_OUT_INTERVAL][:_MAX_TESTS])

    def stepper(self) -> Callable[[], None]:
        """Return a function that trains the student on one more batch at each call."""
        batches = self._batches()
        return lambda: self._step(next(batches))

    def test(self) -> StudentScore:
        """Return the student's loss and accuracy on the held-out answers."""
        loss_sum, num_right, count = 0.0, 0, 0
        with torch.no_grad():
            for example in self._held_out:
                loss, hits = self._compare([example])
                loss_sum += float(loss.sum())
                num_right += int(hits.sum())
                count += len(hits)
        return StudentScore(loss_sum / count, num_right / count)

    def _step(self, batch: Sequence[TrainingExample]) -> None:
        with self._fast:
            loss = self._compare(batch)[0].mean()
        self.descent.descend(loss)
        self.descent.loss = float(loss.detach())

    def _batches(self) -> Iterator[list[TrainingExample]]:
        """Yield training batches without end; every example is used once before any is repeated."""
        rng = np.random.default_rng([self.seed, self.descent.num_steps])
        batch: list[TrainingExample] = []
        while True:
            for index in rng.permutation(len(self._examples)):
                batch.append(self._examples[index])
                if sum(len(example.tokens) for example in batch) >= _BATCH_ROWS:
                    yield batch
                    batch = []

    def _compare(self, batch: Sequence[TrainingExample]) -> tuple[Tensor, Tensor]:
        """Return the loss of each row, and whether its most likely token is right: (rows,) each.

        The loss is the KL divergence from the teacher; without a teacher, the cross-entropy.
        """
        tokens, positions, sampled, following = [], [], [], []
        start = 0
        for example in batch:
            length = len(example.tokens) - 1
            tokens.append(example.tokens[:-1])
            positions.append(np.arange(length))
            sampled.append(np.arange(start + example.first, start + length))
            following.append(example.tokens[example.first + 1 :])
            start += length
        token_rows, position_rows, sampled_rows, targets = (
            torch.from_numpy(np.concatenate(part)).long()
            for part in (tokens, positions, sampled, following)
        )
        keeper = WholeSequences([len(part) for part in tokens], self.model.program.ops)
        step = TorchStepState(token_rows, position_rows, sampled_rows, self.weights(), keeper)
        name = self.model.program.ops[-1].output
        logits = self.model.run(step, (name,))[name].float()
        if self.teacher is None:
            loss = functional.cross_entropy(logits, targets, reduction="none")
            return loss, logits.argmax(1) == targets
        states = [example.states for example in batch if example.states is not None]
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            teacher_states = torch.from_numpy(np.concatenate(states)).float()
            teacher_logits = self.teacher.logits(teacher_states)
        # The wider vocabulary has padding: rows without a token.
        width = min(logits.shape[1], teacher_logits.shape[1])
        student_logprobs = logits[:, :width].log_softmax(1)
        teacher_logprobs = teacher_logits[:, :width].log_softmax(1)
        loss = functional.kl_div(
            student_logprobs, teacher_logprobs, reduction="none", log_target=True
        ).sum(1)
        return loss, student_logprobs.argmax(1) == teacher_logprobs.argmax(1)
