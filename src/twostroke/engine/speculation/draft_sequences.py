"""Requests as a small model knows them, and its guesses of their next tokens."""

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

_NUM_LIKELY = 3  # likeliest tokens; those that were not drawn may be guessed, too
_LEAST_SURENESS = 0.1  # of a token that was not drawn
_FEW = 8  # steps, after which their time is known
_LEAST_FIRST = 0.5  # rate of first guesses, for later ones: these follow right ones
# Sampling parameters that name tokens mean nothing in another vocabulary.
ANY_VOCABULARY: Final[dict[str, Any]] = {
    "logprobs": _NUM_LIKELY,
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
    """A request as a small model knows it, and a chain of guesses.

    `sequence` is the model's own request, and `token_ids[i]` the target's id of its token i.
    `sure[i]` is the model's probability of the guess `tokens[i]`, and by it a guess is of one of
    `num_sure` kinds; `others[i]` are likely tokens in its place, each with its kind. `chance` is
    that all guesses are right, `expected` how many are.
    """

    sequence: Request
    rate: AcceptanceRate
    num_sure: int
    token_ids: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    others: list[list[tuple[int, int]]] = field(default_factory=list)
    chance: float = 1.0
    expected: float = 0.0

    def clear(self) -> None:
        """Drop the guesses."""
        self.tokens, self.sure, self.others = [], [], []
        self.chance, self.expected = 1.0, 0.0

    def take(self, drawn: int, logprobs: TokenLogprobs | None, hidden: State | None = None) -> bool:
        """Add a drawn token to the guesses; return whether another one may follow.

        `hidden` is the state from which it was drawn, if the model reports that.
        """
        del hidden
        if drawn == NO_TOKEN or logprobs is None or drawn >= len(self.token_ids):
            return False
        sureness = math.exp(logprobs.logprob)
        self.tokens.append(self.token_ids[drawn])
        self.sure.append(sureness)
        self.chance *= self.rate.of(self.kind(sureness))
        self.expected += self.chance
        likely = zip(logprobs.top_ids, map(math.exp, logprobs.top_logprobs), strict=True)
        self.others.append(
            [
                (self.token_ids[other], self.kind(sureness))
                for other, sureness in likely
                if other != drawn and sureness >= _LEAST_SURENESS
            ]
        )
        return True

    def inputs(self, count: int) -> list[State]:
        """Return what the model reads besides the next `count` tokens, if anything."""
        del count
        return []

    def end_round(self) -> int:
        """Return how many of the sequence's tokens to keep for the next guesses."""
        return self.sequence.num_computed

    def proposal(self, source: str, most: int) -> Proposal | None:
        """Return up to `most` guesses: the chain, and leaves where the model was in doubt."""
        if not self.tokens:
            return None
        count = min(len(self.tokens), most)
        tokens, kinds = self.tokens[:count], [self.kind(sureness) for sureness in self.sure[:count]]
        parents = list(range(-1, count - 1))
        for place, others in enumerate(self.others[:count]):
            for token, kind in others[: most - len(tokens)]:
                tokens.append(token)
                kinds.append(kind)
                parents.append(place - 1)
        odds = tuple([self.rate.of(kind) for kind in kinds])
        if len(tokens) == count:
            return Proposal(source, tuple(tokens), odds, tuple(kinds))
        return Proposal(source, tuple(tokens), odds, tuple(kinds), tuple(parents)).best_first()

    def kind(self, sureness: float) -> int:
        """Return the kind of a guess of which the model was this sure."""
        return min(int(sureness * self.num_sure), self.num_sure - 1)


F = TypeVar("F", bound=DraftSequence)


@dataclass(slots=True)
class TimedRunner:
    """Runs steps of a small model and learns how long they take.

    The first step finds untouched memory, so it is not measured.
    """

    runner: Runner
    step_time: StepTimeModel
    _is_warm: bool = False

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step."""
        began_s = time.monotonic()
        result = self.runner.run(plan)
        if self._is_warm:
            self.step_time.learn(BatchShape.of(plan), time.monotonic() - began_s)
        self._is_warm = True
        return result

    def least_chance(self, num_requests: int, price: DraftCost, step_s: float) -> float:
        """Return the chance from which on first guesses pay, if one step makes all of them.

        Any guess is tried until the time of steps is known: what never runs is never measured.
        """
        if self.step_time.num_steps < _FEW:
            return 0.0
        return price.least_chance(step_s / max(1, num_requests))


class ModelProposer(Generic[F]):
    """What proposers with a small model do besides proposing; `forget` drops a sequence."""

    def __init__(self, name: str, runner: TimedRunner, forget: Callable[[Request], None]) -> None:
        self.name = name
        self._runner = runner
        self._forget = forget
        self._followers: dict[Request, F] = {}

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Take in what became of a proposal."""
        if follower := self._followers.get(request):
            follower.rate.learn(proposal, outcome)

    def finish(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        if follower := self._followers.pop(request, None):
            self._forget(follower.sequence)

    def close(self) -> None:
        """Release memory and threads."""
        self._runner.runner.close()


class Sequences(Generic[F]):
    """Sequences of a small model that write ahead of requests.

    A sequence is a request of a scheduler of the small model. When its computed tokens have caught
    up with the target's, the token that is drawn next is a guess, and the guess is the next token
    to compute. Wrong guesses are taken back when the target's tokens are known.
    """

    def __init__(self, runner: TimedRunner, scheduler: Scheduler) -> None:
        self.context_length = scheduler.config.context_length
        self._runner = runner
        self._scheduler = scheduler
        self._followers: dict[Request, F] = {}  # by sequence

    def __contains__(self, sequence: Request) -> bool:
        return sequence in self._followers

    def rewrite(self, follower: F, num_kept: int, tokens: list[int]) -> None:
        """Give a sequence these tokens after the first `num_kept`; add it if it is new."""
        sequence = follower.sequence
        if sequence in self._followers:
            self._scheduler.replace_tokens(sequence, num_kept, tokens)
            return
        sequence.tokens[num_kept:] = tokens
        self._scheduler.add(sequence)
        self._followers[sequence] = follower

    def forget(self, sequence: Request) -> None:
        """Drop a sequence, if it is known."""
        if self._followers.pop(sequence, None):
            self._scheduler.finish(sequence, FinishReason.CANCEL)
        self._runner.runner.forget(sequence)

    def least_chance(self, num_requests: int, price: DraftCost) -> float:
        """Return the chance from which on first guesses pay, one for each request."""
        return self._runner.least_chance(num_requests, price, self._step_s(num_requests, 1))

    def guess(self, asked: Sequence[F], num_requests: int, price: DraftCost) -> None:
        """Let sequences write as many guesses as may pay, one a step for all of them together.

        Sequences that were not asked are dropped if others wait for their pages.
        """
        for follower in asked:
            follower.clear()
        if self._scheduler.stats().num_waiting:
            for follower in [f for f in self._followers.values() if f not in asked]:
                self.forget(follower.sequence)
        spent_s = self._step_s(num_requests, 1)
        guessed = active = self._step(asked) if asked else []
        for _ in range(price.most - 1):
            start = max((follower.sequence.num_computed for follower in active), default=0)
            next_s = self._step_s(len(active), start)
            num_guesses = sum([len(follower.tokens) for follower in guessed])
            num_tokens = num_requests + sum([follower.expected for follower in guessed])
            each_s = next_s / max(1, len(active))
            least = price.least_next(num_guesses, num_tokens, spent_s, each_s)
            active = [f for f in active if f.chance * max(f.rate.first, _LEAST_FIRST) >= least]
            if not active:
                break
            spent_s += next_s
            active = self._step(active, len(active))
        for follower in guessed:
            self._end_round(follower)

    def _step(self, wanted: Sequence[F], budget: int | None = None) -> list[F]:
        """Compute a step; return those of `wanted` that have one more guess and can go on."""
        plan = self._scheduler.plan(budget)
        if plan is None:
            return []
        parts = [(self._followers[part.request], part.count) for part in plan.slices]
        if states := [state for follower, count in parts for state in follower.inputs(count)]:
            plan = replace(plan, external=np.stack(states))
        result = self._runner.run(plan)
        guessed = []
        for row, delta in enumerate(self._scheduler.commit(plan, result)):
            follower = self._followers[delta.request]
            hidden = None if result.hidden is None else result.hidden[row]
            if follower.take(delta.tokens[0], delta.logprobs[0], hidden) and follower in wanted:
                guessed.append(follower)
            else:
                self._end_round(follower)
        for lost in plan.preempted:
            self.forget(lost)
        return [follower for follower in guessed if not follower.sequence.is_finished]

    def _end_round(self, follower: F) -> None:
        """Leave a sequence without pending tokens, so that it waits for the next round."""
        if not follower.sequence.is_finished:
            self._scheduler.replace_tokens(follower.sequence, follower.end_round(), [])

    def _step_s(self, num_requests: int, start: int) -> float:
        """Return how long a step takes with one guess for each request, at position `start`."""
        return self._runner.step_time.seconds(BatchShape.decode((start,) * max(1, num_requests)))
