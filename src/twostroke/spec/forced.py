"""Guesses that a grammar makes: the tokens of a text that cannot go on in another way."""

from __future__ import annotations

from itertools import accumulate, takewhile
from operator import mul
from typing import TYPE_CHECKING

from twostroke.spec.odds import Odds, RequestOdds
from twostroke.spec.proposal import Proposal

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.spec.proposal import Outcome, Price

# The text is certain, the tokens that spell it are not: a model may cut words otherwise. Kinds are
# places behind the newest token; further ones are of the last kind.
_PRIOR = (0.9, 0.9, 0.9, 0.9)


class ForcedTokens:
    """Offers what must follow in the answer of a request with a constraint, such as a key."""

    source = "grammar"

    def __init__(self) -> None:
        """Know nothing yet."""
        self._odds = Odds(_PRIOR)
        self._requests: dict[Request, RequestOdds] = {}

    def propose(self, request: Request, price: Price) -> Proposal | None:
        """Return what must follow, if anything must and it may pay."""
        if request.matcher is None:
            return None
        tokens = request.matcher.forced(request.output)[: price.most]
        if not tokens:
            return None
        odds = self._requests.get(request)
        if odds is None:
            odds = self._requests[request] = self._odds.for_request()
        kinds = [min(place, len(_PRIOR) - 1) for place in range(len(tokens))]
        chances = [odds.of(kind) for kind in kinds]
        worths = takewhile(lambda worth: worth >= price.row_chance, accumulate(chances, mul))
        count = len(list(worths))
        if not count:
            odds.fade(0)
            return None
        return Proposal(
            self.source, tuple(tokens[:count]), tuple(chances[:count]), tuple(kinds[:count])
        )

    def learn(self, request: Request, proposal: Proposal, outcome: Outcome) -> None:
        """Hear what became of a proposal."""
        odds = self._requests.get(request)
        if odds is not None:
            odds.learn(proposal, outcome)

    def finish(self, request: Request) -> None:
        """Forget a request."""
        self._requests.pop(request, None)
