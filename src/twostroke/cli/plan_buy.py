"""`twostroke plan buy`: compares the costs of hosting a model with the prices of APIs."""

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
    efficiency_options,
    objective_options,
    price_option,
    weights_option,
)
from twostroke.cli.terminal import printable, show_table
from twostroke.core.errors import Field, UsageError
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

    from twostroke.lab.planner.buy import CostComparison, CostInputs, HostingComparison


class _HourlyLoadParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: the relative load in each hour of the day: flat, office, or 24 numbers."""

    name = "hours"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Return the relative loads of the 24 hours of a day."""
        from twostroke.lab.planner.buy import HOUR_WEIGHTS

        if isinstance(value, tuple):
            return value
        if value in HOUR_WEIGHTS:
            return HOUR_WEIGHTS[value]
        try:
            weights = tuple(float(word) for word in str(value).split(","))
        except ValueError:
            weights = ()
        if len(weights) != 24:
            self.fail(f"'{value}' is not flat, office, or 24 numbers such as 1,1,2.", param, ctx)
        return weights


@click.command("plan buy", cls=Command)
@click.argument("model")
@option(
    "--on", "device", required=True, help="Device of the table, such as H100-SXM, or a .toml file."
)
@option("--devices", "count", default=1, help="Number of devices of a replica.")
@weights_option
@option(
    "--requests-per-day", type=float, required=True, help="Mean requests per day.", section="Load"
)
@option(
    "--hours",
    type=_HourlyLoadParam(),
    default="flat",
    help="Load by hour of day (UTC): flat, office or 24 numbers.",
    section="Load",
)
@option("--growth", default=0.0, help="Growth of the load per month, such as 0.1.", section="Load")
@option(
    "--batch", default=0.0, help="Share of requests that can wait, from 0 to 1.", section="Load"
)
@option("--prompt", default=1024, help="Tokens of a request's prompt.", section="Load")
@option("--output", default=256, help="Tokens of a request's answer.", section="Load")
@option("--cached", default=0.0, help="Share of the prompt that is cached, 0 to 1.", section="Load")
@objective_options("Load")
@efficiency_options(0.5, 0.7)
@price_option
@option(
    "--purchase-price",
    "purchase_usd",
    type=float,
    help="Price of a device that you buy, with its share of the server, in $.",
    section="Own devices",
)
@option(
    "--lifetime",
    "lifetime_years",
    default=4.0,
    help="Years over which it is written off.",
    section="Own devices",
)
@option(
    "--power-price",
    "usd_per_kwh",
    default=0.0,
    help="Price of power, in $ per kWh; 0 if the rent includes it.",
    section="Own devices",
)
@option(
    "--watts",
    type=float,
    help="Power of a running device with its share of the server [default: the device's TDP].",
    section="Own devices",
)
@option(
    "--pue",
    default=1.0,
    help="Power of the data centre, with cooling, over the power of its servers.",
    section="Own devices",
)
@option(
    "--carbon",
    "grams_per_kwh",
    type=float,
    help="Carbon dioxide of power, in g per kWh.",
    section="Own devices",
)
@option("--token-budget", default=2048, help="Most tokens of a step.")
@option("--utilization", default=0.6, help="Most time that a replica is busy, from 0 to 1.")
@option("--spare", default=1, help="Replicas beyond the number that the load needs.")
@option("--scaled", is_flag=True, help="Stop replicas in hours that do not need them.")
@option("--engineering", "engineering_usd", default=0.0, help="Costs of people, $ per month.")
@option("--setup", "setup_usd", default=0.0, help="Costs of moving to self-hosting, $.")
@option("--availability", default=0.99, help="Share of time that a replica runs, 0 to 1.")
@option(
    "--api",
    "apis",
    multiple=True,
    help="API of the table; repeatable [default: all].",
    section="API",
)
@option("--prices", type=click.Path(path_type=Path), help="CSV file with prices.", section="API")
@option("--api-ttft", type=MS, help="The API's measured TTFT, in ms.", section="API")
@option("--api-tpot", type=MS, help="The API's measured TPOT, in ms.", section="API")
@option(
    "--api-availability",
    type=BoundedNumberParam(high=1),
    help="The API's availability, promised or measured, from 0 to 1.",
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
    """Compare the costs of hosting MODEL with the prices of APIs, for a load by hour of day.

    Shows the cost per month, the load from which hosting costs less, and the inputs that change the
    saving most.
    """
    from twostroke.lab import planner
    from twostroke.lab.planner.buy import CostInputs, Hosting, Traffic, compare_costs
    from twostroke.lab.planner.prices import find_price, load_prices

    _check_power(values)
    check_effect("api_ttft", "api_tpot", has_effect=api_tpot is not None)
    check_effect("api_tpot", "api_ttft", has_effect=api_ttft is not None)
    known_prices = load_prices(prices)
    api_prices = [find_price(name, known_prices) for name in apis] or list(known_prices.values())
    planned = planner.load_planned_model(model)
    case = CostInputs(
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
    for line in (*_stale(result), *_decision_sentences(result, case, measured)):
        click.echo(printable(line))


def _check_power(values: dict[str, Any]) -> None:
    """Raise UsageError for options about own devices and power that have no effect."""
    is_bought = values["purchase_usd"] is not None
    if is_bought and values["usd_per_hour"] is not None:
        reason = "cannot be combined with {other}: a device is bought or rented."
        raise UsageError(reason, field="purchase_usd", other=Field("usd_per_hour"))
    check_effect("lifetime_years", "purchase_usd", has_effect=is_bought)
    counts_energy = values["usd_per_kwh"] > 0 or values["grams_per_kwh"] is not None
    for name in ("watts", "pue"):
        check_effect(name, "usd_per_kwh", has_effect=counts_energy)


def _take(values: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: values[name] for name in kind.__struct_fields__ if name in values}


def _costs(result: HostingComparison, case: CostInputs) -> Iterator[str]:
    from twostroke.lab.planner.words import describe_missing_fields

    costs, replica, count = result.costs, result.replica, case.question.count
    devices = f"{count} x {result.device}" if count > 1 else result.device
    fewest, largest = min(costs.replicas), max(costs.replicas)
    number = f"{largest}" if fewest == largest else f"{fewest} to {largest}"
    yield (
        f"{result.model} on {number} replicas of {devices}: {costs.usd:,.0f} $ per month, "
        f"{costs.devices_usd:,.0f} for devices and {costs.engineering_usd:,.0f} for people"
        f"{f', {costs.energy_usd:,.0f} for power' if costs.energy_usd else ''}."
    )
    if costs.energy_kwh is not None:
        carbon = "" if costs.carbon_kg is None else f", {costs.carbon_kg:,.0f} kg carbon dioxide"
        yield (
            f"Running devices take {costs.energy_kwh:,.0f} kWh per month at full power, with "
            f"cooling{carbon}."
        )
    yield (
        f"A replica serves {replica.requests_per_s:.3g} requests/s, {replica.streams:,} at once "
        f"(limited by {replica.bound}); devices are busy {costs.busy_share:.0%} of the time."
    )
    if result.assumed:
        yield describe_missing_fields(result.assumed, result.model)


def _api(comparison: CostComparison, today: str) -> tuple[str, ...]:
    at = "never" if comparison.break_even is None else f"{comparison.break_even:,.0f} a day"
    paid = "–"
    if comparison.months is not None:
        year, month = map(int, today.split("-")[:2])
        later = year * 12 + month - 1 + comparison.months
        paid = f"{later // 12}-{later % 12 + 1:02d}"
    return (
        comparison.api,
        f"{comparison.usd:,.0f}",
        f"{comparison.saving_usd:+,.0f}",
        at,
        paid,
        comparison.source_date,
    )


def _swings(result: HostingComparison) -> Iterator[tuple[str, ...]]:
    for swing in result.swings:
        yield swing.name, f"{swing.low_usd:+,.0f}", f"{swing.high_usd:+,.0f}"


def _stale(result: HostingComparison) -> Iterator[str]:
    for comparison in result.comparisons:
        if comparison.is_stale:
            yield (
                f"The prices of {comparison.api} are from {comparison.source_date}, "
                f"{counted_noun(comparison.months_old, 'month')} ago: check them, and give your "
                "own with --prices."
            )


def _decision_sentences(
    result: HostingComparison,
    case: CostInputs,
    measured: tuple[float | None, float | None, float | None],
) -> Iterator[str]:
    """Yield a sentence each about cost, latency and reliability of hosting and of the API.

    `measured` has the API's TTFT and TPOT in seconds and its availability from 0 to 1; a figure is
    None if it is not known.
    """
    from twostroke.lab.measure.report_text import format_ms, format_number

    cheapest = result.comparisons[0]
    ttft_s, tpot_s, promised = measured
    side = "hosting" if cheapest.saving_usd > 0 else "the API"
    share = result.costs.usd / cheapest.usd
    yield f"Cost: for {side}. Hosting costs {format_number(share)} times what {cheapest.api} does."
    hosted = result.replica
    text = (
        f"Hosted TTFT {format_ms(hosted.ttft_s)} ms, without queues, and "
        f"{format_ms(hosted.tpot_s)} ms a token"
    )
    if ttft_s is None or tpot_s is None:
        yield f"Latency: open. {text}; measure the API's (--api-ttft, --api-tpot)."
    else:
        num_wins = (hosted.ttft_s < ttft_s) + (hosted.tpot_s < tpot_s)
        side = ("for the API", "divided", "for hosting")[num_wins]
        api_times = f"{format_ms(ttft_s)} and {format_ms(tpot_s)} ms"
        yield f"Latency: {side}. {text}; the API's are {api_times}."
    num_running = max(result.costs.replicas)
    spare = case.hosting.spare
    text = (
        f"The peak hour has enough of its {counted_noun(num_running, 'replica')} ({spare} spare) "
        f"with a chance of {result.peak_availability:.3%}, if each runs "
        f"{case.hosting.availability:.1%} of the time"
    )
    if promised is None:
        yield f"Reliability: open. {text}. What the API promises is --api-availability."
    else:
        side = "hosting" if result.peak_availability > promised else "the API"
        yield f"Reliability: for {side}. {text}. The API's is {promised:.3%}."
