"""Latency objectives, and goodput: how many answers meet them."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import UsageError, nearest
from twostroke.core.service import SERVICES
from twostroke.engine.seconds import MAX_SECONDS, Seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twostroke.engine.output import Timings, Usage

MEASURES: Final = ("queue", "ttft", "tpot", "e2e")
ALL: Final = "all"  # the objectives of a class together

_FORM = re.compile(r"(?:([^:=]*):)?([^:=]*)=\s*(.*?)\s*(ms|s)?\s*", re.DOTALL)
_MAX_SHOWN: Final = 60


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit in seconds on one of `MEASURES`, for one class of service or, if None, for all."""

    measure: str
    limit_s: float
    service: str | None = None


def parse_objective(text: str) -> Objective:
    """Read `ttft=0.5`, `tpot=50ms` or `priority:ttft=0.2`.

    Raises:
        UsageError: it has another form.
    """
    shown = ascii(text[:_MAX_SHOWN])
    found = _FORM.fullmatch(text)
    if found is None:
        reason = "must be NAME=SECONDS or CLASS:NAME=SECONDS, such as ttft=0.5, got {value}."
        raise UsageError(reason, field="objectives", value=shown)
    service, measure, number, unit = (part and part.strip() for part in found.groups())
    for kind, word, known in (("class", service, [*SERVICES]), ("measure", measure, [*MEASURES])):
        if word is not None and word not in known:
            reason = f"must name a {kind} out of {', '.join(known)}, got {{value}}.{{hint}}"
            hint = nearest(word, known)
            raise UsageError(reason, field="objectives", value=shown, hint=hint)
    try:
        limit_s = float(number or "") * (1e-3 if unit == "ms" else 1)
    except ValueError:
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        reason = "must have a limit greater than 0, in seconds or ms, got {value}."
        raise UsageError(reason, field="objectives", value=shown)
    return Objective(measure or "", limit_s, service)


def limits_of(objectives: Iterable[Objective]) -> dict[str, dict[str, float]]:
    """Return each class's limits by measure; an objective of one class overrides that of all.

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
            if (service, measure) in found or (None, measure) in found
        }
        for service in SERVICES
    }


@dataclass(frozen=True, slots=True)
class GoodputTotals:
    """How often objectives were met and missed, by class and measure (or `ALL`).

    `good_tokens` are the tokens of answers that met all objectives, by class.
    """

    met: Counter[tuple[str, str]]
    missed: Counter[tuple[str, str]]
    good_tokens: Counter[str]

    def __sub__(self, earlier: GoodputTotals) -> GoodputTotals:
        """Return what was added since `earlier`."""
        return GoodputTotals(
            self.met - earlier.met,
            self.missed - earlier.missed,
            self.good_tokens - earlier.good_tokens,
        )


class Goodput:
    """Judges answers as they end. It belongs to the event loop.

    An answer that failed, or was refused because the queue was full, misses all objectives. One
    of client disconnected misses those of limit had passed by then.
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
        self._met: Counter[tuple[str, str]] = Counter()
        self._missed: Counter[tuple[str, str]] = Counter()
        self._good_tokens: Counter[str] = Counter()
        self._seconds = Seconds(self.read, clock)

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
        self._count(service, met=limits.keys() - missed, missed=missed)
        if limits and not missed:
            self._good_tokens[service] += usage.completion_tokens

    def miss(self, service: str, count: int) -> None:
        """Count answers that failed or were refused."""
        self._count(service, missed=self.limits[service], count=count)

    def leave(self, service: str, count: int, waited_s: float, *, has_begun: bool) -> None:
        """Count answers of client disconnected after `waited_s`, if an objective was missed.

        `has_begun` says whether their first token had come.
        """
        late = ("e2e",) if has_begun else ("queue", "ttft", "e2e")
        limits = self.limits[service]
        missed = [name for name in late if waited_s > limits.get(name, math.inf)]
        if missed:
            self._count(service, missed=missed, count=count)

    def read(self) -> GoodputTotals:
        """Return the counts so far."""
        return GoodputTotals(Counter(self._met), Counter(self._missed), Counter(self._good_tokens))

    def recent(self, seconds: int = MAX_SECONDS) -> tuple[GoodputTotals, int]:
        """Return the counts of the last whole seconds, and the number of seconds."""
        span = self._seconds.span(seconds)
        return span.last - span.first, span.seconds

    def _count(
        self, service: str, *, met: Iterable[str] = (), missed: Iterable[str] = (), count: int = 1
    ) -> None:
        met, missed = list(met), list(missed)
        if not met and not missed:
            return
        self._seconds.turn(self._clock())
        (missed or met).append(ALL)
        for measure in met:
            self._met[service, measure] += count
        for measure in missed:
            self._missed[service, measure] += count
