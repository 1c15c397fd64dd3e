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

    Counts = Counter[tuple[str, str, str]]  # by service tier, measure (or `ALL`) and result

MEASURES: Final = ("queue", "ttft", "tpot", "e2e")
ALL: Final = "all"  # all objectives of a service tier together
MET, MISSED = "met", "missed"
GOOD_TOKENS: Final = "good_tokens"  # the result that counts tokens of answers that met `ALL`

_OBJECTIVE_PATTERN = re.compile(
    rf"(?:({'|'.join(SERVICE_TIERS)})\s*:\s*)?({'|'.join(MEASURES)})\s*="
    r"\s*\+?([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(ms|s)?"
)
_MAX_SHOWN_LENGTH: Final = 60


def parse_objective(text: str) -> Objective:
    """Parse the text of a latency objective, such as `ttft=0.5` or `priority:tpot=50ms`.

    Raises:
        UsageError: the text is not an objective.
    """
    if (match := _OBJECTIVE_PATTERN.fullmatch(text.strip())) is not None:
        service_tier, measure, number, unit = match.groups()
        try:
            limit_s = float(number) * (1e-3 if unit == "ms" else 1)
        except ValueError:
            limit_s = math.nan
        if 0 < limit_s < math.inf:
            return Objective(measure, limit_s, service_tier)
    reason = (
        f"must be NAME=SECONDS or CLASS:NAME=SECONDS, such as ttft=0.5 or flex:tpot=50ms, with a "
        f"name of {', '.join(MEASURES)} and a class of {', '.join(SERVICE_TIERS)}, got {{value}}."
    )
    raise UsageError(reason, field="objectives", value=ascii(text[:_MAX_SHOWN_LENGTH]))


def limits_of(objectives: Iterable[Objective]) -> dict[str, dict[str, float]]:
    """Return the latency limit in seconds of each measure, by service tier.

    An objective of a tier overrides an objective of all tiers. The batch tier has only its own
    objectives.

    Raises:
        UsageError: two objectives limit the same measure of the same service tier.
    """
    limits_by_key: dict[tuple[str | None, str], float] = {}
    for objective in objectives:
        if (objective.service_tier, objective.measure) in limits_by_key:
            scope = f" for {objective.service_tier}" if objective.service_tier else ""
            reason = f"is given twice for {objective.measure}{scope}: leave one of them out."
            raise UsageError(reason, field="objectives")
        limits_by_key[objective.service_tier, objective.measure] = objective.limit_s
    return {
        service_tier: {
            measure: limits_by_key.get(
                (service_tier, measure), limits_by_key.get((None, measure), 0.0)
            )
            for measure in MEASURES
            if (service_tier, measure) in limits_by_key
            or ((None, measure) in limits_by_key and service_tier != BATCH_SERVICE_TIER)
        }
        for service_tier in SERVICE_TIERS
    }


class Goodput:
    """Counts the answers that meet and miss latency objectives.

    An answer that failed, or was refused because the queue was full, misses all objectives. If the
    client disconnected, the answer misses only the objectives whose limits had passed by then. Call
    the methods only in the event loop's thread.
    """

    def __init__(
        self, objectives: Iterable[Objective], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to count for these latency objectives; `clock` returns monotonic seconds.

        Raises:
            UsageError: two objectives limit the same measure of the same service tier.
        """
        self.limits = limits_of(objectives)
        self._clock = clock
        self._counts: Counts = Counter()
        self._seconds = SumHistory(self.read, clock)

    @property
    def has_objectives(self) -> bool:
        """Whether there are any latency objectives."""
        return any(self.limits.values())

    def judge(self, service_tier: str, usage: Usage, timings: Timings) -> None:
        """Count which latency objectives an answer that has ended met, and which it missed."""
        durations_s = {
            "queue": timings.queue_s,
            "ttft": timings.ttft_s,
            "tpot": timings.tpot_s(usage.completion_tokens) or 0.0,  # None: a single token
            "e2e": timings.e2e_s,
        }
        limits = self.limits[service_tier]
        missed = {measure for measure, limit_s in limits.items() if durations_s[measure] > limit_s}
        self._count(service_tier, MISSED, missed)
        self._count(service_tier, MET, limits.keys() - missed, is_all=not missed)
        if limits and not missed:
            self._counts[service_tier, ALL, GOOD_TOKENS] += usage.completion_tokens

    def miss(self, service_tier: str, count: int) -> None:
        """Count failed or refused answers of a service tier, which miss all objectives."""
        self._count(service_tier, MISSED, self.limits[service_tier], count)

    def leave(self, service_tier: str, count: int, waited_s: float, *, has_begun: bool) -> None:
        """Count the objectives that answers missed before their client disconnected.

        The client disconnected `waited_s` seconds after the request's arrival; `has_begun` says
        whether the first token had arrived by then.
        """
        passed_measures = ("e2e",) if has_begun else ("queue", "ttft", "e2e")
        limits = self.limits[service_tier]
        missed = [name for name in passed_measures if waited_s > limits.get(name, math.inf)]
        self._count(service_tier, MISSED, missed, count)

    def read(self) -> Counts:
        """Return the counts of met and missed objectives since the server's start.

        The keys are (service tier, measure or ALL, MET or MISSED); ALL stands for all objectives of
        the tier together.
        """
        return Counter(self._counts)

    def recent(self, seconds: int = 60, ago_s: int = 0) -> tuple[Counts, int]:
        """Return the counts of met and missed objectives in a recent period, and its seconds.

        The period has at most `seconds` full seconds, and ended `ago_s` seconds ago.
        """
        span = self._seconds.span(seconds, ago_s)
        return span.last - span.first, span.seconds

    def _count(
        self,
        service_tier: str,
        result: str,
        measures: Iterable[str],
        count: int = 1,
        *,
        is_all: bool = True,
    ) -> None:
        """Add `count` answers to the result MET or MISSED of some measures, such as "ttft".

        With `is_all` the result also counts for all objectives of the tier together. Does nothing
        without measures.
        """
        names = list(measures)
        if not names:
            return
        self._seconds.advance(self._clock())
        for name in (*names, ALL) if is_all else names:
            self._counts[service_tier, name, result] += count
