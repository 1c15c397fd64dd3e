"""What became of the requests of each class of service: tokens, ends, and how long things took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from twostroke.core.request import FinishReason
from twostroke.engine.histogram import Histogram

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.engine.histogram import Distribution
    from twostroke.engine.output import Timings

LATENCIES: Final = ("queue", "ttft", "tpot", "itl", "e2e")
WELL_ENDED: Final = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class ServiceTotals:
    """Sums of one class since the engine started.

    Prompts count when their first token has come, `completion_tokens` as they are made, `ends` by
    why. `latencies` are by the names in `LATENCIES`, in seconds. Texts to embed are no answers:
    they have counts of their own, from their vectors on.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ends: dict[FinishReason, int]
    latencies: dict[str, Distribution]
    embedded_texts: int
    embedded_tokens: int

    @property
    def answers(self) -> int:
        """How many ended well."""
        return sum(self.ends.get(reason, 0) for reason in WELL_ENDED)


class Tally:
    """Counts for one class of service. The engine's loop writes, under its lock.

    A token costs it an item of a list: the gaps of a step are counted together, and in most steps
    they are all the same.
    """

    __slots__ = (
        *LATENCIES,
        "_cached",
        "_ends",
        "_prompt",
        "_read_texts",
        "_read_tokens",
        "gaps",
        "num_tokens",
    )

    def __init__(self) -> None:
        """Count from nothing."""
        self.queue, self.ttft, self.tpot, self.itl, self.e2e = (Histogram() for _ in LATENCIES)
        self.gaps: list[float] = []  # when the tokens before those of this step were made
        self.num_tokens = 0
        self._prompt = self._cached = self._read_texts = self._read_tokens = 0
        self._ends: Counter[FinishReason] = Counter()

    def begin(self, request: Request, now_s: float) -> None:
        """Count a request whose first token has come."""
        self._prompt += request.num_prompt
        self._cached += request.num_cached
        self.queue.observe(request.started_s - request.arrival_s)
        self.ttft.observe(now_s - request.arrival_s)

    def count_embedded(self, request: Request) -> None:
        """Count a text whose vector is ready."""
        self._read_texts += 1
        self._read_tokens += request.num_prompt

    def settle(self, now_s: float) -> None:
        """Count the gaps before the tokens of a step."""
        gaps = self.gaps
        if gaps.count(gaps[0]) == len(gaps):
            self.itl.observe(now_s - gaps[0], len(gaps))
        else:
            for before_s, count in Counter(gaps).items():
                self.itl.observe(now_s - before_s, count)
        gaps.clear()

    def end(self, reason: FinishReason, timings: Timings | None, num_output: int) -> None:
        """Count a request that has ended; one that ended well has `timings`."""
        self._ends[reason] += 1
        if reason not in WELL_ENDED or timings is None:
            return
        self.e2e.observe(timings.e2e_s)
        tpot_s = timings.tpot_s(num_output)
        if tpot_s is not None:
            self.tpot.observe(tpot_s)

    def read(self) -> ServiceTotals:
        """Return the sums so far."""
        latencies = {name: getattr(self, name).read() for name in LATENCIES}
        return ServiceTotals(
            self._prompt,
            self._cached,
            self.num_tokens,
            dict(self._ends),
            latencies,
            self._read_texts,
            self._read_tokens,
        )
