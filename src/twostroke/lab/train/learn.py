"""Trains heads by gradient descent, and measures their accuracy on held-out answers."""

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
    from twostroke.lab.train.lesson import HeadTrainingData, LabelledBatch, Target
    from twostroke.model.families.heads import HeadsSpec
    from twostroke.model.program import Program

_BATCH_PIECES = 4
_TEST_PIECES = 16
_DEPTH_LOSS_WEIGHT = 0.8  # weight of a depth's loss, relative to the depth before it
_SHALLOW_TIME_SHARE = 0.5  # share of the time in which only depth 0 of EAGLE is trained
_PRIOR_COUNT = 10.0  # number of drafts that the prior counts as


class HeadScore(Frozen):
    """How often draft heads are right on held-out answers of their target model.

    `accepted` has the share of right drafts by depth, and `right_if_sure` by the head's
    probability, as in `HeadsFacts`.
    """

    accepted: tuple[float, ...]
    right_if_sure: tuple[float, ...]

    @property
    def per_pass(self) -> float:
        """Expected tokens per step of the target model, if drafts of all depths are verified."""
        total = probability = 1.0
        for share in self.accepted:
            probability *= share
            total += probability
        return total


@dataclass(slots=True)
class HeadTrainer:
    """Trains draft heads on recorded answers of their target model."""

    spec: HeadsSpec
    program: Program
    descent: Descent
    target: Target
    lesson: HeadTrainingData
    seed: int

    def stepper(self) -> Callable[[], None]:
        """Return a function that trains the draft heads on one more batch at each call."""
        batches = self._batches()
        return lambda: self._step(next(batches))

    def test(self) -> HeadScore:
        """Return how often the heads' drafts are right on the held-out answers."""
        depth = self.spec.depth
        right, tried = np.zeros(depth), np.zeros(depth)
        sure_right, sure_tried = np.zeros(SURENESS_KINDS), np.zeros(SURENESS_KINDS)
        pieces = self.lesson.held_out
        with torch.no_grad():
            for start in range(0, len(pieces), _TEST_PIECES):
                rows = self.lesson.rows(pieces[start : start + _TEST_PIECES])
                is_reached = rows.batch.valid  # rows where all earlier drafts are right
                for at, (logits, mask) in enumerate(self._unroll(rows, depth)):
                    is_right = torch.zeros_like(mask)
                    best_ids = self.target.token_ids[logits.argmax(1)]
                    is_right[mask] = best_ids == rows.following[mask]
                    is_tried = mask & is_reached
                    right[at] += int((is_right & is_tried).sum())
                    tried[at] += int(is_tried.sum())
                    kinds = (logits.softmax(1).amax(1) * SURENESS_KINDS).long()
                    kinds = kinds.clamp(max=SURENESS_KINDS - 1)[is_tried[mask]].numpy()
                    sure_tried += np.bincount(kinds, minlength=SURENESS_KINDS)
                    hits = is_right[mask][is_tried[mask]].numpy()
                    sure_right += np.bincount(kinds[hits], minlength=SURENESS_KINDS)
                    is_reached = torch.zeros_like(is_right)
                    is_reached[:, 1:] = (is_right & is_tried)[:, :-1]
        middles = (np.arange(SURENESS_KINDS) + 0.5) / SURENESS_KINDS
        sure = (sure_right + _PRIOR_COUNT * middles) / (sure_tried + _PRIOR_COUNT)
        shares = (right + 0.5) / (tried + 1.0)
        return HeadScore(tuple(map(float, shares)), tuple(map(float, sure)))

    def _batches(self) -> Iterator[LabelledBatch]:
        """Yield training batches without end; each part of an answer is used once per round."""
        rng = np.random.default_rng([self.seed, self.descent.num_steps])
        pieces = self.lesson.pieces
        while True:
            order = rng.permutation(len(pieces))
            for start in range(0, len(order), _BATCH_PIECES):
                yield self.lesson.rows([pieces[i] for i in order[start : start + _BATCH_PIECES]])

    def _step(self, rows: LabelledBatch) -> None:
        with torch.no_grad():
            probabilities = self.target.logits(rows.states).softmax(dim=2)
        loss = torch.zeros(())
        # EAGLE's deeper drafts depend on the first; Medusa's are independent.
        is_shallow = self.descent.progress < _SHALLOW_TIME_SHARE and self.spec.kind == "eagle"
        depth = 1 if is_shallow else self.spec.depth
        for at, (logits, mask) in enumerate(self._unroll(rows, depth)):
            if len(logits):
                depth_loss = functional.cross_entropy(logits, probabilities[mask])
                loss = loss + _DEPTH_LOSS_WEIGHT**at * depth_loss
        if loss.requires_grad:
            self.descent.descend(loss)
        self.descent.loss = float(loss.detach()) / sum(
            _DEPTH_LOSS_WEIGHT**at for at in range(depth)
        )

    def _unroll(self, rows: LabelledBatch, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        spec = replace(self.spec, depth=depth)
        return unroll(spec, self.program, self.descent.weights, rows.batch)
