"""`twostroke route`: routes requests from one address to many servers."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.help import Command
from twostroke.cli.options import click_params, take_struct
from twostroke.cli.process_options import (
    ProcessOptions,
    announce_stop,
    open_records,
    print_to_stderr,
)
from twostroke.core import env
from twostroke.core.errors import UsageError
from twostroke.fleet.router.options import RouteOptions

if TYPE_CHECKING:
    from twostroke.fleet.shared_records.records import SharedRecords
    from twostroke.server.auth.keys import ApiKeys
    from twostroke.server.http.api_key import Key

_TWO_PLACES: Final = (
    "Give either --records, where one router keeps keys and usage, or --store, where several do."
)
_NEEDS_KEY: Final = (
    "A router with --records or --store needs TWOSTROKE_REPLICA_KEY, a secret by which its "
    "replicas know it: set the same for the router and all its replicas, such as "
    "$(openssl rand -hex 32)."
)
_KEEPS_NOTHING: Final = (
    "The store {address} keeps nothing on its disk: its restart loses keys and usage, unless you "
    "start it with --appendonly yes."
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
    from twostroke.server.storage.trace_file import check_trace_file

    process = take_struct(ProcessOptions, values)
    replica_key = env.replica_key()
    store: str | None = values["store"]
    if process.records is not None and store is not None:
        raise UsageError(_TWO_PLACES)
    if (process.records is not None or store is not None) and replica_key is None:
        raise UsageError(_NEEDS_KEY)
    if replica_key is not None:
        check_router(replica_key)
    with ExitStack() as stack:
        records = stack.enter_context(open_records(process.records))
        shared_keys = None if store is None else _read_shared_keys(store)
        keys = ApiKeys.read(
            values["api_keys"],
            env.api_key(),
            process.records,
            asks=process.require_keys,
            shared=shared_keys,
        )
        if keys is not None and replica_key is not None:
            keys.set_router_key(replica_key)
        if values["record_trace"] is not None:
            check_trace_file(values["record_trace"])
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
            shared_records=_share_records(options, keys),
        )


def _read_shared_keys(url: str) -> list[Key]:
    """Return the API keys in the store, and warn if its restart would lose them."""
    from twostroke.core.urls import redis_address
    from twostroke.fleet.shared_records import stored
    from twostroke.fleet.shared_records.store import check_scripts, keeps_nothing, open_store

    with open_store(url) as store:
        check_scripts(store)
        if keeps_nothing(store):
            print_to_stderr(_KEEPS_NOTHING.format(address=redis_address(url)))
        return [key for key, _ in stored.all_keys(store)]


def _share_records(options: RouteOptions, keys: ApiKeys | None) -> SharedRecords | None:
    replica_key = options.replica_key
    if options.store is None or keys is None or replica_key is None:
        return None
    from twostroke.fleet.shared_records.records import SharedRecords
    from twostroke.fleet.shared_records.store import StoreConnection

    return SharedRecords(StoreConnection(options.store), keys, replica_key, options.store_wait_s)


def _announce(url: str, policy: str, *, log_format: str) -> None:
    text = f"Twostroke routes requests at {url} by the policy {policy}."
    if log_format == "json":
        _logger.info(text)
        return
    with suppress(OSError):
        click.echo(f"{text} Ctrl-C stops it.", err=True)
