"""Guesses of small layers that were trained to read the target's hidden states.

Sources: EAGLE (arXiv:2401.15077, 2406.16858, 2503.01840) and Medusa (arXiv:2401.10774); here both
guess a chain with leaves. Heads draw as the request would, with its temperature, its seed and the
token's index, out of fewer tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from twostroke.core.request import Request
from twostroke.core.step import Slice, StepPlan
from twostroke.engine.kv_cache import PagePool
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig
from twostroke.engine.speculation.draft_sequences import (
    ANY_VOCABULARY,
    DraftSequence,
    ModelProposer,
    Sequences,
    State,
    TimedRunner,
)
from twostroke.engine.speculation.proposal import drawn_rows
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends.interface import Runner
    from twostroke.core.step import StepResult, TokenLogprobs
    from twostroke.engine.speculation.acceptance import AcceptanceRate
    from twostroke.engine.speculation.proposal import DraftCost, Proposal
    from twostroke.engine.speculation.step_time import StepTimeModel

MOST_WAITING = 32  # states of one request that was not asked about; then it begins anew


@dataclass(slots=True, eq=False)
class EagleFollower(DraftSequence):
    """A request as the head knows it, from position `base` on.

    Token i of the sequence is the request's token base + 1 + i. It is computed together with the
    hidden state from which it was drawn: `states` are those of the tokens after the computed ones.
    `text` are the tokens that the request really has; guesses follow them in the sequence.
    """

    base: int = 0
    text: list[int] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """The position of the newest token."""
        return self.base + len(self.text)

    def take(self, drawn: int, logprobs: TokenLogprobs | None, hidden: State | None = None) -> bool:
        """Add a drawn token to the guesses, and keep the state for the next one."""
        assert hidden is not None
        self.states = [hidden]
        has_drawn = DraftSequence.take(self, drawn, logprobs)
        if has_drawn:  # the head reads the target's tokens, and draws an index of its own list
            self.sequence.tokens[-1] = self.tokens[-1]
        return has_drawn

    def inputs(self, count: int) -> list[State]:
        """Return the hidden states of the next `count` tokens, for the last time."""
        given, self.states = self.states[:count], self.states[count:]
        return given

    def end_round(self) -> int:
        """Keep the request's tokens alone: guesses were computed with the head's states."""
        self.states.clear()
        return len(self.text)


class EagleHeads(ModelProposer[EagleFollower]):
    """Lets an EAGLE head write ahead.

    It begins where a request's first token is drawn: that row's hidden state says what is in the
    prompt. Keys and values of guesses are overwritten in the next round by those of the drawn
    tokens, with the target's states.
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
    ) -> None:
        """Write with `runner`, up to `token_budget` rows a step; `token_ids` are the target's.

        `rate` is how often the head was right on held-out text: its kinds are equal ranges of the
        head's sureness. The head begins anew after `context_length` tokens of a request.
        """
        facts, timed = runner.facts, TimedRunner(runner, step_time)
        config = SchedulerConfig(context_length, token_budget, token_budget)
        pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
        scheduler = Scheduler(config, pool, None, Continuous())
        self._sequences = Sequences[EagleFollower](timed, scheduler)
        super().__init__("eagle", timed, self._sequences.forget)
        self._rate = rate
        self._token_ids = tuple(token_ids)

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the hidden states from which requests' tokens were drawn."""
        for part, rows in drawn_rows(plan, result):
            request, position = part.request, part.start + part.count - 1
            taken = rows[: len(request.tokens) - 1 - position]
            if result.hidden is None or not taken or request.is_finished:
                self.finish(request)
            elif request.hints.speculate in {"auto", self.name}:
                self._keep(request, position, result.hidden[taken])

    def propose(self, requests: Sequence[Request], price: DraftCost) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        least = self._sequences.least_chance(len(requests), price)
        found = [self._follow(request, price, least) for request in requests]
        self._sequences.guess([f for f in found if f is not None], len(requests), price)
        return [None if f is None else f.proposal(self.name, price.most) for f in found]

    def _keep(self, request: Request, position: int, states: State) -> None:
        """Take over the tokens that were drawn from `states`, the first of them at `position`."""
        follower = self._followers.get(request)
        if follower is None or follower.newest != position or follower.sequence.is_finished:
            follower = self._begin(request, position)
        elif len(follower.states) + len(states) > MOST_WAITING:
            position += len(states) - 1
            states = states[-1:]
            follower = self._begin(request, position)
        follower.text += request.tokens[position + 1 : position + 1 + len(states)]
        follower.states += list(states)

    def _begin(self, request: Request, position: int) -> EagleFollower:
        """Begin with a request, or anew, at a position; what was learned of it stays."""
        old = self._followers.get(request)
        rate = old.rate if old else self._rate.for_request()
        self.finish(request)
        num_prompt = request.num_prompt - position - 1  # indices of output tokens stay the same
        params = replace(request.params, **ANY_VOCABULARY)
        sequence = Request(request.id, [], num_prompt, params, request.seed, num_final=0)
        follower = EagleFollower(sequence, rate, rate.num_kinds, self._token_ids, base=position)
        self._followers[request] = follower
        return follower

    def _follow(self, request: Request, price: DraftCost, least: float) -> EagleFollower | None:
        """Return a follower that has the request's tokens; None if it is to make no guess."""
        follower, newest = self._followers.get(request), len(request.tokens) - 1
        if follower is None or follower.sequence.is_finished or not follower.states:
            return None
        if not follower.rate.pays(least) or follower.newest != newest:
            return None
        if len(follower.text) + price.most >= self._sequences.context_length:
            state = follower.states[-1:]
            follower = self._begin(request, newest - 1)
            follower.text, follower.states = request.tokens[newest:], state
        num_kept = follower.sequence.num_final or 0
        follower.sequence.num_final = len(follower.text)
        self._sequences.rewrite(follower, num_kept, follower.text[num_kept:])
        return follower


@dataclass(slots=True, eq=False)
class MedusaFollower(DraftSequence):
    """A request as the heads know it: the state from which its newest token was drawn.

    The sequence's tokens only count those that the request has drawn. Rows of heads carry the
    numbers of blocks, and use one page that is never written.
    """

    hidden: State | None = None
    num_tokens: int = 0  # of the request


class MedusaHeads(ModelProposer[MedusaFollower]):
    """Lets Medusa heads guess several tokens at once, for all requests in one step."""

    def __init__(
        self,
        runner: Runner,
        step_time: StepTimeModel,
        rate: AcceptanceRate,
        token_ids: Sequence[int],
        depth: int,
    ) -> None:
        """Guess `depth` tokens; `token_ids[i]` is the target's id of the heads' token i.

        `rate` is how often heads were right on held-out text, as of `EagleHeads`.
        """
        super().__init__("medusa", TimedRunner(runner, step_time), runner.forget)
        self._depth = depth
        self._rate = rate
        self._token_ids = tuple(token_ids)

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the hidden states from which requests' newest tokens were drawn."""
        for part, rows in drawn_rows(plan, result):
            request = part.request
            is_whole = len(request.tokens) == part.start + part.count + len(rows)
            if result.hidden is None or request.is_finished or not is_whole:
                self.finish(request)
            elif request.hints.speculate in {"auto", self.name}:
                follower = self._followers.get(request) or self._begin(request)
                follower.hidden, follower.num_tokens = result.hidden[rows[-1]], len(request.tokens)
                drawn = follower.sequence.tokens
                drawn += [0] * (request.num_output - len(drawn))

    def propose(self, requests: Sequence[Request], price: DraftCost) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        depth = min(self._depth, price.most)
        num_rows = depth * max(1, len(requests))
        step_s = self._runner.step_time.seconds(BatchShape((0,), (num_rows,), num_rows))
        least = self._runner.least_chance(len(requests), price, step_s)
        found = [self._follow(request, least) for request in requests]
        asked = [follower for follower in found if follower is not None]
        if asked and depth:
            self._guess(asked, depth)
        return [None if f is None else f.proposal(self.name, price.most) for f in found]

    def _begin(self, request: Request) -> MedusaFollower:
        params, rate = replace(request.params, **ANY_VOCABULARY), self._rate.for_request()
        sequence = Request(request.id, [], 0, params, request.seed, pages=[[0]])
        follower = MedusaFollower(sequence, rate, rate.num_kinds, self._token_ids)
        self._followers[request] = follower
        return follower

    def _follow(self, request: Request, least: float) -> MedusaFollower | None:
        """Return the heads' view of a request; None if there is none, or guesses do not pay."""
        follower = self._followers.get(request)
        if follower is None or follower.num_tokens != len(request.tokens):
            return None
        follower.clear()
        return follower if follower.rate.pays(least) else None

    def _guess(self, followers: Sequence[MedusaFollower], depth: int) -> None:
        others = tuple(range(1, depth))
        slices = [Slice(f.sequence, 0, 1, samples=True, drafts=others) for f in followers]
        states = [follower.hidden for follower in followers if follower.hidden is not None]
        given = np.repeat(np.stack(states), depth, axis=0)
        result = self._runner.run(StepPlan(tuple(slices), external=given))
        drawn = iter(zip(result.tokens, result.logprobs, strict=True))
        for follower in followers:
            can_go_on = True
            for token, logprobs in islice(drawn, depth):
                can_go_on = can_go_on and follower.take(token, logprobs)
