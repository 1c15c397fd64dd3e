"""`twostroke plan`: what a model could do on a device, what it needs and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from twostroke.cli.drawing import PLOTS, check_file, file_option
from twostroke.cli.given import is_given
from twostroke.cli.help import Command, option
from twostroke.cli.planning import (
    kv_format_option,
    objective_options,
    price_option,
    share_options,
    weights_option,
)
from twostroke.cli.terminal import printable, show_table
from twostroke.compress.unfinished import unfinished
from twostroke.core import env
from twostroke.core.errors import Field, UnreachableError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.planner import Plan, PlannedModel


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
@weights_option
@kv_format_option
@option("--prompt", default=1024, help="Tokens of a request's prompt.")
@option("--output", default=256, help="Tokens of its answer.")
@option("--cached", default=0.0, help="Share of the prompt that the prefix cache has.")
@option("--streams", type=int, help="Requests that decode together [default: as many as can].")
@objective_options()
@share_options(1.0, 1.0)
@price_option
@option(
    "--calibrate",
    is_flag=True,
    help="First measure steps of MODEL on this machine (a minute); later plans use them, too.",
)
@option(
    "--server",
    metavar="URL",
    help="With --calibrate: watch this server of MODEL on this machine for half a minute instead, "
    "while it serves its load. The key in TWOSTROKE_API_KEY is sent.",
)
@option(
    "--plot",
    **file_option(PLOTS),
    help="Draw both strokes under the roofline, and latency against throughput (needs "
    "twostroke[plots]).",
)
@option(
    "--html",
    **file_option((".html",)),
    help="Write a report of one page, with the plots and each formula (needs twostroke[plots]).",
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
    server: str | None,
    plot: Path | None,
    html: Path | None,
    **given: Any,
) -> None:
    """Show what MODEL could do on a device: memory, both strokes, batch sizes, costs.

    MODEL is a name, a GGUF file, or a config.json (or its folder), whose weights need not be here.
    With --mfu 1 and --mbu 1 times are limits that no engine passes. On this machine they are
    corrected by measured steps of MODEL, if there are any (--calibrate) and neither is given. The
    exit code is 9 if what is asked cannot be.
    """
    from twostroke import planner

    check_file(plot, "plot", PLOTS)
    check_file(html, "html", (".html",))
    question = planner.Question(**given)
    is_here = device == "here"
    found = planner.this_machine() if is_here else planner.find_device(device)
    planned = planner.planned_model(model)
    if calibrate and not is_here:
        reason = "measures this machine: leave {on} out."
        raise UsageError(reason, field="calibrate", on=Field("device"))
    shares = [name for name in ("mfu", "mbu") if is_given(name)]
    if calibrate and shares:
        reason = "has no effect on measured steps ({other}): leave one of them out."
        raise UsageError(reason, field=shares[0], other=Field("calibrate"))
    if server is not None and not calibrate:
        raise UsageError("needs {other}.", field="server", other=Field("calibrate"))
    if calibrate:
        _calibrate(planned, model, server)
    known = planner.known_calibration(planned.identity) if is_here and not shares else None
    plan = planner.make_plan(planned.as_(weights) if weights else planned, found, question, known)
    if plot is not None or html is not None:
        _draw(plan, plot, html)
    if as_json:
        click.echo(msgspec.json.encode(plan).decode())
    else:
        _show(plan, explained=explained)
    if plan.chosen is None:
        raise UnreachableError(plan.verdict)


def _calibrate(planned: PlannedModel, model: str, server: str | None) -> None:
    from twostroke import planner

    def notice(text: str) -> None:
        click.echo(text, err=True)

    if server is None:
        length = planned.program.context_length
        planner.calibrate(model, planned.identity, length, notice)
    else:
        planner.calibrate_from(server, env.api_key(), planned, notice)


def _show(plan: Plan, *, explained: bool) -> None:
    from twostroke.planner import words

    for line in words.facts(plan):
        click.echo(printable(line))
    click.echo()
    show_table([words.HEADINGS, *map(words.cells, plan.rows)], range(9))
    click.echo()
    if plan.chosen is not None:  # why there is no answer is an error
        for line in words.answer(plan):
            click.echo(printable(line))
        click.echo()
    show_table([words.WHAT_IF_HEADINGS, *words.what_ifs(plan)])
    if explained:
        click.echo()
        for line in plan.steps:
            click.echo(printable(line))


def _draw(plan: Plan, plot: Path | None, html: Path | None) -> None:
    from twostroke.measure.plots import save
    from twostroke.planner.plots import draw
    from twostroke.planner.report import report

    if plot is not None:
        with unfinished(plot) as part:
            save(draw(plan), part)
    if html is not None:
        with unfinished(html) as part:
            part.write_text(report(plan), encoding="utf-8")
