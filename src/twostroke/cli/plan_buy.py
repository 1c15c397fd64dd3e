"""`twostroke plan buy`: hosting a model beside the prices of APIs."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli.help import Command, option
from twostroke.cli.options import check_effect
from twostroke.cli.planning import (
    MS,
    BoundedNumberParam,
    objective_options,
    price_option,
    share_options,
    weights_option,
)
from twostroke.cli.terminal import printable, show_table
from twostroke.core.json_io import encode_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

    from twostroke.lab.planner.buy import Buy, Case, CostComparison


class _Hours(click.ParamType):  # type: ignore[type-arg]
    """A shape of a day: flat, office, or 24 numbers."""

    name = "hours"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Return the weights of 24 hours."""
        from twostroke.lab.planner.buy import HOUR_WEIGHTS

        if isinstance(value, tuple):
            return value
        if value in HOUR_WEIGHTS:
            return HOUR_WEIGHTS[value]
        try:
            found = tuple(float(word) for word in str(value).split(","))
        except ValueError:
            found = ()
        if len(found) != 24:
            self.fail(f"'{value}' is not flat, office, or 24 numbers such as 1,1,2.", param, ctx)
        return found


@click.command("plan buy", cls=Command)
@click.argument("model")
@option("--on", "device", required=True, help="A device of the table, or a .toml file.")
@option("--devices", "count", default=1, help="Devices of a replica.")
@weights_option
@option("--requests-per-day", type=float, required=True, help="The load.", section="Load")
@option("--hours", type=_Hours(), default="flat", help="Shape of a day (UTC).", section="Load")
@option("--growth", default=0.0, help="Of the load in a month, such as 0.1.", section="Load")
@option("--batch", default=0.0, help="Share of requests that can wait.", section="Load")
@option("--prompt", default=1024, help="Tokens of a request's prompt.", section="Load")
@option("--output", default=256, help="Tokens of its answer.", section="Load")
@option("--cached", default=0.0, help="Share of the prompt that is cached.", section="Load")
@objective_options("Load")
@share_options(0.5, 0.7)
@price_option
@option("--token-budget", default=2048, help="Most tokens of a step; longer prompts are in chunks.")
@option("--utilization", default=0.6, help="Share of its time that a replica may be busy.")
@option("--spare", default=1, help="Replicas that run beside those that are needed.")
@option("--scaled", is_flag=True, help="Stop replicas in hours that do not need them.")
@option("--engineering", "engineering_usd", default=0.0, help="$ a month for people.")
@option("--setup", "setup_usd", default=0.0, help="$ once, to move to self-hosting.")
@option("--availability", default=0.99, help="Share of time that one replica runs.")
@option("--api", "apis", multiple=True, help="An API of the table [default: all].", section="API")
@option("--prices", type=click.Path(path_type=Path), help="CSV of prices.", section="API")
@option("--api-ttft", type=MS, help="Measured, in ms.", section="API")
@option("--api-tpot", type=MS, help="Measured, in ms.", section="API")
@option(
    "--api-availability",
    type=BoundedNumberParam(most=1),
    help="As promised or measured.",
    section="API",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    device: str,
    weights: str | None,
    *,
    apis: tuple[str, ...],
    prices: Path | None,
    api_ttft: float | None,
    api_tpot: float | None,
    api_availability: float | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Compare hosting MODEL with the prices of APIs, for a load by hour of day.

    Shows the cost of a month, the load from which hosting costs less, and what moves it most.
    """
    from twostroke.lab import planner
    from twostroke.lab.planner.buy import Case, Hosting, Traffic, compare_costs
    from twostroke.lab.planner.prices import find_price, load_prices

    check_effect("api_ttft", "api_tpot", has_effect=api_tpot is not None)
    check_effect("api_tpot", "api_ttft", has_effect=api_ttft is not None)
    known_prices = load_prices(prices)
    api_prices = [find_price(name, known_prices) for name in apis] or list(known_prices.values())
    planned = planner.load_planned_model(model)
    case = Case(
        planned.with_weights(weights) if weights else planned,
        planner.find_device(device),
        planner.Question(**_take(values, planner.Question)),
        Traffic(**_take(values, Traffic)),
        Hosting(**_take(values, Hosting)),
    )
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    result = compare_costs(case, api_prices, today)
    if as_json:
        click.echo(encode_json(result).decode())
        return
    for line in _costs(result, case):
        click.echo(printable(line))
    headings = ("API", "$/MONTH", "SAVING", "BREAK-EVEN AT", "PAID BACK", "PRICES OF")
    click.echo()
    show_table([headings, *(_api(comparison, today) for comparison in result.comparisons)])
    click.echo()
    show_table(
        [(f"SAVING BESIDE {result.against}", "A FIFTH LESS", "A FIFTH MORE"), *_swings(result)]
    )
    click.echo()
    measured = (api_ttft, api_tpot, api_availability)
    for line in (*_stale(result), *_signals(result, case, measured)):
        click.echo(printable(line))


def _take(values: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: values[name] for name in kind.__struct_fields__ if name in values}


def _costs(found: Buy, case: Case) -> Iterator[str]:
    from twostroke.lab.planner.words import left_out

    costs, replica, count = found.costs, found.replica, case.question.count
    devices = f"{count} x {found.device}" if count > 1 else found.device
    least, most = min(costs.replicas), max(costs.replicas)
    number = f"{most}" if least == most else f"{least} to {most}"
    yield (
        f"{found.model} on {number} replicas of {devices}: {costs.usd:,.0f} $ a month, "
        f"{costs.devices_usd:,.0f} for devices and {costs.engineering_usd:,.0f} for people."
    )
    yield (
        f"A replica serves {replica.requests_per_s:.3g} requests/s, {replica.streams:,} at once "
        f"(bound by {replica.bound}); devices are busy {costs.busy_share:.0%} of the time."
    )
    if found.assumed:
        yield left_out(found.assumed, found.model)


def _api(one: CostComparison, today: str) -> tuple[str, ...]:
    at = "never" if one.break_even is None else f"{one.break_even:,.0f} a day"
    paid = "–"
    if one.months is not None:
        year, month = map(int, today.split("-")[:2])
        later = year * 12 + month - 1 + one.months
        paid = f"{later // 12}-{later % 12 + 1:02d}"
    return one.api, f"{one.usd:,.0f}", f"{one.saving_usd:+,.0f}", at, paid, one.source_date


def _swings(found: Buy) -> Iterator[tuple[str, ...]]:
    for one in found.swings:
        yield one.name, f"{one.low_usd:+,.0f}", f"{one.high_usd:+,.0f}"


def _stale(found: Buy) -> Iterator[str]:
    for one in found.comparisons:
        if one.is_stale:
            yield (
                f"The prices of {one.api} are from {one.source_date}, {one.months_old} months ago: "
                "check them, and give your own with --prices."
            )


def _signals(
    found: Buy, case: Case, measured: tuple[float | None, float | None, float | None]
) -> Iterator[str]:
    """Yield what speaks for hosting and what for the API: cost, latency, reliability."""
    from twostroke.lab.measure.report_text import format_ms, format_number

    cheapest, (ttft, tpot, promised) = found.comparisons[0], measured
    side = "hosting" if cheapest.saving_usd > 0 else "the API"
    share = found.costs.usd / cheapest.usd
    yield f"Cost: for {side}. Hosting costs {format_number(share)} times what {cheapest.api} does."
    own = found.replica.ttft_s, found.replica.tpot_s
    text = f"Hosted TTFT {format_ms(own[0])} ms, without queues, and {format_ms(own[1])} ms a token"
    if ttft is None or tpot is None:
        yield f"Latency: open. {text}; measure the API's (--api-ttft, --api-tpot)."
    else:
        wins = (own[0] < ttft) + (own[1] < tpot)
        side = ("for the API", "divided", "for hosting")[wins]
        theirs = f"{format_ms(ttft)} and {format_ms(tpot)} ms"
        yield f"Latency: {side}. {text}; the API's are {theirs}."
    running, spare = max(found.costs.replicas), case.hosting.spare
    text = (
        f"The peak hour has enough of its {running} replicas ({spare} spare) with a chance of "
        f"{found.peak_availability:.3%}, if each runs {case.hosting.availability:.1%} of the time"
    )
    if promised is None:
        yield f"Reliability: open. {text}. What the API promises is --api-availability."
    else:
        side = "hosting" if found.peak_availability > promised else "the API"
        yield f"Reliability: for {side}. {text}. The API's is {promised:.3%}."
