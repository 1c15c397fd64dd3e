"""Guesses of an EAGLE head: a small layer that goes on from the target's hidden states.

Source: EAGLE (arXiv:2401.15077, 2406.16858, 2503.01840); here a chain with leaves beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.request import NO_PAGE, Request
from twostroke.core.step import Slice, StepPlan
from twostroke.program import BatchShape
from twostroke.spec.drawn import drawn_rows
from twostroke.spec.guesses import PLAIN, Guesses
from twostroke.spec.heads import HeadsProposer
from twostroke.spec.round import Round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.backends import Runner
    from twostroke.core.step import StepResult
    from twostroke.spec.guesses import HeadsOdds
    from twostroke.spec.pace import Pace
    from twostroke.spec.proposal import Price, Proposal

    Row = NDArray[np.float32]  # (width)

_MOST_WAITING = 32  # rows of one request that nobody asked about; then it is begun anew
_LEAST_HOPE = 0.5


@dataclass(slots=True, eq=False)
class _Follower:
    """A request as the head knows it: from position `base` on, where it was first drawn from.

    The mirror's token i is the request's token base + 1 + i, and comes with the hidden state from
    which it was drawn. The first `num_computed` of these have keys and values in the head's pages;
    the states of the others wait. Guesses stand behind the first `num_true` tokens.
    """

    mirror: Request
    base: int
    guesses: Guesses
    num_true: int = 0
    num_computed: int = 0
    waiting: list[Row] = field(default_factory=list)
    handed_on: Row | None = None  # the head's own state, from which the newest guess was drawn
    is_done: bool = False


class EagleHeads(HeadsProposer[_Follower]):
    """Lets an EAGLE head write ahead, in batches, on pages of its own.

    It begins where a request's first token is drawn: what the prompt says is in that row's hidden
    state. Of the keys and values of a round those of guesses are overwritten in the next one by
    those of the tokens that were drawn, with the target's states. It draws as the request would,
    with its temperature, its seed and the token's index, out of fewer tokens.
    """

    def __init__(
        self,
        name: str,
        runner: Runner,
        pace: Pace,
        odds: HeadsOdds,
        token_ids: Sequence[int],
        *,
        context_length: int,
    ) -> None:
        """Write with `runner`, whose steps take what `pace` says; the rest as in the base.

        Of one request it has room for `context_length` tokens, behind which it begins anew.
        """
        super().__init__(name, runner, pace, odds, token_ids)
        self._context_length = context_length
        facts = runner.facts
        self._page_size, self._window = facts.page_size, facts.windows[0]
        self._free = list(range(facts.num_pages))

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the hidden states from which requests' tokens were drawn."""
        for part, rows in drawn_rows(plan, result):
            request, position = part.request, part.start + part.count - 1
            taken = rows[: len(request.tokens) - 1 - position]
            if result.hidden is None or not taken or request.is_finished:
                self._drop(request)
            elif request.hints.speculate in {"auto", self.name}:
                self._keep(request, position, result.hidden[taken])

    def propose(self, requests: Sequence[Request], price: Price) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        step_s = self._pace.seconds(BatchShape.decode((1,) * max(1, len(requests))))
        least = self._least_chance(len(requests), price, step_s)
        found = {request: self._follow(request, least) for request in requests}
        ready = self._catch_up([f for f in found.values() if f is not None])
        this_round = Round(len(requests), price, step_s)
        for _ in range(price.most - 1):
            self._stop(ready, this_round)
            active = [f for f in ready if not f.is_done]
            active = [f for f in active if self._grow(f, 1, ready)]
            if not active:
                break
            self._guess(active)
        return self._proposals(requests, found, price)

    def finish(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        self._drop(request)

    def _keep(self, request: Request, position: int, rows: NDArray[np.float32]) -> None:
        """Take over the tokens that were drawn from `rows`, the first of which is at `position`."""
        follower = self._followers.get(request)
        if follower is None or follower.base + follower.num_true != position:
            follower = self._begin(request, position)
        elif len(follower.waiting) + len(rows) > _MOST_WAITING:
            position += len(rows) - 1
            rows = rows[-1:]
            follower = self._begin(request, position)
        mirror, first = follower.mirror, follower.num_true
        follower.num_true = first + len(rows)
        mirror.tokens[first:] = request.tokens[position + 1 : position + 1 + len(rows)]
        follower.waiting += list(rows)

    def _begin(self, request: Request, position: int) -> _Follower:
        """Begin with a request, or anew, at a position; what was learned of it stays."""
        old = self._drop(request)
        mirror = Request(
            request.id,
            [],
            request.num_prompt - position - 1,  # so that indices of output tokens are the same
            replace(request.params, **PLAIN),
            request.seed,
            pages=[[]],
        )
        guesses = old.guesses if old else self._no_guesses()
        follower = self._followers[request] = _Follower(mirror, position, guesses)
        return follower

    def _drop(self, request: Request) -> _Follower | None:
        follower = self._followers.pop(request, None)
        if follower is not None:
            self._release(follower)
        return follower

    def _release(self, follower: _Follower) -> None:
        self._free += [page for page in follower.mirror.pages[0] if page != NO_PAGE]
        follower.mirror.pages = [[]]
        self._runner.forget(follower.mirror)

    def _follow(self, request: Request, least: float) -> _Follower | None:
        """Return the head's view of a request; None if it has none, or no hope."""
        follower = self._followers.pop(request, None)
        if follower is None:
            return None
        self._followers[request] = follower
        follower.guesses.clear()
        follower.is_done = False
        del follower.mirror.tokens[follower.num_true :]
        follower.mirror.num_computed = follower.num_computed
        is_current = follower.base + follower.num_true == len(request.tokens) - 1
        if not is_current or not follower.waiting or follower.guesses.hope.is_lost(least):
            return None
        return follower

    def _catch_up(self, followers: Sequence[_Follower]) -> list[_Follower]:
        """Compute what was drawn since the last round; return those that have a first guess."""
        ready = [f for f in followers if self._grow(f, len(f.waiting), followers)]
        if not ready:
            return []
        slices = [Slice(f.mirror, f.num_computed, len(f.waiting), samples=True) for f in ready]
        self._run(ready, slices, np.stack([row for f in ready for row in f.waiting]))
        for follower in ready:
            follower.num_computed = follower.num_true
            follower.waiting = []
            self._leave_behind(follower)
        return [f for f in ready if not f.is_done]

    def _guess(self, followers: Sequence[_Follower]) -> None:
        """Compute the newest guess of each, for another one."""
        slices = [Slice(f.mirror, f.mirror.num_computed, 1, samples=True) for f in followers]
        given = [f.handed_on for f in followers if f.handed_on is not None]
        self._run(followers, slices, np.stack(given))

    def _run(
        self, followers: Sequence[_Follower], slices: Sequence[Slice], given: NDArray[np.float32]
    ) -> None:
        plan = StepPlan(tuple(slices), external=given)
        result = self._compute(plan)
        assert result.hidden is not None
        drawn = zip(followers, slices, result.tokens, result.logprobs, result.hidden, strict=True)
        for follower, part, token, logprobs, hidden in drawn:
            mirror = follower.mirror
            mirror.num_computed += part.count
            follower.handed_on = hidden
            if follower.guesses.add(token, logprobs, self._token_ids):
                mirror.tokens.append(follower.guesses.tokens[-1])
            else:
                follower.is_done = True

    def _stop(self, followers: Sequence[_Follower], this_round: Round) -> None:
        """Mark those for which another guess would not be worth its time."""
        num_active = sum(not follower.is_done for follower in followers)
        start = max((f.mirror.num_computed for f in followers), default=0)
        step_s = self._pace.seconds(BatchShape.decode((start,) * max(1, num_active)))
        num_guesses = sum([len(follower.guesses.tokens) for follower in followers])
        num_expected = sum([follower.guesses.expected for follower in followers])
        least = this_round.least_next(num_guesses, num_expected, num_active, step_s)
        for follower in followers:
            hope = max(follower.guesses.hope.value, _LEAST_HOPE)
            follower.is_done |= follower.guesses.chance * hope < least

    def _grow(self, follower: _Follower, count: int, kept: Sequence[_Follower]) -> bool:
        """Have pages for `count` more tokens, if need be those of others that are not `kept`."""
        mirror = follower.mirror
        if mirror.num_computed + count > self._context_length:
            follower.is_done = True
            return False
        pages = mirror.pages[0]
        num_new = -(-(mirror.num_computed + count) // self._page_size) - len(pages)
        if num_new > len(self._free):
            for request, other in list(self._followers.items()):
                if other not in kept and len(self._free) < num_new:
                    self._drop(request)
        if num_new > len(self._free):
            follower.is_done = True
            return False
        pages += [self._free.pop() for _ in range(num_new)]
        return True

    def _leave_behind(self, follower: _Follower) -> None:
        """Give back pages that lie wholly behind what the next rows see."""
        if self._window is None:
            return
        pages = follower.mirror.pages[0]
        end = max(0, follower.num_computed + 1 - self._window) // self._page_size
        for place in range(end - 1, -1, -1):
            if pages[place] == NO_PAGE:
                break
            self._free.append(pages[place])
            pages[place] = NO_PAGE
