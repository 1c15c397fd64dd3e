"""A proposer that is right with a given chance, to simulate speculation by the real controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.hardware import Hardware
from twostroke.engine.speculation import Speculator, StepTimeModel, budgets
from twostroke.engine.speculation.proposal import Proposal
from twostroke.lab.simulator.replica import drawn
from twostroke.model.program.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request
    from twostroke.engine.speculation.proposal import DraftCost, DraftOutcome
    from twostroke.lab.planner.roofline import Roofline
    from twostroke.lab.simulator.replica import Clock
    from twostroke.model.program.cost import StepCost

_MOST = 8  # guesses of a request
_CHANCES = 1 << 16
_WORD = (1 << 64) - 1


class SimulatedProposer:
    """Guesses next tokens, each right with chance `odds` if those before it are.

    A guess for all requests takes `cost` times a decode step of theirs, in virtual time.
    """

    name = "simulated"

    def __init__(
        self, odds: float, cost: float, roofline: Roofline, clock: Clock, vocab_size: int
    ) -> None:
        self._odds, self._cost, self._vocab_size = odds, cost, vocab_size
        self._roofline, self._clock = roofline, clock

    def propose(self, requests: Sequence[Request], price: DraftCost) -> list[Proposal | None]:
        """Return guesses for each request, as many as may pay."""
        starts = tuple([len(request.tokens) - 1 for request in requests])
        next_s = self._cost * self._roofline.totals(BatchShape.decode(starts)).seconds
        count, expected = 0, float(len(requests))
        while count < min(_MOST, price.most):
            chance = self._odds ** (count + 1)
            least = price.least_next(count * len(requests), expected, count * next_s, next_s)
            if next_s and chance * len(requests) < least:
                break
            count, expected = count + 1, expected + chance * len(requests)
        self._clock.now_s += count * next_s
        return [self._proposal(request, count) if count else None for request in requests]

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Learn nothing: the odds are known."""

    def finish(self, request: Request) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Hold nothing."""

    def _proposal(self, request: Request, count: int) -> Proposal:
        first, size = len(request.tokens), self._vocab_size
        tokens = [
            (drawn(request, place, size) + (not self._is_right(request, place))) % size
            for place in range(first, first + count)
        ]
        return Proposal(self.name, tuple(tokens), (self._odds,) * count, (0,) * count)

    def _is_right(self, request: Request, place: int) -> bool:
        mixed = (request.seed * 1_000_003 + place) * 0x9E3779B97F4A7C15 & _WORD
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
            mixed = (mixed ^ mixed >> shift) * factor & _WORD
        return (mixed >> 32) % _CHANCES < self._odds * _CHANCES


def make_speculator(
    guesser: SimulatedProposer, cost: StepCost, roofline: Roofline, clock: Clock
) -> Speculator:
    """Return the engine's controller for guesses of `guesser`, under virtual time."""
    limits = Hardware("simulated", 1, 0, roofline.bandwidth, roofline.peak, "", "")
    step_time = StepTimeModel(cost, limits)
    return Speculator([guesser], budgets(step_time, None), step_time, clock=clock.read)
