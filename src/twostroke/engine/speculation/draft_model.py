"""Drafts of a draft model: a smaller model, which may have another vocabulary."""

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
    DraftSequences,
    ModelProposer,
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

_NUM_PROBABILITY_KINDS = 10  # kinds of drafts: ranges of the draft model's probability
# The last token of a translated text may be the beginning of a longer token.
_LAST_TOKEN_FACTOR = 0.7
PROBABILITY_PRIOR = tuple(
    (kind + 0.5) / _NUM_PROBABILITY_KINDS for kind in range(_NUM_PROBABILITY_KINDS)
)
PRIOR = (*PROBABILITY_PRIOR, *[_LAST_TOKEN_FACTOR * prior for prior in PROBABILITY_PRIOR])
FIRST_PRIOR = 0.75  # rate of first drafts
_LENGTH_WEIGHT = 0.05  # of a new answer in the average length
# Of the prior in the rate of first drafts, when a prompt was not worth its prefill.
_DECLINED_RECOVERY_WEIGHT = 0.02
_PLACEHOLDER_TOKEN = 0  # in place of a token for which the draft model has no row
_SAME_SAMPLING: Any = {
    "logprobs": 0,
    "prompt_logprobs": None,
    "max_tokens": None,
    "min_tokens": 0,
}
# With another vocabulary a shared random number is meaningless: the likeliest token is best.
_GREEDY_SAMPLING = ANY_VOCABULARY | {"temperature": 0.0, "logprobs": 0}
_NUM_UNSETTLED_TOKENS = 2  # at the end of a text, which more text may change
_STRIDE_TOKENS = 2048  # of a prompt that are translated at once, so that no step waits for long


class DraftModel(ModelProposer["DraftModelSequence"]):
    """Proposes draft tokens that a second, smaller model samples.

    The draft model samples with the request's parameters, its seed and the token's index. So two
    models that agree on a distribution agree on the token, at any temperature. A draft model with
    another vocabulary gets the request's text in its own tokens and samples greedily.

    The draft model prefills a request's prompt when it is first asked for drafts of the request,
    unless the answer is probably too short for drafts to save that time.
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
        translator: TokenTranslator | None = None,
    ) -> None:
        """Run the draft model with `runner`, up to `token_budget` rows per step.

        `vocab_size` belongs to the target model and `own_vocab_size` to the draft model. Even with
        equal vocabularies the sizes may differ: by padding rows, or by control tokens that only the
        target has. `translator` is needed if the vocabularies differ.
        """
        facts = runner.facts
        pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
        self._index = PrefixIndex(pool, reuse_generated=translator is None)
        config = SchedulerConfig(context_length, token_budget, token_budget)
        timed = TimedRunner(runner, step_time)
        scheduler = Scheduler(config, pool, self._index, Continuous())
        self._sequences = DraftSequences[DraftModelSequence](timed, scheduler)
        super().__init__("draft", timed, self._sequences.forget)
        self._token_ids = range(own_vocab_size if translator is not None else vocab_size)
        self._own_vocab_size = own_vocab_size
        self._translator = translator
        self._rate = AcceptanceRate(PRIOR, FIRST_PRIOR)
        self._declined: set[Request] = set()
        self._mean_answer_length = 100.0

    def propose(self, requests: Sequence[Request], cost: DraftCost) -> list[Proposal | None]:
        """Let the draft model make draft tokens for each request; None for no drafts.

        The newest token of each request is not computed yet. `cost` says how many drafts may be
        made and how likely a draft must be to pay.
        """
        return self._sequences.propose(requests, cost, follow=self._follow, source=self.name)

    def finish(self, request: Request) -> None:
        """Drop the draft model's copy of a request that has ended."""
        if request.num_output:
            self._mean_answer_length += _LENGTH_WEIGHT * (
                request.num_output - self._mean_answer_length
            )
        self._declined.discard(request)
        super().finish(request)

    def _follow(
        self, request: Request, cost: DraftCost, min_chance: float
    ) -> DraftModelSequence | None:
        """Return a request's draft sequence, updated with the target's newest tokens.

        `min_chance` is the lowest acceptance rate of first drafts at which drafting pays. Returns
        None if the request should get no drafts: they are rarely right, its text is not translated
        yet, or the draft model's prefill would not pay.
        """
        if request in self._declined:
            return None
        draft_sequence = self._draft_sequences.get(request)
        if draft_sequence is None or draft_sequence.sequence.is_finished:
            draft_sequence = self._draft_sequences[request] = self._new_draft_sequence(request)
        if not draft_sequence.rate.pays(min_chance):
            return None
        sequence, translated = draft_sequence.sequence, draft_sequence.draft_tokens
        if translated is None:
            tokens, num_final = request.tokens, len(request.tokens)
        else:
            translated.follow(request)
            tokens, num_final = translated.tokens, translated.num_settled
            sequence.num_prompt = translated.num_prompt
            if not translated.is_ready:
                return None
        is_too_long = len(tokens) + cost.max_drafts >= self._sequences.context_length
        is_new = sequence not in self._sequences
        if is_too_long or (is_new and not self._prefill_pays(request, tokens, cost, min_chance)):
            self._rate.recover(_DECLINED_RECOVERY_WEIGHT)
            super().finish(request)
            self._declined.add(request)
            return None
        if request.params.has_penalties:
            self._runner.runner.forget(sequence)  # it has counted wrong drafts
        first = min(sequence.num_final or 0, len(sequence.tokens))
        num_equal = first + num_accepted(sequence.tokens[first:], tokens[first:])
        num_kept = min(num_equal, len(tokens) - 1)  # the last token is computed for its logits
        new = [
            token if token < self._own_vocab_size else _PLACEHOLDER_TOKEN
            for token in tokens[num_kept:]
        ]
        sequence.num_final = num_final
        self._sequences.rewrite(draft_sequence, num_kept, new)
        return draft_sequence

    def _new_draft_sequence(self, request: Request) -> DraftModelSequence:
        draft_tokens = None
        end_ids, options = request.end_ids, _SAME_SAMPLING
        if self._translator is not None:
            draft_tokens = DraftTokens(self._translator)
            end_ids, options = self._translator.to_target.source.eos_ids, _GREEDY_SAMPLING
        params = replace(request.params, **options)
        sequence = Request(
            request.id, [], request.num_prompt, params, request.seed, salt=request.salt, num_final=0
        )
        rate = self._rate.for_request()
        return DraftModelSequence(
            sequence,
            rate,
            _NUM_PROBABILITY_KINDS,
            self._token_ids,
            end_ids=end_ids,
            draft_tokens=draft_tokens,
        )

    def _prefill_pays(
        self, request: Request, tokens: list[int], cost: DraftCost, min_chance: float
    ) -> bool:
        """Return whether drafts may save a request more time than the draft model's prefill takes.

        `tokens` are the request's tokens for the draft model. `min_chance` is the time of making a
        draft, measured in tokens that the target would generate meanwhile.
        """
        hit = self._index.match(self._index.chain(request.salt), tokens, request.num_prompt)
        num_cached = hit.num_pages * self._runner.runner.facts.page_size
        num_left = max(self._mean_answer_length - request.num_output, self._mean_answer_length / 4)
        if request.params.max_tokens is not None:
            num_left = min(num_left, request.params.max_tokens - request.num_output)
        batch = BatchShape.prefill(max(1, len(tokens) - num_cached), num_cached)
        prompt_s = self._runner.step_time.seconds(batch)
        saved = _saved_part(self._rate.first, min_chance, cost.max_drafts) * num_left
        return saved >= cost.tokens_per_s * prompt_s


@dataclass(slots=True, eq=False)
class DraftModelSequence(DraftSequence):
    """A request's copy in the draft model, perhaps in tokens of another vocabulary.

    Attributes:
        end_ids: tokens after which no draft follows.
        draft_tokens: the request's text in the draft model's tokens, if its vocabulary differs.
    """

    end_ids: frozenset[int] = frozenset()
    draft_tokens: DraftTokens | None = None

    def take(self, token: int, logprobs: TokenLogprobs | None, hidden: State | None = None) -> bool:
        """Add a token that the draft model sampled; return whether another draft may follow."""
        return DraftSequence.take(self, token, logprobs, hidden) and token not in self.end_ids

    def proposal(self, source: str, max_drafts: int) -> Proposal | None:
        """Return a proposal of up to `max_drafts` draft tokens, in the target's vocabulary."""
        if self.draft_tokens is None:
            return DraftSequence.proposal(self, source, max_drafts)
        tokens, kinds = self._translated(self.draft_tokens.translator.to_target)
        if not tokens:
            return None
        tokens, kinds = tokens[:max_drafts], kinds[:max_drafts]
        chances = tuple([self.rate.of(kind) for kind in kinds])
        return Proposal(source, tuple(tokens), chances, tuple(kinds))

    def _translated(self, translation: Translation) -> tuple[list[int], list[int]]:
        """Return the drafts in the target model's tokens, and the kind of each translated draft.

        A target token may need several drafts. Its kind comes from the product of the probabilities
        of the drafts that it consumes.
        """
        translated = translation.translate(self.tokens)
        ends = translation.end_offsets(self.tokens)
        kinds: list[int] = []
        index = 0
        for end in translated.ends:
            first = index
            while index < len(ends) and (ends[index - 1] if index else 0) < end:
                index += 1
            kinds.append(self.kind(math.prod(self.probabilities[first:index])))
        if kinds:
            kinds[-1] += _NUM_PROBABILITY_KINDS
        return translated.tokens, kinds


class TokenTranslator(Frozen):
    """Translates the target model's tokens into the draft model's tokens, and back."""

    to_draft: Translation
    to_target: Translation

    def missing_prefix(self, request: Request) -> list[int]:
        """Return the prefix tokens, such as BOS, that a draft model needs before a request's text.

        Empty if the request begins with them.
        """
        prefix = self.to_draft.target.prefix_ids
        translated = self.to_draft.translate(request.tokens[: len(prefix)]).tokens
        return [] if translated == prefix else prefix


@dataclass(slots=True, eq=False)
class DraftTokens:
    """A request's text, translated into the tokens of a draft model with another vocabulary.

    The text is translated in portions while it grows. The last translated tokens may still change
    when more text follows.

    Attributes:
        translator: translates the tokens.
        stride: how many tokens of the request to translate at once.
        tokens: the translated tokens. Only the first `num_settled` are final.
        num_settled: how many of `tokens` are final; they are the translation of the request's first
            `num_read` tokens.
        num_prompt: how many final `tokens` belong to the request's prompt.
        num_read: how many of the request's tokens have a final translation.
        is_behind: whether the request has more tokens to translate.
        is_ready: whether a draft may follow `tokens`.
    """

    translator: TokenTranslator
    stride: int = _STRIDE_TOKENS
    tokens: list[int] = field(default_factory=list)
    num_settled: int = 0
    num_prompt: int = 0
    num_read: int = 0
    is_behind: bool = True
    is_ready: bool = False
    _is_new: bool = True  # the prompt was not translated to its end yet
    _span: int = 0  # tokens beyond `stride` that must be translated at once

    def follow(self, request: Request) -> None:
        """Translate about `stride` more tokens of a request into the draft model's tokens."""
        if not self.tokens:
            self.tokens += self.translator.missing_prefix(request)
            self.num_settled = len(self.tokens)
        first = self.num_settled
        end = self.num_read + self.stride + self._span
        translated, ends_whole = self._translate(request.tokens[self.num_read : end])
        self.is_behind = end < len(request.tokens)
        if self._is_new:
            self.num_prompt = self.num_settled
        if self.is_behind:
            # Text after the cut may change tokens before it. If it may change all, cut later.
            self._span = self.stride + 2 * self._span if self.num_settled == first else 0
            translated = translated[: self.num_settled - first]
        self.tokens[first:] = translated
        self._is_new &= self.is_behind
        self.is_ready = ends_whole and not self.is_behind and bool(self.tokens)

    def _translate(self, new: list[int]) -> tuple[list[int], bool]:
        """Translate a request's tokens into the draft model's tokens.

        Also returns whether the text ends with a whole character. All but the last tokens become
        final: `num_settled` and `num_read` advance.
        """
        translation = self.translator.to_draft
        translated = translation.translate(new)
        breaks, ends = translation.character_starts(new), translated.ends
        for count in range(len(translated.tokens) - _NUM_UNSETTLED_TOKENS, 0, -1):
            if ends[count - 1] in breaks and ends[count - 1] < ends[count]:
                self.num_read += breaks[ends[count - 1]]
                self.num_settled += count
                break
        return translated.tokens, translated.is_whole


def _saved_part(chance: float, draft_cost: float, max_drafts: int) -> float:
    """Return the fraction of decode time that drafts save, with the best number of drafts per step.

    The number is at most `max_drafts`. Each draft is right with probability `chance` if the drafts
    before it are. Making a draft takes as long as `draft_cost` tokens take without drafts.
    """
    expected = accumulate(chance**count for count in range(max_drafts + 1))  # tokens of a step
    return max(1 - (1 + count * draft_cost) / tokens for count, tokens in enumerate(expected))
