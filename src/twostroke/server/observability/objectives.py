"""Latency objectives, and goodput: how many answers meet them."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import UsageError
from twostroke.core.request import BATCH_SERVICE_TIER, SERVICE_TIERS
from twostroke.engine.counters import SumHistory
from twostroke.server.options import Objective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twostroke.engine.output import Timings, Usage

    Counts = Counter[tuple[str, str, str]]  # by class, measure (or `ALL`) and result

MEASURES: Final = ("queue", "ttft", "tpot", "e2e")
ALL: Final = "all"  # the objectives of a class together
MET, MISSED = "met", "missed"
GOOD_TOKENS: Final = "good_tokens"  # the result that counts tokens of answers that met `ALL`

_FORM = re.compile(
    rf"(?:({'|'.join(SERVICE_TIERS)})\s*:\s*)?({'|'.join(MEASURES)})\s*="
    r"\s*\+?([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(ms|s)?"
)
_MAX_SHOWN: Final = 60


def parse_objective(text: str) -> Objective:
    """Read `ttft=0.5`, `tpot=50ms` or `priority:ttft=0.2`.

    Raises:
        UsageError: it has another form.
    """
    if (found := _FORM.fullmatch(text.strip())) is not None:
        service, measure, number, unit = found.groups()
        try:
            limit_s = float(number) * (1e-3 if unit == "ms" else 1)
        except ValueError:
            limit_s = math.nan
        if 0 < limit_s < math.inf:
            return Objective(measure, limit_s, service)
    reason = (
        f"must be NAME=SECONDS or CLASS:NAME=SECONDS, such as ttft=0.5 or flex:tpot=50ms, with a "
        f"name of {', '.join(MEASURES)} and a class of {', '.join(SERVICE_TIERS)}, got {{value}}."
    )
    raise UsageError(reason, field="objectives", value=ascii(text[:_MAX_SHOWN]))


def limits_of(objectives: Iterable[Objective]) -> dict[str, dict[str, float]]:
    """Return each class's limits by measure; an objective of one class overrides that of all.

    Batches, for which nobody waits, only have objectives of their own.

    Raises:
        UsageError: two objectives limit the same measure of the same class.
    """
    found: dict[tuple[str | None, str], float] = {}
    for one in objectives:
        if (one.service, one.measure) in found:
            of = f" for {one.service}" if one.service else ""
            reason = f"is given twice for {one.measure}{of}: leave one of them out."
            raise UsageError(reason, field="objectives")
        found[one.service, one.measure] = one.limit_s
    return {
        service: {
            measure: found.get((service, measure), found.get((None, measure), 0.0))
            for measure in MEASURES
            if (service, measure) in found
            or ((None, measure) in found and service != BATCH_SERVICE_TIER)
        }
        for service in SERVICE_TIERS
    }


class Goodput:
    """Judges answers as they end. It belongs to the event loop.

    An answer that failed, or was refused because the queue was full, misses all objectives. If the
    client left, the answer misses those whose limit had passed by then.
    """

    def __init__(
        self, objectives: Iterable[Objective], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Judge answers by `objectives`.

        Raises:
            UsageError: they contradict each other.
        """
        self.limits = limits_of(objectives)
        self._clock = clock
        self._counts: Counts = Counter()
        self._seconds = SumHistory(self.read, clock)

    @property
    def has_objectives(self) -> bool:
        """Whether there are any objectives."""
        return any(self.limits.values())

    def judge(self, service: str, usage: Usage, timings: Timings) -> None:
        """Count a completed answer."""
        taken_s = {
            "queue": timings.queue_s,
            "ttft": timings.ttft_s,
            "tpot": timings.tpot_s(usage.completion_tokens) or 0.0,  # None: a single token
            "e2e": timings.e2e_s,
        }
        limits = self.limits[service]
        missed = {measure for measure, limit_s in limits.items() if taken_s[measure] > limit_s}
        self._count(service, MISSED, missed)
        self._count(service, MET, limits.keys() - missed, is_all=not missed)
        if limits and not missed:
            self._counts[service, ALL, GOOD_TOKENS] += usage.completion_tokens

    def miss(self, service: str, count: int) -> None:
        """Count answers that failed or were refused."""
        self._count(service, MISSED, self.limits[service], count)

    def leave(self, service: str, count: int, waited_s: float, *, has_begun: bool) -> None:
        """Count answers whose client left after `waited_s`, if an objective was missed.

        `has_begun` says whether their first token had come.
        """
        late = ("e2e",) if has_begun else ("queue", "ttft", "e2e")
        limits = self.limits[service]
        missed = [name for name in late if waited_s > limits.get(name, math.inf)]
        self._count(service, MISSED, missed, count)

    def read(self) -> Counts:
        """Return the counts so far."""
        return Counter(self._counts)

    def recent(self, seconds: int = 60, ago_s: int = 0) -> tuple[Counts, int]:
        """Return the counts of the last whole seconds up to `ago_s`, and how many these are."""
        span = self._seconds.span(seconds, ago_s)
        return span.last - span.first, span.seconds

    def _count(
        self,
        service: str,
        result: str,
        measures: Iterable[str],
        count: int = 1,
        *,
        is_all: bool = True,
    ) -> None:
        """Count a result for some measures, and for all together where `is_all`."""
        names = list(measures)
        if not names:
            return
        self._seconds.advance(self._clock())
        for name in (*names, ALL) if is_all else names:
            self._counts[service, name, result] += count
