"""Trains a whole model to draw the tokens that another one draws."""

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
    from twostroke.lab.train.teach import Example, Teacher

_HELD_OUT = 25  # one example of so many is for tests
_MOST_TESTS = 64
_BATCH_ROWS = 512
_MIN_BFLOAT16_SPEEDUP = 1.3  # bfloat16 rounds more: it must be this much faster than float32
_NUM_TIMED_PRODUCTS = 10


def learned(examples: Sequence[Example]) -> list[Example]:
    """Return the examples that are not held out; UsageError if there are none."""
    if len(examples) < 2:
        raise UsageError("There are too few answers to learn from: raise --tokens.")
    return [example for index, example in enumerate(examples) if index % _HELD_OUT]


def fast_products() -> torch.autocast:
    """Return a context that computes products in bfloat16 if this machine computes them faster."""
    seconds = {dtype: _product_s(dtype) for dtype in (torch.float32, torch.bfloat16)}
    is_faster = seconds[torch.float32] > _MIN_BFLOAT16_SPEEDUP * seconds[torch.bfloat16]
    return torch.autocast("cpu", torch.bfloat16, enabled=is_faster)


def _product_s(dtype: torch.dtype) -> float:
    """Return the shortest of several times of one 512 x 512 matrix product, in seconds."""
    rows, weight = (torch.ones(512, 512, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(_NUM_TIMED_PRODUCTS):
        start_s = time.perf_counter()
        _ = rows @ weight
        times.append(time.perf_counter() - start_s)
    return min(times)


class Likeness(Frozen):
    """How well a student knows held-out answers: mean loss in nats, and its share of right tokens.

    The loss is the KL divergence from the teacher, or without its distributions that of the tokens.
    """

    loss: float
    right: float


@dataclass(slots=True)
class Imitator:
    """A student in training; `teacher` is None if it has other tokens.

    `weights` returns those of the Program of `model` as they are now.
    """

    model: TorchModel
    weights: Callable[[], Mapping[str, Tensor]]
    descent: Descent
    teacher: Teacher | None
    examples: Sequence[Example]
    seed: int
    _fast: torch.autocast = field(init=False, default_factory=fast_products)
    _ours: list[Example] = field(init=False)
    _held_out: list[Example] = field(init=False)

    def __post_init__(self) -> None:
        """Hold out some examples; UsageError if nothing is left."""
        self._ours = learned(self.examples)
        self._held_out = list(self.examples[::_HELD_OUT][:_MOST_TESTS])

    def stepper(self) -> Callable[[], None]:
        """Return what learns from one batch more each time."""
        batches = self._batches()
        return lambda: self._step(next(batches))

    def test(self) -> Likeness:
        """Compare with the held-out answers."""
        losses, right, count = 0.0, 0, 0
        with torch.no_grad():
            for example in self._held_out:
                loss, hits = self._compare([example])
                losses, right, count = (
                    losses + float(loss.sum()), right + int(hits.sum()), count + len(hits),
                )  # fmt: skip
        return Likeness(losses / count, right / count)

    def _step(self, batch: Sequence[Example]) -> None:
        with self._fast:
            loss = self._compare(batch)[0].mean()
        self.descent.descend(loss)
        self.descent.loss = float(loss.detach())

    def _batches(self) -> Iterator[list[Example]]:
        """Yield batches without end; every example comes once before any comes again."""
        rng = np.random.default_rng([self.seed, self.descent.num_steps])
        batch: list[Example] = []
        while True:
            for index in rng.permutation(len(self._ours)):
                batch.append(self._ours[index])
                if sum(len(one.tokens) for one in batch) >= _BATCH_ROWS:
                    yield batch
                    batch = []

    def _compare(self, batch: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """Return the loss of each row that learns, and whether its likeliest token is right."""
        tokens, positions, sampled, following, start = [], [], [], [], 0
        for one in batch:
            length = len(one.tokens) - 1
            tokens.append(one.tokens[:-1])
            positions.append(np.arange(length))
            sampled.append(np.arange(start + one.first, start + length))
            following.append(one.tokens[one.first + 1 :])
            start += length
        rows, places, drawn, wanted = (
            torch.from_numpy(np.concatenate(part)).long()
            for part in (tokens, positions, sampled, following)
        )
        keeper = WholeSequences([len(part) for part in tokens], self.model.program.ops)
        step = TorchStepState(rows, places, drawn, self.weights(), keeper)
        name = self.model.program.ops[-1].output
        logits = self.model.run(step, (name,))[name].float()
        if self.teacher is None:
            loss = functional.cross_entropy(logits, wanted, reduction="none")
            return loss, logits.argmax(1) == wanted
        states = np.concatenate([one.states for one in batch if one.states is not None])
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            theirs = self.teacher.logits(torch.from_numpy(states).float())
        width = min(logits.shape[1], theirs.shape[1])  # either may have rows without a token
        ours, theirs = logits[:, :width].log_softmax(1), theirs[:, :width].log_softmax(1)
        loss = functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(1)
        return loss, ours.argmax(1) == theirs.argmax(1)
