"""Drafts of EAGLE and Medusa heads: small layers trained on the target's hidden states.

Sources: EAGLE (arXiv:2401.15077, 2406.16858, 2503.01840) and Medusa (arXiv:2401.10774). Here,
drafts of both are a chain of tokens, with alternative tokens as leaves beside it. Heads sample with
the request's temperature, its seed and the token's index, from a smaller vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.core.request import Request
from twostroke.core.step import Slice, StepPlan
from twostroke.engine.kv_cache import PagePool
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig
from twostroke.engine.speculation.draft_sequences import (
    ANY_VOCABULARY,
    DraftSequence,
    DraftSequences,
    ModelProposer,
    State,
    TimedRunner,
)
from twostroke.engine.speculation.proposal import sampled_rows
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends.interface import Runner
    from twostroke.core.step import StepResult, TokenLogprobs
    from twostroke.engine.speculation.acceptance import AcceptanceRate
    from twostroke.engine.speculation.proposal import DraftCost, Proposal
    from twostroke.engine.speculation.step_time import StepTimeModel

HiddenNorm = Callable[[State], State]  # of rows

MAX_WAITING_STATES = 32  # of a request without drafts; after more, its sequence starts again


@dataclass(slots=True, eq=False)
class EagleSequence(DraftSequence):
    """An EAGLE head's copy of a request, with the draft tokens at its end.

    The head computes each token together with the hidden state from which the token was sampled.
    Token i of the sequence is the request's token base + 1 + i.

    Attributes:
        base: the position of the request at which the sequence begins.
        text: the request's tokens; drafts follow them in the sequence.
        states: the hidden states of tokens that are not computed yet.
        own_norm: normalizes the head's own hidden states before the head reads them; None: they are
            read as they are.
        max_waiting: maximum number of `states`; if there are more, the sequence starts again.
    """

    base: int = 0
    text: list[int] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    own_norm: HiddenNorm | None = None
    max_waiting: int = MAX_WAITING_STATES

    @property
    def newest(self) -> int:
        """The position, in the request, of the newest token that the sequence has."""
        return self.base + len(self.text)

    def take(self, token: int, logprobs: TokenLogprobs | None, hidden: State | None = None) -> bool:
        """Add a draft that the head sampled, with its hidden state for the head's next step.

        Returns whether another draft may follow.
        """
        assert hidden is not None
        self.states = [hidden if self.own_norm is None else self.own_norm(hidden[None])[0]]
        is_added = DraftSequence.take(self, token, logprobs)
        if is_added:  # the head reads ids of the target, and samples indices of `token_ids`
            self.sequence.tokens[-1] = self.tokens[-1]
        return is_added

    def inputs(self, count: int) -> list[State]:
        """Take the hidden states that the head needs to compute the next `count` tokens.

        The states are removed from the sequence.
        """
        states, self.states = self.states[:count], self.states[count:]
        return states

    def end_round(self) -> int:
        """Return how many of the sequence's tokens stay computed after a round of drafts.

        Only the request's own tokens stay: drafts were computed with the head's hidden states
        instead of the target's.
        """
        self.states.clear()
        return len(self.text)


class HeadKind(Frozen):
    """How an EAGLE head, or a layer for multi-token prediction, reads hidden states.

    Attributes:
        name: the name of the method.
        target_norm: normalizes the target's hidden states before the head reads them; None: they
            are read as they are.
        own_norm: the same for the head's own hidden states.
        num_prompt_states: how many rows at the end of a prompt the head computes, if the target
            reports their hidden states.
        max_requests: while this number of requests have sequences, the head does not compute the
            prompts of further requests, since their hidden states would take much memory.
    """

    name: str = "eagle"
    target_norm: HiddenNorm | None = None
    own_norm: HiddenNorm | None = None
    num_prompt_states: int = 0
    max_requests: int = 0


class EagleHeads(ModelProposer[EagleSequence]):
    """Proposes draft tokens that an EAGLE head samples from the target's hidden states.

    A layer for multi-token prediction (MTP) is used like an EAGLE head.

    A sequence begins where the request's first token is sampled, because that row's hidden state
    represents the prompt. In the next round, the keys and values of drafts are overwritten by the
    values of the sampled tokens, computed with the target's hidden states.
    """

    def __init__(
        self,
        runner: Runner,
        step_time: StepTimeModel,
        rate: AcceptanceRate,
        token_ids: Sequence[int],
        *,
        context_length: int,
        token_budget: int,
        kind: HeadKind = HeadKind(),  # noqa: B008 - frozen
    ) -> None:
        """Run the EAGLE head with `runner`, up to `token_budget` rows per step.

        `token_ids[i]` is the target's id of the head's token i. `rate` has the acceptance rates on
        held-out text, by equal ranges of the head's probability. After `context_length` tokens of a
        request, its sequence starts again.
        """
        facts, timed = runner.facts, TimedRunner(runner, step_time)
        config = SchedulerConfig(context_length, token_budget, token_budget)
        pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
        scheduler = Scheduler(config, pool, None, Continuous())
        self._sequences = DraftSequences[EagleSequence](timed, scheduler)
        super().__init__(kind.name, timed, self._sequences.forget)
        self._kind = kind
        self._rate = rate
        self._token_ids = token_ids

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Take the hidden states of a target model's step, from which its tokens were sampled."""
        if self._kind.num_prompt_states and result.row_states is not None:
            self._see_prompts(plan, result.row_states)
        for slice_, rows in sampled_rows(plan, result):
            request, position = slice_.request, slice_.start + slice_.count - 1
            rows_with_token = rows[: len(request.tokens) - 1 - position]
            if result.hidden is None or not rows_with_token or request.is_finished:
                self.finish(request)
            elif self._may_draft(request):
                self._keep(request, position, result.hidden[rows_with_token])

    def _see_prompts(self, plan: StepPlan, row_states: State) -> None:
        """Take the hidden states of rows near the end of prompts, whose next tokens are known.

        `row_states` has the states of all rows of the step. The text of a preempted request is
        computed again, and counts as its prompt.
        """
        first_row, num_states = 0, self._kind.num_prompt_states
        for slice_ in plan.slices:
            request, start = slice_.request, slice_.start
            end = start + slice_.count - slice_.samples
            first = max(start, len(request.tokens) - 1 - num_states)
            num_others = len(self._draft_sequences) - (request in self._draft_sequences)
            may_begin = self._may_draft(request) and num_others < self._kind.max_requests
            if first < end < len(request.tokens) and may_begin:
                rows = slice(first_row + first - start, first_row + end - start)
                states = row_states[rows].copy()
                self._keep(request, first, states, max_waiting=MAX_WAITING_STATES + num_states)
            first_row += slice_.num_rows

    def _may_draft(self, request: Request) -> bool:
        return request.hints.speculate in {"auto", self.name}

    def propose(self, requests: Sequence[Request], cost: DraftCost) -> list[Proposal | None]:
        """Let the EAGLE head make draft tokens for each request; None for no drafts.

        The newest token of each request is not computed yet.
        """
        return self._sequences.propose(requests, cost, follow=self._follow, source=self.name)

    def _keep(
        self,
        request: Request,
        position: int,
        states: State,
        max_waiting: int = MAX_WAITING_STATES,
    ) -> None:
        """Add hidden states, and the tokens that the target sampled from them, to a draft sequence.

        The first state is at `position` of the request. If this call starts a sequence,
        `max_waiting` is the maximum number of states in it.
        """
        if self._kind.target_norm is not None:
            states = self._kind.target_norm(states)
        draft_sequence = self._draft_sequences.get(request)
        if (
            draft_sequence is None
            or draft_sequence.newest != position
            or draft_sequence.sequence.is_finished
        ):
            draft_sequence = self._begin(request, position, max_waiting)
        elif len(draft_sequence.states) + len(states) > draft_sequence.max_waiting:
            position += len(states) - 1
            states = states[-1:]
            draft_sequence = self._begin(request, position)
        draft_sequence.text += request.tokens[position + 1 : position + 1 + len(states)]
        draft_sequence.states += list(states)

    def _begin(
        self, request: Request, position: int, max_waiting: int = MAX_WAITING_STATES
    ) -> EagleSequence:
        """Start the head's sequence for a request at `position`, or start it again.

        `max_waiting` is the maximum number of hidden states that wait in it. The request's
        acceptance rate stays.
        """
        old = self._draft_sequences.get(request)
        rate = old.rate if old else self._rate.for_request()
        self.finish(request)
        num_prompt = request.num_prompt - position - 1  # indices of output tokens stay the same
        params = replace(request.params, **ANY_VOCABULARY)
        sequence = Request(request.id, [], num_prompt, params, request.seed, num_final=0)
        draft_sequence = EagleSequence(
            sequence,
            rate,
            rate.num_kinds,
            self._token_ids,
            base=position,
            own_norm=self._kind.own_norm,
            max_waiting=max_waiting,
        )
        self._draft_sequences[request] = draft_sequence
        return draft_sequence

    def _follow(self, request: Request, cost: DraftCost, min_chance: float) -> EagleSequence | None:
        """Return a request's draft sequence, updated with the target's newest tokens.

        None if the request should get no drafts: its first drafts are right less often than
        `min_chance`, or the head has not seen its newest hidden states.
        """
        draft_sequence, newest = self._draft_sequences.get(request), len(request.tokens) - 1
        if (
            draft_sequence is None
            or draft_sequence.sequence.is_finished
            or not draft_sequence.states
        ):
            return None
        if not draft_sequence.rate.pays(min_chance) or draft_sequence.newest != newest:
            return None
        if len(draft_sequence.text) + cost.max_drafts >= self._sequences.context_length:
            state = draft_sequence.states[-1:]
            draft_sequence = self._begin(request, newest - 1)
            draft_sequence.text, draft_sequence.states = request.tokens[newest:], state
        num_kept = draft_sequence.sequence.num_final or 0
        draft_sequence.sequence.num_final = len(draft_sequence.text)
        self._sequences.rewrite(draft_sequence, num_kept, draft_sequence.text[num_kept:])
        return draft_sequence


@dataclass(slots=True, eq=False)
class MedusaSequence(DraftSequence):
    """The state of Medusa heads for one request, with its draft tokens.

    Medusa heads read nothing but a hidden state of the target model. The sequence has a placeholder
    token for each output token of the request. Rows of the heads use one page that is never
    written.

    Attributes:
        hidden: the hidden state from which the request's newest token was sampled.
        num_tokens: the number of the request's tokens up to this newest token.
    """

    hidden: State | None = None
    num_tokens: int = 0


class MedusaHeads(ModelProposer[MedusaSequence]):
    """Proposes draft tokens of Medusa heads: several tokens of all requests in one step."""

    def __init__(
        self,
        runner: Runner,
        step_time: StepTimeModel,
        rate: AcceptanceRate,
        token_ids: Sequence[int],
        depth: int,
    ) -> None:
        """Make `depth` draft tokens for each request: each Medusa head makes a token.

        `token_ids[i]` is the target's id of the heads' token i. `rate` has the acceptance rates on
        held-out text, as for `EagleHeads`.
        """
        super().__init__("medusa", TimedRunner(runner, step_time), runner.forget)
        self._depth = depth
        self._rate = rate
        self._token_ids = tuple(token_ids)

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Take the hidden states from which the target's step sampled the newest tokens."""
        for slice_, rows in sampled_rows(plan, result):
            request = slice_.request
            has_all_tokens = len(request.tokens) == slice_.start + slice_.count + len(rows)
            if result.hidden is None or request.is_finished or not has_all_tokens:
                self.finish(request)
            elif request.hints.speculate in {"auto", self.name}:
                draft_sequence = self._draft_sequences.get(request) or self._begin(request)
                draft_sequence.hidden = result.hidden[rows[-1]]
                draft_sequence.num_tokens = len(request.tokens)
                tokens = draft_sequence.sequence.tokens
                tokens += [0] * (request.num_output - len(tokens))

    def propose(self, requests: Sequence[Request], cost: DraftCost) -> list[Proposal | None]:
        """Let the Medusa heads make draft tokens for each request; None for no drafts.

        The newest token of each request is not computed yet.
        """
        depth = min(self._depth, cost.max_drafts)
        num_rows = depth * max(1, len(requests))
        step_s = self._runner.step_time.seconds(BatchShape((0,), (num_rows,), num_rows))
        min_chance = self._runner.min_chance(len(requests), cost, step_s)
        draft_sequences = [self._follow(request, min_chance) for request in requests]
        drafting = [
            draft_sequence for draft_sequence in draft_sequences if draft_sequence is not None
        ]
        if drafting and depth:
            self._make_drafts(drafting, depth)
        return [
            None if draft_sequence is None else draft_sequence.proposal(self.name, cost.max_drafts)
            for draft_sequence in draft_sequences
        ]

    def _begin(self, request: Request) -> MedusaSequence:
        params, rate = replace(request.params, **ANY_VOCABULARY), self._rate.for_request()
        sequence = Request(request.id, [], 0, params, request.seed, pages=[[0]])
        draft_sequence = MedusaSequence(sequence, rate, rate.num_kinds, self._token_ids)
        self._draft_sequences[request] = draft_sequence
        return draft_sequence

    def _follow(self, request: Request, min_chance: float) -> MedusaSequence | None:
        """Return a request's draft sequence; None if there is no sequence, or drafts do not pay.

        `min_chance` is the lowest acceptance rate of first drafts at which drafting pays.
        """
        draft_sequence = self._draft_sequences.get(request)
        if draft_sequence is None or draft_sequence.num_tokens != len(request.tokens):
            return None
        draft_sequence.clear()
        return draft_sequence if draft_sequence.rate.pays(min_chance) else None

    def _make_drafts(self, draft_sequences: Sequence[MedusaSequence], depth: int) -> None:
        """Make `depth` draft tokens for each sequence in one step, a row for each head."""
        later_heads = tuple(range(1, depth))
        slices = [
            Slice(draft_sequence.sequence, 0, 1, samples=True, drafts=later_heads)
            for draft_sequence in draft_sequences
        ]
        states = [
            draft_sequence.hidden
            for draft_sequence in draft_sequences
            if draft_sequence.hidden is not None
        ]
        inputs = np.repeat(np.stack(states), depth, axis=0)  # (sequences * depth, width)
        result = self._runner.run(StepPlan(tuple(slices), external=inputs))
        sampled = iter(zip(result.tokens, result.logprobs, strict=True))
        for draft_sequence in draft_sequences:
            can_continue = True
            for token, logprobs in islice(sampled, depth):
                can_continue = can_continue and draft_sequence.take(token, logprobs)
