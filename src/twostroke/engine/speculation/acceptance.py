"""Acceptance rates: how often drafts are right, over all requests and for each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.speculation.proposal import DraftOutcome, Proposal

_PRIOR_WEIGHT = 6.0  # of the prior, or of the shared rate, in drafts
_MAX_WEIGHT = 200.0  # drafts older than about this many are forgotten
_FADE_FACTOR = 0.998  # of the weight of measurements that kept a draft from being tried
_FIRST_WEIGHT = 0.05  # of a new outcome in the rate of first drafts
_RECOVERY_WEIGHT = 0.002  # of the prior, each time that no draft was made


class AcceptanceRate:
    """The measured probability that a draft token is right, given that the drafts before it are.

    Each draft has a kind: a small number whose meaning the proposer defines, such as a range of the
    draft model's probability. Each kind has its own rate. The rate of one request (`for_request`)
    starts with the shared rate of all requests, and measurements update both. A rate so low that no
    drafts are made would never be measured again, so it moves back towards its prior.

    Attributes:
        first: how often the first draft of a step was right lately.
        num_kinds: the number of kinds.
    """

    def __init__(
        self, prior: Sequence[float], first: float = 0.5, shared: AcceptanceRate | None = None
    ) -> None:
        """Start with `prior[kind]` for drafts of each kind, and `first` for first drafts.

        Both are probabilities. Measurements also update `shared`, the rate of all requests.
        """
        self.first: float = first if shared is None else shared.first
        self.num_kinds = len(prior)
        self._prior = prior
        self._first_prior = first
        self._shared = shared
        self._num_right = [0.0] * len(prior)
        self._num_tried = [0.0] * len(prior)

    def for_request(self) -> AcceptanceRate:
        """Return a new rate for one request, which starts with this rate of all requests."""
        return AcceptanceRate(self._prior, self._first_prior, self)

    def of(self, kind: int) -> float:
        """Return the probability that a draft of this kind is right if the drafts before it are."""
        prior = self._prior[kind] if self._shared is None else self._shared.of(kind)
        num_right = self._num_right[kind] + _PRIOR_WEIGHT * prior
        return num_right / (self._num_tried[kind] + _PRIOR_WEIGHT)

    def pays(self, min_chance: float) -> bool:
        """Return whether the first drafts of steps are right with at least this probability.

        If not, the rate moves towards its prior, so that drafts are tried again later.
        """
        if self.first >= min_chance:
            return True
        self.recover()
        return False

    def learn(self, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Learn from a step which drafts of a proposal were right; the shared rate learns, too."""
        if self._shared is not None:
            self._shared.learn(proposal, outcome)
        for draft, is_right in outcome.trials(proposal):
            kind = proposal.kinds[draft]
            if self._num_tried[kind] >= _MAX_WEIGHT:
                self._scale(kind, 1 - 1 / _MAX_WEIGHT)
            self._num_right[kind] += is_right
            self._num_tried[kind] += 1
        if outcome.tried:
            self.first += _FIRST_WEIGHT * (bool(outcome.accepted) - self.first)
        else:
            self._scale(proposal.kinds[0], _FADE_FACTOR)

    def fade(self, kind: int) -> None:
        """Give the past measurements of a kind of drafts less weight.

        The proposer calls this when drafts of the kind were not worth a row, so that they are tried
        again later.
        """
        if self._shared is not None:
            self._shared.fade(kind)
        self._scale(kind, _FADE_FACTOR)

    def recover(self, weight: float = _RECOVERY_WEIGHT) -> None:
        """Move the rate of first drafts towards its prior, so that drafts are tried again later."""
        if self._shared is not None:
            self._shared.recover(weight)
        self.first += weight * (self._first_prior - self.first)

    def _scale(self, kind: int, factor: float) -> None:
        self._num_right[kind] *= factor
        self._num_tried[kind] *= factor
