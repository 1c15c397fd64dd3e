"""Runs the server: bind, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from twostroke.core.errors import PortInUseError, UsageError
from twostroke.serve.app import Api
from twostroke.serve.http.connection import Connection
from twostroke.serve.layers import build_app
from twostroke.serve.options import ServeOptions
from twostroke.serve.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.engine.limits import Limits
    from twostroke.engine.served import ServedEngine
    from twostroke.records import Records

_BACKLOG = 2048
_GRACE_S = 5  # after the drain, for connections that hang
_FLUSH_S = 1  # to write the errors of requests that were cut off
_logger = logging.getLogger("twostroke.serve")


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that a taken address is reported before the model loads.

    Clients that connect before `run_server` wait for it. Port 0 takes a free one.

    Raises:
        UsageError: the port is out of range.
        PortInUseError: the address is in use, not of this machine, or not allowed.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"must be from 0 to 65535, got {port}.", field="port")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            address, family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except (OSError, ValueError) as error:
        raise PortInUseError(_why(error, host, port)) from None
    listener.settimeout(0)
    return listener


def run_server(
    engine: ServedEngine,
    options: ServeOptions | None = None,
    *,
    listener: socket.socket | None = None,
    limits: Limits | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[int], None] | None = None,
    records: Records | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, and return the process's exit code.

    After the first signal the server refuses new work (503), as `GET /health` reports, and running
    requests have `options.drain_s` seconds to finish. Then, or at a second signal, the rest is cut
    off with an error. The exit code is 0 if all requests finished, 1 if some were cut off. The
    caller closes the engine.

    Args:
        engine: the engine to serve.
        options: the address, and how to serve.
        listener: from `bind`; without it, the server binds now.
        limits: the machine's limits, against which `/metrics` measures utilization.
        on_ready: called with the server's URL once it answers.
        on_stop: called with the number of running requests at the first signal.
        records: keep files and batches; None keeps none. The caller closes them.

    Raises:
        UsageError: the port is out of range.
        PortInUseError: the address cannot be bound.
    """
    options = options or ServeOptions()
    listener = listener or bind(options.host, options.port)
    api = Api(engine, options, limits, records)
    return asyncio.run(_serve(api, listener, on_ready, on_stop))


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to us and reports when it is up."""

    def __init__(self, config: uvicorn.Config, on_up: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_up = on_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_up()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Shutdown:
    """Stops the server: drains at the first signal, cuts off at the second or at the time limit."""

    def __init__(
        self,
        server: uvicorn.Server,
        api: Api,
        watchdog: Watchdog,
        on_stop: Callable[[int], None] | None,
    ) -> None:
        self._server = server
        self._api = api
        self._watchdog = watchdog
        self._on_stop = on_stop
        self._draining: asyncio.Task[None] | None = None
        self.num_cut = 0
        self.has_lost_engine = False

    def on_signal(self) -> None:
        """Drain at the first signal, cut off at the second."""
        if self._draining is not None:
            self._cut()
            return
        self._api.drain()
        self._watchdog.stop()
        state = self._server.server_state
        for connection in state.connections:
            if isinstance(connection, Connection):
                connection.hurry()
        loop = asyncio.get_running_loop()
        self._draining = loop.create_task(self._stop_after(set(state.tasks)))
        loop.call_later(self._api.options.drain_s, self._cut)
        if self._on_stop is not None:
            self._on_stop(self._api.num_running)

    def on_engine_end(self) -> None:
        """Stop, since nothing can be answered any more."""
        self.has_lost_engine = True
        self._cut()

    async def _stop_after(self, requests: set[asyncio.Task[None]]) -> None:
        """Stop listening once these are answered; until then `GET /health` says "draining"."""
        if requests:
            await asyncio.wait(requests)
        self._server.should_exit = True

    def _cut(self) -> None:
        self._server.should_exit = True
        num_running = self._api.num_running
        if num_running:
            noun = "request" if num_running == 1 else "requests"
            _logger.warning("Shutdown: cut off %d running %s.", num_running, noun)
        self.num_cut += num_running
        self._api.abort()
        asyncio.get_running_loop().call_later(_FLUSH_S, self._leave)

    def _leave(self) -> None:
        """Close the connections that neither send nor read."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


async def _serve(
    api: Api,
    listener: socket.socket,
    on_ready: Callable[[str], None] | None,
    on_stop: Callable[[int], None] | None,
) -> int:
    url = _url(listener)
    watchdog = Watchdog(lambda: api.engine.health)

    def on_up() -> None:
        if on_ready is not None:
            on_ready(url)
        watchdog.begin()

    server = _Server(_config(api), on_up)
    shutdown = _Shutdown(server, api, watchdog, on_stop)
    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()  # only it gets signals
    signals = [signal.SIGINT, signal.SIGTERM] if is_main else []
    for number in signals:
        loop.add_signal_handler(number, shutdown.on_signal)
    api.engine.attach(shutdown.on_engine_end)
    try:
        await server.serve(sockets=[listener])
    finally:
        watchdog.end()
        api.close()
        for number in signals:
            loop.remove_signal_handler(number)
    return 1 if shutdown.num_cut or shutdown.has_lost_engine else 0


def _config(api: Api) -> uvicorn.Config:
    limits = api.options.limits
    connection: Any = partial(Connection, limits=limits, is_draining=lambda: api.is_draining)
    return uvicorn.Config(
        build_app(api),
        http=connection,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=math.ceil(limits.idle_timeout_s),
        h11_max_incomplete_event_size=limits.max_header_bytes,
        timeout_graceful_shutdown=_GRACE_S,
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if listener.family == socket.AF_INET6:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def _why(error: Exception, host: str, port: int) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return f"Port {port} on {host} is already in use: stop its program, or choose --port."
    if code == errno.EACCES:
        return f"This user may not bind port {port} on {host}: choose --port above 1023."
    if code in {errno.EADDRNOTAVAIL, None} or isinstance(error, socket.gaierror):
        return f"'{host}' is not an address of this machine: check --host."
    return f"Port {port} on {host} cannot be bound: {os.strerror(code)}."
