"""Runs the HTTP server of an engine until it is stopped by a signal."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from twostroke.server.app import Api
from twostroke.server.http.drain_notice import DrainNotice
from twostroke.server.http.server import bind, run
from twostroke.server.middleware import build_app
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from twostroke.backends.machine_limits import MachineLimits
    from twostroke.engine.process.served import ServedEngine
    from twostroke.server.app import ExtensionFactory
    from twostroke.server.storage import Records


def serve(  # noqa: PLR0913 - the parts of a server
    engine: ServedEngine,
    options: ServeOptions | None = None,
    *,
    listener: socket.socket | None = None,
    limits: MachineLimits | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[int], None] | None = None,
    records: Records | None = None,
    extensions: Sequence[ExtensionFactory] = (),
) -> int:
    """Run the HTTP server of an engine until a signal stops it; return the process's exit code.

    After SIGINT, SIGTERM or a notice (`options.drain_notice`), the server refuses new requests with
    status 503, which `GET /health` also returns, and running requests have `options.drain_s`
    seconds to finish. After that time, or at a second signal, they are cut off with an error. The
    exit code is 0 if all requests finished, 1 if some were cut off. The caller closes the engine.

    Args:
        engine: the engine to serve, or a `ModelPool` of several.
        options: the options of the server, such as its address.
        listener: a listening socket from `bind`; None listens at the address in `options`.
        limits: the machine's memory bandwidth and peak compute, with which the metrics compare
            the engine's speed; None shows no utilization.
        on_ready: called with the server's URL when the server answers requests.
        on_stop: called with the number of running requests at the first signal.
        records: the database and folder that store files and batches; None stores none. The
            caller closes it.
        extensions: functions that make further endpoints.

    Raises:
        UsageError: the port is out of range, or the drain notice cannot be read.
        PortInUseError: the address cannot be bound.
    """
    options = options or ServeOptions()
    notice = None if options.drain_notice is None else DrainNotice(options.drain_notice)
    listener = listener or bind(options.host, options.port)
    api = Api(engine, options, limits, records=records, extensions=extensions)
    return asyncio.run(
        run(
            build_app(api),
            api,
            listener=listener,
            on_ready=on_ready,
            on_stop=on_stop,
            notice=notice,
        )
    )
