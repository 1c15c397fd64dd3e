"""Sequences of a small model that follow requests of the target, one for each.

A sequence is a request of a scheduler of the small model. When its computed tokens have caught up
with the target's, the token that is drawn next is a guess, and the guess is the next token to
compute. Wrong guesses are taken back when the target's tokens are known.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from twostroke.core.request import FinishReason
from twostroke.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends import Runner
    from twostroke.core.request import Request
    from twostroke.core.step import Delta, StepPlan, StepResult
    from twostroke.schedule import Scheduler
    from twostroke.spec.guesses import Guesses
    from twostroke.spec.proposal import Outcome, Price, Proposal
    from twostroke.spec.step_time import StepTime

_FEW = 8  # steps, after which their time is known
_LEAST_FIRST = 0.5  # rate of first guesses, for later ones: these follow right ones


class Follower(Protocol):
    """A request as a small model knows it: `sequence` is the small model's own request."""

    request: Request
    sequence: Request
    guesses: Guesses


F = TypeVar("F", bound=Follower)


@dataclass(slots=True)
class TimedRunner:
    """Runs steps of a small model and learns how long they take.

    The first step finds untouched memory, so it is not measured.
    """

    runner: Runner
    step_time: StepTime
    _is_warm: bool = False

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step."""
        began_s = time.monotonic()
        result = self.runner.run(plan)
        if self._is_warm:
            self.step_time.learn(BatchShape.of(plan), time.monotonic() - began_s)
        self._is_warm = True
        return result

    def least_chance(self, num_requests: int, price: Price, step_s: float) -> float:
        """Return the chance from which on first guesses pay, if one step makes all of them.

        Any guess is tried until the time of steps is known: what never runs is never measured.
        """
        if self.step_time.num_steps < _FEW:
            return 0.0
        return price.least_chance(step_s / max(1, num_requests))


class SequenceProposer(Generic[F]):
    """Guesses with sequences that a scheduler keeps, together for all requests of a step."""

    def __init__(
        self, name: str, runner: Runner, step_time: StepTime, scheduler: Scheduler
    ) -> None:
        self.name = name
        self._runner = TimedRunner(runner, step_time)
        self._scheduler = scheduler
        self._followers: dict[Request, F] = {}
        self._by_sequence: dict[Request, F] = {}

    def propose(self, requests: Sequence[Request], price: Price) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        step_s = self._runner.step_time.seconds(BatchShape.decode((1,) * max(1, len(requests))))
        least = self._runner.least_chance(len(requests), price, step_s)
        found = [self._follow(request, price, least) for request in requests]
        asked = [follower for follower in found if follower is not None]
        for follower in asked:
            follower.guesses.clear()
        if self._scheduler.stats().num_waiting:
            self._make_room(asked)
        guessed = active = self._step(asked) if asked else []
        spent_s = step_s
        for _ in range(price.most - 1):
            next_s = self._next_s(active)
            active = self._paying(guessed, active, price, len(requests), spent_s, next_s)
            if not active:
                break
            spent_s += next_s
            active = self._step(active, len(active))
        for follower in guessed:
            if not follower.sequence.is_finished:
                self._take_back(follower)
        return [None if f is None else self._proposal(f, price.most) for f in found]

    def learn(self, request: Request, proposal: Proposal, outcome: Outcome) -> None:
        """Take in what became of a proposal."""
        follower = self._followers.get(request)
        if follower is not None:
            follower.guesses.rate.learn(proposal, outcome)

    def finish(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        follower = self._followers.get(request)
        if follower is not None:
            self._drop(follower)

    def close(self) -> None:
        """Release memory and threads."""
        self._runner.runner.close()

    def _follow(self, request: Request, price: Price, least: float) -> F | None:
        """Return a follower that has the request's tokens; None if it is to make no guess."""
        raise NotImplementedError

    def _take_back(self, follower: F) -> None:
        """Leave a sequence without pending tokens, so that it waits for the next round."""
        raise NotImplementedError

    def _proposal(self, follower: F, most: int) -> Proposal | None:
        return follower.guesses.proposal(self.name, most)

    def _with_inputs(self, plan: StepPlan) -> StepPlan:
        return plan

    def _take(self, follower: F, delta: Delta, result: StepResult, row: int) -> bool:
        """Add what was drawn to the guesses; return whether the sequence can go on."""
        del result, row
        return follower.guesses.add(delta.tokens[0], delta.logprobs[0])

    def _continue(self, follower: F, num_kept: int, tokens: list[int]) -> None:
        """Give a sequence the tokens after the first `num_kept`; add it if it is new."""
        sequence = follower.sequence
        if sequence in self._by_sequence:
            self._scheduler.rewrite(sequence, num_kept, tokens)
            return
        sequence.tokens = [*sequence.tokens[:num_kept], *tokens]
        self._scheduler.add(sequence)
        self._by_sequence[sequence] = follower

    def _step(self, wanted: Sequence[F], budget: int | None = None) -> list[F]:
        """Compute a step of the small model; return the followers that have one more guess."""
        plan = self._scheduler.plan(budget)
        if plan is None:
            return []
        plan = self._with_inputs(plan)
        result = self._runner.run(plan)
        deltas = self._scheduler.commit(plan, result)
        drawing = [part for part in plan.slices if part.samples]
        guessed = []
        for row, (part, delta) in enumerate(zip(drawing, deltas, strict=True)):
            follower = self._by_sequence[part.request]
            goes_on = self._take(follower, delta, result, row)
            if follower in wanted and goes_on:
                guessed.append(follower)
            elif not part.request.is_finished:
                self._take_back(follower)
        for lost in plan.preempted:
            self._drop(self._by_sequence[lost])
        return [follower for follower in guessed if not follower.sequence.is_finished]

    def _paying(
        self,
        guessed: Sequence[F],
        active: Sequence[F],
        price: Price,
        num_requests: int,
        spent_s: float,
        next_s: float,
    ) -> list[F]:
        """Return the followers of which one more guess may pay."""
        num_guesses = sum([len(follower.guesses.tokens) for follower in guessed])
        num_tokens = num_requests + sum([follower.guesses.expected for follower in guessed])
        each_s = next_s / max(1, len(active))
        least = price.least_next(num_guesses, num_tokens, spent_s, each_s)
        return [
            f for f in active if f.guesses.chance * max(f.guesses.rate.first, _LEAST_FIRST) >= least
        ]

    def _next_s(self, active: Sequence[F]) -> float:
        start = max((f.sequence.num_computed for f in active), default=0)
        return self._runner.step_time.seconds(BatchShape.decode((start,) * max(1, len(active))))

    def _make_room(self, asked: Sequence[F]) -> None:
        """Drop the sequences that are not asked about: others wait for their pages."""
        for follower in [f for f in self._followers.values() if f not in asked]:
            self._drop(follower)

    def _drop(self, follower: F) -> None:
        del self._followers[follower.request]
        self._by_sequence.pop(follower.sequence, None)
        self._scheduler.finish(follower.sequence, FinishReason.CANCEL)
        self._runner.runner.forget(follower.sequence)
