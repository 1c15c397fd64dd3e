"""`twostroke route`: one address before many servers."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import click

from twostroke.cli.help import Command, OneOf, option
from twostroke.cli.listening import listening, open_records, say_stop
from twostroke.core import env
from twostroke.core.errors import UsageError

_NEEDS_KEY: Final = (
    "A router with --records needs TWOSTROKE_REPLICA_KEY, a secret by which its replicas know it: "
    "set the same for the router and all its replicas, such as $(openssl rand -hex 32)."
)
_logger = logging.getLogger("twostroke.router")


@click.command("route", cls=Command)
@option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="URL",
    help="A server, such as http://10.0.0.7:8000: of twostroke, vLLM or llama-server; repeatable.",
)
@option(
    "--discover",
    metavar="NAME:PORT",
    help="Use every address of this DNS name, such as a headless service of Kubernetes.",
)
@option(
    "--replicas-file",
    "listing",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Use the servers whose URLs FILE has, one on each line, and follow its changes.",
)
@listening(
    port=8080,
    records="Take the keys that `twostroke keys` keeps in this folder, hold them to their limits, "
    "and count there what they use. Needs TWOSTROKE_REPLICA_KEY, here and at the replicas.",
)
@option(
    "--policy",
    type=OneOf(("prefix", "least-work", "two-choices", "round-robin")),
    default="prefix",
    help="How to choose a replica; prefix: where the first token comes soonest.",
)
@option(
    "--wait",
    "wait_s",
    type=float,
    default=5.0,
    help="Seconds that a request waits if no replica is ready.",
)
@option(
    "--eject-after",
    "eject_s",
    type=float,
    default=5.0,
    help="Seconds of silence after which a replica's requests are given up.",
)
@option(
    "--mixed",
    is_flag=True,
    help="Accept replicas of one model whose versions or numerics differ.",
)
@option(
    "--busy",
    "busy_s",
    type=float,
    default=1.0,
    help="Mean seconds of work of a replica above which /metrics wants more of them.",
)
@option(
    "--dashboard/--no-dashboard",
    default=None,
    help="Serve /api/state [default: only on a loopback host].",
)
@option("--log-format", type=OneOf(("text", "json")), default="text", help="Log format.")
@option(
    "--log-level",
    type=OneOf(("debug", "info", "warning", "error")),
    default="info",
    help="Lowest level that is logged.",
)
@option("--access-log/--no-access-log", default=True, help="Log a line for each request.")
def command(**given: Any) -> int:
    """Put one address before many servers, and send each request where it is answered soonest.

    Ctrl-C or SIGTERM stops the router after the running requests; a second one cuts them off.
    """
    from twostroke.core.process_tuning import ease_collector
    from twostroke.fleet.router.app import run_router
    from twostroke.fleet.router.options import RouteOptions
    from twostroke.server.auth.keys import ApiKeys, check_router
    from twostroke.server.http.logs import logging_to
    from twostroke.server.http.server import bind

    form, level = given.pop("log_format"), given.pop("log_level")
    folder, key = given.pop("records"), env.replica_key()
    if folder is not None and key is None:
        raise UsageError(_NEEDS_KEY)
    if key is not None:
        check_router(key)
    with ExitStack() as stack:
        records = stack.enter_context(open_records(folder))
        asks = given.pop("require_keys")
        keys = ApiKeys.read(given["api_keys"], env.api_key(), folder, asks=asks)
        if keys is not None and key is not None:
            keys.trust(key)
        options = RouteOptions(**given | {"api_keys": keys}, replica_key=key)
        listener = stack.enter_context(bind(options.host, options.port))
        stack.enter_context(logging_to(sys.stderr, form, level))

        def on_ready(url: str) -> None:
            ease_collector()
            _announce(url, options.policy, form=form)

        return run_router(
            options,
            listener=listener,
            on_ready=on_ready,
            on_stop=lambda count: say_stop(count, form=form),
            records=records,
        )


def _announce(url: str, policy: str, *, form: str) -> None:
    text = f"Twostroke routes requests at {url} by the policy {policy}."
    if form == "json":
        _logger.info(text)
        return
    with suppress(OSError):
        click.echo(f"{text} Ctrl-C stops it.", err=True)
