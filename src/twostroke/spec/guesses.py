"""What heads have guessed behind one request, and how sure they were."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.step import NO_TOKEN
from twostroke.spec.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.step import TokenLogprobs
    from twostroke.spec.odds import RequestOdds
    from twostroke.spec.proposal import Outcome

# What heads draw without: nothing that names tokens fits a vocabulary of their own.
PLAIN: Final[dict[str, Any]] = {
    "logprobs": 0,
    "logit_bias": {},
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
}

_HOPE_STEP = 0.05
_HOPE_FADE = 0.002  # of the way back to the beginning, each time that nothing was guessed


@dataclass(frozen=True, slots=True)
class HeadsOdds:
    """How often heads were right on text that they had not learned from.

    `accepted[d]`: guesses at depth d, if all before were right. `right_if_sure[k]`: guesses of
    which the head was sure by a share of k to k + 1 parts of as many as there are.
    """

    accepted: tuple[float, ...]
    right_if_sure: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Guesses:
    """Guesses of one request's next tokens, of which each has odds by how sure the head was.

    `hope` is how often the first guess was right lately, `first_hope` what it began with.
    """

    odds: RequestOdds
    first_hope: float
    hope: float = 0.0
    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    chance: float = 1.0  # that all are right

    def __post_init__(self) -> None:
        """Begin with what is known of all requests."""
        self.hope = self.first_hope

    def clear(self) -> None:
        """Drop the guesses."""
        self.tokens, self.kinds, self.chance = [], [], 1.0

    def add(self, drawn: int, logprobs: TokenLogprobs | None, token_ids: Sequence[int]) -> bool:
        """Take over what a head drew, a place in `token_ids`; False if it drew nothing."""
        if drawn == NO_TOKEN or logprobs is None:
            return False
        num_kinds = self.odds.num_kinds
        kind = min(int(math.exp(logprobs.logprob) * num_kinds), num_kinds - 1)
        self.tokens.append(token_ids[drawn])
        self.kinds.append(kind)
        self.chance *= self.odds.of(kind)
        return True

    def is_hopeless(self, least: float) -> bool:
        """Whether to leave it for now, if guesses pay from the chance `least` on."""
        if self.hope >= least:
            return False
        self.hope += _HOPE_FADE * (self.first_hope - self.hope)
        return True

    def learn(self, proposal: Proposal, outcome: Outcome) -> None:
        """Hear what became of a proposal."""
        if outcome.tried:
            self.odds.learn(proposal, outcome)
            self.hope += _HOPE_STEP * (bool(outcome.right) - self.hope)

    def proposal(self, source: str) -> Proposal | None:
        """Return the guesses."""
        if not self.tokens:
            return None
        odds = tuple(self.odds.of(kind) for kind in self.kinds)
        return Proposal(source, tuple(self.tokens), odds, tuple(self.kinds))
