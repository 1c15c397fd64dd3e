"""Copies of requests in a draft model or head, which run ahead of the target to make drafts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from twostroke.core.request import FinishReason
from twostroke.core.step import NO_TOKEN
from twostroke.engine.speculation.proposal import Proposal
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.backends.interface import Runner
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult, TokenLogprobs
    from twostroke.engine.scheduler import Scheduler
    from twostroke.engine.speculation.acceptance import AcceptanceRate
    from twostroke.engine.speculation.proposal import DraftCost, DraftOutcome
    from twostroke.engine.speculation.step_time import StepTimeModel

State = NDArray[np.float32]  # (width)

_NUM_TOP_TOKENS = 3  # the likeliest tokens, which may be drafts beside the sampled one
_MIN_TOP_PROBABILITY = 0.1  # of a token that was not sampled
_MIN_TIMED_STEPS = 8  # after which the time of steps is known
_MIN_FIRST_RATE = 0.5  # assumed for drafts that follow others, which are then right
# Sampling parameters that name tokens are meaningless in another vocabulary.
ANY_VOCABULARY: Final[dict[str, Any]] = {
    "logprobs": _NUM_TOP_TOKENS,
    "prompt_logprobs": None,
    "logit_bias": {},
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
    "max_tokens": None,
}


@dataclass(slots=True, eq=False)
class DraftSequence:
    """A request's copy in a draft model, and the chain of draft tokens at its end.

    The copy has the request's tokens. In each round the draft model extends it by some tokens, the
    drafts. When the target model has verified them, wrong drafts are replaced by the target's
    tokens.

    Attributes:
        sequence: the draft model's own request.
        rate: the acceptance rate of the request.
        num_kinds: the number of kinds of drafts: equal ranges of the draft model's probability.
        token_ids: the target's ids of the draft model's tokens.
        tokens: the draft tokens.
        probabilities: the draft model's probability of each draft.
        alternatives: for each draft, likely tokens in its place, each with its kind.
        chance: the probability that all drafts are right.
        num_expected: the expected number of right drafts.
    """

    sequence: Request
    rate: AcceptanceRate
    num_kinds: int
    token_ids: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    alternatives: list[list[tuple[int, int]]] = field(default_factory=list)
    chance: float = 1.0
    num_expected: float = 0.0

    def clear(self) -> None:
        """Remove the draft tokens; the request's own tokens stay in the sequence."""
        self.tokens = []
        self.probabilities = []
        self.alternatives = []
        self.chance = 1.0
        self.num_expected = 0.0

    def take(self, token: int, logprobs: TokenLogprobs | None, hidden: State | None = None) -> bool:
        """Add a token that the draft model sampled; return whether another draft may follow.

        `hidden` is the hidden state from which it was sampled, if the model reports it.
        """
        del hidden
        if token == NO_TOKEN or logprobs is None or token >= len(self.token_ids):
            return False
        probability = math.exp(logprobs.logprob)
        self.tokens.append(self.token_ids[token])
        self.probabilities.append(probability)
        self.chance *= self.rate.of(self.kind(probability))
        self.num_expected += self.chance
        top_tokens = zip(logprobs.top_ids, map(math.exp, logprobs.top_logprobs), strict=True)
        self.alternatives.append(
            [
                (self.token_ids[other], self.kind(probability))
                for other, probability in top_tokens
                if other != token and probability >= _MIN_TOP_PROBABILITY
            ]
        )
        return True

    def inputs(self, count: int) -> list[State]:
        """Return the hidden states that the draft model needs to compute the next `count` tokens.

        Empty for draft models, which read only tokens; heads read hidden states.
        """
        del count
        return []

    def end_round(self) -> int:
        """Prepare for the next round of drafts.

        Returns the number of the sequence's tokens whose keys and values stay valid.
        """
        return self.sequence.num_computed

    def proposal(self, source: str, max_drafts: int) -> Proposal | None:
        """Return the drafts as a proposal of up to `max_drafts` tokens, or None without drafts.

        The proposal is the chain of drafts, with alternatives as leaves beside it.
        """
        if not self.tokens:
            return None
        count = min(len(self.tokens), max_drafts)
        tokens = self.tokens[:count]
        kinds = [self.kind(probability) for probability in self.probabilities[:count]]
        parents = list(range(-1, count - 1))
        for depth, alternatives in enumerate(self.alternatives[:count]):
            for token, kind in alternatives[: max_drafts - len(tokens)]:
                tokens.append(token)
                kinds.append(kind)
                parents.append(depth - 1)
        chances = tuple([self.rate.of(kind) for kind in kinds])
        if len(tokens) == count:
            return Proposal(source, tuple(tokens), chances, tuple(kinds))
        tree = Proposal(source, tuple(tokens), chances, tuple(kinds), parents=tuple(parents))
        return tree.best_first()

    def kind(self, probability: float) -> int:
        """Return the kind of a draft token, by which its acceptance rate is learned.

        The kinds are equal ranges of the draft model's probability for the token.
        """
        return min(int(probability * self.num_kinds), self.num_kinds - 1)


F = TypeVar("F", bound=DraftSequence)


@dataclass(slots=True)
class TimedRunner:
    """Runs steps of a draft model or head, and learns how long they take.

    The first step is not measured: it is slower, because memory is touched for the first time.
    """

    runner: Runner
    step_time: StepTimeModel
    _is_warm: bool = False

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step of the draft model, and learn how long it takes."""
        began_s = time.monotonic()
        result = self.runner.run(plan)
        if self._is_warm:
            self.step_time.learn(BatchShape.of(plan), time.monotonic() - began_s)
        self._is_warm = True
        return result

    def min_chance(self, num_requests: int, cost: DraftCost, step_s: float) -> float:
        """Return the lowest acceptance rate of first drafts at which making drafts pays.

        A first draft is the first draft token of a request in a round. A step of the draft model
        takes `step_s` seconds and makes one draft token for each of `num_requests` requests. The
        result is 0 until a few steps of the draft model were timed, so that these are made at all.
        """
        if self.step_time.num_steps < _MIN_TIMED_STEPS:
            return 0.0
        return cost.min_chance(step_s / max(1, num_requests))


class ModelProposer(Generic[F]):
    """The base class of proposers that run a draft model or heads; subclasses add `propose`."""

    def __init__(self, name: str, runner: TimedRunner, forget: Callable[[Request], None]) -> None:
        """Make drafts with `runner`; `forget` drops the draft sequence of an ended request."""
        self.name = name
        self._runner = runner
        self._forget = forget
        self._draft_sequences: dict[Request, F] = {}

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Learn which drafts of a request's proposal were right."""
        if draft_sequence := self._draft_sequences.get(request):
            draft_sequence.rate.learn(proposal, outcome)

    def finish(self, request: Request) -> None:
        """Drop the draft sequence of a request that has ended."""
        if draft_sequence := self._draft_sequences.pop(request, None):
            self._forget(draft_sequence.sequence)

    def close(self) -> None:
        """Release the memory and the threads of the draft model or heads."""
        self._runner.runner.close()


class DraftSequences(Generic[F]):
    """All sequences of a draft model or head, with the scheduler that computes them.

    A sequence is a request of the draft model's own scheduler. When its computed tokens have caught
    up with the target's, the next sampled token is a draft, and the draft is the next token to
    compute. Wrong drafts are removed when the target's tokens are known.
    """

    def __init__(self, runner: TimedRunner, scheduler: Scheduler) -> None:
        self.context_length = scheduler.config.context_length
        self._runner = runner
        self._scheduler = scheduler
        self._draft_sequences: dict[Request, F] = {}  # by sequence

    def __contains__(self, sequence: Request) -> bool:
        return sequence in self._draft_sequences

    def propose(
        self,
        requests: Sequence[Request],
        cost: DraftCost,
        *,
        follow: Callable[[Request, DraftCost, float], F | None],
        source: str,
    ) -> list[Proposal | None]:
        """Make draft tokens for each request of the target model; None for no drafts.

        `follow` is called with a request, `cost` and the result of `min_chance`. It returns the
        request's draft sequence, updated with the target's newest tokens, or None if the request
        should get no drafts. `source` is the name of the proposer, for metrics. The result has an
        entry for each request, in order.
        """
        min_chance = self.min_chance(len(requests), cost)
        draft_sequences = [follow(request, cost, min_chance) for request in requests]
        drafting = [
            draft_sequence for draft_sequence in draft_sequences if draft_sequence is not None
        ]
        self.make_drafts(drafting, len(requests), cost)
        return [
            None if draft_sequence is None else draft_sequence.proposal(source, cost.max_drafts)
            for draft_sequence in draft_sequences
        ]

    def rewrite(self, draft_sequence: F, num_kept: int, tokens: list[int]) -> None:
        """Replace the tokens of a draft sequence after the first `num_kept`.

        The proposer calls this with the tokens that the target model sampled. A sequence that is
        new is added to the draft model's scheduler.
        """
        sequence = draft_sequence.sequence
        if sequence in self._draft_sequences:
            self._scheduler.replace_tokens(sequence, num_kept, tokens)
            return
        sequence.tokens[num_kept:] = tokens
        self._scheduler.add(sequence)
        self._draft_sequences[sequence] = draft_sequence

    def forget(self, sequence: Request) -> None:
        """Drop a draft sequence and its KV pages, if it exists."""
        if self._draft_sequences.pop(sequence, None):
            self._scheduler.finish(sequence, FinishReason.CANCEL)
        self._runner.runner.forget(sequence)

    def min_chance(self, num_requests: int, cost: DraftCost) -> float:
        """Return the lowest acceptance rate of first drafts at which making drafts pays.

        A first draft is the first draft token of a request in a round. A step of the draft model
        makes one draft token for each of `num_requests` requests.
        """
        return self._runner.min_chance(num_requests, cost, self._step_s(num_requests, 1))

    def make_drafts(self, draft_sequences: Sequence[F], num_requests: int, cost: DraftCost) -> None:
        """Extend draft sequences by draft tokens, one token of each sequence in a step.

        `num_requests` counts all requests that were asked about, also those without a sequence. A
        sequence is extended while its drafts are probable enough to pay for their time, and has at
        most `cost.max_drafts`. If sequences wait for KV pages, all sequences that are not in
        `draft_sequences` are dropped.
        """
        for draft_sequence in draft_sequences:
            draft_sequence.clear()
        if self._scheduler.stats().num_waiting:
            for other in [f for f in self._draft_sequences.values() if f not in draft_sequences]:
                self.forget(other.sequence)
        spent_s = self._step_s(num_requests, 1)
        with_drafts = active = self._step(draft_sequences) if draft_sequences else []
        for _ in range(cost.max_drafts - 1):
            start = max(
                (draft_sequence.sequence.num_computed for draft_sequence in active), default=0
            )
            next_s = self._step_s(len(active), start)
            num_drafts = sum([len(draft_sequence.tokens) for draft_sequence in with_drafts])
            num_tokens = num_requests + sum(
                [draft_sequence.num_expected for draft_sequence in with_drafts]
            )
            draft_s = next_s / max(1, len(active))
            min_chance = cost.min_next_chance(num_drafts, num_tokens, spent_s, draft_s)
            active = [
                draft_sequence
                for draft_sequence in active
                if draft_sequence.chance * max(draft_sequence.rate.first, _MIN_FIRST_RATE)
                >= min_chance
            ]
            if not active:
                break
            spent_s += next_s
            active = self._step(active, len(active))
        for draft_sequence in with_drafts:
            self._end_round(draft_sequence)

    def _step(self, drafting: Sequence[F], budget: int | None = None) -> list[F]:
        """Run a step of the draft model, and add the sampled tokens to the draft sequences.

        Returns the sequences of `drafting` that got a draft and may get another.

        `budget` is the maximum number of tokens of the step; None for the scheduler's limit.
        """
        plan = self._scheduler.plan(budget)
        if plan is None:
            return []
        states = [
            state
            for slice_ in plan.slices
            for state in self._draft_sequences[slice_.request].inputs(slice_.count)
        ]
        if states:
            plan = replace(plan, external=np.stack(states))
        result = self._runner.run(plan)
        with_draft = []
        for row, delta in enumerate(self._scheduler.commit(plan, result)):
            draft_sequence = self._draft_sequences[delta.request]
            hidden = None if result.hidden is None else result.hidden[row]
            if (
                draft_sequence.take(delta.tokens[0], delta.logprobs[0], hidden)
                and draft_sequence in drafting
            ):
                with_draft.append(draft_sequence)
            else:
                self._end_round(draft_sequence)
        for sequence in plan.preempted:
            self.forget(sequence)
        return [
            draft_sequence
            for draft_sequence in with_draft
            if not draft_sequence.sequence.is_finished
        ]

    def _end_round(self, draft_sequence: F) -> None:
        """Remove a sequence's tokens that must be computed again in the next round of drafts."""
        if not draft_sequence.sequence.is_finished:
            self._scheduler.replace_tokens(draft_sequence.sequence, draft_sequence.end_round(), [])

    def _step_s(self, num_requests: int, start: int) -> float:
        """Predict the seconds of a draft model's step: one token for each request, at `start`."""
        return self._runner.step_time.seconds(BatchShape.decode((start,) * max(1, num_requests)))
