"""Guesses of a smaller model, which may have a vocabulary of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from twostroke.core.draft_tree import num_accepted
from twostroke.core.frozen import Frozen
from twostroke.core.request import Request
from twostroke.engine.kv_cache import PagePool, PrefixIndex
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig
from twostroke.engine.speculation.acceptance import AcceptanceRate
from twostroke.engine.speculation.draft_sequences import (
    ANY_VOCABULARY,
    DraftSequence,
    ModelProposer,
    Sequences,
    TimedRunner,
)
from twostroke.engine.speculation.proposal import Proposal
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends.interface import Runner
    from twostroke.core.step import TokenLogprobs
    from twostroke.engine.speculation.draft_sequences import State
    from twostroke.engine.speculation.proposal import DraftCost
    from twostroke.engine.speculation.step_time import StepTimeModel
    from twostroke.model.tokenizer import Translation

_NUM_SURE = 10  # kinds of guesses: those of which the draft was about as sure
_UNFINISHED = 0.7  # prior share of the end of a text that may begin a longer token
_SURE_PRIOR = tuple((kind + 0.5) / _NUM_SURE for kind in range(_NUM_SURE))
PRIOR = (*_SURE_PRIOR, *[_UNFINISHED * prior for prior in _SURE_PRIOR])
FIRST_PRIOR = 0.75  # rate of first guesses
_LENGTH_STEP = 0.05
_DECLINED_RETURN = 0.02  # of first guesses' rate to its prior, when a prompt was not worth reading
_UNKNOWN = 0  # stands for a token that the draft has no row for
_AS_REQUEST: Any = {
    "logprobs": 0,
    "prompt_logprobs": None,
    "max_tokens": None,
    "min_tokens": 0,
}
# With another vocabulary a shared random number means nothing: the likeliest token is best.
_LIKELIEST = ANY_VOCABULARY | {"temperature": 0.0, "logprobs": 0}
_UNSETTLED = 2  # tokens at the end of a text that more of it may change
_STRIDE = 2048  # tokens of a prompt that are translated at once, so that no step waits for long


class DraftModel(ModelProposer["DraftFollower"]):
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
        step_time: StepTimeModel,
        *,
        vocab_size: int,
        own_vocab_size: int,
        context_length: int,
        token_budget: int,
        words: TokenTranslator | None = None,
    ) -> None:
        """Write with `runner`, up to `token_budget` rows a step.

        `vocab_size` is the target's. The draft, with `own_vocab_size`, may have rows for tokens
        that do not exist, or lack some of the target's control tokens. `words` translates if the
        vocabularies differ.
        """
        facts = runner.facts
        pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
        self._index = PrefixIndex(pool, reuse_generated=words is None)
        config = SchedulerConfig(context_length, token_budget, token_budget)
        timed = TimedRunner(runner, step_time)
        scheduler = Scheduler(config, pool, self._index, Continuous())
        self._sequences = Sequences[DraftFollower](timed, scheduler)
        super().__init__("draft", timed, self._sequences.forget)
        self._token_ids = range(own_vocab_size if words is not None else vocab_size)
        self._own_vocab_size = own_vocab_size
        self._words = words
        self._rate = AcceptanceRate(PRIOR, FIRST_PRIOR)
        self._declined: set[Request] = set()
        self._answer_length = 100.0  # on average

    def propose(self, requests: Sequence[Request], price: DraftCost) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        least = self._sequences.least_chance(len(requests), price)
        found = [self._follow(request, price, least) for request in requests]
        self._sequences.guess([f for f in found if f is not None], len(requests), price)
        return [None if f is None else f.proposal(self.name, price.most) for f in found]

    def finish(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        if request.num_output:
            self._answer_length += _LENGTH_STEP * (request.num_output - self._answer_length)
        self._declined.discard(request)
        super().finish(request)

    def _follow(self, request: Request, price: DraftCost, least: float) -> DraftFollower | None:
        """Return a follower that has the request's tokens; None if it is to make no guess."""
        if request in self._declined:
            return None
        follower = self._followers.get(request)
        if follower is None or follower.sequence.is_finished:
            follower = self._followers[request] = self._meet(request)
        if not follower.rate.pays(least):
            return None
        sequence, transcript = follower.sequence, follower.transcript
        if transcript is None:
            tokens, num_final = request.tokens, len(request.tokens)
        else:
            transcript.follow(request)
            tokens, num_final = transcript.tokens, transcript.num_settled
            sequence.num_prompt = transcript.num_prompt
            if not transcript.is_ready:
                return None
        too_long = len(tokens) + price.most >= self._sequences.context_length
        is_new = sequence not in self._sequences
        if too_long or (is_new and not self._reading_pays(request, tokens, price, least)):
            self._rate.recover(_DECLINED_RETURN)
            super().finish(request)
            self._declined.add(request)
            return None
        if request.params.has_penalties:
            self._runner.runner.forget(sequence)  # it has counted wrong guesses
        first = min(sequence.num_final or 0, len(sequence.tokens))
        same = first + num_accepted(sequence.tokens[first:], tokens[first:])
        kept = min(same, len(tokens) - 1)  # the last one is computed for its logits
        new = [token if token < self._own_vocab_size else _UNKNOWN for token in tokens[kept:]]
        sequence.num_final = num_final
        self._sequences.rewrite(follower, kept, new)
        return follower

    def _meet(self, request: Request) -> DraftFollower:
        words, transcript, end_ids, options = self._words, None, request.end_ids, _AS_REQUEST
        if words is not None:
            options = _LIKELIEST
            transcript, end_ids = DraftTokens(words), words.to_target.source.eos_ids
        params = replace(request.params, **options)
        sequence = Request(
            request.id, [], request.num_prompt, params, request.seed, salt=request.salt, num_final=0
        )
        rate = self._rate.for_request()
        return DraftFollower(
            sequence, rate, _NUM_SURE, self._token_ids, end_ids=end_ids, transcript=transcript
        )

    def _reading_pays(
        self, request: Request, tokens: list[int], price: DraftCost, least: float
    ) -> bool:
        """Return whether guesses may save more time than reading the request takes.

        Each guess costs as much time as `least` tokens take without any.
        """
        hit = self._index.match(self._index.chain(request.salt), tokens, request.num_prompt)
        num_known = hit.num_pages * self._runner.runner.facts.page_size
        left = max(self._answer_length - request.num_output, self._answer_length / 4)
        if request.params.max_tokens is not None:
            left = min(left, request.params.max_tokens - request.num_output)
        batch = BatchShape.prefill(max(1, len(tokens) - num_known), num_known)
        prompt_s = self._runner.step_time.seconds(batch)
        return _share_saved(self._rate.first, least, price.most) * left >= price.rate * prompt_s


@dataclass(slots=True, eq=False)
class DraftFollower(DraftSequence):
    """A request as the draft knows it; `transcript` is its text in the draft's own tokens."""

    end_ids: frozenset[int] = frozenset()
    transcript: DraftTokens | None = None

    def take(self, drawn: int, logprobs: TokenLogprobs | None, hidden: State | None = None) -> bool:
        """Add a drawn token to the guesses; return whether another one may follow."""
        return DraftSequence.take(self, drawn, logprobs, hidden) and drawn not in self.end_ids

    def proposal(self, source: str, most: int) -> Proposal | None:
        """Return up to `most` guesses, in the target's tokens."""
        if self.transcript is None:
            return DraftSequence.proposal(self, source, most)
        tokens, kinds = self._translated(self.transcript.words.to_target)
        if not tokens:
            return None
        odds = [self.rate.of(kind) for kind in kinds[:most]]
        return Proposal(source, tuple(tokens[:most]), tuple(odds), tuple(kinds[:most]))

    def _translated(self, translation: Translation) -> tuple[list[int], list[int]]:
        """Return the target's tokens for the guesses, and their kinds.

        A token is as sure as all guesses together that reach into it and not into one before it.
        """
        translated, ends = translation.translate(self.tokens), translation.end_offsets(self.tokens)
        kinds, at = [], 0
        for end in translated.ends:
            first = at
            while at < len(ends) and (ends[at - 1] if at else 0) < end:
                at += 1
            kinds.append(self.kind(math.prod(self.sure[first:at])))
        if kinds:
            kinds[-1] += _NUM_SURE
        return translated.tokens, kinds


class TokenTranslator(Frozen):
    """Translates the target's tokens into the draft's, and back."""

    to_draft: Translation
    to_target: Translation

    def before(self, request: Request) -> list[int]:
        """Return the tokens that the draft wants before a text that does not begin with them."""
        prefix = self.to_draft.target.prefix_ids
        translated = self.to_draft.translate(request.tokens[: len(prefix)]).tokens
        return [] if translated == prefix else prefix


@dataclass(slots=True, eq=False)
class DraftTokens:
    """A request's text in the draft's tokens.

    The first `num_settled` of `tokens` say what the first `num_read` of the request's do, and will
    stay; the others say the rest as well as can be known by now.
    """

    words: TokenTranslator
    stride: int = _STRIDE
    tokens: list[int] = field(default_factory=list)
    num_settled: int = 0
    num_prompt: int = 0  # settled tokens of the request's prompt
    num_read: int = 0
    is_behind: bool = True  # there is more of the request to translate
    is_ready: bool = False  # a guess may follow `tokens`
    _is_new: bool = True  # the prompt was not translated to its end yet
    _span: int = 0  # tokens beyond `stride` that must be translated at once

    def follow(self, request: Request) -> None:
        """Translate some more of what the request has become."""
        if not self.tokens:
            self.tokens += self.words.before(request)
            self.num_settled = len(self.tokens)
        first = self.num_settled
        end = self.num_read + self.stride + self._span
        translated, is_whole = self._translate(request.tokens[self.num_read : end])
        self.is_behind = end < len(request.tokens)
        if self._is_new:
            self.num_prompt = self.num_settled
        if self.is_behind:
            # What follows a cut may change what is before it; where that is all, take a longer one.
            self._span = self.stride + 2 * self._span if self.num_settled == first else 0
            translated = translated[: self.num_settled - first]
        self.tokens[first:] = translated
        self._is_new &= self.is_behind
        self.is_ready = is_whole and not self.is_behind and bool(self.tokens)

    def _translate(self, new: list[int]) -> tuple[list[int], bool]:
        """Return the draft's tokens, and whether they are whole; settle all but the last ones."""
        translation = self.words.to_draft
        translated = translation.translate(new)
        breaks, ends = translation.character_starts(new), translated.ends
        for count in range(len(translated.tokens) - _UNSETTLED, 0, -1):
            if ends[count - 1] in breaks and ends[count - 1] < ends[count]:
                self.num_read += breaks[ends[count - 1]]
                self.num_settled += count
                break
        return translated.tokens, translated.is_whole


def _share_saved(chance: float, cost: float, most: int) -> float:
    """Return the share of the time that the best number of guesses up to `most` saves.

    Each is right with `chance` if those before it are, and costs as much as `cost` tokens.
    """
    expected = accumulate(chance**count for count in range(most + 1))  # tokens of a step
    return max(1 - (1 + count * cost) / tokens for count, tokens in enumerate(expected))
