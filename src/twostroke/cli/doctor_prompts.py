"""`twostroke doctor prompts`: where similar prompts begin to differ, and the costs of that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.help import Command, option
from twostroke.cli.planning import THIS_MACHINE, BoundedNumberParam, threads_option
from twostroke.cli.terminal import printable, show_table
from twostroke.core import env
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun, masked_url

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIN_REPEATED_SHARE: Final = 0.5  # of the tokens after a point, to advise to move what differs


class _Row(Frozen):
    """A position, in tokens, at which prompts begin to differ from earlier prompts.

    The numbers are sums over these prompts, as in the server's `PartingRow`.
    """

    position: int
    num_prompts: int
    num_after: int
    num_repeated: int
    before: str | None = None
    after: str | None = None


class _TenantRows(Frozen):
    """The numbers of a tenant's prompts and tokens, and the positions where prompts differ."""

    tenant: str
    num_prompts: int
    num_tokens: int
    partings: tuple[_Row, ...]


@click.command("doctor prompts", cls=Command)
@click.argument("source")
@option("--model", help="Show the seconds that the model needs, from its measured steps.")
@threads_option
@option(
    "--price",
    "usd_per_million",
    type=BoundedNumberParam(high=1e9),
    help="Price of 1M prompt tokens in $, to show costs.",
)
@option(
    "--show-text",
    is_flag=True,
    help="Show the text around each point; only from a server, and only of your own key's prompts.",
)
@option("--top", type=click.IntRange(1), default=10, help="Show the N costliest points.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(source: str, *, as_json: bool, top: int, **values: Any) -> None:
    """Show where similar prompts part, how often, and what that costs.

    SOURCE is a trace of `serve` or `route` with --record-trace, or the URL of a server that was
    started with --prompt-doctor; its key is in TWOSTROKE_API_KEY. WOULD HIT counts tokens that
    earlier prompts have, too: the prefix cache would have them if the tokens that differ, such as a
    date in the system prompt, stood after them. A server also says how many seconds they take.
    """
    notes: tuple[str, ...] = ()
    seconds = _seconds_per_token(values)
    if "://" in source:
        tenant, served_seconds = _of_server(source, shows_text=values["show_text"])
        tenants = [tenant]
        seconds = served_seconds if seconds is None else seconds
    else:
        if values["show_text"]:
            raise UsageError("needs a server: a trace has no text.", field="show_text")
        tenants, notes = _of_trace(source)
    price = values["usd_per_million"]
    if as_json:
        body = {"tenants": tenants, "s_per_token": seconds, "usd_per_million_tokens": price}
        click.echo(encode_json(body).decode())
        return
    for note in notes:
        click.echo(printable(note), err=True)
    for tenant in tenants:
        _show(tenant, top, seconds, price)


def _of_trace(source: str) -> tuple[list[_TenantRows], tuple[str, ...]]:
    from twostroke.lab.simulator.recorded_traces import (
        is_recorded_trace,
        read_recorded_trace,
        report_prompts,
    )

    path = env.expand_home(source)
    try:
        if not is_recorded_trace(path):
            raise UsageError(f"{path.name} is not a trace that --record-trace has recorded.")
        trace = read_recorded_trace(path)
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}.") from None
    tenants = [
        _TenantRows(
            report.tenant,
            report.num_prompts,
            report.num_tokens,
            tuple(
                _Row(point.position, point.num_prompts, point.num_after, point.num_repeated)
                for point in report.partings
            ),
        )
        for report in report_prompts(trace)
    ]
    return tenants, trace.notes


def _of_server(url: str, *, shows_text: bool) -> tuple[_TenantRows, float | None]:
    """Ask a server for the statistics of the user's own tenant.

    Returns them with the server's prefill seconds per prompt token; None if these are unknown.
    """
    import msgspec

    from twostroke.lab.planner.served import fetch_json

    class Body(Frozen):
        num_prompts: int
        num_tokens: int
        partings: tuple[_Row, ...]
        s_per_token: float | None = None

    path = "/api/prompts?show_text=1" if shows_text else "/api/prompts"
    answer = fetch_json(url, path, env.client_api_key(), field="source")
    if isinstance(answer, dict) and isinstance(error := answer.get("error"), dict):
        raise UsageError(f"{masked_url(url)} answers: {error.get('message')}")
    try:
        body = msgspec.convert(answer, Body)
    except msgspec.ValidationError:
        reason = f"{masked_url(url)} is not a server of this version of Twostroke."
        raise UsageError(reason) from None
    rows = _TenantRows("", body.num_prompts, body.num_tokens, body.partings)
    return rows, body.s_per_token


def _seconds_per_token(values: dict[str, Any]) -> float | None:
    if values["model"] is None:
        return None
    from twostroke.cli.advise import server_setup

    options = {"device": THIS_MACHINE, "memory_bytes": None, "num_threads": values["num_threads"]}
    return server_setup(values["model"], options).prefill_s_per_token()


def _show(tenant: _TenantRows, top: int, seconds: float | None, price: float | None) -> None:
    name = f"Tenant {tenant.tenant}: " if tenant.tenant else ""
    prompts = counted_noun(tenant.num_prompts, "prompt", form=",")
    click.echo(f"{name}{prompts} with {counted_noun(tenant.num_tokens, 'token', form=',')}\n")
    if not tenant.partings:
        click.echo("No prompt parts from an earlier one.\n")
        return
    header = ["PART AT TOKEN", "PROMPTS", "TOKENS AFTER", "WOULD HIT"]
    header += ["SECONDS"] if seconds is not None else []
    header += ["$"] if price is not None else []
    rows = [tuple(header)]
    for row in tenant.partings[:top]:
        cells = [f"{row.position:,}", f"{row.num_prompts:,}", f"{row.num_after:,}"]
        cells.append(f"{row.num_repeated:,} ({row.num_repeated / max(1, row.num_after):.0%})")
        cells += [f"{row.num_repeated * seconds:,.1f}"] if seconds is not None else []
        cells += [f"{row.num_repeated * price / 1e6:,.4f}"] if price is not None else []
        rows.append(tuple(cells))
    show_table(rows, range(len(header)))
    for line in _advice(tenant, top):
        click.echo(printable(line))
    click.echo("")


def _advice(tenant: _TenantRows, top: int) -> Iterator[str]:
    """Yield the text around the first `top` positions, and advice about which part to move."""
    for row in tenant.partings[:top]:
        if row.before is not None and row.after is not None:
            before, after = (_one_line(text) for text in (row.before, row.after))
            yield f"  token {row.position:,}: ...{before} | {after}..."
    worst = tenant.partings[0]
    if worst.num_repeated >= _MIN_REPEATED_SHARE * worst.num_after > 0:
        share = worst.num_repeated / worst.num_after
        yield (
            f"\nAt token {worst.position:,} something changes, and {share:.0%} of the tokens after "
            "it are the same as in earlier prompts: put the changing part (a date, a name, an id) "
            "after them."
        )
    else:
        yield "\nNothing to move: most tokens after these points differ from earlier prompts."


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")
