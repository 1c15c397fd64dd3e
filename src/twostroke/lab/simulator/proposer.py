"""Speculative decoding in a simulation: drafts are right with a given acceptance rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.hardware import Hardware
from twostroke.engine.speculation import Speculator, StepTimeModel, budget_function
from twostroke.engine.speculation.proposal import Proposal
from twostroke.lab.simulator.replica import token_at
from twostroke.model.program.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request
    from twostroke.engine.speculation.proposal import DraftCost, DraftOutcome
    from twostroke.lab.planner.roofline import Roofline
    from twostroke.lab.simulator.replica import Clock
    from twostroke.model.program.cost import StepCost

_MAX_DRAFTS = 8  # of a request
_PROBABILITY_STEPS = 1 << 16
_WORD_MASK = (1 << 64) - 1


class SimulatedProposer:
    """Proposes draft tokens in a simulation; each draft is right with a given probability.

    A draft can only be right if the drafts before it are right. Drafting a token for each request
    takes `cost` times the time of the requests' decode step, in virtual time.
    """

    name = "simulated"

    def __init__(
        self, acceptance: float, cost: float, roofline: Roofline, clock: Clock, vocab_size: int
    ) -> None:
        self._acceptance = acceptance
        self._cost = cost
        self._vocab_size = vocab_size
        self._roofline = roofline
        self._clock = clock

    def propose(self, requests: Sequence[Request], cost: DraftCost) -> list[Proposal | None]:
        """Return as many drafts for each request as are expected to save time.

        All requests get the same number, or None if drafts do not pay. The virtual clock advances
        by the time of drafting.
        """
        starts = tuple([len(request.tokens) - 1 for request in requests])
        next_s = self._cost * self._roofline.totals(BatchShape.decode(starts)).seconds
        count, expected = 0, float(len(requests))
        while count < min(_MAX_DRAFTS, cost.max_drafts):
            probability = self._acceptance ** (count + 1)
            min_gain = cost.min_next_chance(count * len(requests), expected, count * next_s, next_s)
            if next_s and probability * len(requests) < min_gain:
                break
            count, expected = count + 1, expected + probability * len(requests)
        self._clock.now_s += count * next_s
        return [self._proposal(request, count) if count else None for request in requests]

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Do nothing, because the acceptance rate of simulated drafts is given."""

    def finish(self, request: Request) -> None:
        """Do nothing, because the simulated proposer stores nothing for a request."""

    def close(self) -> None:
        """Do nothing, because the simulated proposer holds no resources."""

    def _proposal(self, request: Request, count: int) -> Proposal:
        first, size = len(request.tokens), self._vocab_size
        tokens = [
            (token_at(request, index, size) + (not self._is_right(request, index))) % size
            for index in range(first, first + count)
        ]
        return Proposal(self.name, tuple(tokens), (self._acceptance,) * count, (0,) * count)

    def _is_right(self, request: Request, index: int) -> bool:
        """Decide whether a draft is right, by a hash of the request's seed and the token's index.

        The hash is SplitMix64.
        """
        mixed = (request.seed * 1_000_003 + index) * 0x9E3779B97F4A7C15 & _WORD_MASK
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ mixed >> shift) * factor & _WORD_MASK
        return (mixed >> 32) % _PROBABILITY_STEPS < self._acceptance * _PROBABILITY_STEPS


def make_speculator(
    proposer: SimulatedProposer, cost: StepCost, roofline: Roofline, clock: Clock
) -> Speculator:
    """Return the engine's controller of speculative decoding for a simulated proposer.

    It reads the virtual time of `clock`, and decides how many drafts pay off as in a real engine.
    """
    limits = Hardware(
        "simulated", 1, 0, bandwidth=roofline.bandwidth, peak=roofline.peak, peak_kind="", source=""
    )
    step_time = StepTimeModel(cost, limits)
    return Speculator([proposer], budget_function(step_time, None), step_time, clock=clock.read)
