"""All that the engine's loop counts, and what of it fell into the last seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.core.service import SERVICES
from twostroke.engine.seconds import Seconds
from twostroke.engine.tally import Tally

if TYPE_CHECKING:
    from twostroke.engine.meter import Meter, Strokes
    from twostroke.engine.seconds import Span
    from twostroke.engine.tally import ServiceTotals
    from twostroke.spec import SpeculationStats


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the engine started.

    `services` by class; `proposed` and `accepted` guesses by where they came from.
    """

    services: dict[str, ServiceTotals]
    strokes: Strokes
    proposed: dict[str, int]
    accepted: dict[str, int]


class Ledger:
    """The engine's counts. The loop writes and reads them under its lock."""

    def __init__(self, meter: Meter, speculation: SpeculationStats) -> None:
        """Count classes of service, and look at what others count."""
        self.tallies = {service: Tally() for service in SERVICES}
        self._meter = meter
        self._speculation = speculation
        self._seconds = Seconds(self.read)

    def turn(self, now_s: float) -> None:
        """Note the sums if a second has begun; to be called before a step is counted."""
        self._seconds.turn(now_s)

    def settle(self, now_s: float) -> None:
        """Count a step's gaps."""
        for tally in self.tallies.values():
            if tally.gaps:
                tally.settle(now_s)

    def read(self) -> Totals:
        """Return the sums so far."""
        services = {service: tally.read() for service, tally in self.tallies.items()}
        guesses = self._speculation
        return Totals(services, self._meter.strokes, dict(guesses.proposed), dict(guesses.accepted))

    def span(self, seconds: int) -> Span[Totals]:
        """Return the sums at both ends of the last whole seconds."""
        return self._seconds.span(seconds)

    @property
    def age_s(self) -> float:
        """Seconds since the engine started."""
        return self._seconds.age_s
