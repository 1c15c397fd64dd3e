"""`twostroke simulate --what-if`: the largest load under changed settings of the simulation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.availability import FAILURE_PARAMS
from twostroke.cli.terminal import show_table
from twostroke.core.errors import UsageError, nearest
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import encode_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.lab.measure.requests import LatencyStatistics, Objectives
    from twostroke.lab.simulator import LoadProbe, SimulationSetup, Workload
    from twostroke.lab.simulator.what_if import LoadLimit

USUAL: Final = "usual"
AS_IT_IS: Final = "as it is"
_OF_THE_LOAD: Final = frozenset(
    (
        *("trace", "rate", "arrivals", "burstiness", "prompt", "output", "spread", "shared"),
        *("requests", "speed", "scale", "seed", "ttft_s", "tpot_s", "sweep", "share"),
        *("record", "as_json", "what_if", "model"),
        *(param.name for param in FAILURE_PARAMS),
    )
)
_DRAFT: Final = "acceptance=0.7,draft-cost=0.1"
_PAGE_CACHE: Final = "page-cache-size=10GB"
_MISSED_TEXTS: Final = {
    "": "nothing",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "queue": "the queue grows",
    "refusals": "refusals",
}


class Variant(Frozen):
    """Changed settings to simulate: the user's text, and the new values by parameter name."""

    text: str
    values: dict[str, Any]


def read_variants(texts: Sequence[str], values: dict[str, Any]) -> list[Variant]:
    """Return the variants of settings that --what-if names; the first has no changes.

    `values` are the values of the command's parameters. The text "usual" stands for common changes.

    Raises:
        UsageError: a text is not SETTING=VALUE, or a value is not valid.
    """
    all_texts = [
        text for option in texts for text in (_usual(values) if option == USUAL else (option,))
    ]
    variants = [Variant(AS_IT_IS, {})]
    for text in dict.fromkeys(all_texts):
        changes = dict(_read_change(change) for change in text.split(","))
        variants.append(Variant(text, changes))
    return variants


def show_limits(
    variants: Sequence[Variant],
    make_setup: Callable[[dict[str, Any]], SimulationSetup],
    load: Workload,
    objectives: Objectives,
    *,
    share: float,
    as_json: bool,
) -> None:
    """Simulate a load under each variant, and show up to which load the objectives are met.

    `make_setup` returns the simulated replicas for changed values of parameters. `share` is the
    share of requests that must meet the objectives. After Ctrl-C, the finished variants are shown,
    with a note that the table is incomplete.
    """
    from twostroke.lab.simulator.what_if import find_load_limit

    limits: list[tuple[Variant, LoadLimit]] = []
    try:
        for number, variant in enumerate(variants, 1):
            click.echo(f"{variant.text} ({number} of {len(variants)})", err=True)
            try:
                setup = make_setup(variant.values)
                limit = find_load_limit(setup, load, objectives, share, _progress)
            except UsageError as error:
                if variant.text == AS_IT_IS:
                    raise
                click.echo(f"  not possible: {error}", err=True)
            else:
                limits.append((variant, limit))
    except KeyboardInterrupt:
        if not limits:
            raise
        click.echo("Interrupted: the table has the variants that were done.", err=True)
    if as_json:
        rows = [
            {
                "change": variant.text,
                "multiple": None if math.isinf(limit.multiple) else limit.multiple,
                "missed_first": limit.missed,
                "report": limit.today.report,
            }
            for variant, limit in limits
        ]
        click.echo(encode_json({"is_complete": len(rows) == len(variants), "what_if": rows}))
        return
    show_table(
        [("WHAT IF", "LOAD UP TO", "MISSED FIRST", "GOOD", "TTFT P50", "P99", "TPOT P99", "HITS")]
        + [_row(variant, limit) for variant, limit in limits],
        {1, 3, 4, 5, 6, 7},
    )
    click.echo(
        f"\nLOAD UP TO: multiple of today's load at which {share:.0%} of requests still meet the "
        "objectives. Other columns: at today's load, times in ms."
    )
    click.echo(_sentence(limits[0][1]))
    if refusal := limits[0][1].today.refusal:
        click.echo(f"First refusal: {refusal}")


def _usual(values: dict[str, Any]) -> list[str]:
    """Return common changes, such as twice the replicas, that would change the given settings."""
    budget = values["token_budget"]
    texts = [
        f"replicas={2 * values['replicas']}",
        f"token-budget={max(16, budget // 2)}",
        f"token-budget={2 * budget}",
    ]
    if values["kv_format"] != "int8":
        texts.append("kv-format=int8")
    if values["prefix_cache"]:
        texts.append("no-prefix-cache")
    if values["acceptance"] is None:
        texts.append(_DRAFT)
    if values["prefix_cache"] and values["page_cache_size"] is None:
        texts.append(_PAGE_CACHE)
    return texts


def _read_change(text: str) -> tuple[str, Any]:
    """Return the parameter's name and the value in the text of a change, such as replicas=2."""
    context = click.get_current_context()
    name, separator, value = text.strip().partition("=")
    flag = f"--{name.strip().removeprefix('--')}"
    params = {
        opt: param
        for param in context.command.params
        if param.name not in _OF_THE_LOAD and isinstance(param, click.Option)
        for opt in (*param.opts, *param.secondary_opts)
        if opt.startswith("--") and opt != "--help"
    }
    param = params.get(flag)
    if param is None:
        hint = nearest(flag, params)
        raise UsageError(
            f"changes settings such as replicas=2,token-budget=512; {flag} is none of them.{hint}",
            field="what_if",
        )
    assert param.name is not None
    if isinstance(param, click.Option) and param.is_flag:
        if separator:
            raise UsageError(f"takes {flag} without a value.", field="what_if")
        return param.name, flag in param.opts
    if not value:
        raise UsageError(f"needs a value, as in {flag.removeprefix('--')}=2.", field="what_if")
    return param.name, param.type_cast_value(context, value.strip())


def _row(variant: Variant, limit: LoadLimit) -> tuple[str, ...]:
    from twostroke.lab.measure.report_text import format_ms

    report = limit.today.report

    def cell(latency: LatencyStatistics | None, name: str) -> str:
        percentile = latency.percentiles.get(name) if latency is not None else None
        return "–" if percentile is None else format_ms(percentile.value)

    ttft, tpot = (report.latencies.get(name) for name in ("ttft", "tpot"))
    return (
        variant.text,
        _multiple(limit.multiple),
        _MISSED_TEXTS[limit.missed],
        f"{report.good_share:.1%}",
        cell(ttft, "p50"),
        cell(ttft, "p99"),
        cell(tpot, "p99"),
        f"{report.hit_rate:.1%}",
    )


def _multiple(multiple: float) -> str:
    if math.isinf(multiple):
        return "any"
    return f"{multiple:.2f}x" if multiple else "none"


def _sentence(limit: LoadLimit) -> str:
    """Return a sentence about the unchanged settings: which objective breaks first, at which load.

    The load is a multiple of today's load.
    """
    missed = _MISSED_TEXTS[limit.missed]
    if math.isinf(limit.multiple):
        return "As it is, the objectives hold even if all requests arrive at the same time."
    if not limit.multiple:
        return f"As it is, requests miss the objectives at every load ({missed})."
    subject = missed if limit.missed in {"queue", "refusals"} else f"{missed} breaks"
    verb = {"queue": "", "refusals": " begin"}.get(limit.missed, " first")
    return f"As it is, {subject}{verb}, above {limit.multiple:.2f} times today's load."


def _progress(probe: LoadProbe) -> None:
    share = probe.simulation.report.good_share or 0.0
    click.echo(f"  {probe.speed:.3g}x: {share:.1%} are good", err=True)
