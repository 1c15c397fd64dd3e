"""`twostroke plan`: predicts the speed, memory and costs of a model on a device."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from twostroke.cli.help import Command, option
from twostroke.cli.options import (
    PLOT_SUFFIXES,
    check_effect,
    check_file,
    file_option,
    is_given_by_user,
)
from twostroke.cli.planning import (
    THIS_MACHINE,
    check_threads,
    efficiency_options,
    kv_format_option,
    objective_options,
    price_option,
    threads_option,
    weights_option,
)
from twostroke.cli.terminal import printable, show_table
from twostroke.core import env
from twostroke.core.errors import Field, UnreachableError, UsageError
from twostroke.core.files import atomic_output
from twostroke.core.json_io import encode_json

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.lab.planner import Calibration, Plan, PlannedModel


ALL: Final = "all"  # the devices of the table


@click.command("plan", cls=Command)
@click.argument("model")
@option(
    "--on",
    "device",
    multiple=True,
    default=(THIS_MACHINE,),
    show_default=THIS_MACHINE,
    help="Device: a name of the table, such as H100-SXM, a .toml file that describes one, or "
    "`here`, this machine as measured; repeatable. Several devices, or `all` of the table, are "
    "ranked.",
)
@option("--devices", "count", default=1, help="Number of devices that divide each layer.")
@threads_option
@weights_option
@kv_format_option
@option("--prompt", default=1024, help="Tokens of a request's prompt.")
@option("--output", default=256, help="Tokens of a request's answer.")
@option(
    "--cached", default=0.0, help="Share of the prompt that is in the prefix cache, from 0 to 1."
)
@option(
    "--streams",
    type=int,
    help="Requests that decode together [default: as many as meet the objectives, and without "
    "--tpot up to 256].",
)
@option(
    "--users",
    type=int,
    metavar="N",
    help="Number of users who each send a request, wait for the answer, think, and send another.",
)
@option(
    "--think",
    "think_s",
    type=float,
    metavar="X",
    help="With --users: seconds between an answer and the next request [default: 20].",
)
@option(
    "--token-budget",
    type=int,
    help="Most tokens of a step; longer prompts are prefilled in chunks [default: 256 on this "
    "machine, as `serve` uses; 2048 elsewhere].",
)
@objective_options()
@efficiency_options(1.0, 1.0)
@price_option
@option(
    "--calibrate",
    is_flag=True,
    help="First measure steps of MODEL on this machine, which takes minutes; later plans also use "
    "them.",
)
@option(
    "--server",
    metavar="URL",
    help="With --calibrate: measure the steps of this server of MODEL on this machine for half a "
    "minute, while it serves requests. The key in TWOSTROKE_API_KEY is sent to it.",
)
@option(
    "--plot",
    **file_option(PLOT_SUFFIXES),
    help="Draw prefill and decode under the roofline, and latency against throughput (needs the "
    "extra [plots]).",
)
@option(
    "--html",
    **file_option((".html",)),
    help="Write a report of one page with the plots and each formula (needs the extra [plots]).",
)
@option("--explain", "explained", is_flag=True, help="Print each formula with its numbers.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    device: tuple[str, ...],
    weights: str | None,
    *,
    explained: bool,
    as_json: bool,
    calibrate: bool,
    server: str | None,
    num_threads: int | None,
    plot: Path | None,
    html: Path | None,
    **values: Any,
) -> None:
    """Predict memory, prefill, decode, batch sizes and costs of MODEL on a device.

    MODEL is a name, a GGUF file, or a config.json or its folder; the weights are not needed. With
    --mfu 1 and --mbu 1 the times are limits that no engine exceeds. On this machine, if neither
    option is given, times are corrected by measured steps of MODEL (--calibrate), or of another
    model. The exit code is 9 if the model does not fit or an objective cannot be met.
    """
    from twostroke.lab import planner
    from twostroke.lab.planner.words import verdict

    check_file(plot, "plot", PLOT_SUFFIXES)
    check_file(html, "html", (".html",))
    check_effect("think_s", "users", has_effect=values["users"] is not None)
    names = _device_names(device)
    plan_options = _PlanOptions(
        weights, num_threads, {k: v for k, v in values.items() if v is not None}
    )
    planned = planner.load_planned_model(model)
    if len(names) > 1:
        _check_for_several(plot, html, calibrate=calibrate, explained=explained)
        _show_ranking([_plan(planned, name, plan_options) for name in names], as_json=as_json)
        return
    [name] = names
    check_threads(name)
    _check_calibration(server, num_threads, calibrate=calibrate, is_here=name == THIS_MACHINE)
    if calibrate:
        num_threads = _calibrate(planned, model, server, num_threads)
        plan_options = _PlanOptions(weights, num_threads, plan_options.question)
    plan = _plan(planned, name, plan_options)
    if plan.fits and (plot is not None or html is not None):
        _draw(plan, plot, html)
    if as_json:
        click.echo(encode_json(plan).decode())
    elif plan.fits:
        _show(plan, _simulate_command(plan, model, name), explained=explained)
    if plan.chosen_row is None or (plan.user_load and not plan.user_load.meets_objectives):
        raise UnreachableError(verdict(plan))


class _PlanOptions(NamedTuple):
    """The options of `twostroke plan` that are the same for all devices."""

    weights: str | None
    num_threads: int | None
    question: dict[str, Any]


def _device_names(names: tuple[str, ...]) -> list[str]:
    """Return the names of the devices to plan, each once.

    The name `all` stands for every device of the table with a known memory.
    """
    from twostroke.lab.planner.devices import known_devices

    in_table = [name for name, device in known_devices().items() if device.memory_bytes]
    unique: dict[str, None] = {}
    for name in names:
        unique |= dict.fromkeys(in_table if name == ALL else [name])
    return list(unique)


def _plan(planned: PlannedModel, name: str, options: _PlanOptions) -> Plan:
    """Return the plan of a model on one device.

    `name` is this machine, a device of the table, or a device file. Measured steps correct the
    times on this machine.
    """
    from twostroke.lab import planner

    is_here = name == THIS_MACHINE
    defaults: dict[str, Any] = {
        "token_budget": planner.default_token_budget(is_here=is_here),
        "kv_format": planner.default_kv_format(is_here=is_here),
    }
    question = planner.Question(**(defaults | options.question))
    model = planned.with_weights(options.weights) if options.weights else planned
    if not is_here:
        return planner.make_plan(model, planner.find_device(name), question)
    machine = planner.this_machine(options.num_threads)
    has_shares = is_given_by_user("mfu") or is_given_by_user("mbu")
    calibration = None
    if not has_shares:
        calibration = _load_calibration(planned, options.num_threads) or planner.reference_steps(
            machine
        )
    return planner.make_plan(model, machine, question, calibration)


def _check_for_several(
    plot: Path | None, html: Path | None, *, calibrate: bool, explained: bool
) -> None:
    """Raise UsageError for options of `plan` that apply only to a single device."""
    options = {
        "plot": plot is not None,
        "html": html is not None,
        "calibrate": calibrate,
        "explained": explained,
        "usd_per_hour": is_given_by_user("usd_per_hour"),
    }
    for field, is_set in options.items():
        if is_set:
            reason = "is about one device, and {on} names several: leave one of them out."
            raise UsageError(reason, field=field, on=Field("device"))


def _check_calibration(
    server: str | None, num_threads: int | None, *, calibrate: bool, is_here: bool
) -> None:
    """Raise UsageError for options of `plan` that have no effect with, or without, --calibrate."""
    if calibrate and not is_here:
        reason = "measures this machine: leave {on} out."
        raise UsageError(reason, field="calibrate", on=Field("device"))
    shares = [name for name in ("mfu", "mbu") if is_given_by_user(name)]
    if calibrate and shares:
        reason = "has no effect on measured steps ({other}): leave one of them out."
        raise UsageError(reason, field=shares[0], other=Field("calibrate"))
    if server is not None and not calibrate:
        raise UsageError("needs {other}.", field="server", other=Field("calibrate"))
    if server is not None and num_threads is not None:
        reason = "has no effect with {other}, which has its own: leave it out."
        raise UsageError(reason, field="num_threads", other=Field("server"))


def _load_calibration(planned: PlannedModel, num_threads: int | None) -> Calibration | None:
    """Return the model's stored measurements on this machine; None if there are none.

    They must be for this number of threads. If others exist, a hint is printed.
    """
    from twostroke.lab import planner
    from twostroke.lab.planner.served import thread_count_text

    calibration = planner.load_calibration(planned.identity, num_threads)
    if calibration is None and (others := planner.calibrated_threads(planned.identity)):
        text = f"Steps were measured {thread_count_text(others[0])}: "
        click.echo(f"{text}--threads {others[0]} plans with them.", err=True)
    return calibration


def _calibrate(
    planned: PlannedModel, model: str, server: str | None, num_threads: int | None
) -> int | None:
    """Measure steps of a model to correct its plans; return their number of threads.

    With a `server`, the steps of this running server are measured. A number of threads that is None
    stands for the engine's default.
    """
    from twostroke.lab import planner

    def notice(text: str) -> None:
        click.echo(text, err=True)

    if server is None:
        length = planned.program.context_length
        planner.calibrate(model, planned.identity, length, notice, num_threads)
        return num_threads
    return planner.calibrate_from_server(server, env.client_api_key(), planned, notice)


def _simulate_command(plan: Plan, model: str, device: str) -> str:
    """Return a `twostroke simulate` command that simulates the largest load of a plan.

    It is empty if the plan has no load.
    """
    if plan.chosen_row is None:
        return ""
    params = click.get_current_context().params
    question = plan.question
    names = {
        "count": "devices", "num_threads": "threads", "weights": "weights",
        "kv_format": "kv-format", "ttft_s": "ttft", "tpot_s": "tpot", "mfu": "mfu", "mbu": "mbu",
        "usd_per_hour": "price",
    }  # fmt: skip
    values = {
        option: f"{params[name] * 1e3:g}" if name.endswith("_s") else params[name]
        for name, option in names.items()
        if is_given_by_user(name)
    }
    if plan.calibrated is not None:  # perhaps on the threads of a server
        values["threads"] = plan.calibrated.num_threads
    options: dict[str, Any] = {
        "on": device, **values, "rate": f"{plan.loads[-1].requests_per_s:.4g}",
        "prompt": question.prompt, "output": question.output,
    }  # fmt: skip
    if question.num_cached:
        options["shared"] = question.num_cached
    options["max-running"] = plan.chosen_row.streams
    options["token-budget"] = question.token_budget
    if (max_tokens := plan.memory.most_tokens) is not None and max_tokens < plan.context_length:
        options["context-length"] = max(max_tokens, question.prompt + question.output)
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in options.items()]
    return " ".join(["twostroke simulate", shlex.quote(model), *words])


def _show_ranking(plans: list[Plan], *, as_json: bool) -> None:
    """Print the plans of several devices as one table, the best device first."""
    from twostroke.lab.planner import words

    ranking = words.rank(plans)
    verdict = words.rank_verdict(ranking)
    if as_json:
        click.echo(encode_json({"verdict": verdict, "plans": ranking}).decode())
    else:
        for line in (verdict, *words.about_ranking(ranking)):
            click.echo(printable(line))
        click.echo()
        show_table([words.RANK_HEADINGS, *map(words.ranking_row, ranking)], range(1, 9))
    if not words.is_met(ranking[0]):
        raise UnreachableError(verdict)


def _show(plan: Plan, simulation: str, *, explained: bool) -> None:
    from twostroke.lab.planner import words

    first, *details = words.answer_sentences(plan)
    click.echo(printable(first if plan.chosen_row is not None else f"No: {first}"))
    for line in words.plan_facts(plan):
        click.echo(printable(line))
    click.echo()
    show_table([words.HEADINGS, *map(words.row_cells, plan.rows)], range(10))
    click.echo()
    if plan.chosen_row is not None:
        for line in details:
            click.echo(printable(line))
        if details:
            click.echo()
        show_table([words.LOAD_HEADINGS, *words.load_rows(plan)], range(5))
        click.echo()
        click.echo(printable(f"{words.ABOUT_LOADS}\n  {simulation}"))
        click.echo()
    show_table([words.WHAT_IF_HEADINGS, *words.what_if_rows(plan)])
    if explained:
        click.echo()
        for line in plan.steps:
            click.echo(printable(line))


def _draw(plan: Plan, plot: Path | None, html: Path | None) -> None:
    from twostroke.lab.measure.plots import save
    from twostroke.lab.planner.plots import draw
    from twostroke.lab.planner.report import report

    if plot is not None:
        with atomic_output(plot) as part:
            save(draw(plan), part)
    if html is not None:
        with atomic_output(html) as part:
            part.write_text(report(plan), encoding="utf-8")
