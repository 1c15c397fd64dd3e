"""What proposers with trained heads have in common."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from twostroke.program import BatchShape
from twostroke.spec.guesses import Guesses
from twostroke.spec.hope import Hope
from twostroke.spec.odds import Odds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.backends import Runner
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult
    from twostroke.spec.guesses import HeadsOdds
    from twostroke.spec.pace import Pace
    from twostroke.spec.proposal import Outcome, Price, Proposal


_FEW = 8  # steps, which do not tell yet how long others take


class _Follows(Protocol):
    """A request as heads know it."""

    guesses: Guesses


F = TypeVar("F", bound=_Follows)


class HeadsProposer(Generic[F]):
    """Keeps a follower for each request, and learns how often heads are right.

    `name` is what they are asked for by; `token_ids[i]` is what the target calls the token that
    they call i.
    """

    def __init__(
        self, name: str, runner: Runner, pace: Pace, odds: HeadsOdds, token_ids: Sequence[int]
    ) -> None:
        """Guess with `runner`, whose steps take what `pace` says."""
        self.name = name
        self._runner = runner
        self._pace = pace
        self._known = odds
        self._odds = Odds(odds.right_if_sure)
        self._token_ids = tuple(token_ids)
        self._followers: dict[Request, F] = {}  # the one asked about longest ago first
        self._is_warm = False

    def learn(self, request: Request, proposal: Proposal, outcome: Outcome) -> None:
        """Hear what became of a proposal."""
        follower = self._followers.get(request)
        if follower is not None:
            follower.guesses.learn(proposal, outcome)

    def close(self) -> None:
        """Give back memory and threads."""
        self._runner.close()

    def _compute(self, plan: StepPlan) -> StepResult:
        """Run a step, and note how long it took; not the first, which finds memory untouched."""
        began_s = time.monotonic()
        result = self._runner.run(plan)
        if self._is_warm:
            self._pace.learn(BatchShape.of(plan), time.monotonic() - began_s)
        self._is_warm = True
        return result

    def _least_chance(self, num_requests: int, price: Price, step_s: float) -> float:
        """Return the chance from which on first guesses pay that take `step_s` together.

        Before it is known how long steps take, any is tried: who is not asked learns nothing.
        """
        if self._pace.num_steps < _FEW:
            return 0.0
        return price.least_chance(step_s / max(1, num_requests))

    def _no_guesses(self) -> Guesses:
        """Return a request's guesses before there are any."""
        first = self._known.accepted[0]
        return Guesses(self._odds.for_request(), Hope(first, first))

    def _proposals(
        self, requests: Sequence[Request], found: Mapping[Request, F | None], price: Price
    ) -> list[Proposal | None]:
        most = price.most
        return [f.guesses.proposal(self.name, most) if (f := found[r]) else None for r in requests]
