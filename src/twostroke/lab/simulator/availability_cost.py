"""Searches for the cheapest number of replicas that meets an availability."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import UnreachableError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.lab.measure.requests import make_report
from twostroke.lab.simulator.availability import (
    Availability,
    AvailabilityQuestion,
    estimate_availability,
    find_outcome,
    play_failures,
)
from twostroke.lab.simulator.failures import random_failures, share_of_time_short
from twostroke.lab.simulator.fleet import START_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.lab.simulator.failures import FailureRates
    from twostroke.lab.simulator.simulation import SimulationSetup

DEFAULT_MAX_REPLICAS: Final = 16
MIN_AVAILABILITY, MAX_AVAILABILITY = 0.5, 0.999999
_NUM_DRAWN: Final = 20_000  # failures by which hopeless candidates are found without a simulation
# A candidate is hopeless if it has too few replicas for this many times the allowed time.
_MAX_SHORT_RATIO: Final = 20.0


class Candidate(Frozen):
    """Numbers of replicas on permanent machines and on spot machines, and their availability.

    `usd_per_hour` is the price of all devices; None if the price of a device is not known.
    """

    num_on_demand: int
    num_spot: int
    usd_per_hour: float | None
    availability: Availability

    @property
    def num_replicas(self) -> int:
        """The number of all replicas."""
        return self.num_on_demand + self.num_spot


class AvailabilityCost(Frozen):
    """The result of a search for the cheapest replicas that meet an availability.

    Attributes:
        target: the availability that is asked for, from 0 to 1.
        num_needed: the replicas that meet it without failures.
        candidates: all simulated numbers of replicas, by price.
        best: the cheapest that meets the availability.
    """

    target: float
    num_needed: int
    candidates: tuple[Candidate, ...]
    best: Candidate


def find_cheapest(
    setup: SimulationSetup,
    question: AvailabilityQuestion,
    target: float,
    *,
    max_replicas: int = DEFAULT_MAX_REPLICAS,
    spot_usd_per_hour: float | None = None,
    watch: Callable[[Candidate], None] = lambda _: None,
) -> AvailabilityCost:
    """Search for the cheapest replicas with which a share `target` of requests is answered well.

    Candidates are simulated in the order of their prices, so the first that meets the target is the
    cheapest. With a rate of spot losses, some or all replicas may be on spot machines, whose
    devices cost `spot_usd_per_hour`. `watch` gets each simulated candidate.

    Raises:
        UsageError: an argument is out of range, or a price is missing.
        UnreachableError: no number of replicas up to `max_replicas` meets the target.
    """
    _check_target(target)
    rates = question.rates
    device_usd = setup.question.price_of(setup.device)
    if rates.spot_mtbf_s is not None:
        if spot_usd_per_hour is None:
            raise UsageError("is needed to compare spot machines.", field="spot_usd_per_hour")
        if device_usd is None:
            reason = f"is needed to compare spot machines: {setup.device.name} has no price."
            raise UsageError(reason, field="usd_per_hour")
    num_needed = _num_needed(setup, question, target, max_replicas)
    count = setup.question.count
    mixes = [*_mixes(num_needed, max_replicas, has_spot=rates.spot_mtbf_s is not None)]

    def price(mix: tuple[int, int]) -> float | None:
        if device_usd is None:
            return None
        return count * (mix[0] * device_usd + mix[1] * (spot_usd_per_hour or 0.0))

    mixes.sort(key=lambda mix: (price(mix) or 0.0, mix[0] + mix[1], mix[1]))
    candidates: list[Candidate] = []
    for num_on_demand, num_spot in mixes:
        num_replicas = num_on_demand + num_spot
        mixed = replace(rates, num_spot=num_spot)
        if num_spot and _is_hopeless(mixed, num_replicas, num_needed, target):
            continue
        availability = estimate_availability(
            replace(setup, replicas=num_replicas), replace(question, rates=mixed)
        )
        usd = price((num_on_demand, num_spot))
        candidates.append(Candidate(num_on_demand, num_spot, usd, availability))
        watch(candidates[-1])
        if availability.share >= target:
            return AvailabilityCost(target, num_needed, tuple(candidates), candidates[-1])
    best = max(candidates, key=lambda candidate: candidate.availability.share)
    raise UnreachableError(_why_unreachable(target, max_replicas, best))


def _check_target(target: float) -> None:
    if not MIN_AVAILABILITY <= target <= MAX_AVAILABILITY:
        reason = (
            f"must be a percentage from {100 * MIN_AVAILABILITY:g} to {100 * MAX_AVAILABILITY:g}, "
            f"such as 99.9, got {100 * target:.10g}."
        )
        raise UsageError(reason, field="availability")


def _num_needed(
    setup: SimulationSetup, question: AvailabilityQuestion, target: float, max_replicas: int
) -> int:
    """Return the smallest number of replicas that meets the target without failures.

    Raises:
        UnreachableError: no number up to `max_replicas` does.
    """
    shares: dict[int, float] = {}

    def meets(num_replicas: int) -> bool:
        run = play_failures(replace(setup, replicas=num_replicas), question.load, ())
        outcome = find_outcome(run.logs, run.causes, question.objectives, START_S, math.inf)
        shares[num_replicas] = 1 - outcome.num_bad / max(1, outcome.num_requests)
        causes[num_replicas] = outcome.causes
        is_growing = make_report(run.logs, question.objectives).is_growing
        return shares[num_replicas] >= target and not is_growing

    causes: dict[int, dict[str, int]] = {}
    high = 1
    while not meets(high):
        if high >= max_replicas:
            best = max(shares, key=lambda num: (shares[num], -num))
            reason = "the queue grows"
            if causes[best]:
                cause = max(causes[best], key=causes[best].__getitem__)
                reason = f"requests {_miss_text(cause)}"
            raise UnreachableError(
                f"No number of replicas up to {max_replicas} meets {100 * target:g}%: the best is "
                f"{best} with {100 * shares[best]:.4g}% even without failures, because {reason}."
            )
        high = min(2 * high, max_replicas)
    low = high // 2 if high > 1 else 0
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return high


def _miss_text(cause: str) -> str:
    return f"miss the objective of {cause}" if cause.isupper() else f"fail ({cause})"


def _mixes(num_needed: int, max_replicas: int, *, has_spot: bool) -> Iterator[tuple[int, int]]:
    """Yield pairs: (replicas on permanent machines, replicas on spot machines)."""
    for num_replicas in range(num_needed, max_replicas + 1):
        for num_spot in range(num_replicas + 1 if has_spot else 1):
            yield num_replicas - num_spot, num_spot


def _is_hopeless(rates: FailureRates, num_replicas: int, num_needed: int, target: float) -> bool:
    """Whether too few replicas are up for much more time than the target allows."""
    duration_s = _NUM_DRAWN / rates.failures_per_s(num_replicas)
    rng = np.random.default_rng(0)
    failures = random_failures(rates, num_replicas, duration_s, rng)
    short = share_of_time_short(failures, num_replicas - num_needed, duration_s)
    return short > _MAX_SHORT_RATIO * (1 - target)


def _why_unreachable(target: float, max_replicas: int, best: Candidate) -> str:
    causes = best.availability.causes
    cause = max(causes, key=causes.__getitem__)
    return (
        f"No number of replicas up to {max_replicas} meets {100 * target:g}%: the best is "
        f"{counted_noun(best.num_replicas, 'replica')} with {100 * best.availability.share:.6g}%, "
        f"because {100 * causes[cause]:.2g}% of requests {_miss_text(cause)}."
    )
