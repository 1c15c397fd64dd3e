"""Guesses that cost nothing: what followed the same words before.

The method that is called n-gram, prompt lookup or inference with reference; here with three
references: the request's own tokens, what its caller expects the answer to be like, and what
the same tenant's earlier answers said (suffix statistics). Where a constraint leaves no choice,
what it forces comes first.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.spec.forced import ForcedTokens
from twostroke.spec.index import Match, TokenIndex
from twostroke.spec.memory import Memory, until_break
from twostroke.spec.odds import Odds, RequestOdds
from twostroke.spec.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.core.request import Request
    from twostroke.spec.proposal import Outcome, Price

# Guesses are of a kind with those behind matches of about the same length: the kinds' least
# lengths, and how often such guesses are right before anything is known.
_LENGTHS = (3, 4, 5, 6, 8, 12, 16, 24, 32)
_PRIOR = (0.35, 0.45, 0.55, 0.62, 0.7, 0.8, 0.87, 0.92, 0.96)
_LEAST_SHARE = 0.5  # of the places, that must go on with a token for it to be guessed
_EXPECTED = 12  # as how long a match the beginning of what the caller expects counts
_TAIL = 0.25  # of what the cheapest rows cost: further ones may be cheaper, up to the next eight
_SHARE = 0.005  # of a step's time, that looking may take
_TIME_STEP = 0.05


class ContextProposer:
    """Looks for the longest end of a request's tokens in the references, and offers what followed.

    Where several places have the same longest match, each next token is that of most of them.

    Looking costs next to nothing, but not nothing: of many requests in short steps only as many are
    looked at as fit into a small share of the step, in turn, and those of which the last guess was
    right.
    """

    name = "ngram"

    def __init__(self) -> None:
        """Know nothing yet."""
        self._memory = Memory()
        self._forced = ForcedTokens()
        self._odds = {source: Odds(_PRIOR) for source in ("context", "prediction", "memory")}
        self._requests: dict[Request, _References] = {}
        self._hot: set[Request] = set()  # their last guess was right
        self._look_s = 1e-5
        self._turn = 0

    def propose(self, requests: Sequence[Request], price: Price) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        began_s = time.perf_counter()
        looked_at = self._looked_at(requests, price)
        found: list[Proposal | None] = [None] * len(requests)
        for index in looked_at:
            found[index] = self._propose(requests[index], price)
        look_s = (time.perf_counter() - began_s) / len(looked_at)
        self._look_s += _TIME_STEP * (min(look_s, 2 * self._look_s) - self._look_s)
        return found

    def _looked_at(self, requests: Sequence[Request], price: Price) -> Sequence[int]:
        """Return the indices of the requests for which there is time in a step."""
        count = len(requests)
        room = count
        if price.rate:
            room = max(1, int(_SHARE * count / (price.rate * self._look_s)))
        if room >= count:
            return range(count)
        first = self._turn = (self._turn + room) % count
        in_turn = {index % count for index in range(first, first + room)}
        return sorted(in_turn.union(i for i in range(count) if requests[i] in self._hot))

    def _propose(self, request: Request, price: Price) -> Proposal | None:
        if forced := self._forced.propose(request, price):
            return forced
        known = self._requests.get(request)
        if known is None:
            known = self._requests[request] = _References.of(request, self._odds)
        known.own.catch_up()
        found = max(self._matches(request, known), key=lambda m: m[1].length, default=None)
        if found is None:
            return None
        source, match, index = found
        tokens, shares = _followers(index.tokens, match.ends, price.most)
        of_kind = known.odds[source]
        kinds: list[int] = []
        odds: list[float] = []
        worth = 1.0
        for place, share in enumerate(shares):
            kind = _kind(match.length + place)
            odd = of_kind.of(kind) * share
            worth *= odd
            if worth < (_TAIL if odds else 1) * price.row_chance:
                break
            kinds.append(kind)
            odds.append(odd)
        if odds:
            return Proposal(source, tuple(tokens[: len(odds)]), tuple(odds), tuple(kinds))
        if shares:  # no number of such guesses could pay
            of_kind.fade(_kind(match.length))
            self._hot.discard(request)
        return None

    def learn(self, request: Request, proposal: Proposal, outcome: Outcome) -> None:
        """Hear what became of a proposal."""
        known = self._requests.get(request)
        if proposal.source == ForcedTokens.source:
            self._forced.learn(request, proposal, outcome)
        elif known is not None:
            known.odds[proposal.source].learn(proposal, outcome)
        if outcome.right:
            self._hot.add(request)
        else:
            self._hot.discard(request)

    def close(self) -> None:
        """Hold nothing that must be given back."""

    def finish(self, request: Request) -> None:
        """Remember what a request has said, for its tenant's next ones."""
        self._requests.pop(request, None)
        self._hot.discard(request)
        self._forced.finish(request)
        self._memory.add(request)

    def _matches(
        self, request: Request, known: _References
    ) -> Iterator[tuple[str, Match, TokenIndex]]:
        if match := known.own.match(request.tokens):
            yield "context", match, known.own
        if known.expected is not None:
            num_output = request.num_output
            if known.num_as_expected(request) == num_output:
                match = Match(max(_EXPECTED, num_output), (num_output,))
            else:
                match = known.expected.match(request.tokens)
            if match:
                yield "prediction", match, known.expected
        for index in self._memory.of(request):
            if match := index.match(request.tokens):
                yield "memory", match, index


@dataclass(slots=True)
class _References:
    own: TokenIndex
    expected: TokenIndex | None
    odds: dict[str, RequestOdds]
    _num_as_expected: int = 0

    @classmethod
    def of(cls, request: Request, odds: dict[str, Odds]) -> _References:
        prediction = request.hints.prediction
        expected = TokenIndex(list(prediction)) if prediction else None
        own_odds = {source: shared.for_request() for source, shared in odds.items()}
        return cls(TokenIndex(request.tokens), expected, own_odds)

    def num_as_expected(self, request: Request) -> int:
        """Return how many tokens of the answer are, from its first one on, what was expected."""
        expected = self.expected.tokens if self.expected is not None else []
        said, end = request.tokens, min(len(expected), request.num_output)
        count = self._num_as_expected
        while count < end and said[request.num_prompt + count] == expected[count]:
            count += 1
        self._num_as_expected = count
        return count


def _kind(length: int) -> int:
    return bisect_right(_LENGTHS, length) - 1


def _followers(tokens: list[int], ends: Sequence[int], most: int) -> tuple[list[int], list[float]]:
    """Return what followed, token by token that of most places, and the share of those places."""
    if len(ends) == 1:
        found = until_break(tokens[ends[0] : ends[0] + most])
        return found, [1.0] * len(found)
    runs = [until_break(tokens[end : end + most]) for end in ends]
    guesses: list[int] = []
    shares: list[float] = []
    for depth in range(most):
        nexts = [run[depth] for run in runs if depth < len(run)]
        if not nexts:
            break
        token, count = Counter(nexts).most_common(1)[0]  # the latest place's among equals
        share = count / len(runs)
        if share < _LEAST_SHARE:
            break
        guesses.append(token)
        shares.append(share)
        runs = [run for run in runs if depth < len(run) and run[depth] == token]
    return guesses, shares
