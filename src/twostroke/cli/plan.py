"""`twostroke plan`: what a model could do on a device, what it needs and what it costs."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli.drawing import PLOTS, check_file, file_option
from twostroke.cli.given import is_given
from twostroke.cli.help import Command, option
from twostroke.cli.planning import (
    HERE,
    check_threads,
    kv_format_option,
    objective_options,
    price_option,
    share_options,
    threads_option,
    weights_option,
)
from twostroke.cli.terminal import printable, show_table
from twostroke.compress.unfinished import unfinished
from twostroke.core import env
from twostroke.core.errors import Field, UnreachableError, UsageError
from twostroke.core.json_lines import encode_json

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.planner import Calibration, Plan, PlannedModel


@click.command("plan", cls=Command)
@click.argument("model")
@option(
    "--on",
    "device",
    default=HERE,
    help="A device of the table such as H100-SXM, a .toml file that describes one, or this "
    "machine, measured.",
)
@option("--devices", "count", default=1, help="Devices that divide each layer.")
@threads_option
@weights_option
@kv_format_option
@option("--prompt", default=1024, help="Tokens of a request's prompt.")
@option("--output", default=256, help="Tokens of its answer.")
@option("--cached", default=0.0, help="Share of the prompt that the prefix cache has.")
@option(
    "--streams",
    type=int,
    help="Requests that decode together [default: as many as meet the objectives, and without "
    "--tpot up to 256].",
)
@option(
    "--token-budget",
    type=int,
    help="Most tokens of a step; longer prompts are read in chunks [default: 256 here, as serve; "
    "2048 elsewhere].",
)
@objective_options()
@share_options(1.0, 1.0)
@price_option
@option(
    "--calibrate",
    is_flag=True,
    help="First measure steps of MODEL on this machine (minutes); later plans use them, too.",
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
    "the extra [plots]).",
)
@option(
    "--html",
    **file_option((".html",)),
    help="Write a report of one page, with the plots and each formula (needs the extra [plots]).",
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
    num_threads: int | None,
    plot: Path | None,
    html: Path | None,
    **given: Any,
) -> None:
    """Show what MODEL could do on a device: memory, both strokes, batch sizes, costs.

    MODEL is a name, a GGUF file, or a config.json (or its folder), whose weights need not be here.
    With --mfu 1 and --mbu 1 times are limits that no engine passes. On this machine they are
    corrected by measured steps of MODEL (--calibrate), or else of another model, if neither is
    given. The exit code is 9 if what is asked cannot be.
    """
    from twostroke import planner

    check_file(plot, "plot", PLOTS)
    check_file(html, "html", (".html",))
    is_here = device == HERE
    usual = {
        "token_budget": planner.usual_budget(is_here=is_here),
        "kv_format": planner.usual_kv_format(is_here=is_here),
    }
    given |= {name: value for name, value in usual.items() if given[name] is None}
    question = planner.Question(**given)
    check_threads(device)
    found = None if is_here else planner.find_device(device)
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
    if server is not None and num_threads is not None:
        reason = "has no effect with {other}, which has its own: leave it out."
        raise UsageError(reason, field="num_threads", other=Field("server"))
    if calibrate:
        num_threads = _calibrate(planned, model, server, num_threads)
    known = None
    if found is None:
        found = planner.this_machine(num_threads)
        known = None if shares else _known(planned, num_threads) or planner.usual(found)
    planned = planned.as_(weights) if weights else planned
    plan = planner.make_plan(planned, found, question, known)
    if plan.fits and (plot is not None or html is not None):
        _draw(plan, plot, html)
    if as_json:
        click.echo(encode_json(plan).decode())
    elif plan.fits:
        _show(plan, _simulation(plan, model, device), explained=explained)
    if plan.chosen is None:
        raise UnreachableError(plan.verdict)


def _known(planned: PlannedModel, num_threads: int | None) -> Calibration | None:
    """Return the measured steps on these threads; note where there are others."""
    from twostroke import planner
    from twostroke.planner.served import on_threads

    known = planner.known_calibration(planned.identity, num_threads)
    if known is None and (others := planner.calibrated_threads(planned.identity)):
        text = f"Steps were measured {on_threads(others[0])}: "
        click.echo(f"{text}--threads {others[0]} plans with them.", err=True)
    return known


def _calibrate(
    planned: PlannedModel, model: str, server: str | None, num_threads: int | None
) -> int | None:
    """Measure steps; return the threads on which."""
    from twostroke import planner

    def notice(text: str) -> None:
        click.echo(text, err=True)

    if server is None:
        length = planned.program.context_length
        planner.calibrate(model, planned.identity, length, notice, num_threads)
        return num_threads
    return planner.calibrate_from(server, env.api_key(), planned, notice)


def _simulation(plan: Plan, model: str, device: str) -> str:
    """Return the command that simulates the largest load of the plan."""
    if plan.chosen is None:
        return ""
    params, asked = click.get_current_context().params, plan.question
    names = {
        "count": "devices", "num_threads": "threads", "weights": "weights",
        "kv_format": "kv-format", "ttft_s": "ttft", "tpot_s": "tpot", "mfu": "mfu", "mbu": "mbu",
        "usd_per_hour": "price",
    }  # fmt: skip
    given = {
        option: f"{params[name] * 1e3:g}" if name.endswith("_s") else params[name]
        for name, option in names.items()
        if is_given(name)
    }
    if plan.calibrated is not None:  # perhaps on the threads of a server
        given["threads"] = plan.calibrated.num_threads
    options: dict[str, Any] = {
        "on": device, **given, "rate": f"{plan.loads[-1].requests_per_s:.4g}",
        "prompt": asked.prompt, "output": asked.output,
    }  # fmt: skip
    if asked.num_cached:
        options["shared"] = asked.num_cached
    options["max-running"] = plan.chosen.streams
    options["token-budget"] = asked.token_budget
    if (most := plan.memory.most_tokens) is not None and most < plan.context_length:
        options["context-length"] = max(most, asked.prompt + asked.output)
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in options.items()]
    return " ".join(["twostroke simulate", shlex.quote(model), *words])


def _show(plan: Plan, simulation: str, *, explained: bool) -> None:
    from twostroke.planner import words

    for line in words.facts(plan):
        click.echo(printable(line))
    click.echo()
    show_table([words.HEADINGS, *map(words.cells, plan.rows)], range(10))
    click.echo()
    if plan.chosen is not None:  # why there is no answer is an error
        for line in words.answer(plan):
            click.echo(printable(line))
        click.echo()
        show_table([words.LOAD_HEADINGS, *words.loads(plan)], range(5))
        click.echo()
        click.echo(printable(f"{words.ABOUT_LOADS}\n  {simulation}"))
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
