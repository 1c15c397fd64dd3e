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
    from twostroke.spec.hope import Hope
    from twostroke.spec.odds import RequestOdds
    from twostroke.spec.proposal import Outcome

_NUM_SEEN = 3  # likeliest tokens, of which those that were not drawn are guessed beside
_LEAST_SURENESS = 0.1  # of a token beside the one that was drawn
# What heads draw without: nothing that names tokens fits a vocabulary of their own.
PLAIN: Final[dict[str, Any]] = {
    "logprobs": _NUM_SEEN,
    "logit_bias": {},
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
}


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

    `tokens` are what the head drew, one behind the other; `others[i]` are what it found likely in
    the place of `tokens[i]`, each with its kind. `hope` is whether to make any.
    """

    odds: RequestOdds
    hope: Hope
    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    others: list[list[tuple[int, int]]] = field(default_factory=list)
    chance: float = 1.0  # that all are right
    expected: float = 0.0  # how many are

    def clear(self) -> None:
        """Drop the guesses."""
        self.tokens, self.kinds, self.others = [], [], []
        self.chance, self.expected = 1.0, 0.0

    def add(self, drawn: int, logprobs: TokenLogprobs | None, token_ids: Sequence[int]) -> bool:
        """Take over what a head drew, a place in `token_ids`; False if it drew nothing."""
        if drawn == NO_TOKEN or logprobs is None:
            return False
        kind = self._kind(math.exp(logprobs.logprob))
        self.tokens.append(token_ids[drawn])
        self.kinds.append(kind)
        self.chance *= self.odds.of(kind)
        self.expected += self.chance
        likely = zip(logprobs.top_ids, map(math.exp, logprobs.top_logprobs), strict=True)
        self.others.append(
            [
                (token_ids[other], self._kind(sureness))
                for other, sureness in likely
                if other != drawn and sureness >= _LEAST_SURENESS
            ]
        )
        return True

    def learn(self, proposal: Proposal, outcome: Outcome) -> None:
        """Hear what became of a proposal."""
        if outcome.tried:
            self.odds.learn(proposal, outcome)
            self.hope.learn(right=bool(outcome.right))

    def proposal(self, source: str, most: int) -> Proposal | None:
        """Return `most` guesses: a chain, with leaves beside it where the head was in doubt."""
        if not self.tokens:
            return None
        tokens, kinds = [*self.tokens], [*self.kinds]
        parents = list(range(-1, len(tokens) - 1))
        for place, others in enumerate(self.others):
            for token, kind in others:
                if len(tokens) < most:
                    tokens.append(token)
                    kinds.append(kind)
                    parents.append(place - 1)
        odds = tuple(self.odds.of(kind) for kind in kinds)
        if len(tokens) == len(self.tokens):
            return Proposal(source, tuple(tokens), odds, tuple(kinds))
        return Proposal(source, tuple(tokens), odds, tuple(kinds), tuple(parents)).best_first()

    def _kind(self, sureness: float) -> int:
        return min(int(sureness * self.odds.num_kinds), self.odds.num_kinds - 1)
