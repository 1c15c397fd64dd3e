"""The router's ASGI application: what it answers itself, and what it passes on, and where."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from twostroke.core.errors import RequestError, TwostrokeError
from twostroke.core.json_io import encode_json
from twostroke.core.request import DEFAULT_SERVICE_TIER, SERVICE_TIERS
from twostroke.fleet.router.content_hash import content_hash
from twostroke.fleet.router.forward import Forwarder
from twostroke.fleet.router.health_checker import HealthChecker, decoded, fetch, fetch_status, rows
from twostroke.fleet.router.metrics import RouterMetrics
from twostroke.fleet.router.paths import (
    COMPUTED,
    FILE_ID,
    FREE,
    NO_BACKGROUND,
    NO_BATCHES,
    NO_RECORDS,
    READ,
    STORED,
    STORED_ID,
    TENANTS,
    BatchPathError,
    is_harmless,
    stored_path,
)
from twostroke.fleet.router.proxied_request import ProxiedRequest, credentials
from twostroke.fleet.router.replica_registry import ReplicaRegistry, hash_of
from twostroke.fleet.router.response import LostError, ReplicaError
from twostroke.fleet.router.state import fleet_state
from twostroke.fleet.router.usage_meter import TokenRate, UsageMeter
from twostroke.fleet.routing.prompt import read_prompt
from twostroke.server.auth.key_refresher import KeyRefresher
from twostroke.server.auth.keys import KeyCheck
from twostroke.server.auth.limits import LimitCheck
from twostroke.server.auth.usage import UsageBook
from twostroke.server.http.api_key import CLASSES
from twostroke.server.http.boundary import Boundary
from twostroke.server.http.errors import (
    BodySizeError,
    MethodError,
    ServerStoppingError,
    UnknownPathError,
    report,
    to_response,
)
from twostroke.server.http.limits import read_json
from twostroke.server.http.logs import AccessLog
from twostroke.server.http.origins import OriginCheck, Origins, wants_page
from twostroke.server.http.request_context import served_of
from twostroke.server.http.server import bind, run
from twostroke.server.web_ui.site import Site

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from twostroke.fleet.router.options import RouteOptions
    from twostroke.fleet.router.replica_registry import Replica
    from twostroke.fleet.routing.prompt import RoutedPrompt
    from twostroke.server.http.request_context import Observer
    from twostroke.server.storage import Records


class _RouteLabel:
    """What the counts of responses call a path."""

    def __init__(self, path: str) -> None:
        self.path = path


_LARGE_BODY_BYTES: Final = 64 * 1024
_OTHER: Final = _RouteLabel("other")
_ROUTES: Final = {path: _RouteLabel(path) for path in (*COMPUTED, *TENANTS)}


class Router:
    """Answers requests with the replicas of a fleet."""

    def __init__(self, options: RouteOptions, records: Records | None = None) -> None:
        """Know the replicas that the options name; `records` keep keys and usage."""
        self.options = options
        usage = UsageBook("unknown")
        self.upkeep = KeyRefresher(records, options.api_keys, usage)
        self._keeps_usage, self._pace = records is not None, TokenRate()
        self.fleet = ReplicaRegistry(options)
        self.watch = HealthChecker(self.fleet)
        self.metrics = RouterMetrics(self.fleet)
        self.observers: list[Observer] = [AccessLog()] if options.access_log else []
        self.observers += [usage] if records is not None else []
        self.is_draining = False
        self._forwarder = Forwarder(self.fleet)
        self._site = Site("fleet.html")
        self._own: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/": self._about,
            "/health": self._ready,
            "/health/ready": self._ready,
            "/health/live": self._live,
            "/health/progress": self._ready,
            "/metrics": self._scrape,
            "/api/load": self._load,
            "/api/state": self._state,
            "/v1/models": self._models,
        }
        self._own |= {f"/page/{name}": self._file for name in self._site}
        self._own_routes = {path: _RouteLabel(path) for path in self._own}

    def find_endpoint(self, scope: Scope) -> str:
        """Return the path that a request counts for; "other" for most paths that are proxied."""
        path = scope["path"]
        return self._own_routes.get(path, _ROUTES.get(path, _OTHER)).path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. A fault is answered in the form of the client's protocol."""
        path, method = scope["path"], scope["method"]
        try:
            own = self._own.get(path)
            if own is not None:
                scope["route"] = self._own_routes[path]
                if method not in {"GET", "HEAD"}:
                    raise MethodError(f"{path} does not accept {method}, only GET.")
                response = await own(Request(scope, receive))
                await response(scope, receive, send)
                return
            scope["route"] = _ROUTES.get(path, _OTHER)
            if self.is_draining:
                raise ServerStoppingError("The router is stopping and takes no new requests.")
            await self._pass(scope, receive, send)
        except TwostrokeError as error:
            served = served_of(scope)
            if served.status:
                raise
            if error.http_status >= 500:
                report(error, scope)
            if isinstance(error, ReplicaError):
                error = LostError("The server of this request was lost.")
            await to_response(error, scope)(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the replica that suits it."""
        path, method, request = scope["path"], scope["method"], Request(scope, receive)
        is_kept = any(path == one or path.startswith(f"{one}/") for one in TENANTS)
        if self._keeps_usage and is_kept and method == "POST":
            raise BatchPathError(NO_BATCHES)
        if self._keeps_usage and not is_harmless(method, path):
            reason = "it could control a server, or bypass the limits of keys"
            raise UnknownPathError(f"This router does not pass on {method} {path}: {reason}.")
        salt = _salt(scope)
        home = self._home(salt) if is_kept else None
        if path in COMPUTED and method == "POST":
            data = await read_json(request, self.options.limits)
            prompt = read_prompt(data, salt)
            content = b"" if path in FREE else await self._content(data, prompt.model)
            self._forwarder.killers.check(content)
            meter = self._admit(prompt, scope)
            key = self.options.replica_key
            errand = ProxiedRequest(
                scope, receive, send, data, key, meter=meter, model=prompt.model
            )
            errand.content = content
            has_file_id = FILE_ID.search(data) is not None
            del data  # the errand drops it once it has an answer
            if prompt.previous:
                place = self._storing(prompt.previous, scope)
                work: Any = self._at(errand, place)
            elif has_file_id and (keeper := self._file_keeper(salt)) is not None:
                work = self._forwarder.run_at(errand, keeper)
            else:
                work = self._forwarder.run(errand, prompt.asked)
            await self._forwarder.guard(errand, work)
            return
        stored = STORED.fullmatch(path)
        body = await self._body(request)
        prompt = read_prompt(body if isinstance(body, bytes) else b"", salt)
        meter = self._admit(prompt, scope) if method == "POST" else None
        key, (_, _, model) = self.options.replica_key, path.partition("/v1/models/")
        model = model or request.query_params.get("model", "")
        errand = ProxiedRequest(scope, receive, send, body, key, meter=meter, model=model)
        del body
        errand.is_safe = method in {"GET", "HEAD"}
        if stored is not None:
            work = self._at(errand, self._storing(stored[1], scope))
        elif home is not None:
            work = self._forwarder.run_at(errand, home)
        else:
            work = self._forwarder.run(errand, read_prompt(b"", salt).asked)
        await self._forwarder.guard(errand, work)

    async def _content(self, body: bytes, model: str) -> bytes:
        """Return the hash of a request's content, which is the same for all names of its model."""
        replicas = self.fleet.replicas.values()
        name = next((name for replica in replicas if (name := replica.facts.find(model))), "")
        if len(body) <= _LARGE_BODY_BYTES:
            return content_hash(body, name)
        return await asyncio.to_thread(content_hash, body, name)  # streams do not wait for it

    def _admit(self, prompt: RoutedPrompt, scope: Scope) -> UsageMeter | None:
        """Hold a request to what its key allows; return what measures it, if usage is kept.

        Raises:
            ClassError: its key may not have the class that it asks for.
            RequestError: nobody waits for its answer, so nobody learns what it uses.
            RateLimitError: its key has no tokens left.
        """
        served, path = served_of(scope), scope["path"]
        if path in FREE or not self._keeps_usage:
            return None
        if path not in COMPUTED and not self._has_foreign:  # ours compute nothing there
            return None
        if served.key is not None:
            service = prompt.service if prompt.service in CLASSES else DEFAULT_SERVICE_TIER
            priority = SERVICE_TIERS[service] if prompt.priority is None else prompt.priority
            is_named = prompt.service not in {"", "auto"}
            served.key.class_of(service, priority, is_named=is_named)
        if prompt.in_background and path == "/v1/responses":
            raise RequestError(NO_BACKGROUND, field="background")
        num_answer = 0 if path in READ else self._max_answer_tokens(prompt, path)
        served.reserve(prompt.num_tokens + num_answer)
        return UsageMeter(prompt.num_tokens, num_answer, self._pace)

    def _max_answer_tokens(self, prompt: RoutedPrompt, path: str) -> int:
        """Return the largest number of answer tokens that a request may have at any replica."""
        length = self.fleet.context_length
        return prompt.max_answer_tokens(path, length, is_foreign=self._has_foreign)

    @property
    def _has_foreign(self) -> bool:
        """Whether a server of others is among the replicas."""
        return any(replica.is_foreign for replica in self.fleet.replicas.values())

    def _home(self, salt: bytes) -> Replica:
        """Return the replica that keeps the files and batches of a tenant.

        Raises:
            BatchPathError: no replica keeps them apart by tenant, as a router with records needs.
            UnknownPathError: no replica keeps any.
        """
        home = self._file_keeper(salt)
        if home is not None:
            return home
        raise BatchPathError(NO_BATCHES) if self._keeps_usage else UnknownPathError(NO_RECORDS)

    def _file_keeper(self, salt: bytes) -> Replica | None:
        """Return the replica that stores a tenant's files; None if no replica stores files."""
        return self.fleet.home(hash_of(salt.hex()), is_ours=self._keeps_usage)

    async def _at(self, errand: ProxiedRequest, finding: Awaitable[Replica]) -> None:
        await self._forwarder.run_at(errand, await finding)

    async def _storing(self, id_: str, scope: Scope) -> Replica:
        """Return the replica that stores an answer, asking all if it is not known.

        If none does, any can say so.
        """
        known = self.fleet.storing(id_)
        if known is not None:
            return known
        ready = self.fleet.ready
        if not ready:
            raise self.fleet.nothing()
        if not STORED_ID.fullmatch(id_):  # a client can write anything
            return ready[0]
        headers = credentials(scope, self.options.replica_key)
        lookups = [fetch_status(replica, stored_path(id_), headers) for replica in ready]
        answers = await asyncio.gather(*lookups, return_exceptions=True)
        for replica, answer in zip(ready, answers, strict=True):
            if answer == 200:
                self.fleet.store(id_, replica)
                return replica
        return ready[0]

    async def _body(self, request: Request) -> bytes | AsyncIterator[bytes]:
        """Return a body whole, or the pieces of a form, which may have a file."""
        length = request.headers.get("content-length", "")
        is_form = request.headers.get("content-type", "").startswith("multipart/")
        limits = self.options.limits
        if is_form:
            if length.isdecimal() and int(length) > limits.max_file_bytes + 65536:
                raise BodySizeError(f"The body is larger than {limits.max_file_bytes} bytes.")
            return _pieces(request, limits.max_file_bytes + 65536)
        if not length and "transfer-encoding" not in request.headers:
            return b""
        return await read_json(request, limits)

    async def _file(self, request: Request) -> Response:
        """Return a file of the page."""
        return self._site.respond(request, request.url.path.removeprefix("/page/"))

    async def _about(self, request: Request) -> Response:
        """Answer a browser with the page, and a program with a description as JSON."""
        if wants_page(request):
            return self._site.respond(request)
        urls = list(self.fleet.replicas)
        paths = ["/v1/models", "/health", "/metrics", "/api/state", *COMPUTED]
        body = {"name": "twostroke route", "replicas": len(urls), "endpoints": paths}
        response = _json(body)
        response.headers["vary"] = "accept"
        return response

    async def _live(self, _request: Request) -> Response:
        return _json({"status": "ok"})

    async def _ready(self, _request: Request) -> Response:
        """Say whether a request would be answered now."""
        num_ready = len(self.fleet.ready)
        status = "draining" if self.is_draining else "ok" if num_ready else "no replica"
        body = {"status": status, "ready": num_ready, "replicas": len(self.fleet.replicas)}
        body |= {"warning": warning} if (warning := self.fleet.warning) else {}
        return _json(body, 200 if status == "ok" else 503)

    async def _scrape(self, request: Request) -> Response:
        body, content_type = self.metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _state(self, request: Request) -> Response:
        key = self.options.replica_key
        shown = key and request.headers.get("authorization") == f"Bearer {key}"
        if not self.options.shows_dashboard and not shown:
            raise UnknownPathError("The dashboard is off: start the router with --dashboard.")
        return _json(fleet_state(self.fleet))

    async def _load(self, _request: Request) -> Response:
        """Say that this is not a server, to another router or to this one itself."""
        raise UnknownPathError(f"A router has no load of its own ({self.fleet.mark}).")

    async def _models(self, request: Request) -> Response:
        """Return all models that replicas have, each as the first of them describes it."""
        headers = credentials(request.scope, self.options.replica_key)
        headers += [pair for pair in request.scope["headers"] if pair[0] == b"anthropic-version"]
        ready = self.fleet.ready
        if not ready:
            raise self.fleet.nothing()
        asked = [fetch(one, "/v1/models", headers) for one in ready]
        whole: dict[str, Any] = {}
        models: dict[str, Any] = {}
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException) or answer[0] != 200:
                continue
            whole = whole or decoded(answer[1])
            for row in rows(answer[1]):
                if isinstance(name := row.get("id"), str):
                    models.setdefault(name, row)
        if not models:
            raise LostError("No replica lists its models.")
        if "last_id" in whole:  # Anthropic's list
            whole |= {"first_id": next(iter(models)), "last_id": next(reversed(models))}
        return _json(whole | {"data": list(models.values())})

    @property
    def num_running(self) -> int:
        """The number of requests that are on their way."""
        return len(self._forwarder.running)

    @property
    def vitals(self) -> Router:
        """The router is always well, as far as it can say so."""
        return self

    @property
    def is_well(self) -> bool:
        """True: what runs the event loop answers."""
        return True

    def attach(self, on_end: Callable[[], None]) -> None:
        """Do nothing: a router does not end by itself."""

    def drain(self) -> None:
        """Take no new requests."""
        self.is_draining = True

    def abort(self) -> None:
        """Cut off all requests."""
        self.fleet.give_up()
        for errand in list(self._forwarder.running):
            if errand.connection is not None:
                errand.connection.fail(ServerStoppingError("The router is stopping."))

    def close(self) -> None:
        """Free what it holds."""
        for observer in self.observers:
            observer.close()


def build_app(router: Router) -> ASGIApp:
    """Return the ASGI application of a router, with the layers that a server has."""
    options = router.options
    keys, origins = options.api_keys, Origins(options)
    limited = LimitCheck(router, lambda _path: True)
    guarded = OriginCheck(router if keys is None else KeyCheck(limited, keys), origins)
    inner = Boundary(
        guarded,
        router.metrics.responses,
        options.limits,
        origins,
        router.observers,
        find_endpoint=router.find_endpoint,
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(router, receive, send)
        elif scope["type"] == "http":
            await inner(scope, receive, send)

    return app


async def _live(router: Router, receive: Receive, send: Send) -> None:
    await receive()
    await router.upkeep.start()
    await router.watch.start()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await router.watch.stop()
    await router.upkeep.stop()
    await send({"type": "lifespan.shutdown.complete"})


async def _pieces(request: Request, most: int) -> AsyncIterator[bytes]:
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise BodySizeError(f"The body is larger than {most} bytes.")
        if part:
            yield part


def _salt(scope: Scope) -> bytes:
    """Return what tells tenants apart: their name, or else the key that they show."""
    tenant = served_of(scope).tenant
    if tenant:
        return tenant.encode()
    for name, value in scope["headers"]:
        if name in {b"authorization", b"x-api-key"}:
            return bytes(value)
    return b""


def _json(body: Any, status: int = 200) -> Response:
    return Response(encode_json(body), status, media_type="application/json")


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
