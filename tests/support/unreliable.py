"""A backend that acts as a pipeline of ranks, some of which get lost, in one process."""

from __future__ import annotations

import random
import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from twostroke.backends.interface import RankFacts, RankState
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.errors import BackendError, RanksLostError
from twostroke.model.program.mesh import MeshCoordinate

if TYPE_CHECKING:
    from twostroke.backends.interface import Backend
    from twostroke.core.step import StepPlan, StepResult


class Ranks:
    """Makes a backend a `RankRunner`, of which any call may lose ranks by chance.

    A step is computed when it is finished; if that fails, so do the others in flight. After a loss
    the reference backend's pages hold no numbers.

    Attributes:
        chance: of a loss, in each call; below 1, a step succeeds between two of them.
        gate: closed, it holds up a recovery.
        failure: an error that ends recoveries for good.
        num_losses: how many there were.
        most_in_flight: how many steps there were at once.
    """

    def __init__(self, backend: Backend, steps_ahead: int, seed: int = 0) -> None:
        self.chance = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.num_losses = self.most_in_flight = 0
        self._backend, self._run = backend, backend.run
        self._rng = random.Random(seed)
        self._is_lost = False
        self._has_succeeded = False  # since the last loss
        self._plans: deque[StepPlan] = deque()
        self._num_spoiled = 0  # of these
        ranks = tuple(
            [RankFacts(i, "here", 1, 2, 3, MeshCoordinate(1 - i, 0, 0)) for i in range(2)]
        )
        facts = replace(backend.facts, steps_ahead=steps_ahead, ranks=ranks, link="shared")
        backend.facts = facts  # type: ignore[misc]
        for name in ("run", "start", "finish", "check", "recover", "give_up", "states"):
            setattr(backend, name, getattr(self, name))

    def run(self, plan: StepPlan) -> StepResult:
        assert not self._plans, "a step is run while others are in flight"
        self._perhaps_lose()
        self._has_succeeded = True
        return self._run(plan)

    def start(self, plan: StepPlan) -> None:
        assert len(self._plans) <= self._backend.facts.steps_ahead
        self._perhaps_lose()
        self._plans.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self._plans))

    def finish(self) -> StepResult:
        self._perhaps_lose()
        self._has_succeeded = True
        plan = self._plans.popleft()
        if self._num_spoiled:
            self._num_spoiled -= 1
            raise BackendError("An earlier step failed.")
        try:
            return self._run(plan)
        except Exception:
            self._num_spoiled = len(self._plans)
            raise

    def lose(self) -> None:
        """Lose a rank while no step runs."""
        self.num_losses += 1
        self._is_lost = True

    def check(self) -> None:
        if self._is_lost:
            raise RanksLostError("Rank 1 does not answer.")

    def recover(self) -> None:
        assert self._is_lost
        self.gate.wait(timeout=30)
        if self.failure is not None:
            raise self.failure
        if isinstance(self._backend, ReferenceBackend):
            for cache in self._backend._caches:
                cache._memory.fill(np.nan)
        self._is_lost = False

    def give_up(self) -> None:
        self.gate.set()

    def states(self) -> list[RankState]:
        zero, rank_one = self._backend.facts.ranks
        state = "lost" if self._is_lost else "ready"
        return [RankState(zero, "ready", 0.5), RankState(rank_one, state, 0.25, self.num_losses)]

    def _perhaps_lose(self) -> None:
        assert not self._is_lost, "lost ranks were not replaced"
        may_lose = self._has_succeeded or self.chance == 1
        if may_lose and self._rng.random() < self.chance:
            self._is_lost, self._has_succeeded = True, False
            self._plans.clear()
            self._num_spoiled = 0
            self.num_losses += 1
            raise RanksLostError("Rank 1 does not answer.")
