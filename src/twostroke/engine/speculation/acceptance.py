"""How often guesses are right, over all requests and for one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.speculation.proposal import DraftOutcome, Proposal

_PRIOR_WEIGHT = 6.0  # guesses that the prior, or what all requests taught, counts as
_MOST_WEIGHT = 200.0  # guesses older than about this many are forgotten
_FADE = 0.998  # share of what was learned that stays when it kept a guess from being tried
_FIRST_STEP = 0.05  # share of a new outcome in the rate of first guesses
_FIRST_RETURN = 0.002  # share of the way back to the prior, each time that nothing was guessed


class AcceptanceRate:
    """The chance that a guess of a kind is right, if those before it are.

    `prior[kind]` is assumed before anything is known. A request's own rate (`for_request`) begins
    with what all requests have taught, and teaches them in turn. `first` is how often the first
    guess of a step was right lately. Guesses that are not made are not measured either, so both
    go back towards their priors while they keep guesses from being made.
    """

    def __init__(
        self, prior: Sequence[float], first: float = 0.5, shared: AcceptanceRate | None = None
    ) -> None:
        self.first: float = first if shared is None else shared.first
        self.num_kinds = len(prior)
        self._prior = prior
        self._first_prior = first
        self._shared = shared
        self._right = [0.0] * len(prior)
        self._tried = [0.0] * len(prior)

    def for_request(self) -> AcceptanceRate:
        """Return the rate of one request."""
        return AcceptanceRate(self._prior, self._first_prior, self)

    def of(self, kind: int) -> float:
        """Return the chance of a guess of this kind."""
        before = self._prior[kind] if self._shared is None else self._shared.of(kind)
        weight = _PRIOR_WEIGHT
        return (self._right[kind] + weight * before) / (self._tried[kind] + weight)

    def pays(self, least: float) -> bool:
        """Return whether first guesses are right often enough, if they pay from `least` on."""
        if self.first >= least:
            return True
        self.recover()
        return False

    def learn(self, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Take in what became of a proposal, for the request and for all."""
        if self._shared is not None:
            self._shared.learn(proposal, outcome)
        for guess, is_right in outcome.trials(proposal):
            kind = proposal.kinds[guess]
            if self._tried[kind] >= _MOST_WEIGHT:
                self._scale(kind, 1 - 1 / _MOST_WEIGHT)
            self._right[kind] += is_right
            self._tried[kind] += 1
        if outcome.tried:
            self.first += _FIRST_STEP * (bool(outcome.right) - self.first)
        else:
            self._scale(proposal.kinds[0], _FADE)

    def fade(self, kind: int) -> None:
        """Trust what was learned a little less, so that the kind will be tried again."""
        if self._shared is not None:
            self._shared.fade(kind)
        self._scale(kind, _FADE)

    def recover(self, share: float = _FIRST_RETURN) -> None:
        """Move the rate of first guesses back towards its prior."""
        if self._shared is not None:
            self._shared.recover(share)
        self.first += share * (self._first_prior - self.first)

    def _scale(self, kind: int, share: float) -> None:
        self._right[kind] *= share
        self._tried[kind] *= share
