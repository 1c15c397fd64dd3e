"""Runs an HTTP server: binds an address, serves, drains and stops."""

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
from twostroke.core.message_text import counted_noun
from twostroke.core.process_tuning import (
    raise_open_file_limit,
    request_short_time_slices,
    return_freed_memory_regularly,
)
from twostroke.server.http.connection import HttpConnection
from twostroke.server.http.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import ASGIApp

    from twostroke.server.http.drain_notice import DrainNotice
    from twostroke.server.http.limits import RequestLimits

_BACKLOG = 2048
_ACCEPTS_PER_TURN = 8  # new connections in an event loop turn, so open ones make progress
_CLOSE_TIMEOUT_S = 5  # after the drain, for connections that do not end
_LOG_INTERVAL_S = 10.0  # between two log lines about connections that cannot be accepted
_FLUSH_TIMEOUT_S = 1  # to send the errors of requests that were cut off
_logger = logging.getLogger("twostroke.serve")


class AppOptions(Protocol):
    """The options of an application that the HTTP server reads."""

    @property
    def limits(self) -> RequestLimits:
        """Limits for one HTTP client: sizes and times."""

    @property
    def drain_s(self) -> float:
        """The seconds that running requests may take when the server stops."""


class AppHealth(Protocol):
    """Tells the HTTP server whether its application can still answer requests."""

    @property
    def is_well(self) -> bool:
        """Whether the application makes progress.

        If it does not, systemd's watchdog restarts the server.
        """

    def attach(self, on_end: Callable[[], None]) -> None:
        """Register `on_end`, which is called when no request can be answered any more.

        The call comes in the running event loop.
        """


class Application(Protocol):
    """The server or router that answers the requests of an HTTP server, which stops it cleanly."""

    @property
    def options(self) -> AppOptions:
        """The application's options that the HTTP server uses."""

    @property
    def health(self) -> AppHealth:
        """Tells whether the application makes progress."""

    @property
    def is_draining(self) -> bool:
        """Whether the application refuses new requests because the HTTP server stops."""

    @property
    def num_running(self) -> int:
        """The number of clients' requests whose responses are not complete."""

    def drain(self) -> None:
        """Refuse new requests, and let running requests finish."""

    def abort(self) -> None:
        """Cut off all running requests; their clients get an error."""

    def close(self) -> None:
        """Free the application's resources after the last request."""


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket for the server's address.

    A server binds before it loads a model, so an address in use is reported early. Clients that
    connect before `run` wait. Port 0 chooses a free port.

    Raises:
        UsageError: the port is out of range.
        PortInUseError: the address is in use, is not of this machine, or is not allowed.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"must be from 0 to 65535, got {port}.", field="port")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        is_dual_stack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual_stack
        )
    except (OSError, ValueError) as error:
        raise PortInUseError(_bind_error(error, host, port)) from None
    listener.settimeout(0)
    return listener


async def run(
    app: ASGIApp,
    application: Application,
    listener: socket.socket,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[int], None] | None = None,
    notice: DrainNotice | None = None,
) -> int:
    """Serve HTTP requests until a signal stops the server, and return the process's exit code.

    The signals are SIGINT, SIGTERM and SIGHUP. After the first, the application drains, and running
    requests have its `drain_s` seconds to finish. Then, or at a second signal, they are cut off
    with an error. The exit code is 0 if all requests finished, and 1 if some were cut off.

    Args:
        app: the ASGI application with all its layers.
        application: drains and aborts the requests of `app`.
        listener: the socket from `bind`.
        on_ready: called with the server's URL once it answers.
        on_stop: called with the number of running requests at the first signal.
        notice: waits for the notice that this machine will be taken away, which counts as the
            first signal.
    """
    url = _url(listener)
    watchdog = Watchdog(lambda: application.health.is_well)

    def on_listening() -> None:
        if on_ready is not None:
            on_ready(url)
        watchdog.begin()

    server = Server(app, application, on_listening)
    shutdown = _Shutdown(server, application, watchdog, on_stop)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(LoopExceptionHandler())
    is_main = threading.current_thread() is threading.main_thread()  # only this thread gets signals
    stop_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # nohup ignores SIGHUP
    signals = [
        number
        for number in stop_signals
        if is_main and signal.getsignal(number) is not signal.SIG_IGN
    ]
    for number in signals:
        loop.add_signal_handler(number, shutdown.on_signal)
    application.health.attach(shutdown.on_end)
    tasks: list[asyncio.Task[None]] = [loop.create_task(return_freed_memory_regularly())]
    if notice is not None:
        tasks.append(loop.create_task(_drain_on_notice(notice, shutdown)))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        watchdog.end()
        application.close()
        for number in signals:
            loop.remove_signal_handler(number)
    return 1 if shutdown.num_cut_off or shutdown.has_ended else 0


class LoopExceptionHandler:
    """The event loop's exception handler, which logs one line for each error.

    asyncio's own handler would log a traceback for each error.
    """

    def __init__(self) -> None:
        """Create the handler, which has not logged anything yet."""
        self._last_logged_s = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error that asyncio reports.

        Frequent errors about connections that cannot be accepted are logged only now and then.
        """
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}):
            loop.default_exception_handler(context)
        elif (now_s := time.monotonic()) - self._last_logged_s >= _LOG_INTERVAL_S:
            self._last_logged_s = now_s
            _logger.error("New connections wait: this process may not open more files.")


class Server(uvicorn.Server):
    """uvicorn's server, with a callback when it listens, and without signal handlers."""

    def __init__(
        self, app: ASGIApp, application: Application, on_listening: Callable[[], None]
    ) -> None:
        """Prepare to serve `app`; `on_listening` is called when connections are accepted."""
        super().__init__(_config(app, application))
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, and call `on_listening`."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # further connections wait in the kernel's queue
        request_short_time_slices()  # even if engines use all cores
        self._on_listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, unlike uvicorn's method, because `run` handles the signals."""
        yield


class _Shutdown:
    """Stops the server in two steps: it drains, and then cuts running requests off.

    The first signal starts the drain. Requests are cut off at a second signal, or after the time
    limit for draining.
    """

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
        self.num_cut_off = 0
        self.has_ended = False

    def on_signal(self) -> None:
        """Drain the server at the first signal; cut running requests off at the second."""
        if self._draining is not None:
            self._cut_off()
            return
        self._application.drain()
        self._watchdog.stop()
        state = self._server.server_state
        for connection in state.connections:
            if isinstance(connection, HttpConnection):
                connection.hurry()
        loop = asyncio.get_running_loop()
        self._draining = loop.create_task(self._stop_after(set(state.tasks)))
        loop.call_later(self._application.options.drain_s, self._cut_off)
        if self._on_stop is not None:
            self._on_stop(self._application.num_running)

    def on_notice(self) -> None:
        """Drain the server, unless a signal has come before."""
        if self._draining is None:
            self.on_signal()

    def on_end(self) -> None:
        """Stop the server, because its application cannot answer any more requests."""
        self.has_ended = True
        self._cut_off()

    async def _stop_after(self, requests: set[asyncio.Task[None]]) -> None:
        """Wait until the given running requests have ended, then stop listening.

        Until then the server still answers `GET /health` with "draining".
        """
        if requests:
            await asyncio.wait(requests)
        self._server.should_exit = True

    def _cut_off(self) -> None:
        """Stop the server, and abort all running requests with an error."""
        self._server.should_exit = True
        num_running = self._application.num_running
        if num_running:
            requests = counted_noun(num_running, "running request")
            _logger.warning("Shutdown: cut off %s.", requests)
        self.num_cut_off += num_running
        self._application.abort()
        asyncio.get_running_loop().call_later(_FLUSH_TIMEOUT_S, self._abort_connections)

    def _abort_connections(self) -> None:
        """Close the client connections that are still open."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


async def _drain_on_notice(notice: DrainNotice, shutdown: _Shutdown) -> None:
    """Drain the server when there is a notice that this machine will be taken away."""
    await notice.wait()
    _logger.warning("This machine will end (--drain-notice %s): the server stops.", notice.source)
    shutdown.on_notice()


def _config(app: ASGIApp, application: Application) -> uvicorn.Config:
    limits = application.options.limits
    connection: Any = partial(
        HttpConnection,
        limits=limits,
        is_draining=lambda: application.is_draining,
        # Half of the open files, as a router opens a connection to a replica for each client.
        max_connections=raise_open_file_limit() // 2,
        idle_connections={},
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
        backlog=_ACCEPTS_PER_TURN,
        timeout_keep_alive=math.ceil(limits.idle_timeout_s),
        h11_max_incomplete_event_size=limits.max_header_bytes,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if listener.family == socket.AF_INET6:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def _bind_error(error: Exception, host: str, port: int) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return f"Port {port} on {host} is already in use: stop its program, or choose --port."
    if code == errno.EACCES:
        return f"This user may not bind port {port} on {host}: choose --port above 1023."
    if code in {errno.EADDRNOTAVAIL, None} or isinstance(error, socket.gaierror):
        return f"'{host}' is not an address of this machine: check --host."
    return f"Port {port} on {host} cannot be bound: {os.strerror(code)}."
