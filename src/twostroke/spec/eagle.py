"""Guesses of an EAGLE head: a small layer that goes on from the target's hidden states.

Source: EAGLE (arXiv:2401.15077, 2406.16858, 2503.01840); here a chain with leaves beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from twostroke.cache import PagePool
from twostroke.core.request import Request
from twostroke.schedule import Continuous, Scheduler, SchedulerConfig
from twostroke.spec.acceptance import AcceptanceRate
from twostroke.spec.guesses import ANY_VOCABULARY, Guesses
from twostroke.spec.proposal import drawn_rows
from twostroke.spec.sequences import SequenceProposer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.backends import Runner
    from twostroke.core.step import Delta, StepPlan, StepResult
    from twostroke.spec.guesses import HeadAccuracy
    from twostroke.spec.proposal import Price
    from twostroke.spec.step_time import StepTime

    Row = NDArray[np.float32]  # (width)

_MOST_WAITING = 32  # states of one request that was not asked about; then it begins anew


@dataclass(slots=True, eq=False)
class EagleFollower:
    """A request as the head knows it, from position `base` on.

    Token i of the sequence is the request's token base + 1 + i. It is computed together with the
    hidden state from which it was drawn: `states` are those of the tokens after the computed ones.
    `text` are the tokens that the request really has; guesses follow them in the sequence.
    """

    request: Request
    sequence: Request
    guesses: Guesses
    base: int
    text: list[int] = field(default_factory=list)
    states: list[Row] = field(default_factory=list)


class EagleHeads(SequenceProposer[EagleFollower]):
    """Lets an EAGLE head write ahead.

    It begins where a request's first token is drawn: that row's hidden state says what is in the
    prompt. It draws as the request would, with its temperature, its seed and the token's index, out
    of fewer tokens. Keys and values of guesses are overwritten in the next round by those of the
    drawn tokens, with the target's states.
    """

    def __init__(
        self,
        runner: Runner,
        step_time: StepTime,
        accuracy: HeadAccuracy,
        token_ids: Sequence[int],
        *,
        context_length: int,
        max_running: int,
    ) -> None:
        """Write with `runner`; `token_ids[i]` is the target's id of the head's token i.

        The head begins anew after `context_length` tokens of a request.
        """
        facts = runner.facts
        config = SchedulerConfig(context_length, max_running, max_running * _MOST_WAITING)
        pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
        super().__init__("eagle", runner, step_time, Scheduler(config, pool, None, Continuous()))
        self._rate = AcceptanceRate(accuracy.right_if_sure, accuracy.accepted[0])
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

    def _keep(self, request: Request, position: int, states: NDArray[np.float32]) -> None:
        """Take over the tokens that were drawn from `states`, the first of them at `position`."""
        follower = self._followers.get(request)
        if follower is None or follower.base + len(follower.text) != position:
            follower = self._begin(request, position)
        elif len(follower.states) + len(states) > _MOST_WAITING:
            position += len(states) - 1
            states = states[-1:]
            follower = self._begin(request, position)
        follower.text += request.tokens[position + 1 : position + 1 + len(states)]
        follower.states += list(states)

    def _begin(self, request: Request, position: int) -> EagleFollower:
        """Begin with a request, or anew, at a position; what was learned of it stays."""
        old = self._followers.get(request)
        self.finish(request)
        num_prompt = request.num_prompt - position - 1  # indices of output tokens stay the same
        params = replace(request.params, **ANY_VOCABULARY)
        sequence = Request(request.id, [], num_prompt, params, request.seed, num_final=0)
        guesses = Guesses(self._rate.for_request(), self._rate.num_kinds)
        follower = EagleFollower(request, sequence, old.guesses if old else guesses, position)
        self._followers[request] = follower
        return follower

    def _follow(self, request: Request, price: Price, least: float) -> EagleFollower | None:
        follower = self._followers.get(request)
        if follower is None or not follower.states or not follower.guesses.rate.pays(least):
            return None
        newest = len(request.tokens) - 1
        if follower.base + len(follower.text) != newest:
            return None
        if len(follower.text) + price.most >= self._scheduler.config.context_length:
            state = follower.states[-1:]
            follower = self._begin(request, newest - 1)
            follower.text, follower.states = request.tokens[newest:], state
        num_kept = follower.sequence.num_final or 0
        follower.sequence.num_final = len(follower.text)
        self._continue(follower, num_kept, follower.text[num_kept:])
        return follower

    def _take_back(self, follower: EagleFollower) -> None:
        follower.states.clear()
        self._scheduler.rewrite(follower.sequence, len(follower.text), [])

    def _with_inputs(self, plan: StepPlan) -> StepPlan:
        given = []
        for part in plan.slices:
            states = self._by_sequence[part.request].states
            given += states[: part.count]
            del states[: part.count]
        return replace(plan, external=np.stack(given))

    def _take(self, follower: EagleFollower, delta: Delta, result: StepResult, row: int) -> bool:
        assert result.hidden is not None
        follower.states = [result.hidden[row]]
        drew = follower.guesses.add(delta.tokens[0], delta.logprobs[0], self._token_ids)
        if drew:  # the head reads the target's tokens, and draws an index of its own list
            follower.sequence.tokens[-1] = follower.guesses.tokens[-1]
        return drew
