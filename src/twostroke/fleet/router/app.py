"""The router: answers some paths itself, and forwards all others to replicas."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from twostroke.core.errors import TwostrokeError
from twostroke.core.json_io import encode_json
from twostroke.fleet.router.forward import Forwarder
from twostroke.fleet.router.health_checker import (
    HealthChecker,
    decode_object,
    decode_rows,
    fetch,
)
from twostroke.fleet.router.metrics import RouterMetrics
from twostroke.fleet.router.overflow import Overflow
from twostroke.fleet.router.paths import (
    COMPUTED_PATHS,
    FILE_PATHS,
)
from twostroke.fleet.router.proxied_request import credentials
from twostroke.fleet.router.replica_registry import ReplicaRegistry
from twostroke.fleet.router.request_reader import RequestReader
from twostroke.fleet.router.response import LostError, ReplicaError
from twostroke.fleet.router.state import fleet_state
from twostroke.fleet.router.trace_recorder import RouterTraceRecorder
from twostroke.fleet.shared_records.limit_check import SharedLimitCheck
from twostroke.server.auth.key_refresher import KeyRefresher
from twostroke.server.auth.keys import KeyCheck
from twostroke.server.auth.limits import LimitCheck
from twostroke.server.auth.usage import UsageBook
from twostroke.server.http.boundary import Boundary
from twostroke.server.http.error_forms import ANTHROPIC
from twostroke.server.http.errors import (
    MethodError,
    ServerStoppingError,
    UnknownPathError,
    report,
    to_response,
)
from twostroke.server.http.logs import AccessLog
from twostroke.server.http.origins import OriginCheck, Origins, wants_page
from twostroke.server.http.request_context import served_of
from twostroke.server.http.server import bind, run
from twostroke.server.web_ui.site import Site

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from twostroke.fleet.router.options import RouteOptions
    from twostroke.fleet.shared_records.records import SharedRecords
    from twostroke.server.http.request_context import Observer
    from twostroke.server.storage import Records


class _RouteLabel:
    """The label of a request's path in the router's metrics of responses.

    It has the attribute `path` of a Starlette route, which the metrics of the server read.
    """

    def __init__(self, path: str) -> None:
        self.path = path


_OTHER_LABEL: Final = _RouteLabel("other")
_LABELS: Final = {path: _RouteLabel(path) for path in (*COMPUTED_PATHS, *FILE_PATHS)}


class Router:
    """A router as an ASGI application: answers its own paths, and forwards others to replicas.

    Attributes:
        options: the router's options.
        fleet: the replicas.
        health_checker: checks the replicas.
        key_refresher: reads changed API keys from the database, and writes usage to it.
        shared_records: the keys, limits and usage that several routers share; None without them.
        overflow: the APIs that may answer requests; None without `--overflow`.
        metrics: the metrics of `/metrics`.
        observers: observe requests and responses, for logs and usage.
        is_draining: whether new requests are refused, since the router stops.
    """

    def __init__(
        self,
        options: RouteOptions,
        records: Records | None = None,
        shared_records: SharedRecords | None = None,
    ) -> None:
        """Create a router for the replicas that the options name.

        `records` is a database of API keys: the router accepts these keys, and writes their usage
        to the database. `shared_records` has keys and usage that several routers share.
        """
        usage = UsageBook("unknown")
        self.options = options
        self.fleet = ReplicaRegistry(options)
        self.health_checker = HealthChecker(self.fleet)
        self.key_refresher = KeyRefresher(records, options.api_keys, usage)
        self.shared_records = shared_records
        self.observers: list[Observer] = [AccessLog()] if options.access_log else []
        self.observers += [usage] if records is not None else []
        self.observers += [shared_records] if shared_records is not None else []
        trace = None if options.record_trace is None else RouterTraceRecorder(options.record_trace)
        self.observers += [trace] if trace is not None else []
        self.overflow: Overflow | None = None
        if options.overflow is not None:
            self.overflow = Overflow(options.overflow, self.fleet, records, shared_records)
            self.observers.append(self.overflow.costs)
        self.metrics = RouterMetrics(self.fleet, shared_records, self.overflow)
        self.is_draining = False
        self._forwarder = Forwarder(self.fleet, self.overflow)
        self._reader = RequestReader(
            self.fleet,
            self._forwarder.killers,
            keeps_usage=records is not None or shared_records is not None,
            measures_usage=self.overflow is not None,
            trace=trace,
        )
        self._site = Site("fleet.html")
        self._handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/": self._get_home,
            "/health": self._get_ready,
            "/health/ready": self._get_ready,
            "/health/live": self._get_live,
            "/health/progress": self._get_ready,
            "/metrics": self._get_metrics,
            "/api/load": self._get_load,
            "/api/state": self._get_state,
            "/v1/models": self._get_models,
        }
        self._handlers |= {f"/page/{name}": self._get_file for name in self._site}
        self._handler_labels = {path: _RouteLabel(path) for path in self._handlers}

    def find_endpoint(self, scope: Scope) -> str:
        """Return the label of a request's path in the metrics of responses.

        It is "other" for most forwarded paths, so that clients cannot create labels without limit.
        """
        path = scope["path"]
        return self._handler_labels.get(path, _LABELS.get(path, _OTHER_LABEL)).path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a client's request, or forward it to a replica (an ASGI application).

        An error is answered in the form of the protocol to which the path belongs.
        """
        path, method = scope["path"], scope["method"]
        try:
            handler = self._handlers.get(path)
            if handler is not None:
                scope["route"] = self._handler_labels[path]
                if method not in {"GET", "HEAD"}:
                    raise MethodError(f"{path} does not accept {method}, only GET.")
                response = await handler(Request(scope, receive))
                await response(scope, receive, send)
                return
            scope["route"] = _LABELS.get(path, _OTHER_LABEL)
            if self.is_draining:
                raise ServerStoppingError("The router is stopping and takes no new requests.")
            if method == "GET" and (row := self._startable_row(scope)) is not None:
                await _json(row)(scope, receive, send)
                return
            await self._forwarder.forward(await self._reader.read(scope, receive, send))
        except TwostrokeError as error:
            context = served_of(scope)
            if context.status:
                raise
            if error.http_status >= 500:
                report(error, scope)
            if isinstance(error, ReplicaError):
                error = LostError("The server of this request was lost.")
            await to_response(error, scope)(scope, receive, send)

    async def _get_file(self, request: Request) -> Response:
        """Return a file of the web UI."""
        return self._site.respond(request, request.url.path.removeprefix("/page/"))

    async def _get_home(self, request: Request) -> Response:
        """Return the web UI for a browser, and a description in JSON for a program."""
        if wants_page(request):
            return self._site.respond(request)
        urls = list(self.fleet.replicas)
        paths = ["/v1/models", "/health", "/metrics", "/api/state", *COMPUTED_PATHS]
        body = {"name": "twostroke route", "replicas": len(urls), "endpoints": paths}
        response = _json(body)
        response.headers["vary"] = "accept"
        return response

    async def _get_live(self, _request: Request) -> Response:
        return _json({"status": "ok"})

    async def _get_ready(self, _request: Request) -> Response:
        """Answer with the router's readiness: status 200 if it accepts requests, else 503.

        The router accepts requests if at least one replica is ready, if requests may wait for the
        start of a replica, or if an upstream may answer in place of replicas ("overflow").
        """
        num_ready = len(self.fleet.ready)
        may_wait = bool(self.fleet.starts.models)  # requests are accepted, and wait for a start
        is_ok = num_ready > 0 or may_wait
        status = "draining" if self.is_draining else "ok" if is_ok else "no replica"
        if status == "no replica" and self.overflow and self.overflow.can_replace_replicas:
            status = "overflow"
        body = {"status": status, "ready": num_ready, "replicas": len(self.fleet.replicas)}
        warnings = [self.fleet.warning or ""]
        warnings += [self.shared_records.warning] if self.shared_records is not None else []
        body |= {"warning": warning} if (warning := " ".join(filter(None, warnings))) else {}
        return _json(body, 200 if status in {"ok", "overflow"} else 503)

    async def _get_metrics(self, request: Request) -> Response:
        body, content_type = self.metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _get_state(self, request: Request) -> Response:
        key = self.options.replica_key
        has_key = key and request.headers.get("authorization") == f"Bearer {key}"
        if not self.options.shows_dashboard and not has_key:
            raise UnknownPathError("The dashboard is off: start the router with --dashboard.")
        overflow = {} if self.overflow is None else {"overflow": self.overflow.state()}
        return _json(fleet_state(self.fleet) | overflow)

    async def _get_load(self, _request: Request) -> Response:
        """Answer 404, with the router's id, on the path on which servers report their load.

        If the router is listed as its own replica, its health check finds the id, and refuses the
        replica.
        """
        raise UnknownPathError(f"A router has no load of its own ({self.fleet.router_id}).")

    async def _get_models(self, request: Request) -> Response:
        """Return the list of all replicas' models, each model once.

        A model without a replica is listed, too, if a replica can be started or if an upstream has
        the model.
        """
        headers = credentials(request.scope, self.options.replica_key)
        headers += [pair for pair in request.scope["headers"] if pair[0] == b"anthropic-version"]
        headers += self.fleet.overflow_permission.headers(request.scope)
        ready, starts = self.fleet.ready, self.fleet.starts
        if not ready and not starts.models and self.overflow is None:
            raise self.fleet.no_replica_error()
        requests = [fetch(replica, "/v1/models", headers) for replica in ready]
        response: dict[str, Any] = {}
        models: dict[str, Any] = {}
        for answer in await asyncio.gather(*requests, return_exceptions=True):
            if isinstance(answer, BaseException):
                continue
            status, body = answer
            if status != 200:
                continue
            response = response or decode_object(body)
            for row in decode_rows(body):
                if isinstance(name := row.get("id"), str):
                    models.setdefault(name, row)
        is_anthropic = served_of(request.scope).error_form is ANTHROPIC
        models |= {row["id"]: row for row in starts.rows(models, is_anthropic=is_anthropic)}
        if self.overflow is not None:
            rows = self.overflow.rows(request.scope, models, is_anthropic=is_anthropic)
            models |= {row["id"]: row for row in rows}
        if not models:
            raise (
                LostError("No replica lists its models.")
                if ready
                else (self.fleet.no_replica_error())
            )
        if not response:
            response = {"has_more": False, "last_id": ""} if is_anthropic else {"object": "list"}
        if "last_id" in response:  # Anthropic's list
            response |= {"first_id": next(iter(models)), "last_id": next(reversed(models))}
        return _json(response | {"data": list(models.values())})

    def _startable_row(self, scope: Scope) -> dict[str, Any] | None:
        """Return the body of `GET /v1/models/NAME` for a model that has no replica now.

        Returns None for other paths, and for models that have a replica or are unknown.
        """
        starts = self.fleet.starts
        _, _, name = scope["path"].partition("/v1/models/")
        if not name or any(each.facts.find_model(name) for each in self.fleet.ready):
            return None
        is_anthropic = served_of(scope).error_form is ANTHROPIC
        model = starts.find(name)
        if model is not None:
            rows = starts.rows((), is_anthropic=is_anthropic)
            return next((row for row in rows if row["id"] == model.name), None)
        if self.overflow is None or self.fleet.listed_name(name):
            return None
        rows = self.overflow.rows(scope, (), is_anthropic=is_anthropic)
        return next((row for row in rows if row["id"] == name), None)

    @property
    def num_running(self) -> int:
        """The number of forwarded requests that run; a stopping router waits for them."""
        return len(self._forwarder.running)

    @property
    def health(self) -> Router:
        """The object that the HTTP server asks whether the process is healthy: the router."""
        return self

    @property
    def is_well(self) -> bool:
        """True, since a router that answers is healthy."""
        return True

    def attach(self, on_end: Callable[[], None]) -> None:
        """Do nothing, since a router has no engine whose end it could report to the server."""

    def drain(self) -> None:
        """Refuse new requests; running requests continue."""
        self.is_draining = True

    def abort(self) -> None:
        """Cut off all forwarded requests, when the time for draining is over."""
        self.fleet.stop_waiting()
        for request in list(self._forwarder.running):
            if request.connection is not None:
                request.connection.fail(ServerStoppingError("The router is stopping."))

    def close(self) -> None:
        """Close the access log and the usage records."""
        for observer in self.observers:
            observer.close()


def build_app(router: Router) -> ASGIApp:
    """Return a router's ASGI application, with checks of keys, limits and origins around it."""
    options = router.options
    keys, origins = options.api_keys, Origins(options)
    limit_check: ASGIApp = LimitCheck(router, lambda _path: True)
    if router.shared_records is not None:
        limit_check = SharedLimitCheck(router, router.shared_records)
    origin_check = OriginCheck(router if keys is None else KeyCheck(limit_check, keys), origins)
    boundary = Boundary(
        origin_check,
        router.metrics.responses,
        options.limits,
        origins,
        router.observers,
        find_endpoint=router.find_endpoint,
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _run_lifespan(router, receive, send)
        elif scope["type"] == "http":
            await boundary(scope, receive, send)

    return app


async def _run_lifespan(router: Router, receive: Receive, send: Send) -> None:
    await receive()
    await router.key_refresher.start()
    if router.shared_records is not None:
        await router.shared_records.start()
    await router.health_checker.start()
    if router.overflow is not None:
        await router.overflow.start()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    if router.overflow is not None:
        await router.overflow.stop()
    await router.health_checker.stop()
    await router.key_refresher.stop()
    if router.shared_records is not None:
        await router.shared_records.stop()
    await send({"type": "lifespan.shutdown.complete"})


def _json(body: Any, status: int = 200) -> Response:
    return Response(encode_json(body), status, media_type="application/json")


def route(
    options: RouteOptions,
    *,
    listener: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[int], None] | None = None,
    records: Records | None = None,
    shared_records: SharedRecords | None = None,
) -> int:
    """Run a router until SIGINT or SIGTERM, and return the exit code of the process.

    Args:
        options: the address, the replicas and the policy.
        listener: a listening socket; by default the address of `options` is bound.
        on_ready: called with the URL when requests are accepted.
        on_stop: called with the number of running requests when the router stops.
        records: the database with API keys and usage; the caller closes it.
        shared_records: keys, limits and usage that several routers share.

    Raises:
        UsageError: an option is wrong.
        PortInUseError: the address cannot be bound.
    """
    router = Router(options, records, shared_records)
    listener = listener or bind(options.host, options.port)
    return asyncio.run(run(build_app(router), router, listener, on_ready, on_stop))
