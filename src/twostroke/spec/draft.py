"""Guesses of a smaller model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from twostroke.cache import PagePool, PrefixIndex
from twostroke.core.request import Request
from twostroke.core.tree import num_accepted
from twostroke.program import BatchShape
from twostroke.schedule import Continuous, Scheduler, SchedulerConfig
from twostroke.spec.acceptance import AcceptanceRate
from twostroke.spec.guesses import ANY_VOCABULARY, Guesses
from twostroke.spec.proposal import Proposal
from twostroke.spec.sequences import SequenceProposer
from twostroke.spec.transcript import Transcript

if TYPE_CHECKING:
    from twostroke.backends import Runner
    from twostroke.core.step import Delta, StepResult
    from twostroke.spec.proposal import Price
    from twostroke.spec.step_time import StepTime
    from twostroke.spec.transcript import Words
    from twostroke.tokenize import Translation

_NUM_SURE = 10  # kinds of guesses: those of which the draft was about as sure
_UNFINISHED = 0.7  # prior share of the end of a text that may begin a longer token
_SURE_PRIOR = tuple((kind + 0.5) / _NUM_SURE for kind in range(_NUM_SURE))
PRIOR = (*_SURE_PRIOR, *[_UNFINISHED * prior for prior in _SURE_PRIOR])
FIRST_PRIOR = 0.75  # rate of first guesses
_LENGTH_STEP = 0.05
_DECLINED_RETURN = 0.02  # of first guesses' rate to its prior, when a prompt was not worth reading
_UNKNOWN = 0  # stands for a token that the draft has no row for
_AS_REQUEST: Any = {"logprobs": 0, "max_tokens": None, "min_tokens": 0}
# With another vocabulary a shared random number means nothing: the likeliest token is best.
_LIKELIEST = ANY_VOCABULARY | {"temperature": 0.0, "logprobs": 0}


@dataclass(slots=True, eq=False)
class DraftFollower:
    """A request as the draft knows it; `transcript` is its text in the draft's own tokens."""

    request: Request
    sequence: Request
    guesses: Guesses
    end_ids: frozenset[int]
    transcript: Transcript | None

    def proposal(self, most: int) -> Proposal | None:
        """Return up to `most` guesses, in the target's tokens."""
        guesses = self.guesses
        if not guesses.tokens:
            return None
        if self.transcript is None:
            tokens, kinds = guesses.tokens, [guesses.kind(sureness) for sureness in guesses.sure]
        else:
            tokens, kinds = self._translated(self.transcript.words.to_target)
        if not tokens:
            return None
        odds = [guesses.rate.of(kind) for kind in kinds[:most]]
        return Proposal("draft", tuple(tokens[:most]), tuple(odds), tuple(kinds[:most]))

    def _translated(self, translation: Translation) -> tuple[list[int], list[int]]:
        """Return the target's tokens for the guesses, and their kinds.

        A token is as sure as all guesses together that reach into it and not into one before it.
        """
        said, ends = translation.say(self.guesses.tokens), translation.ends(self.guesses.tokens)
        kinds, at = [], 0
        for end in said.ends:
            first = at
            while at < len(ends) and (ends[at - 1] if at else 0) < end:
                at += 1
            kinds.append(self.guesses.kind(math.prod(self.guesses.sure[first:at])))
        if kinds:
            kinds[-1] += _NUM_SURE
        return said.tokens, kinds


class DraftModel(SequenceProposer[DraftFollower]):
    """Lets a second, smaller model write ahead.

    It draws as the request would, with its parameters, its seed and the token's index: two models
    that agree on a distribution agree on the token, at any temperature. A draft with a vocabulary
    of its own reads the request's text in its own tokens and takes the likeliest one.

    The draft reads a request's prompt when it is first asked about it, unless the answer is too
    short to make up for that.
    """

    def __init__(
        self,
        runner: Runner,
        step_time: StepTime,
        *,
        vocab_size: int,
        own_vocab_size: int,
        context_length: int,
        token_budget: int,
        words: Words | None = None,
    ) -> None:
        """Write with `runner`, up to `token_budget` rows a step.

        `vocab_size` is the target's. The draft, with `own_vocab_size`, may have rows for tokens
        that do not exist, or lack some of the target's control tokens. `words` translates if the
        vocabularies differ.
        """
        facts = runner.facts
        pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
        self._index = PrefixIndex(pool, reuse_generated=words is None)
        config = SchedulerConfig(
            context_length, max_running=token_budget, token_budget=token_budget
        )
        super().__init__(
            "draft", runner, step_time, Scheduler(config, pool, self._index, Continuous())
        )
        self._page_size = facts.page_size
        self._vocab_size, self._own_vocab_size = vocab_size, own_vocab_size
        self._words = words
        self._rate = AcceptanceRate(PRIOR, FIRST_PRIOR)
        self._declined: set[Request] = set()
        self._answer_length = 100.0  # on average

    def finish(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        if request.num_output:
            self._answer_length += _LENGTH_STEP * (request.num_output - self._answer_length)
        self._declined.discard(request)
        super().finish(request)

    def _follow(self, request: Request, price: Price, least: float) -> DraftFollower | None:
        if request in self._declined:
            return None
        follower = self._followers.get(request) or self._meet(request)
        self._followers[request] = follower
        if not follower.guesses.rate.pays(least):
            return None
        sequence, transcript = follower.sequence, follower.transcript
        if transcript is None:
            tokens, num_final = request.tokens, len(request.tokens)
        else:
            transcript.follow(request)
            tokens, num_final = transcript.tokens, transcript.num_settled
            if not transcript.is_ready:
                return None
        is_new = sequence not in self._by_sequence
        too_long = len(tokens) + price.most >= self._scheduler.config.context_length
        if too_long or (is_new and not self._reading_pays(request, tokens, price, least)):
            self._rate.recover(_DECLINED_RETURN)
            self._drop(follower)
            self._declined.add(request)
            return None
        if request.params.has_penalties:
            self._runner.runner.forget(sequence)  # it has counted wrong guesses
        first = min(sequence.num_final or 0, len(sequence.tokens))
        same = first + num_accepted(sequence.tokens[first:], tokens[first:])
        kept = min(same, len(tokens) - 1)  # the last one is computed for its logits
        new = [token if token < self._own_vocab_size else _UNKNOWN for token in tokens[kept:]]
        if transcript is not None:
            sequence.num_prompt = transcript.num_prompt
        sequence.num_final = num_final
        self._continue(follower, kept, new)
        return follower

    def _meet(self, request: Request) -> DraftFollower:
        same_words = self._words is None
        params = replace(request.params, **(_AS_REQUEST if same_words else _LIKELIEST))
        sequence = Request(
            request.id, [], request.num_prompt, params, request.seed, salt=request.salt, num_final=0
        )
        transcript, end_ids = None, request.end_ids
        if self._words is not None:
            transcript, end_ids = Transcript(self._words), self._words.to_target.source.eos_ids
        guesses = Guesses(self._rate.for_request(), _NUM_SURE)
        return DraftFollower(request, sequence, guesses, end_ids, transcript)

    def _reading_pays(
        self, request: Request, tokens: list[int], price: Price, least: float
    ) -> bool:
        """Return whether guesses may save more time than reading the request takes.

        Each guess costs as much time as `least` tokens take without any.
        """
        salt, num_prompt = request.salt, request.num_prompt
        hit = self._index.match(self._index.chain(salt), tokens, num_prompt)
        num_known = hit.num_places * self._page_size
        left = max(self._answer_length - request.num_output, self._answer_length / 4)
        if request.params.max_tokens is not None:
            left = min(left, request.params.max_tokens - request.num_output)
        batch = BatchShape.prefill(max(1, len(tokens) - num_known), num_known)
        prompt_s = self._runner.step_time.seconds(batch)
        return _share_saved(self._rate.first, least, price.most) * left >= price.rate * prompt_s

    def _take_back(self, follower: DraftFollower) -> None:
        self._scheduler.rewrite(follower.sequence, follower.sequence.num_computed, [])

    def _take(self, follower: DraftFollower, delta: Delta, result: StepResult, row: int) -> bool:
        [token] = delta.tokens
        if self._words is None and token >= self._vocab_size:
            return False
        goes_on = super()._take(follower, delta, result, row)
        return goes_on and token not in follower.end_ids

    def _proposal(self, follower: DraftFollower, most: int) -> Proposal | None:
        return follower.proposal(most)


def _share_saved(chance: float, cost: float, most: int) -> float:
    """Return the share of the time that the best number of guesses up to `most` saves.

    Each is right with `chance` if those before it are, and costs as much as `cost` tokens.
    """
    expected = taken = right = 1.0
    best = 0.0
    for _ in range(most):
        right *= chance
        expected += right
        taken += cost
        best = max(best, 1 - taken / expected)
    return best
