"""Trains heads by gradient descent, and measures them on held-out answers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace
from torch.nn import functional

from twostroke.core.frozen import Frozen
from twostroke.train.unroll import unroll
from twostroke.weights.heads import SURENESS_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.models.heads import HeadsSpec
    from twostroke.program import Program
    from twostroke.train.lesson import Lesson, Rows, Target

_PIECES = 4  # in a batch
_TEST_PIECES = 16
_WARM_STEPS = 50
_LOGITS_RATE = 0.3  # of the learning rate: these weights start as the target's
_LATER = 0.8  # weight of a depth's loss, relative to the depth before it
_SHALLOW = 0.5  # share of the time in which only the first guess is trained
_LEAST_RATE = 0.02
_PRIOR = 10.0  # guesses that the assumed share counts as


class Score(Frozen):
    """The shares of right guesses, as in `HeadsFacts`."""

    accepted: tuple[float, ...]
    right_if_sure: tuple[float, ...]

    @property
    def per_pass(self) -> float:
        """Expected tokens for each pass of the target, if all depths are tried."""
        total = chance = 1.0
        for share in self.accepted:
            chance *= share
            total += chance
        return total


@dataclass(slots=True)
class Learner:
    """Heads in training, which has taken `seconds` of the `budget_s` that it may take."""

    spec: HeadsSpec
    program: Program
    weights: dict[str, Tensor]
    target: Target
    lesson: Lesson
    rate: float
    budget_s: float
    seed: int
    seconds: float = 0.0
    num_steps: int = 0
    loss: float = math.nan
    _optimizer: torch.optim.Optimizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Make an optimizer for the weights that require gradients."""
        logits = self.weights["output.weight"]
        others = [weight for weight in self._own.values() if weight is not logits]
        groups = [{"params": others}, {"params": [logits]}]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)

    def learn(self, after_step: Callable[[], None]) -> None:
        """Train until the time is over; calls `after_step` after each step but the last."""
        for rows in self._batches():
            began_s = time.monotonic()
            self._step(rows)
            self.seconds += time.monotonic() - began_s
            if self.seconds >= self.budget_s:
                return
            after_step()

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return the trained weights, and the optimizer's state of each."""
        found: dict[str, NDArray[np.float32]] = {}
        for name, weight in self._own.items():
            found[name] = weight.detach().numpy()
            for part, value in self._optimizer.state[weight].items():
                found[f"{name}:{part}"] = value.float().reshape(value.shape or (1,)).numpy()
        return found

    def restore(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Set weights and optimizer to what `arrays` returned in an earlier run."""
        for name, weight in self._own.items():
            with torch.no_grad():
                weight.copy_(torch.from_numpy(arrays[name]))
            state = self._optimizer.state[weight]
            for part in ("exp_avg", "exp_avg_sq"):
                state[part] = torch.from_numpy(arrays[f"{name}:{part}"].copy())
            state["step"] = torch.tensor(float(arrays[f"{name}:step"][0]))

    def test(self) -> Score:
        """Return how often the heads are right on the held-out answers."""
        depth = self.spec.depth
        right, tried = np.zeros(depth), np.zeros(depth)
        sure_right, sure_tried = np.zeros(SURENESS_KINDS), np.zeros(SURENESS_KINDS)
        pieces = self.lesson.held_out
        with torch.no_grad():
            for start in range(0, len(pieces), _TEST_PIECES):
                rows = self.lesson.rows(pieces[start : start + _TEST_PIECES])
                before = rows.batch.valid  # rows before which all guesses were right
                for at, (logits, mask) in enumerate(self._unroll(rows, depth)):
                    hit = torch.zeros_like(mask)
                    hit[mask] = self.target.token_ids[logits.argmax(1)] == rows.following[mask]
                    counted = mask & before
                    right[at] += int((hit & counted).sum())
                    tried[at] += int(counted.sum())
                    kinds = (logits.softmax(1).amax(1) * SURENESS_KINDS).long()
                    kinds = kinds.clamp(max=SURENESS_KINDS - 1)[counted[mask]].numpy()
                    sure_tried += np.bincount(kinds, minlength=SURENESS_KINDS)
                    hits = hit[mask][counted[mask]].numpy()
                    sure_right += np.bincount(kinds[hits], minlength=SURENESS_KINDS)
                    before = torch.zeros_like(hit)
                    before[:, 1:] = (hit & counted)[:, :-1]
        middles = (np.arange(SURENESS_KINDS) + 0.5) / SURENESS_KINDS
        sure = (sure_right + _PRIOR * middles) / (sure_tried + _PRIOR)
        shares = (right + 0.5) / (tried + 1.0)
        return Score(tuple(map(float, shares)), tuple(map(float, sure)))

    @property
    def _own(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in self.weights.items() if weight.requires_grad}

    def _batches(self) -> Iterator[Rows]:
        """Yield batches without end; every piece comes once before any comes again."""
        rng = np.random.default_rng([self.seed, self.num_steps])
        pieces = self.lesson.pieces
        while True:
            order = rng.permutation(len(pieces))
            for start in range(0, len(order), _PIECES):
                yield self.lesson.rows([pieces[i] for i in order[start : start + _PIECES]])

    def _step(self, rows: Rows) -> None:
        done = self.seconds / self.budget_s
        self._set_rate(done)
        with torch.no_grad():
            wanted = self.target.logits(rows.states).softmax(dim=2)
        loss = torch.zeros(())
        # EAGLE's deeper guesses build on the first; Medusa's are independent.
        depth = 1 if done < _SHALLOW and self.spec.kind == "eagle" else self.spec.depth
        for at, (logits, mask) in enumerate(self._unroll(rows, depth)):
            if len(logits):
                loss = loss + _LATER**at * functional.cross_entropy(logits, wanted[mask])
        if loss.requires_grad:
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._own.values(), 1.0)
            self._optimizer.step()
        self.num_steps += 1
        self.loss = float(loss.detach()) / sum(_LATER**at for at in range(depth))

    def _unroll(self, rows: Rows, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        spec = replace(self.spec, depth=depth)
        return unroll(spec, self.program, self.weights, rows.batch)

    def _set_rate(self, done: float) -> None:
        """Warm up, then follow half a cosine down to `_LEAST_RATE`."""
        wave = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        rate = self.rate * min(1.0, (self.num_steps + 1) / _WARM_STEPS)
        rate *= _LEAST_RATE + (1 - _LEAST_RATE) * wave
        own, logits = self._optimizer.param_groups
        own["lr"], logits["lr"] = rate, rate * _LOGITS_RATE
