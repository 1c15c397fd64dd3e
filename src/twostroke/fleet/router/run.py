"""Runs a router."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from twostroke.fleet.router.app import Router, build_app
from twostroke.server.http.server import bind, run

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from twostroke.fleet.router.options import RouteOptions
    from twostroke.server.storage import Records


def run_router(
    options: RouteOptions,
    *,
    listener: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[int], None] | None = None,
    records: Records | None = None,
) -> int:
    """Route until SIGINT or SIGTERM, and return the process's exit code, as a server does.

    `records` keep keys and usage; the caller closes them.

    Raises:
        UsageError: an option is wrong.
        PortInUseError: the address cannot be bound.
    """
    router = Router(options, records)
    listener = listener or bind(options.host, options.port)
    return asyncio.run(run(build_app(router), router, listener, on_ready, on_stop))
