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
from twostroke.spec.drawn import drawn_rows
from twostroke.spec.guesses import PLAIN, Guesses
from twostroke.spec.heads import HeadsProposer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.core.step import StepResult
    from twostroke.spec.proposal import Price, Proposal


@dataclass(slots=True, eq=False)
class _Follower:
    """A request as the heads know it: the state from which its newest token was drawn.

    The mirror's tokens say nothing but how many the request has drawn: rows of heads bear the
    numbers of blocks, and stand on one page that nobody writes.
    """

    mirror: Request
    hidden: NDArray[np.float32]
    num_tokens: int  # of the request, with the newest one
    guesses: Guesses


class MedusaHeads(HeadsProposer[_Follower]):
    """Lets Medusa heads guess, for all requests in one step.

    They draw as the request would, with its temperature, its seed and the token's index.
    """

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
        depth = min(len(self._known.accepted), price.most)
        num_rows = depth * max(1, len(requests))
        step_s = self._pace.seconds(BatchShape((0,), (num_rows,), num_rows))
        least = self._least_chance(len(requests), price, step_s)
        found = {request: self._follow(request, least) for request in requests}
        asked = [follower for follower in found.values() if follower is not None]
        if asked and depth:
            self._run(asked, depth)
        return self._proposals(requests, found, price)

    def finish(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        follower = self._followers.pop(request, None)
        if follower is not None:
            self._runner.forget(follower.mirror)

    def _keep(self, request: Request, hidden: NDArray[np.float32]) -> None:
        follower = self._followers.get(request)
        if follower is None:
            params = replace(request.params, **PLAIN)
            mirror = Request(request.id, [], 0, params, request.seed, pages=[[0]])
            guesses = self._no_guesses()
            follower = self._followers[request] = _Follower(mirror, hidden, 0, guesses)
        follower.hidden, follower.num_tokens = hidden, len(request.tokens)
        tokens = follower.mirror.tokens
        tokens += [0] * (request.num_output - len(tokens))

    def _follow(self, request: Request, least: float) -> _Follower | None:
        """Return the heads' view of a request; None if it has none, or no hope."""
        follower = self._followers.get(request)
        if follower is None or follower.num_tokens != len(request.tokens):
            return None
        follower.guesses.clear()
        return None if follower.guesses.hope.is_lost(least) else follower

    def _run(self, followers: Sequence[_Follower], depth: int) -> None:
        others = tuple(range(1, depth))
        slices = [Slice(f.mirror, 0, 1, samples=True, drafts=others) for f in followers]
        given = np.repeat(np.stack([f.hidden for f in followers]), depth, axis=0)
        plan = StepPlan(tuple(slices), external=given)
        result = self._compute(plan)
        for index, follower in enumerate(followers):
            for row in range(index * depth, (index + 1) * depth):
                drawn, logprobs = result.tokens[row], result.logprobs[row]
                if not follower.guesses.add(drawn, logprobs, self._token_ids):
                    break
