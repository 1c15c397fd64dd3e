"""Runs a server: bind, serve, drain, stop."""

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
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn

from twostroke.core.errors import PortInUseError, UsageError
from twostroke.core.process_tuning import (
    raise_open_file_limit,
    request_short_time_slices,
    trim_regularly,
)
from twostroke.server.http.connection import HttpConnection
from twostroke.server.http.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import ASGIApp

    from twostroke.server.http.limits import RequestLimits

_BACKLOG = 2048
_PER_TURN = 8  # new connections in a turn of the event loop, so that those that are there get on
_GRACE_S = 5  # after the drain, for connections that hang
_QUIET_S = 10.0  # between two lines of the log about connections that cannot be taken
_FLUSH_S = 1  # to write the errors of requests that were cut off
_logger = logging.getLogger("twostroke.serve")


class Options(Protocol):
    """What a server needs to know."""

    @property
    def limits(self) -> RequestLimits:
        """Limits for one client."""

    @property
    def drain_s(self) -> float:
        """How long running requests may take once the server stops."""


class AppHealth(Protocol):
    """Whether an application gets on."""

    @property
    def is_well(self) -> bool:
        """Whether it makes progress, for systemd's watchdog."""

    def attach(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` in the running event loop if nothing can be answered any more."""


class Application(Protocol):
    """What becomes of the requests of an ASGI application when its server stops."""

    @property
    def options(self) -> Options:
        """How it is served."""

    @property
    def vitals(self) -> AppHealth:
        """How it is."""

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""

    @property
    def num_running(self) -> int:
        """The number of clients' requests whose answers are not complete."""

    def drain(self) -> None:
        """Take no new requests."""

    def abort(self) -> None:
        """Cut off all running answers; their clients get an error."""

    def close(self) -> None:
        """Free what it holds, after the last request."""


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


async def run(
    app: ASGIApp,
    application: Application,
    listener: socket.socket,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[int], None] | None = None,
) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP, and return the process's exit code.

    After the first signal the application drains, and running requests have its `drain_s` seconds
    to finish. Then, or at a second signal, the rest is cut off with an error. The exit code is 0 if
    all requests finished, 1 if some were cut off.

    Args:
        app: what to serve.
        application: what becomes of its requests.
        listener: from `bind`.
        on_ready: called with the server's URL once it answers.
        on_stop: called with the number of running requests at the first signal.
    """
    url = _url(listener)
    watchdog = Watchdog(lambda: application.vitals.is_well)

    def on_up() -> None:
        if on_ready is not None:
            on_ready(url)
        watchdog.begin()

    server = Server(app, application, on_up)
    shutdown = _Shutdown(server, application, watchdog, on_stop)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(Faults())
    is_main = threading.current_thread() is threading.main_thread()  # only it gets signals
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # nohup ignores the last
    signals = [one for one in ends if is_main and signal.getsignal(one) is not signal.SIG_IGN]
    for number in signals:
        loop.add_signal_handler(number, shutdown.on_signal)
    application.vitals.attach(shutdown.on_end)
    trimming = loop.create_task(trim_regularly())
    try:
        await server.serve(sockets=[listener])
    finally:
        trimming.cancel()
        watchdog.end()
        application.close()
        for number in signals:
            loop.remove_signal_handler(number)
    return 1 if shutdown.num_cut or shutdown.has_ended else 0


class Faults:
    """Takes the faults that the event loop reports; asyncio alone logs each with a traceback."""

    def __init__(self) -> None:
        """Begin with none."""
        self._said_s = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log a fault; a connection that cannot be taken, which is often, now and then."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}):
            loop.default_exception_handler(context)
        elif (now_s := time.monotonic()) - self._said_s >= _QUIET_S:
            self._said_s = now_s
            _logger.error("New connections wait: this process may not open more files.")


class Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to us and reports when it is up."""

    def __init__(self, app: ASGIApp, application: Application, on_up: Callable[[], None]) -> None:
        """Serve `app`; call `on_up` once connections are taken."""
        super().__init__(_config(app, application))
        self._on_up = on_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and report it."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(_BACKLOG)  # the rest waits outside
        request_short_time_slices()  # also where engines use all cores
        self._on_up()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class _Shutdown:
    """Stops the server: drains at the first signal, cuts off at the second or at the time limit."""

    def __init__(
        self,
        server: uvicorn.Server,
        application: Application,
        watchdog: Watchdog,
        on_stop: Callable[[int], None] | None,
    ) -> None:
        self._server = server
        self._application = application
        self._watchdog = watchdog
        self._on_stop = on_stop
        self._draining: asyncio.Task[None] | None = None
        self.num_cut = 0
        self.has_ended = False

    def on_signal(self) -> None:
        """Drain at the first signal, cut off at the second."""
        if self._draining is not None:
            self._cut()
            return
        self._application.drain()
        self._watchdog.stop()
        state = self._server.server_state
        for connection in state.connections:
            if isinstance(connection, HttpConnection):
                connection.hurry()
        loop = asyncio.get_running_loop()
        self._draining = loop.create_task(self._stop_after(set(state.tasks)))
        loop.call_later(self._application.options.drain_s, self._cut)
        if self._on_stop is not None:
            self._on_stop(self._application.num_running)

    def on_end(self) -> None:
        """Stop, since nothing can be answered any more."""
        self.has_ended = True
        self._cut()

    async def _stop_after(self, requests: set[asyncio.Task[None]]) -> None:
        """Stop listening once these are answered; until then `GET /health` says "draining"."""
        if requests:
            await asyncio.wait(requests)
        self._server.should_exit = True

    def _cut(self) -> None:
        self._server.should_exit = True
        num_running = self._application.num_running
        if num_running:
            noun = "request" if num_running == 1 else "requests"
            _logger.warning("Shutdown: cut off %d running %s.", num_running, noun)
        self.num_cut += num_running
        self._application.abort()
        asyncio.get_running_loop().call_later(_FLUSH_S, self._leave)

    def _leave(self) -> None:
        """Close the connections that neither send nor read."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


def _config(app: ASGIApp, application: Application) -> uvicorn.Config:
    limits = application.options.limits
    connection: Any = partial(
        HttpConnection,
        limits=limits,
        is_draining=lambda: application.is_draining,
        most=raise_open_file_limit() // 2,  # a router has another for each
        idle={},
    )
    return uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_PER_TURN,
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
