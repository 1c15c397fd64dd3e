"""What operators promise, and how often it is kept: goodput."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import UsageError, nearest
from twostroke.core.service import SERVICES
from twostroke.engine.seconds import MOST_SECONDS, Seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from twostroke.engine.output import Timings, Usage

MEASURES: Final = ("queue", "ttft", "tpot", "e2e")
ALL: Final = "all"  # of the objectives that hold for a class, together

_FORM = re.compile(r"(?:([^:=]*):)?([^:=]*)=\s*(.*?)\s*(ms|s)?\s*", re.DOTALL)
_MOST_SHOWN: Final = 60


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit in seconds on one of `MEASURES`, for one class of service or, None, for all."""

    measure: str
    limit_s: float
    service: str | None = None


def parse_objective(text: str) -> Objective:
    """Read `ttft=0.5`, `tpot=50ms` or `priority:ttft=0.2`.

    Raises:
        UsageError: it is no objective.
    """
    shown = ascii(text[:_MOST_SHOWN])
    found = _FORM.fullmatch(text)
    if found is None:
        message = f"{shown} is no objective: write NAME=SECONDS or CLASS:NAME=SECONDS, as ttft=0.5."
        raise UsageError(message, param="objective")
    service, measure, number, unit = (part and part.strip() for part in found.groups())
    for kind, word, known in (("class", service, [*SERVICES]), ("measure", measure, [*MEASURES])):
        if word is not None and word not in known:
            named = f"{kind} {word[:_MOST_SHOWN]!a}"
            message = f"{shown} names the {named}, which is none of {', '.join(known)}."
            raise UsageError(message + nearest(word, known), param="objective")
    try:
        limit_s = float(number or "") * (1e-3 if unit == "ms" else 1)
    except ValueError:
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        message = f"{shown} has no limit: write a number of seconds above 0, or of ms."
        raise UsageError(message, param="objective")
    return Objective(measure or "", limit_s, service)


def limits_of(objectives: Iterable[Objective]) -> dict[str, dict[str, float]]:
    """Return each class's limits by measure; what is said for one class goes before all.

    Raises:
        UsageError: one is said twice.
    """
    found: dict[tuple[str | None, str], float] = {}
    for one in objectives:
        if (one.service, one.measure) in found:
            whose = f" for {one.service}" if one.service else ""
            message = f"There are two objectives of {one.measure}{whose}: leave one of them out."
            raise UsageError(message, param="objective")
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
class Kept:
    """How often objectives were met and missed, by class and measure (or `ALL`).

    `good_tokens` are those of answers that met all of their class's, by class.
    """

    met: Mapping[tuple[str, str], int]
    missed: Mapping[tuple[str, str], int]
    good_tokens: Mapping[str, int]

    def __sub__(self, earlier: Kept) -> Kept:
        """Return what was added since `earlier`."""
        pairs = (self.met, earlier.met), (self.missed, earlier.missed)
        met, missed = (_minus(late, early) for late, early in pairs)
        return Kept(met, missed, _minus(self.good_tokens, earlier.good_tokens))


class Goodput:
    """Judges answers as they end. It belongs to the event loop.

    An answer that failed, or was refused because the queue was full, misses everything: whoever
    waits for it has not been served. One whose client left is judged by what it had missed by then.
    """

    def __init__(
        self, objectives: Iterable[Objective], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Hold answers against `objectives`.

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
    def is_asked(self) -> bool:
        """Whether there are any objectives."""
        return any(self.limits.values())

    def judge(self, service: str, usage: Usage, timings: Timings) -> None:
        """Count an answer that has ended well."""
        limits = self.limits[service]
        if not limits:
            return
        self._seconds.turn(self._clock())
        taken = {
            "queue": timings.queue_s,
            "ttft": timings.ttft_s,
            "tpot": timings.tpot_s(usage.completion_tokens) or 0.0,  # of one token: no gap at all
            "e2e": timings.e2e_s,
        }
        is_good = True
        for measure, limit_s in limits.items():
            is_met = taken[measure] <= limit_s
            (self._met if is_met else self._missed)[service, measure] += 1
            is_good &= is_met
        (self._met if is_good else self._missed)[service, ALL] += 1
        if is_good:
            self._good_tokens[service] += usage.completion_tokens

    def miss(self, service: str, count: int) -> None:
        """Count answers that never came."""
        if self.limits[service]:
            self._seconds.turn(self._clock())
            for measure in (*self.limits[service], ALL):
                self._missed[service, measure] += count

    def leave(self, service: str, count: int, waited_s: float, *, has_begun: bool) -> None:
        """Count answers whose client left after `waited_s`, if they had missed something by then.

        `has_begun` says whether their first token had come.
        """
        limits = self.limits[service]
        late = ("e2e",) if has_begun else ("queue", "ttft", "e2e")
        missed = [name for name in late if waited_s > limits.get(name, math.inf)]
        if missed:
            self._seconds.turn(self._clock())
            for measure in (*missed, ALL):
                self._missed[service, measure] += count

    def read(self) -> Kept:
        """Return the counts so far."""
        return Kept(dict(self._met), dict(self._missed), dict(self._good_tokens))

    def recent(self, seconds: int = MOST_SECONDS) -> tuple[Kept, int]:
        """Return the counts of the last whole seconds, and how many these were."""
        span = self._seconds.span(seconds)
        return span.last - span.first, span.seconds


def _minus(late: Mapping[Any, int], early: Mapping[Any, int]) -> dict[Any, int]:
    return {key: count - early.get(key, 0) for key, count in late.items()}
