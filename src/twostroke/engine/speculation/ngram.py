"""N-gram drafts, also called prompt lookup: tokens that followed the same text before.

Drafts are looked up in three texts: the request's own tokens, the answer that its caller predicts,
and earlier answers to the same tenant. If a constraint allows only one text, this text is proposed
first.
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

# The kind of a draft depends on the length of the match: the minimum length of each kind, and the
# prior of its acceptance rate.
_MIN_LENGTHS = (3, 4, 5, 6, 8, 12, 16, 24, 32)
_PRIOR = (0.35, 0.45, 0.55, 0.62, 0.7, 0.8, 0.87, 0.92, 0.96)
# A grammar can force a text, but the text can have several tokenizations. There is a kind for each
# of the first tokens.
_GRAMMAR_PRIOR = (0.9, 0.9, 0.9, 0.9)
_PRIORS = {
    "context": _PRIOR,
    "prediction": _PRIOR,
    "memory": _PRIOR,
    "grammar": _GRAMMAR_PRIOR,
}
_MIN_AGREEMENT = 0.5  # the part of the occurrences that must agree on a token
_PREDICTION_MATCH_TOKENS = 12  # the minimum length for which the start of a prediction counts
_LATER_ROW_COST_RATIO = 0.25  # rows after the first may be cheaper, up to the next eight
_MAX_LOOKUP_RATIO = 0.005  # of a step's time
_LOOKUP_WEIGHT = 0.05  # of a new measurement in the average


@dataclass(slots=True)
class _References:
    """The texts in which a request's drafts are looked up, and the acceptance rate of each text.

    Attributes:
        context: the request's tokens.
        prediction: the answer that the caller predicts.
        rates: acceptance rates by source.
        num_predicted: how many of the answer's first tokens are equal to the prediction.
        was_right: whether the last draft was right.
    """

    context: TokenIndex
    prediction: TokenIndex
    rates: dict[str, AcceptanceRate]
    num_predicted: int = 0
    was_right: bool = False


class NgramProposer:
    """Drafts tokens that followed the same text before: in the request, or in earlier answers.

    The longest suffix of the request's tokens is looked up. If the longest match has several
    occurrences, each next token is the most frequent one after them. A lookup takes microseconds.
    If there are many requests in short steps, lookups take turns so that they fit into half a
    percent of the step. Requests whose last draft was right are always looked up.
    """

    name = "ngram"

    def __init__(self) -> None:
        """Start without earlier answers to look up."""
        self._memory = AnswerMemory()
        self._rates = {source: AcceptanceRate(prior) for source, prior in _PRIORS.items()}
        self._requests: dict[Request, _References] = {}
        self._lookup_s = 1e-5
        self._next_turn = 0

    def propose(self, requests: Sequence[Request], cost: DraftCost) -> list[Proposal | None]:
        """Look up draft tokens for each request; None for no drafts.

        The newest token of each request is not computed yet.
        """
        began_s = time.perf_counter()
        indices = self._select(requests, cost)
        proposals: list[Proposal | None] = [None] * len(requests)
        for index in indices:
            proposals[index] = self._propose(requests[index], cost)
        lookup_s = (time.perf_counter() - began_s) / len(indices)
        self._lookup_s += _LOOKUP_WEIGHT * (min(lookup_s, 2 * self._lookup_s) - self._lookup_s)
        return proposals

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Learn which drafts of a request's proposal were right."""
        if references := self._requests.get(request):
            references.rates[proposal.source].learn(proposal, outcome)
            references.was_right = bool(outcome.accepted)

    def finish(self, request: Request) -> None:
        """Store the answer of an ended request, for lookups by later requests of its tenant."""
        self._requests.pop(request, None)
        self._memory.add(request)

    def close(self) -> None:
        """Do nothing: n-gram lookup has no threads to end."""

    def _select(self, requests: Sequence[Request], cost: DraftCost) -> Sequence[int]:
        """Return the indices of the requests for which the step has time to look up drafts.

        Requests take turns; requests whose last drafts were right are always selected.
        """
        count = room = len(requests)
        if cost.tokens_per_s:
            room = max(1, int(_MAX_LOOKUP_RATIO * count / (cost.tokens_per_s * self._lookup_s)))
        if room >= count:
            return range(count)
        first = self._next_turn = (self._next_turn + room) % count
        in_turn = {index % count for index in range(first, first + room)}
        all_references = map(self._requests.get, requests)
        were_right = {
            index
            for index, references in enumerate(all_references)
            if references and references.was_right
        }
        return sorted(in_turn | were_right)

    def _propose(self, request: Request, cost: DraftCost) -> Proposal | None:
        references = self._requests.get(request)
        if references is None:
            references = self._requests[request] = _References(
                context=TokenIndex(request.tokens),
                prediction=TokenIndex(list(request.hints.prediction)),
                rates={source: rate.for_request() for source, rate in self._rates.items()},
            )
        if request.matcher is not None:
            forced = request.matcher.forced(request.output)[: cost.max_drafts]
            kinds = [min(depth, len(_GRAMMAR_PRIOR) - 1) for depth in range(len(forced))]
            proposal = _paying_part(
                references,
                "grammar",
                tokens=forced,
                kinds=kinds,
                agreements=[1.0] * len(forced),
                cost=cost,
            )
            if proposal is not None:
                return proposal
        references.context.catch_up()
        matches = self._matches(request, references)
        longest = max(matches, key=lambda candidate: candidate[1].length, default=None)
        if longest is None:
            return None
        source, match, index = longest
        tokens, agreements = _next_tokens(index.tokens, match.ends, cost.max_drafts)
        kinds = [
            bisect_right(_MIN_LENGTHS, match.length + depth) - 1 for depth in range(len(tokens))
        ]
        proposal = _paying_part(
            references, source, tokens=tokens, kinds=kinds, agreements=agreements, cost=cost
        )
        references.was_right = references.was_right and proposal is not None
        return proposal

    def _matches(
        self, request: Request, references: _References
    ) -> Iterator[tuple[str, Match, TokenIndex]]:
        """Yield the texts in which a request's last tokens occur.

        Each comes as the name of the source ("context", "prediction" or "memory", for earlier
        answers), the longest match, and the text's index of n-grams.
        """
        if match := references.context.match(request.tokens):
            yield "context", match, references.context
        if len(references.prediction):
            num_output = request.num_output
            if _num_predicted(request, references) == num_output:
                match = Match(max(_PREDICTION_MATCH_TOKENS, num_output), (num_output,))
            else:
                match = references.prediction.match(request.tokens)
            if match:
                yield "prediction", match, references.prediction
        for index in self._memory.of(request):
            if match := index.match(request.tokens):
                yield "memory", match, index


def _paying_part(
    references: _References,
    source: str,
    *,
    tokens: Sequence[int],
    kinds: Sequence[int],
    agreements: Sequence[float],
    cost: DraftCost,
) -> Proposal | None:
    """Return a proposal of the first drafts, up to a draft that is too improbable to pay for a row.

    `tokens` are the drafts, `kinds` their kinds, and `agreements` the fraction of the matched
    text's occurrences that continue with each draft. `source` names the text in which they were
    found. None if the first draft does not pay.
    """
    rate, value = references.rates[source], 1.0
    chances: list[float] = []
    for kind, agreement in zip(kinds, agreements, strict=True):
        chance = rate.of(kind) * agreement
        value *= chance
        if value < (_LATER_ROW_COST_RATIO if chances else 1) * cost.row_chance:
            break
        chances.append(chance)
    if chances:
        count = len(chances)
        return Proposal(source, tuple(tokens[:count]), tuple(chances), tuple(kinds[:count]))
    if kinds:
        rate.fade(kinds[0])
    return None


def _num_predicted(request: Request, references: _References) -> int:
    """Return how many of the answer's first tokens are equal to the caller's prediction."""
    tokens, prediction, start = request.tokens, references.prediction.tokens, request.num_prompt
    count, end = references.num_predicted, min(len(prediction), request.num_output)
    while count < end and tokens[start + count] == prediction[count]:
        count += 1
    references.num_predicted = count
    return count


def _next_tokens(
    tokens: list[int], ends: Sequence[int], max_tokens: int
) -> tuple[list[int], list[float]]:
    """Return drafts: the most frequent tokens after the occurrences of a match.

    `ends` are the indices after the occurrences in `tokens`. Also returns an agreement for each
    draft: of the occurrences that continued with the earlier drafts, the fraction that continue
    with this draft.
    """
    continuations = [_until_end(tokens[end : end + max_tokens]) for end in ends]
    if len(continuations) == 1:  # the most frequent case, without counting
        return continuations[0], [1.0] * len(continuations[0])
    drafts: list[int] = []
    agreements: list[float] = []
    for depth in range(max_tokens):
        candidates = [tokens_[depth] for tokens_ in continuations if depth < len(tokens_)]
        if not candidates:
            break
        token, count = Counter(candidates).most_common(1)[0]  # the latest one of equals
        agreement = count / len(continuations)
        if agreement < _MIN_AGREEMENT:
            break
        drafts.append(token)
        agreements.append(agreement)
        continuations = [
            tokens_ for tokens_ in continuations if depth < len(tokens_) and tokens_[depth] == token
        ]
    return drafts, agreements


def _until_end(tokens: list[int]) -> list[int]:
    """Return the tokens before the first `END_OF_ANSWER`, or all tokens without one."""
    return tokens[: tokens.index(END_OF_ANSWER)] if END_OF_ANSWER in tokens else tokens
