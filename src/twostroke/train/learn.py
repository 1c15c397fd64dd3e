"""Learning: rows in, better weights out, and how often heads are right on what was held out."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

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
_LOGITS_RATE = 0.3  # of the learning rate: these weights begin as the target's own
_LATER = 0.8  # what each depth counts, beside the one before it
_SHALLOW = 0.5  # of the time, in which only the first guess is learned
_LEAST_RATE = 0.02
_PRIOR = 10.0  # guesses that a share counts as which was not measured


@dataclass(frozen=True, slots=True)
class Score:
    """How often heads are right, as `HeadsFacts` has it."""

    accepted: tuple[float, ...]
    right_if_sure: tuple[float, ...]

    @property
    def per_pass(self) -> float:
        """How many tokens a pass of the target brings, if all depths are always tried."""
        total = chance = 1.0
        for share in self.accepted:
            chance *= share
            total += chance
        return total


@dataclass(slots=True)
class Learner:
    """Heads in training. `seconds` is what training has taken, of `budget_s` that it may take."""

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
        """Have an optimizer for the weights that want gradients."""
        logits = self.weights["output.weight"]
        others = [weight for weight in self._own.values() if weight is not logits]
        groups = [{"params": others}, {"params": [logits]}]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)

    def learn(self, pause: Callable[[], bool]) -> None:
        """Learn until the time is over, or `pause()`, asked after each step, is true."""
        for rows in self._batches():
            began_s = time.monotonic()
            self._step(rows)
            self.seconds += time.monotonic() - began_s
            if self.seconds >= self.budget_s or pause():
                return

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return the weights, and what the optimizer knows of each."""
        found: dict[str, NDArray[np.float32]] = {}
        for name, weight in self._own.items():
            found[name] = weight.detach().numpy()
            for part, value in self._optimizer.state[weight].items():
                found[f"{name}:{part}"] = value.float().reshape(value.shape or (1,)).numpy()
        return found

    def go_on(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Take over what `arrays` has returned once."""
        for name, weight in self._own.items():
            with torch.no_grad():
                weight.copy_(torch.from_numpy(arrays[name]))
            state = self._optimizer.state[weight]
            for part in ("exp_avg", "exp_avg_sq"):
                state[part] = torch.from_numpy(arrays[f"{name}:{part}"].copy())
            state["step"] = torch.tensor(float(arrays[f"{name}:step"][0]))

    def test(self) -> Score:
        """Return how often the heads are right on what was held out."""
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
        """Yield batches without end, every piece once before any comes again."""
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
        # A row of Medusa heads costs the same at any depth, and none builds on another.
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
        """Warm up, then follow half a cosine to almost nothing."""
        wave = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        rate = self.rate * min(1.0, (self.num_steps + 1) / _WARM_STEPS)
        rate *= _LEAST_RATE + (1 - _LEAST_RATE) * wave
        own, logits = self._optimizer.param_groups
        own["lr"], logits["lr"] = rate, rate * _LOGITS_RATE
