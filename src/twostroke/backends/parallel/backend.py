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
    MeasureCollectives,
    RankReady,
    RankTimes,
    Reset,
)
from twostroke.core.errors import BackendError, RanksLostError
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from twostroke.backends.cpu import CpuBackend
    from twostroke.backends.interface import BackendFacts, CollectiveTest
    from twostroke.backends.parallel.link import Link
    from twostroke.backends.parallel.rank_messages import RankJob
    from twostroke.backends.parallel.ranks import Ranks
    from twostroke.backends.step_frame import StepFrame
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult
    from twostroke.model.program.mesh import Mesh

    Array = NDArray[np.float32]

_CAUSE_TIMEOUT_S: Final = 2.0  # to learn why a step failed
# Ranks are joined again at least this often and this long, because a link may be down for a while.
_MIN_ATTEMPTS: Final = 5
_RECOVERY_TIMEOUT_S: Final = 30.0
_PAUSE_S: Final = 0.5


class RankBackend(Backend, Protocol):
    """Interface of the backend that one rank uses to compute its part of each step.

    For each step, rank 0 calls `fill`, sends the result of `encode_step` to the other ranks, and
    calls `compute`. The other ranks call `follow`. All ranks call `score` and `trace` with the same
    arguments.
    """

    def fill(self, plan: StepPlan) -> None:
        """Write a step's input arrays on rank 0; the next call of `compute` computes the step."""

    def encode_step(self) -> bytes:
        """Return the step that `fill` wrote, as a message to other ranks; call it once a step."""

    def compute(self, plan: StepPlan) -> StepResult:
        """Compute rank 0's part of the step that `fill` wrote, and draw the step's tokens."""

    def follow(self, frame: StepFrame) -> float:
        """Compute this rank's part of a step that rank 0 sent.

        Returns the seconds that the rank spent in collectives.
        """


class ParallelBackend:
    """The backend of several ranks: sends each step to the other ranks, and computes rank 0's part.

    `rank0_backend` is the backend of rank 0, which samples and holds the page tables. Steps finish
    in the order of their starts; with pipeline parallelism, several steps are in flight.
    """

    def __init__(
        self,
        rank0_backend: RankBackend,
        ranks: Ranks,
        link: Link,
        jobs: Callable[[str], Mapping[int, RankJob]],
        mesh: Mesh,
    ) -> None:
        """Wait until all ranks have loaded their parts of the model.

        `jobs`: a function from the text of a renewed link to the jobs of restarted ranks. The new
        object closes the backend, the ranks and the link, also if this call fails.

        Raises:
            RanksLostError, BackendError: a rank ended, or cannot take part.
        """
        self.rank0_backend = rank0_backend
        self._ranks, self._link, self._jobs = ranks, link, jobs
        self._process = os.getpid()
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._num_invalid = 0
        self._finished_s = self._collective_s = 0.0
        self._filled: StepPlan | None = None  # the step in `rank0_backend`
        self._clock = DecodeClock()
        try:
            self._begin()
        except BaseException:  # also after Ctrl-C: the processes of the ranks must not stay
            self.close()
            raise
        self.facts = replace(_facts_of_all(rank0_backend.facts, ranks, mesh), link=link.kind)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step on all ranks, and draw a token for each slice that samples."""
        self.start(plan)
        return self.finish()

    def start(self, plan: StepPlan) -> None:
        """Send a step to the other ranks, which begin to compute their parts of it.

        Raises:
            RanksLostError: some ranks are lost.
        """
        start_s = time.perf_counter()
        self._fill(plan)
        self._ranks.send(self.rank0_backend.encode_step())
        self._in_flight.append((plan, start_s))

    def finish(self) -> StepResult:
        """Compute rank 0's part of the oldest step in flight; return its result.

        Raises:
            RanksLostError: some ranks are lost; no step is in flight any more.
        """
        plan, start_s = self._in_flight.popleft()
        if self._num_invalid:
            self._num_invalid -= 1
            raise BackendError("An earlier step failed.")
        with self._recovering_ranks():
            if self._filled is not plan:
                self._fill(plan)
            result = self.rank0_backend.compute(plan)
        self._collective_s += result.collective_s
        self._clock.end(result.collective_s, is_decode=plan.is_decode)
        now_s = time.perf_counter()
        start_s, self._finished_s = max(start_s, self._finished_s), now_s
        return replace(result, elapsed_s=now_s - start_s)

    def check(self) -> None:
        """Raise RanksLostError if the connection to a rank was lost."""
        self._ranks.check()

    def recover(self) -> None:
        """Restart lost ranks, with empty KV pages, and connect all ranks again.

        Raises:
            BackendError: ranks were lost again in each attempt.
        """
        self._in_flight.clear()
        self._num_invalid = 0
        deadline = time.monotonic() + _RECOVERY_TIMEOUT_S
        for attempt in count(1):
            try:
                self._join(self._ranks.restart())
                return
            except RanksLostError as error:
                if attempt >= _MIN_ATTEMPTS and time.monotonic() > deadline:
                    reason = f"Ranks were joined {attempt} times and lost again. {error}"
                    raise BackendError(reason) from None
                time.sleep(_PAUSE_S)

    def give_up(self) -> None:
        """Make `recover` fail at once, now or later, for shutdown; any thread may call this."""
        self._ranks.give_up()
        self._link.abort()

    def states(self) -> list[RankState]:
        """Return the state of each rank; any thread may call this."""
        rank0_facts, *others = self.facts.ranks
        return [RankState(rank0_facts, "ready", self._collective_s), *self._ranks.states(others)]

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> Array:
        """Return the logits (len(tokens), vocab_size) of a token sequence; see `Backend.score`.

        Rows are computed as in prefill or, if `generated`, as in decode steps. Must not be called
        while requests are running.
        """
        self._ranks.send(Evaluate(list(tokens), (), generated))
        with self._recovering_ranks():
            return self.rank0_backend.score(tokens, generated=generated)

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, Array]:
        """Return the intermediate values named `values`, each (len(tokens), width), by name.

        The token sequence is computed as by `score`; see `Backend.trace`.
        """
        self._ranks.send(Evaluate(list(tokens), tuple(values), generated))
        with self._recovering_ranks():
            return self.rank0_backend.trace(tokens, values, generated=generated)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a KV page on all ranks, while no step runs; only for the cpu backend."""
        self._ranks.send(CopyPage(source, target))
        cast("CpuBackend", self.rank0_backend).copy_page(source, target)

    def measure_collectives(self, test: CollectiveTest) -> tuple[list[float], list[float]]:
        """Measure the time of collectives between all ranks, while no step runs.

        Returns, for each of `test.count` collectives, rank 0's seconds of computing before it, and
        its seconds in it; see `CpuBackend.measure_collectives`.

        Raises:
            RanksLostError: some ranks are lost.
        """
        self._ranks.send(MeasureCollectives(test))
        with self._recovering_ranks():
            return cast("CpuBackend", self.rank0_backend).measure_collectives(test)

    def times(self) -> list[RankTimes]:
        """Return the times of each rank's steps since the last call; only for the cpu backend.

        Raises:
            RanksLostError: some ranks are lost.
        """
        others = self._ranks.times()
        decode_s, waiting_s = self._clock.take()
        operations = [astuple(time_) for time_ in cast("CpuBackend", self.rank0_backend).times()]
        times = RankTimes(operations, decode_s, waiting_s)
        return [times, *(others[rank] for rank in sorted(others))]

    @property
    def state_memory(self) -> None:
        """Return None: slots for recurrent states are not read or written from outside."""

    @property
    def pages(self) -> None:
        """Return None, because each rank has a part of every KV page."""

    def forget(self, request: Request) -> None:
        """Drop the backend's state of a finished request, such as its row of the page tables."""
        self.rank0_backend.forget(request)

    def close(self) -> None:
        """End the processes of the other ranks, and free rank 0's memory and threads.

        Does nothing in a forked copy of the process, because the ranks belong to the original.
        """
        if os.getpid() != self._process:
            return
        self._link.abort()  # ends steps in flight
        self._ranks.close()
        self.rank0_backend.close()
        self._link.close()

    def _fill(self, plan: StepPlan) -> None:
        self._filled = None
        self.rank0_backend.fill(plan)
        self._filled = plan

    @contextmanager
    def _recovering_ranks(self) -> Iterator[None]:
        """Run the `with` block; if a rank makes it fail, connect all ranks again before raising.

        Then raises the error that made the rank fail.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 raised again once the ranks are joined
            raise self._cause(error) from None

    def _cause(self, error: Exception) -> Exception:
        self._link.abort()
        self._filled = None
        if isinstance(error, RanksLostError):
            cause = self._ranks.cause(_CAUSE_TIMEOUT_S)
            if isinstance(cause, RanksLostError):
                self._in_flight.clear()
                return cause
            error = cause
        self._num_invalid = len(self._in_flight)
        self._join()
        return error

    def _join(self, new: Iterable[int] = ()) -> None:
        """Renew the link, and connect all ranks again; `new` ranks first load their model parts."""
        link = self._link.renew()
        jobs = self._jobs(link)
        new = set(new)
        self._ranks.reset(Reset(link), new)
        self._ranks.assign({rank: jobs[rank] for rank in new})
        self._link.join(link)
        self._begin()

    def _begin(self) -> None:
        """Wait until all ranks are ready, and allow collectives over the link."""
        self._ranks.wait_until_ready()
        self._link.begin()
        self._ranks.check()


def _facts_of_all(rank0_facts: BackendFacts, others: Ranks, mesh: Mesh) -> BackendFacts:
    """Return rank 0's backend facts, with the memory use and threads of each rank added."""
    parts = {
        0: RankReady(rank0_facts.num_threads, rank0_facts.weight_bytes, rank0_facts.cache_bytes),
        **others.ready,
    }
    hosts = {rank: hello.host for rank, hello in others.hellos.items()}
    ranks = [
        RankFacts(
            rank=rank,
            host=hosts.get(rank) or socket.gethostname(),
            num_threads=part.num_threads,
            weight_bytes=part.weight_bytes,
            cache_bytes=part.cache_bytes,
            coordinate=mesh.coordinate(rank),
        )
        for rank, part in sorted(parts.items())
    ]
    num_threads = sum(rank.num_threads for rank in ranks)
    threads = f"{counted_noun(num_threads, 'thread')} in {counted_noun(len(ranks), 'rank')}"
    return replace(
        rank0_facts,
        detail=re.sub(r"\b\d+ threads?\b", threads, rank0_facts.detail, count=1),
        num_threads=num_threads,
        weight_bytes=sum(rank.weight_bytes for rank in ranks),
        cache_bytes=sum(rank.cache_bytes for rank in ranks),
        ranks=tuple(ranks),
    )


class DecodeClock:
    """Adds up a rank's time in decode steps, each counted from the end of the previous step."""

    def __init__(self) -> None:
        """Start the clock of a rank; no step has run yet."""
        self.ended_s = time.perf_counter()  # the last step of any kind
        self._total_s = self._waiting_s = 0.0

    def end(self, waiting_s: float, *, is_decode: bool) -> None:
        """Record that a step has ended, in which the rank waited for `waiting_s` seconds.

        Only decode steps are added to the sums.
        """
        now_s = time.perf_counter()
        if is_decode:
            self._total_s += now_s - self.ended_s
            self._waiting_s += waiting_s
        self.ended_s = now_s

    def take(self) -> tuple[float, float]:
        """Return the seconds of decode steps since the last call, and the waits in them."""
        totals = self._total_s, self._waiting_s
        self._total_s = self._waiting_s = 0.0
        return totals
