"""`twostroke route`: routes requests from one address to many servers."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack, suppress
from typing import Any, Final

import click

from twostroke.cli.help import Command
from twostroke.cli.options import click_params, take_struct
from twostroke.cli.process_options import ProcessOptions, announce_stop, open_records
from twostroke.core import env
from twostroke.core.errors import UsageError
from twostroke.fleet.router.options import RouteOptions

_NEEDS_KEY: Final = (
    "A router with --records needs TWOSTROKE_REPLICA_KEY, a secret by which its replicas know it: "
    "set the same for the router and all its replicas, such as $(openssl rand -hex 32)."
)
_logger = logging.getLogger("twostroke.router")


@click.command(
    "route",
    cls=Command,
    params=[
        *click_params(RouteOptions, defaults={"access_log": True}),
        *click_params(ProcessOptions),
    ],
)
def command(**values: Any) -> int:
    """Route requests from one address to many servers, each to the server that answers soonest.

    Ctrl-C or SIGTERM stops the router after the running requests; a second signal cuts them off.
    """
    from twostroke.core.process_tuning import tune_garbage_collector
    from twostroke.fleet.router.app import route as run_router
    from twostroke.server.auth.keys import ApiKeys, check_router
    from twostroke.server.http.logs import logging_to
    from twostroke.server.http.server import bind

    process = take_struct(ProcessOptions, values)
    replica_key = env.replica_key()
    if process.records is not None and replica_key is None:
        raise UsageError(_NEEDS_KEY)
    if replica_key is not None:
        check_router(replica_key)
    with ExitStack() as stack:
        records = stack.enter_context(open_records(process.records))
        keys = ApiKeys.read(
            values["api_keys"], env.api_key(), process.records, asks=process.require_keys
        )
        if keys is not None and replica_key is not None:
            keys.set_router_key(replica_key)
        options = take_struct(RouteOptions, values, api_keys=keys, replica_key=replica_key)
        listener = stack.enter_context(bind(options.host, options.port))
        stack.enter_context(logging_to(sys.stderr, process.log_format, process.log_level))

        def on_ready(url: str) -> None:
            tune_garbage_collector()
            _announce(url, options.policy, log_format=process.log_format)

        return run_router(
            options,
            listener=listener,
            on_ready=on_ready,
            on_stop=lambda count: announce_stop(count, log_format=process.log_format),
            records=records,
        )


def _announce(url: str, policy: str, *, log_format: str) -> None:
    text = f"Twostroke routes requests at {url} by the policy {policy}."
    if log_format == "json":
        _logger.info(text)
        return
    with suppress(OSError):
        click.echo(f"{text} Ctrl-C stops it.", err=True)
