"""Guesses of one request's next tokens, with how sure the guessing model was of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.step import NO_TOKEN
from twostroke.spec.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.step import TokenLogprobs
    from twostroke.spec.acceptance import AcceptanceRate

_NUM_LIKELY = 3  # likeliest tokens; those that were not drawn may be guessed beside the drawn one
_LEAST_SURENESS = 0.1  # of a token beside the drawn one
# Sampling parameters that name tokens mean nothing in another vocabulary.
ANY_VOCABULARY: Final[dict[str, Any]] = {
    "logprobs": _NUM_LIKELY,
    "logit_bias": {},
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
    "max_tokens": None,
}


@dataclass(frozen=True, slots=True)
class HeadAccuracy:
    """How often heads were right on held-out text.

    `accepted[d]` is for guesses at depth d whose ancestors were right; `right_if_sure[k]` for
    guesses of which the head was sure by k to k + 1 parts of the list's length.
    """

    accepted: tuple[float, ...]
    right_if_sure: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Guesses:
    """A chain of guesses, and tokens that were nearly drawn beside them.

    `sure[i]` is the model's probability of `tokens[i]`; `others[i]` are likely tokens in its place,
    each with its kind. `chance` is that all are right, `expected` how many are.
    """

    rate: AcceptanceRate
    num_sure: int  # kinds of guesses, by how sure the model was
    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    others: list[list[tuple[int, int]]] = field(default_factory=list)
    chance: float = 1.0
    expected: float = 0.0

    def clear(self) -> None:
        """Drop the guesses."""
        self.tokens, self.sure, self.others = [], [], []
        self.chance, self.expected = 1.0, 0.0

    def add(
        self, drawn: int, logprobs: TokenLogprobs | None, token_ids: Sequence[int] | None = None
    ) -> bool:
        """Add a drawn token, an index of `token_ids` if given; return False if there is none."""
        if drawn == NO_TOKEN or logprobs is None:
            return False
        sureness = math.exp(logprobs.logprob)
        self.tokens.append(drawn if token_ids is None else token_ids[drawn])
        self.sure.append(sureness)
        self.chance *= self.rate.of(self.kind(sureness))
        self.expected += self.chance
        likely = zip(logprobs.top_ids, map(math.exp, logprobs.top_logprobs), strict=True)
        self.others.append(
            [
                (other if token_ids is None else token_ids[other], self.kind(sureness))
                for other, sureness in likely
                if other != drawn and sureness >= _LEAST_SURENESS
            ]
        )
        return True

    def proposal(self, source: str, most: int) -> Proposal | None:
        """Return up to `most` guesses: the chain, and leaves where the model was in doubt."""
        if not self.tokens:
            return None
        count = min(len(self.tokens), most)
        tokens, kinds = self.tokens[:count], [self.kind(sureness) for sureness in self.sure[:count]]
        parents = list(range(-1, count - 1))
        for place, others in enumerate(self.others[:count]):
            for token, kind in others[: most - len(tokens)]:
                tokens.append(token)
                kinds.append(kind)
                parents.append(place - 1)
        odds = tuple([self.rate.of(kind) for kind in kinds])
        if len(tokens) == count:
            return Proposal(source, tuple(tokens), odds, tuple(kinds))
        return Proposal(source, tuple(tokens), odds, tuple(kinds), tuple(parents)).best_first()

    def kind(self, sureness: float) -> int:
        """Return the kind of a guess of which the model was this sure."""
        return min(int(sureness * self.num_sure), self.num_sure - 1)
