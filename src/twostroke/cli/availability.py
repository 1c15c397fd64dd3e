"""The options of `simulate` about failures of replicas, and its report of their availability."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.help import CommandOption
from twostroke.cli.options import check_effect, click_params, is_given_by_user
from twostroke.cli.planning import BoundedNumberParam
from twostroke.cli.terminal import printable, show_table
from twostroke.core.errors import Field, UsageError
from twostroke.core.message_text import counted_noun
from twostroke.fleet.router.options import RouteOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.measure.requests import Objectives
    from twostroke.lab.simulator import SimulationSetup, Workload
    from twostroke.lab.simulator.availability import Availability, AvailabilityQuestion
    from twostroke.lab.simulator.availability_cost import AvailabilityCost, Candidate
    from twostroke.lab.simulator.failures import FailureRates

_SECTION: Final = "Failures"
_HOURS: Final = BoundedNumberParam(high=1e8, unit=3600.0)
_SECONDS: Final = BoundedNumberParam(low=0, high=1e6)
_MACHINE_START_S: Final = 120.0  # until a machine runs the server, without the load of the model
_MIN_SHARE: Final = 1e-9  # that seven digits of a percentage show
_RATES: Final = ("mtbf_s", "engine_mtbf_s", "spot_mtbf_s")
_TIMES: Final = ("detection_s", "wait_s", "resume_wait_s")
_OTHERS: Final = ("cold_start_s", "engine_start_s", "num_failures", *_TIMES)
_SPOT: Final = ("notice_s", "num_spot")
_SEARCH: Final = ("max_replicas", "spot_usd_per_hour")


def _router_params() -> list[CommandOption]:
    """Return the command-line options for how long the router's requests wait for a replica."""
    declared = click_params(RouteOptions, only=("wait_s", "resume_wait_s"))
    for param in declared:
        param.section = _SECTION
    return declared


_KINDS: Final = {
    "engine": "deaths of engines",
    "replica": "losses of machines",
    "spot": "losses of spot machines",
}
_CAUSES: Final = {
    "TTFT": "miss the TTFT objective",
    "TPOT": "miss the TPOT objective",
    "no replica": "are refused with 503, since no replica is ready within --wait",
    "lost stream": "end with an error, since no replica continues them within --resume-wait",
    "too many losses": "fail, since each replica that computes them fails",
    "queue full": "are refused with 429, since all queues are full",
}


_option = partial(CommandOption, section=_SECTION)

FAILURE_PARAMS: Final = [
    _option(
        ["--mtbf", "mtbf_s"],
        type=_HOURS,
        help="Mean hours between failures of a replica, whose machine is lost.",
    ),
    _option(
        ["--engine-mtbf", "engine_mtbf_s"],
        type=_HOURS,
        help="Mean hours between deaths of a replica's engine process.",
    ),
    _option(
        ["--spot-mtbf", "spot_mtbf_s"],
        type=_HOURS,
        help="Mean hours until a spot machine is taken away.",
    ),
    _option(
        ["--spot-replicas", "num_spot"],
        type=click.IntRange(0),
        help="How many of the replicas are on spot machines [default: all, with --spot-mtbf].",
    ),
    _option(
        ["--spot-notice", "notice_s"],
        type=_SECONDS,
        default=120.0,
        help="Seconds from the notice of a spot loss to the end of the machine, which drains.",
    ),
    _option(
        ["--cold-start", "cold_start_s"],
        type=_SECONDS,
        help="Seconds from the loss of a machine until another one answers [default: "
        f"{_MACHINE_START_S:g}, and the time to load the model].",
    ),
    _option(
        ["--engine-start", "engine_start_s"],
        type=_SECONDS,
        help="Seconds from the death of an engine until the next one computes [default: by the "
        "model's size].",
    ),
    _option(
        ["--detection", "detection_s"],
        type=_SECONDS,
        default=2.0,
        help="Seconds until the router notices that a machine is gone.",
    ),
    _option(
        ["--failures", "num_failures"],
        type=click.IntRange(1, 100_000),
        default=60,
        help="Simulate about N failures.",
    ),
    _option(
        ["--availability", "availability"],
        type=float,
        help="Find the cheapest replicas that answer this percentage of requests well, such as "
        "99.99.",
    ),
    _option(
        ["--max-replicas", "max_replicas"],
        type=click.IntRange(1, 1024),
        default=16,
        help="Try up to N replicas.",
    ),
    _option(
        ["--spot-price", "spot_usd_per_hour"],
        type=BoundedNumberParam(high=1e9),
        help="Price of a spot device in $ per hour.",
    ),
    *_router_params(),
]


class FailureValues:
    """The options about failures that the user gave.

    Attributes:
        has_rates: whether the user gave a mean time between failures, so that replicas fail.
        target: the availability to reach, from 0 to 1; None without --availability.
        seed: the seed of the times of failures.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        """Take the options about failures out of a command's `values`.

        Raises:
            UsageError: an option has no effect, or cannot be combined with others.
        """
        self.seed = values["seed"]
        self._values = {name: values.pop(name) for name in (*_RATES, *_OTHERS, *_SPOT, *_SEARCH)}
        percent = values.pop("availability")
        self.target = None if percent is None else percent / 100
        self.has_rates = any(self._values[name] is not None for name in _RATES)
        if self.target is not None and not self.has_rates:
            reason = "needs failures: give {mtbf}, {engine} or {spot}."
            facts = {"mtbf": Field("mtbf_s"), "engine": Field("engine_mtbf_s")}
            raise UsageError(reason, field="availability", **facts, spot=Field("spot_mtbf_s"))
        for name in ("replicas", "num_spot"):
            if self.target is not None and is_given_by_user(name):
                reason = "cannot be combined with {other}: it finds the number of replicas."
                raise UsageError(reason, field="availability", other=Field(name))
        for name in _OTHERS:
            check_effect(name, "mtbf_s", has_effect=self.has_rates)
        for name in _SPOT:
            check_effect(name, "spot_mtbf_s", has_effect=self._values["spot_mtbf_s"] is not None)
        for name in _SEARCH:
            check_effect(name, "availability", has_effect=self.target is not None)

    def check_alone(self, **others: bool) -> None:
        """Raise UsageError if failures are combined with other options.

        `others` says for each such option, by name, whether the user gave it.
        """
        if self.has_rates:
            name = next(name for name in _RATES if self._values[name] is not None)
            for other in [other for other, is_given in others.items() if is_given]:
                raise UsageError("cannot be combined with {other}.", field=name, other=Field(other))

    def rates(self, setup: SimulationSetup) -> FailureRates:
        """Return the rates of failures, with the times to restart the setup's model.

        Times that the user has not given are estimated from the size of the model.
        """
        from twostroke.engine.process.supervisor import expected_load_s
        from twostroke.lab.simulator.failures import FailureRates

        values, num_spot = self._values, self._values["num_spot"]
        if num_spot is not None and num_spot > setup.replicas:
            reason = f"must be at most {{other}} ({setup.replicas}), got {num_spot}."
            raise UsageError(reason, field="num_spot", other=Field("replicas"))
        load_s = expected_load_s(setup.model.all_bytes)
        engine_start_s, cold_start_s = values["engine_start_s"], values["cold_start_s"]
        return FailureRates(
            **{name: values[name] for name in (*_RATES, *_SPOT)},
            cold_start_s=_MACHINE_START_S + load_s if cold_start_s is None else cold_start_s,
            engine_start_s=load_s if engine_start_s is None else engine_start_s,
        )

    def estimate(
        self, setup: SimulationSetup, load: Workload, objectives: Objectives
    ) -> Availability:
        """Simulate failures of the setup's replicas; show the progress on standard error."""
        from twostroke.lab.simulator.availability import estimate_availability

        num_shown = 0

        def watch(done: int, total: int) -> None:
            nonlocal num_shown
            if done == total or done >= num_shown + total / 10:
                num_shown = done
                click.echo(f"{done} of {counted_noun(total, 'failure')} simulated", err=True)

        return estimate_availability(setup, self._question(setup, load, objectives), watch)

    def search(
        self, setup: SimulationSetup, load: Workload, objectives: Objectives
    ) -> AvailabilityCost:
        """Search for the cheapest replicas that reach `target`; show the progress."""
        from twostroke.lab.simulator.availability_cost import find_cheapest

        assert self.target is not None
        return find_cheapest(
            setup,
            self._question(setup, load, objectives),
            self.target,
            max_replicas=self._values["max_replicas"],
            spot_usd_per_hour=self._values["spot_usd_per_hour"],
            watch=_show_candidate,
        )

    def _question(
        self, setup: SimulationSetup, load: Workload, objectives: Objectives
    ) -> AvailabilityQuestion:
        from twostroke.lab.simulator.availability import AvailabilityQuestion
        from twostroke.lab.simulator.failures import RouterTimes

        return AvailabilityQuestion(
            load,
            objectives,
            self.rates(setup),
            RouterTimes(**{name: self._values[name] for name in _TIMES}),
            num_failures=self._values["num_failures"],
            seed=self.seed,
        )


def _show_candidate(candidate: Candidate) -> None:
    replicas = counted_noun(candidate.num_replicas, "replica")
    spot = f", {candidate.num_spot} of them spot" if candidate.num_spot else ""
    click.echo(f"{replicas}{spot}: {_percent(candidate.availability.share)}", err=True)


def show_availability(availability: Availability, rates: FailureRates) -> None:
    """Print the availability of a number of replicas."""
    click.echo()
    for line in _lines(availability, rates):
        click.echo(printable(line))


def _lines(availability: Availability, rates: FailureRates) -> Iterator[str]:
    from twostroke.lab.simulator.availability import MIN_FAILURES

    interval = f"{_percent(availability.low)} to {_percent(availability.high)}"
    yield (
        f"Availability: {_percent(availability.share)} of requests "
        f"({nines_text(availability)}; {interval}) and {_percent(availability.time_share)} "
        f"of time, {availability.downtime_min_per_month:,.3g} minutes of downtime a month."
    )
    yield from _warnings(availability)
    by_kind = availability.failures_per_month.items()
    kinds = [f"{per_month:,.3g} {_KINDS[kind]}" for kind, per_month in by_kind if per_month]
    yield (
        f"{counted_noun(availability.num_failures, 'failure')} simulated; expected in a month: "
        f"{', '.join(kinds) or 'none'}. A machine is back after {rates.cold_start_s:,.3g} s, an "
        f"engine after {rates.engine_start_s:,.3g} s."
    )
    if availability.num_failures < MIN_FAILURES:
        yield "These are too few failures to say more: simulate more with --failures."
    if availability.undisturbed_share < 1:
        undisturbed = _percent(availability.undisturbed_share)
        yield f"Without failures, {undisturbed} of requests are answered well."
    for cause, share in availability.causes.items():
        if share > 0:
            yield f"{_percent(share)} of requests {_CAUSES[cause]}."
    if availability.num_pauses and availability.longest_pause_s is not None:
        yield (
            f"Streams that continue elsewhere pause for {availability.pause_p99_s:.2f} s (p99), "
            f"at most {availability.longest_pause_s:.2f} s ({availability.num_pauses:,} pauses)."
        )


def _warnings(availability: Availability) -> Iterator[str]:
    """Yield a warning if the load has too few requests to judge answers without failures."""
    if availability.undisturbed_share == 1:
        possible = 3 / availability.num_undisturbed
        if possible > 1 - availability.share:
            good = counted_noun(
                availability.num_undisturbed, "request is", "requests are", form=","
            )
            yield (
                f"The interval counts failures only: without them, {good} answered well, but "
                f"{_percent(possible)} could be bad by chance. Use more requests."
            )


def show_cost(cost: AvailabilityCost, rates: FailureRates) -> None:
    """Print a table with the price and availability of numbers of replicas; name the cheapest."""
    rows: list[tuple[str, ...]] = [
        ("REPLICAS", "SPOT", "$/HOUR", "AVAILABILITY", "NINES", "95%", "DOWN MIN/MONTH")
    ]
    for candidate in cost.candidates:
        availability = candidate.availability
        usd = candidate.usd_per_hour
        rows.append(
            (
                f"{candidate.num_replicas}",
                f"{candidate.num_spot}",
                "–" if usd is None else f"{usd:,.2f}",
                _percent(availability.share),
                _nines(availability.share) if availability.share < 1 else "–",
                _nines_interval(availability),
                f"{availability.downtime_min_per_month:,.3g}",
            )
        )
    show_table(rows, range(7))
    best = cost.best
    spot = f", {best.num_spot} of them on spot machines," if best.num_spot else ""
    price = "" if best.usd_per_hour is None else f" for {best.usd_per_hour:,.2f} $ per hour"
    needed = counted_noun(cost.num_needed, "replica would", "replicas would")
    click.echo()
    replicas = counted_noun(best.num_replicas, "replica")
    click.echo(
        f"{100 * cost.target:.6g}% takes {replicas}{spot}{price}; without failures {needed} be "
        "enough."
    )
    if best.availability.low < cost.target:
        click.echo(
            f"This is not certain: the 95% interval begins at {_percent(best.availability.low)}. "
            "Simulate more with --failures."
        )
    for line in _lines(best.availability, rates):
        click.echo(printable(line))


def nines_text(availability: Availability) -> str:
    """Return an availability as a number of nines, for people: "3.0 nines" for 99.9%.

    If all simulated requests are answered well, only the lower end of the interval is known.
    """
    if availability.share == 1 and availability.low < 1:
        return f"at least {_nines(availability.low)} nines"
    return f"{_nines(availability.share)} nines"


def _nines(share: float) -> str:
    from twostroke.lab.simulator.availability import num_nines

    nines = num_nines(share)
    return "all" if math.isinf(nines) else f"{nines:.1f}"


def _nines_interval(availability: Availability) -> str:
    if availability.high == 1 and availability.low < 1:
        return f"from {_nines(availability.low)}"
    return f"{_nines(availability.low)} to {_nines(availability.high)}"


def _percent(share: float) -> str:
    """Return a share as a percentage, precise to two digits of its distance from 0% or 100%."""
    if 0 < share < _MIN_SHARE:
        return f"less than {100 * _MIN_SHARE:.7f}%"
    rest = min(share, 1 - share)
    digits = 1 if rest <= 0 else max(1, 1 - math.floor(math.log10(100 * rest)))
    return f"{100 * share:.{min(digits, 7)}f}%"
