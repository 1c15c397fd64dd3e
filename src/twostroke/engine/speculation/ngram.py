"""Guesses from text that was said before: n-grams, also called prompt lookup.

There are three references: the request's own tokens, the answer that its caller expects, and
earlier answers to the same tenant. Where a constraint leaves only one text, that comes first.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.engine.speculation.acceptance import AcceptanceRate
from twostroke.engine.speculation.proposal import Proposal
from twostroke.engine.speculation.token_index import END_OF_ANSWER, AnswerMemory, Match, TokenIndex

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.core.request import Request
    from twostroke.engine.speculation.proposal import DraftCost, DraftOutcome

# A guess is of a kind with those after matches of about the same length: the least length of each
# kind, and how often such guesses are right before anything is known.
_LENGTHS = (3, 4, 5, 6, 8, 12, 16, 24, 32)
_PRIOR = (0.35, 0.45, 0.55, 0.62, 0.7, 0.8, 0.87, 0.92, 0.96)
# The text that a grammar forces is certain, its tokens are not: a kind for each of the first ones.
_GRAMMAR_PRIOR = (0.9, 0.9, 0.9, 0.9)
_PRIORS = {
    "context": _PRIOR,
    "prediction": _PRIOR,
    "memory": _PRIOR,
    "grammar": _GRAMMAR_PRIOR,
}
_LEAST_SHARE = 0.5  # of the places that must agree on a token for it to be guessed
_EXPECTED = 12  # length of match that the beginning of an expected answer counts as
_TAIL = 0.25  # of the cheapest row's price: further rows may be cheaper, up to the next eight
_LOOKUP_SHARE = 0.005  # of a step's time
_LOOKUP_STEP = 0.05


@dataclass(slots=True)
class _References:
    """One request's own tokens, its expected answer, and how often guesses from each are right."""

    own: TokenIndex
    expected: TokenIndex
    rates: dict[str, AcceptanceRate]
    num_as_expected: int = 0  # tokens of the answer, from the first one on
    is_lucky: bool = False  # its last guess was right


class NgramProposer:
    """Finds the longest end of a request's tokens in the references, and offers what followed.

    Where several places have the same longest match, each next token is that of most of them.
    A lookup takes microseconds. Of many requests in short steps only as many are looked up as fit
    into half a percent of the step, in turn, besides those whose last guess was right.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._memory = AnswerMemory()
        self._rates = {source: AcceptanceRate(prior) for source, prior in _PRIORS.items()}
        self._requests: dict[Request, _References] = {}
        self._lookup_s = 1e-5
        self._turn = 0

    def propose(self, requests: Sequence[Request], price: DraftCost) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        began_s = time.perf_counter()
        chosen = self._chosen(requests, price)
        found: list[Proposal | None] = [None] * len(requests)
        for index in chosen:
            found[index] = self._propose(requests[index], price)
        lookup_s = (time.perf_counter() - began_s) / len(chosen)
        self._lookup_s += _LOOKUP_STEP * (min(lookup_s, 2 * self._lookup_s) - self._lookup_s)
        return found

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Take in what became of a proposal."""
        if known := self._requests.get(request):
            known.rates[proposal.source].learn(proposal, outcome)
            known.is_lucky = bool(outcome.right)

    def finish(self, request: Request) -> None:
        """Remember a request's answer for its tenant's next ones."""
        self._requests.pop(request, None)
        self._memory.add(request)

    def close(self) -> None:
        """Release nothing."""

    def _chosen(self, requests: Sequence[Request], price: DraftCost) -> Sequence[int]:
        """Return the indices of the requests for which a step has time."""
        count = room = len(requests)
        if price.rate:
            room = max(1, int(_LOOKUP_SHARE * count / (price.rate * self._lookup_s)))
        if room >= count:
            return range(count)
        first = self._turn = (self._turn + room) % count
        in_turn = {index % count for index in range(first, first + room)}
        known = map(self._requests.get, requests)
        return sorted(in_turn.union(i for i, one in enumerate(known) if one and one.is_lucky))

    def _propose(self, request: Request, price: DraftCost) -> Proposal | None:
        known = self._requests.get(request)
        if known is None:
            rates = {source: rate.for_request() for source, rate in self._rates.items()}
            expected = TokenIndex(list(request.hints.prediction))
            known = _References(TokenIndex(request.tokens), expected, rates)
            self._requests[request] = known
        if request.matcher is not None:
            forced = request.matcher.forced(request.output)[: price.most]
            kinds = [min(place, len(_GRAMMAR_PRIOR) - 1) for place in range(len(forced))]
            proposal = _paying(known, "grammar", forced, kinds, [1.0] * len(forced), price)
            if proposal is not None:
                return proposal
        known.own.catch_up()
        found = max(self._matches(request, known), key=lambda m: m[1].length, default=None)
        if found is None:
            return None
        source, match, index = found
        tokens, shares = _followers(index.tokens, match.ends, price.most)
        kinds = [bisect_right(_LENGTHS, match.length + place) - 1 for place in range(len(tokens))]
        proposal = _paying(known, source, tokens, kinds, shares, price)
        known.is_lucky = known.is_lucky and proposal is not None
        return proposal

    def _matches(
        self, request: Request, known: _References
    ) -> Iterator[tuple[str, Match, TokenIndex]]:
        """Yield the longest match in each reference, and where it is from."""
        if match := known.own.match(request.tokens):
            yield "context", match, known.own
        if len(known.expected):
            num_output = request.num_output
            if _num_as_expected(request, known) == num_output:
                match = Match(max(_EXPECTED, num_output), (num_output,))
            else:
                match = known.expected.match(request.tokens)
            if match:
                yield "prediction", match, known.expected
        for index in self._memory.of(request):
            if match := index.match(request.tokens):
                yield "memory", match, index


def _paying(
    known: _References,
    source: str,
    tokens: Sequence[int],
    kinds: Sequence[int],
    shares: Sequence[float],
    price: DraftCost,
) -> Proposal | None:
    """Return the first tokens whose rows may pay; None if not even the first one does."""
    rate, worth, odds = known.rates[source], 1.0, list[float]()
    for kind, share in zip(kinds, shares, strict=True):
        odd = rate.of(kind) * share
        worth *= odd
        if worth < (_TAIL if odds else 1) * price.row_chance:
            break
        odds.append(odd)
    if odds:
        count = len(odds)
        return Proposal(source, tuple(tokens[:count]), tuple(odds), tuple(kinds[:count]))
    if kinds:
        rate.fade(kinds[0])
    return None


def _num_as_expected(request: Request, known: _References) -> int:
    """Return how many of the answer's first tokens are as expected."""
    said, expected, start = request.tokens, known.expected.tokens, request.num_prompt
    count, end = known.num_as_expected, min(len(expected), request.num_output)
    while count < end and said[start + count] == expected[count]:
        count += 1
    known.num_as_expected = count
    return count


def _followers(tokens: list[int], ends: Sequence[int], most: int) -> tuple[list[int], list[float]]:
    """Return what followed at most places, and the share of the places that agree so far."""
    runs = [_until_end(tokens[end : end + most]) for end in ends]
    if len(runs) == 1:  # the usual case, quickly
        return runs[0], [1.0] * len(runs[0])
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


def _until_end(tokens: list[int]) -> list[int]:
    """Return the tokens before the end of an answer."""
    return tokens[: tokens.index(END_OF_ANSWER)] if END_OF_ANSWER in tokens else tokens
