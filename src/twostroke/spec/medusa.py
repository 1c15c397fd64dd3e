"""Guesses of Medusa heads: several tokens from one hidden state, all at once.

Source: Medusa (arXiv:2401.10774); here a chain with leaves beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.request import Request
from twostroke.core.step import Slice, StepPlan
from twostroke.program import BatchShape
from twostroke.spec.acceptance import AcceptanceRate
from twostroke.spec.guesses import ANY_VOCABULARY, Guesses
from twostroke.spec.proposal import drawn_rows
from twostroke.spec.sequences import TimedRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.backends import Runner
    from twostroke.core.step import StepResult
    from twostroke.spec.guesses import HeadAccuracy
    from twostroke.spec.proposal import Outcome, Price, Proposal
    from twostroke.spec.step_time import StepTime


@dataclass(slots=True, eq=False)
class _Follower:
    """A request as the heads know it: the state from which its newest token was drawn.

    The sequence's tokens only count those that the request has drawn. Rows of heads carry the
    numbers of blocks, and use one page that is never written.
    """

    sequence: Request
    hidden: NDArray[np.float32]
    num_tokens: int  # of the request
    guesses: Guesses


class MedusaHeads:
    """Lets Medusa heads guess, for all requests in one step.

    They draw as the request would, with its temperature, its seed and the token's index.
    """

    name = "medusa"

    def __init__(
        self,
        runner: Runner,
        step_time: StepTime,
        accuracy: HeadAccuracy,
        token_ids: Sequence[int],
    ) -> None:
        """Guess with `runner`; `token_ids[i]` is the target's id of the heads' token i."""
        self._runner = TimedRunner(runner, step_time)
        self._depth = len(accuracy.accepted)
        self._rate = AcceptanceRate(accuracy.right_if_sure, accuracy.accepted[0])
        self._token_ids = tuple(token_ids)
        self._followers: dict[Request, _Follower] = {}

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the hidden states from which requests' newest tokens were drawn."""
        for part, rows in drawn_rows(plan, result):
            request = part.request
            is_whole = len(request.tokens) == part.start + part.count + len(rows)
            if result.hidden is None or request.is_finished or not is_whole:
                self.finish(request)
            elif request.hints.speculate in {"auto", self.name}:
                self._keep(request, result.hidden[rows[-1]])

    def propose(self, requests: Sequence[Request], price: Price) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        depth = min(self._depth, price.most)
        num_rows = depth * max(1, len(requests))
        step_s = self._runner.step_time.seconds(BatchShape((0,), (num_rows,), num_rows))
        least = self._runner.least_chance(len(requests), price, step_s)
        found = [self._follow(request, least) for request in requests]
        asked = [follower for follower in found if follower is not None]
        if asked and depth:
            self._run(asked, depth)
        return [None if f is None else f.guesses.proposal(self.name, price.most) for f in found]

    def learn(self, request: Request, proposal: Proposal, outcome: Outcome) -> None:
        """Take in what became of a proposal."""
        follower = self._followers.get(request)
        if follower is not None:
            follower.guesses.rate.learn(proposal, outcome)

    def finish(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        follower = self._followers.pop(request, None)
        if follower is not None:
            self._runner.runner.forget(follower.sequence)

    def close(self) -> None:
        """Release memory and threads."""
        self._runner.runner.close()

    def _keep(self, request: Request, hidden: NDArray[np.float32]) -> None:
        follower = self._followers.get(request)
        if follower is None:
            params = replace(request.params, **ANY_VOCABULARY)
            sequence = Request(request.id, [], 0, params, request.seed, pages=[[0]])
            guesses = Guesses(self._rate.for_request(), self._rate.num_kinds)
            follower = self._followers[request] = _Follower(sequence, hidden, 0, guesses)
        follower.hidden, follower.num_tokens = hidden, len(request.tokens)
        tokens = follower.sequence.tokens
        tokens += [0] * (request.num_output - len(tokens))

    def _follow(self, request: Request, least: float) -> _Follower | None:
        """Return the heads' view of a request; None if there is none, or guesses do not pay."""
        follower = self._followers.get(request)
        if follower is None or follower.num_tokens != len(request.tokens):
            return None
        follower.guesses.clear()
        return follower if follower.guesses.rate.pays(least) else None

    def _run(self, followers: Sequence[_Follower], depth: int) -> None:
        others = tuple(range(1, depth))
        slices = [Slice(f.sequence, 0, 1, samples=True, drafts=others) for f in followers]
        given = np.repeat(np.stack([f.hidden for f in followers]), depth, axis=0)
        result = self._runner.run(StepPlan(tuple(slices), external=given))
        for index, follower in enumerate(followers):
            for row in range(index * depth, (index + 1) * depth):
                drawn, logprobs = result.tokens[row], result.logprobs[row]
                if not follower.guesses.add(drawn, logprobs, self._token_ids):
                    break
