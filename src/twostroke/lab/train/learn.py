"""Trains heads by gradient descent, and measures them on held-out answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace
from torch.nn import functional

from twostroke.core.frozen import Frozen
from twostroke.lab.train.unroll import unroll
from twostroke.model.weights.heads import SURENESS_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from twostroke.lab.train.descent import Descent
    from twostroke.lab.train.lesson import Lesson, Rows, Target
    from twostroke.model.families.heads import HeadsSpec
    from twostroke.model.program import Program

_PIECES = 4  # in a batch
_TEST_PIECES = 16
_LATER = 0.8  # weight of a depth's loss, relative to the depth before it
_SHALLOW = 0.5  # share of the time in which only the first guess is trained
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
    """Heads in training."""

    spec: HeadsSpec
    program: Program
    descent: Descent
    target: Target
    lesson: Lesson
    seed: int

    def stepper(self) -> Callable[[], None]:
        """Return what learns from one batch more each time."""
        batches = self._batches()
        return lambda: self._step(next(batches))

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

    def _batches(self) -> Iterator[Rows]:
        """Yield batches without end; every piece comes once before any comes again."""
        rng = np.random.default_rng([self.seed, self.descent.num_steps])
        pieces = self.lesson.pieces
        while True:
            order = rng.permutation(len(pieces))
            for start in range(0, len(order), _PIECES):
                yield self.lesson.rows([pieces[i] for i in order[start : start + _PIECES]])

    def _step(self, rows: Rows) -> None:
        with torch.no_grad():
            wanted = self.target.logits(rows.states).softmax(dim=2)
        loss = torch.zeros(())
        # EAGLE's deeper guesses build on the first; Medusa's are independent.
        is_shallow = self.descent.done < _SHALLOW and self.spec.kind == "eagle"
        depth = 1 if is_shallow else self.spec.depth
        for at, (logits, mask) in enumerate(self._unroll(rows, depth)):
            if len(logits):
                loss = loss + _LATER**at * functional.cross_entropy(logits, wanted[mask])
        if loss.requires_grad:
            self.descent.descend(loss)
        self.descent.loss = float(loss.detach()) / sum(_LATER**at for at in range(depth))

    def _unroll(self, rows: Rows, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        spec = replace(self.spec, depth=depth)
        return unroll(spec, self.program, self.descent.weights, rows.batch)
