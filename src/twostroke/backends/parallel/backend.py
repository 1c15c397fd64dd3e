"""`ParallelBackend`: on rank 0, makes several ranks look like one backend."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol, cast

from msgspec.structs import astuple, replace

from twostroke.backends.interface import Backend, RankFacts, RankState
from twostroke.backends.parallel.rank_messages import (
    CopyPage,
    Evaluate,
    RankReady,
    RankTimes,
    Reset,
    pack,
)
from twostroke.core.errors import BackendError, RanksLostError
from twostroke.core.transport.channel import MessageType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from twostroke.backends.cpu import CpuBackend
    from twostroke.backends.interface import BackendFacts, Meetings
    from twostroke.backends.parallel.link import Link
    from twostroke.backends.parallel.rank_messages import RankJob
    from twostroke.backends.parallel.ranks import Ranks
    from twostroke.backends.step_frame import StepFrame
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult
    from twostroke.model.program.mesh import Mesh

    Array = NDArray[np.float32]

_CAUSE_S: Final = 2.0  # until it is known why a step failed
# Ranks are joined again at least so often, and for so long: a link may be down for a while.
_ATTEMPTS: Final = 5
_PATIENCE_S: Final = 30.0
_PAUSE_S: Final = 0.5


class RankBackend(Backend, Protocol):
    """One rank's part of a Program, which computes a step in parts.

    Rank 0 lays a step out with `fill`, sends it as `encoded`, and computes its part of it. The
    others `follow`. `score` and `trace` are called on all ranks with the same arguments.
    """

    def fill(self, plan: StepPlan) -> None:
        """Lay out a step, which the next call of `compute` computes."""

    def encoded(self) -> bytes:
        """Return the step that was laid out as a frame; once for each."""

    def compute(self, plan: StepPlan) -> StepResult:
        """Compute the step that was laid out last, of this plan."""

    def follow(self, frame: StepFrame) -> float:
        """Compute this rank's part of a step of rank 0; return its seconds in collectives."""


class ParallelBackend:
    """Sends each step to the other ranks and computes this rank's part of it.

    Sampling, page tables and taps are those of `own`, rank 0's part. The steps that `start` has
    sent are finished in that order; there are more than one with a pipeline.
    """

    def __init__(
        self,
        own: RankBackend,
        ranks: Ranks,
        link: Link,
        jobs: Callable[[str], Mapping[int, RankJob]],
        mesh: Mesh,
    ) -> None:
        """Join ranks that have their jobs; `jobs` makes those of ranks that are started again.

        Takes over what it is given, and gives it back if it fails.

        Raises:
            RanksLostError, BackendError: a rank ended, or cannot take part.
        """
        self.own = own
        self._ranks, self._link, self._jobs = ranks, link, jobs
        self._process = os.getpid()
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._num_spoiled = 0
        self._finished_s = self._collective_s = 0.0
        self._filled: StepPlan | None = None  # what `own` has laid out
        self._clock = DecodeClock()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        self.facts = replace(_facts_of_all(own.facts, ranks, mesh), link=link.kind)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows and draw one token for each slice that samples."""
        self.start(plan)
        return self.finish()

    def start(self, plan: StepPlan) -> None:
        """Let the other ranks begin a step.

        Raises:
            RanksLostError: some of them are gone.
        """
        began_s = time.perf_counter()
        self._lay_out(plan)
        self._ranks.send(MessageType.FRAME, self.own.encoded())
        self._in_flight.append((plan, began_s))

    def finish(self) -> StepResult:
        """Compute this rank's part of the earliest step in flight.

        Raises:
            RanksLostError: some ranks are gone; no step is in flight any more.
        """
        plan, began_s = self._in_flight.popleft()
        if self._num_spoiled:
            self._num_spoiled -= 1
            raise BackendError("An earlier step failed.")
        with self._failing():
            if self._filled is not plan:
                self._lay_out(plan)
            result = self.own.compute(plan)
        self._collective_s += result.collective_s
        self._clock.end(result.collective_s, is_decode=plan.is_decode)
        now_s = time.perf_counter()
        began_s, self._finished_s = max(began_s, self._finished_s), now_s
        return replace(result, elapsed_s=now_s - began_s)

    def check(self) -> None:
        """Raise RanksLostError if a rank was lost."""
        self._ranks.check()

    def recover(self) -> None:
        """Start lost ranks again, with empty pages, and join all.

        Raises:
            BackendError: they end again and again.
        """
        self._in_flight.clear()
        self._num_spoiled = 0
        deadline = time.monotonic() + _PATIENCE_S
        for attempt in count(1):
            try:
                self._join(self._ranks.restart())
                return
            except RanksLostError as error:
                if attempt >= _ATTEMPTS and time.monotonic() > deadline:
                    reason = f"Ranks were joined {attempt} times and lost again. {error}"
                    raise BackendError(reason) from None
                time.sleep(_PAUSE_S)

    def give_up(self) -> None:
        """Let `recover` fail at once, now or later; any thread may call it."""
        self._ranks.give_up()
        self._link.abort()

    def states(self) -> list[RankState]:
        """Return how each rank is now; any thread may call it."""
        own, *others = self.facts.ranks
        return [RankState(own, "ready", self._collective_s), *self._ranks.states(others)]

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> Array:
        """Return the logits of a sequence; see `Backend.score`."""
        self._ranks.send(MessageType.EVALUATE, pack(Evaluate(list(tokens), (), generated)))
        with self._failing():
            return self.own.score(tokens, generated=generated)

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, Array]:
        """Return values of the Program for a sequence; see `Backend.trace`."""
        self._ranks.send(
            MessageType.EVALUATE, pack(Evaluate(list(tokens), tuple(values), generated))
        )
        with self._failing():
            return self.own.trace(tokens, values, generated=generated)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page on all ranks; only the cpu backend can, while no step runs."""
        self._ranks.send(MessageType.COPY, pack(CopyPage(source, target)))
        cast("CpuBackend", self.own).copy_page(source, target)

    def meet(self, what: Meetings) -> tuple[list[float], list[float]]:
        """Let all ranks meet; see `CpuBackend.meet`. Only the cpu backend can, while no step runs.

        Raises:
            RanksLostError: some of them are gone.
        """
        self._ranks.send(MessageType.MEASURE, pack(what))
        with self._failing():
            return cast("CpuBackend", self.own).meet(what)

    def times(self) -> list[RankTimes]:
        """Return what the steps of each rank took since the last call; only of the cpu backend.

        Raises:
            RanksLostError: some of them are gone.
        """
        others = self._ranks.times()
        own = [astuple(one) for one in cast("CpuBackend", self.own).times()]
        return [RankTimes(own, *self._clock.take()), *(others[rank] for rank in sorted(others))]

    @property
    def pages(self) -> None:
        """None: each rank has a part of every page."""

    def forget(self, request: Request) -> None:
        """Drop all that is kept for a finished request."""
        self.own.forget(request)

    def close(self) -> None:
        """End the other ranks, and give back memory and threads.

        In a copy of this process (`os.fork`) it does nothing: the ranks are the original's.
        """
        if os.getpid() != self._process:
            return
        self._link.abort()  # of steps in flight
        self._ranks.close()
        self.own.close()
        self._link.close()

    def _lay_out(self, plan: StepPlan) -> None:
        self._filled = None
        self.own.fill(plan)
        self._filled = plan

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Bring all ranks back after a failed step, and raise what was the cause elsewhere."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 raised again once nobody waits
            raise self._cause(error) from None

    def _cause(self, error: Exception) -> Exception:
        self._link.abort()
        self._filled = None
        if isinstance(error, RanksLostError):
            cause = self._ranks.cause(_CAUSE_S)
            if isinstance(cause, RanksLostError):
                self._in_flight.clear()
                return cause
            error = cause
        self._num_spoiled = len(self._in_flight)
        self._join()
        return error

    def _join(self, new: Iterable[int] = ()) -> None:
        """Let all ranks begin again; `new` ones load first."""
        link = self._link.renew()
        jobs = self._jobs(link)
        new = set(new)
        self._ranks.reset(Reset(link), new)
        self._ranks.assign({rank: jobs[rank] for rank in new})
        self._link.join(link)
        self._begin()

    def _begin(self) -> None:
        """Let steps run, once all ranks are ready."""
        self._ranks.wait_until_ready()
        self._link.begin()
        self._ranks.check()


def _facts_of_all(own: BackendFacts, others: Ranks, mesh: Mesh) -> BackendFacts:
    """Return the facts of all ranks together."""
    parts = {0: RankReady(own.num_threads, own.weight_bytes, own.cache_bytes), **others.ready}
    hosts = {rank: hello.host for rank, hello in others.hellos.items()}
    ranks = [
        RankFacts(
            rank,
            hosts.get(rank) or socket.gethostname(),
            part.num_threads,
            part.weight_bytes,
            part.cache_bytes,
            mesh.coordinate(rank),
        )
        for rank, part in sorted(parts.items())
    ]
    num_threads = sum(rank.num_threads for rank in ranks)
    threads = f"{num_threads} threads in {len(ranks)} ranks"
    return replace(
        own,
        detail=re.sub(r"\b\d+ threads?\b", threads, own.detail, count=1),
        num_threads=num_threads,
        weight_bytes=sum(rank.weight_bytes for rank in ranks),
        cache_bytes=sum(rank.cache_bytes for rank in ranks),
        ranks=tuple(ranks),
    )


class DecodeClock:
    """Sums up the time of a rank's decode steps, from the end of one step to that of the next."""

    def __init__(self) -> None:
        """No step has run."""
        self.ended_s = time.perf_counter()  # the last step of any kind
        self._whole_s = self._waiting_s = 0.0

    def end(self, waiting_s: float, *, is_decode: bool) -> None:
        """Note the end of a step, of which the rank has waited for `waiting_s`."""
        now_s = time.perf_counter()
        if is_decode:
            self._whole_s += now_s - self.ended_s
            self._waiting_s += waiting_s
        self.ended_s = now_s

    def take(self) -> tuple[float, float]:
        """Return the seconds of all decode steps since the last call, and those of waiting."""
        taken = self._whole_s, self._waiting_s
        self._whole_s = self._waiting_s = 0.0
        return taken
