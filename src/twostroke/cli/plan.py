"""`twostroke plan`: what a model could do on a device, what it needs and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from twostroke.cli.help import Command, OneOf, option
from twostroke.cli.terminal import printable, show_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.planner import Memory, Plan, PlannedModel, Row

_WEIGHTS = ("bf16", "fp8", "int8", "w4a16", "nvfp4")
_KV_FORMATS = ("f32", "f16", "bf16", "int8")
_HEADINGS = (
    "STREAMS", "MS/TOKEN", "TOKENS/S", "EACH", "MBU", "MFU", "REQUESTS/S", "$/1M", "J/TOKEN",
    "MOST TIME",
)  # fmt: skip


@click.command("plan", cls=Command)
@click.argument("model")
@option(
    "--on",
    "device",
    default="here",
    help="A device of the table such as H100-SXM, a .toml file that describes one, or this "
    "machine, measured.",
)
@option("--devices", "count", default=1, help="Devices that divide each layer.")
@option("--weights", type=OneOf(_WEIGHTS), help="How weights are stored [default: as in the file].")
@option("--kv-format", type=OneOf(_KV_FORMATS), default="f16", help="Format of keys and values.")
@option("--prompt", default=1024, help="Tokens of a request's prompt.")
@option("--output", default=256, help="Tokens of its answer.")
@option("--cached", default=0.0, help="Share of the prompt that the prefix cache has.")
@option("--streams", type=int, help="Requests that decode together [default: as many as can].")
@option("--ttft", "ttft_s", type=float, help="Objective for the first token, in ms.")
@option("--tpot", "tpot_s", type=float, help="Objective for each further token, in ms.")
@option("--mfu", default=1.0, help="Share of the arithmetic that an engine reaches.")
@option("--mbu", default=1.0, help="Share of the bandwidth that an engine reaches.")
@option("--price", "usd_per_hour", type=float, help="$ an hour of a device [default: the table's].")
@option(
    "--calibrate",
    is_flag=True,
    help="First measure steps of MODEL on this machine (a minute); later plans use them, too.",
)
@option("--explain", "explained", is_flag=True, help="Print each formula with its numbers.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    device: str,
    weights: str | None,
    *,
    explained: bool,
    as_json: bool,
    calibrate: bool,
    **given: Any,
) -> None:
    """Show what MODEL could do on a device: memory, both strokes, batch sizes, costs.

    MODEL is a name, a GGUF file, or a config.json (or its folder), whose weights need not be here.
    With --mfu 1 and --mbu 1 times are limits that no engine passes. On this machine they are
    corrected by measured steps of MODEL, if there are any (--calibrate).
    """
    from twostroke import planner

    for name in ("ttft_s", "tpot_s"):  # given in milliseconds
        given[name] = None if given[name] is None else given[name] / 1e3
    question = planner.Question(**given)
    is_here = device == "here"
    found = planner.this_machine() if is_here else planner.find_device(device)
    planned = planner.planned_model(model)
    if calibrate:
        length = planned.program.context_length
        planner.calibrate(model, planned.identity, length, lambda text: click.echo(text, err=True))
    known = planner.known_calibration(planned.identity) if is_here else None
    plan = planner.make_plan(planned.as_(weights) if weights else planned, found, question, known)
    if as_json:
        click.echo(msgspec.json.encode(plan).decode())
        return
    for line in _facts(plan, planned):
        click.echo(printable(line))
    show_table([_HEADINGS, *map(_cells, plan.rows)], range(9))
    for line in _answer(plan):
        click.echo(printable(line))
    click.echo()
    show_table([("WHAT IF", "TTFT MS", "MS/TOKEN", "FIT", "$/1M"), *_what_ifs(plan)])
    if explained:
        click.echo()
        for line in plan.steps:
            click.echo(printable(line))


def _facts(plan: Plan, model: PlannedModel) -> Iterator[str]:
    asked = plan.question
    devices = f"{asked.count} x {plan.device}" if asked.count > 1 else plan.device
    yield (
        f"{plan.model} on {devices}: {model.num_weights / 1e9:.3g} G weights ({plan.stored}), "
        f"arithmetic {plan.arithmetic}"
    )
    yield _memory(plan.memory)
    yield (
        f"First token of a prompt of {asked.prompt:,} tokens: {plan.ttft_s * 1e3:,.1f} ms "
        f"({plan.prefill_bottleneck}). Knee: {plan.knee:,.0f} streams."
    )
    if (one := plan.calibrated) is not None:
        yield (
            f"Times are corrected by {one.num_steps} steps measured on {one.date}; each of these "
            f"follows from the others with an error of {one.error:.0%} (median). Nearest: "
            f"{one.nearest}."
        )
    else:
        yield "Times are limits, which no engine passes; on this machine --calibrate corrects them."
    yield ""


def _memory(memory: Memory) -> str:
    text = (
        f"Memory: weights {memory.weights / 1e9:,.2f} GB, keys and values "
        f"{memory.kv_per_token:,.0f} bytes a token, {memory.kv_per_request / 1e9:,.3f} GB a request"
    )
    if memory.usable is None:
        return f"{text}. How much the device has is not known."
    return f"{text}; {memory.most_streams:,} requests fit into {memory.usable / 1e9:,.1f} GB."


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.streams:,}",
        f"{row.tpot_s * 1e3:.2f}",
        f"{row.tokens_per_s:,.0f}",
        f"{1 / row.tpot_s:.1f}",
        f"{row.mbu:.0%}",
        f"{row.mfu:.0%}",
        f"{row.requests_per_s:.3g}",
        _usd(row.usd_per_million),
        "–" if row.joules_per_token is None else f"{row.joules_per_token:.3g}",
        row.bottleneck,
    )


def _answer(plan: Plan) -> Iterator[str]:
    yield ""
    row = plan.chosen
    if row is None:
        yield plan.verdict
        return
    yield (
        f"{row.streams:,} streams: {row.tokens_per_s:,.0f} tokens/s, {1 / row.tpot_s:.1f} for "
        f"each, and {row.requests_per_s:.3g} requests/s with their prefill."
    )
    if (ratio := plan.prefill_per_decode) is not None:
        yield f"Prefill and decode apart: {ratio:.2g} prefill devices for each that decodes."


def _what_ifs(plan: Plan) -> Iterator[tuple[str, ...]]:
    for one in plan.what_ifs:
        fits = "–" if one.most_streams is None else f"{one.most_streams:,}"
        cells = f"{one.ttft_s * 1e3:,.1f}", f"{one.tpot_s * 1e3:,.2f}", fits
        yield one.change, *cells, _usd(one.usd_per_million)


def _usd(price: float | None) -> str:
    return "–" if price is None else f"{price:.3g}"
