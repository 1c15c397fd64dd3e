"""How often guesses of each kind turn out right, over all requests and for one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.spec.proposal import Outcome, Proposal

_PRIOR_WEIGHT = 6.0  # guesses that what is thought beforehand counts as
_SHARED_WEIGHT = 6.0  # that what all requests taught counts as, in what is expected of one
_MOST_WEIGHT = 200.0  # older guesses than about so many are forgotten
_FADE = 0.998  # of what was learned, each time that it kept a guess from being tried


@dataclass(slots=True)
class _Count:
    right: float = 0.0
    tried: float = 0.0

    def add(self, *, right: bool) -> None:
        if self.tried >= _MOST_WEIGHT:
            self.fade(1 - 1 / _MOST_WEIGHT)
        self.right += right
        self.tried += 1

    def fade(self, share: float) -> None:
        self.right *= share
        self.tried *= share

    def mean(self, before: float, weight: float) -> float:
        return (self.right + weight * before) / (self.tried + weight)


class Odds:
    """Learns over all requests; `prior[kind]` is what is thought of a kind beforehand."""

    def __init__(self, prior: Sequence[float]) -> None:
        """Know nothing but the prior."""
        self._prior = prior
        self._counts = [_Count() for _ in prior]

    def of(self, kind: int) -> float:
        """Return what to expect of a request of which nothing is known."""
        return self._counts[kind].mean(self._prior[kind], _PRIOR_WEIGHT)

    def for_request(self) -> RequestOdds:
        """Return the odds of one request, which begin with what all have taught."""
        return RequestOdds(self, [_Count() for _ in self._prior])

    def add(self, kind: int, *, right: bool) -> None:
        """Count a guess."""
        self._counts[kind].add(right=right)

    def fade(self, kind: int) -> None:
        """Trust what was learned a little less, so that it will be tried again some day."""
        self._counts[kind].fade(_FADE)


@dataclass(slots=True)
class RequestOdds:
    """Learns for one request."""

    _all: Odds
    _own: list[_Count] = field(repr=False)

    @property
    def num_kinds(self) -> int:
        """How many kinds of guesses there are."""
        return len(self._own)

    def of(self, kind: int) -> float:
        """Return the odds of a guess of a kind, if those before it are right."""
        return self._own[kind].mean(self._all.of(kind), _SHARED_WEIGHT)

    def learn(self, proposal: Proposal, outcome: Outcome) -> None:
        """Hear what became of a proposal."""
        kinds = proposal.kinds
        for guess, is_right in outcome.trials(proposal):
            self.add(kinds[guess], right=is_right)
        if not outcome.tried:
            self.fade(kinds[0])

    def add(self, kind: int, *, right: bool) -> None:
        """Count a guess, for the request and for all."""
        self._all.add(kind, right=right)
        self._own[kind].add(right=right)

    def fade(self, kind: int) -> None:
        """Trust what was learned a little less, so that it will be tried again some day."""
        self._all.fade(kind)
        self._own[kind].fade(_FADE)
