"""The ASGI application: the endpoints, and the middleware around them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Match

from twostroke.core.errors import TwostrokeError
from twostroke.engine.process.served import LocalEngine
from twostroke.server.app import Api
from twostroke.server.auth.keys import KeyCheck
from twostroke.server.auth.limits import LimitCheck
from twostroke.server.auth.usage_header import UsageReporter
from twostroke.server.http import errors
from twostroke.server.http.boundary import Boundary
from twostroke.server.http.origins import OriginCheck, Origins
from twostroke.server.http.request_context import RETRYABLE_STATUSES, served_of
from twostroke.server.options import ServeOptions
from twostroke.server.protocols.responses.background import ended_by_restart
from twostroke.server.routes import (
    EMBEDDING_PROTOCOLS,
    GENERATION_PROTOCOLS,
    UTILITY_ENDPOINTS,
    explain_unknown_path,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Scope

    from twostroke.backends.machine_limits import MachineLimits
    from twostroke.engine.client import Client
    from twostroke.server.app import ExtensionFactory
    from twostroke.server.storage import Records


def create_app(
    client: Client,
    options: ServeOptions | None = None,
    limits: MachineLimits | None = None,
    records: Records | None = None,
    extensions: Sequence[ExtensionFactory] = (),
) -> ASGIApp:
    """Build an ASGI application that serves the model of an engine in this process.

    Programs use it to mount Twostroke's endpoints in their own ASGI server.

    Args:
        client: the client of the engine; the caller closes it.
        options: the options of the server.
        limits: the machine's memory bandwidth and peak compute, with which the metrics compare
            the engine's speed; None shows no utilization.
        records: the database and folder that store files and batches; None stores none. Batches
            run between the startup and the shutdown event of ASGI's lifespan protocol.
        extensions: functions that make further endpoints.
    """
    options = options or ServeOptions()
    api = Api(LocalEngine(client), options, limits, records=records, extensions=extensions)
    return build_app(api)


def build_app(api: Api) -> ASGIApp:
    """Build the ASGI application with the endpoints of `api` and the middleware around them."""
    routes = api.routes()
    paths = [route.path_format for route in routes]

    async def respond(request: Request, error: Exception) -> Response:
        """Return the response for an exception, as JSON in the form of the path's API protocol.

        The middleware `Boundary` logs unexpected exceptions.
        """
        if not isinstance(error, TwostrokeError):
            return errors.to_response(
                TwostrokeError("An unexpected error occurred in the server."), request.scope
            )
        is_from_client = served_of(request.scope).service_tier is None
        is_final = is_from_client or error.http_status not in RETRYABLE_STATUSES
        if error.http_status >= 500 and is_final:
            errors.report(error, request.scope)
        return errors.to_response(error, request.scope)

    async def unrouted(request: Request, error: Exception) -> Response:
        """Answer 404 for an unknown path, and 405 for a method that a path does not accept."""
        assert isinstance(error, HTTPException)
        method = request.method
        path = request.url.path
        if error.status_code == 405:
            allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
            message = f"{path} does not accept {method}, only {allowed}."
            if method == "DELETE" and path.startswith("/v1/models/"):
                message += " Models are removed with `twostroke rm`, not over HTTP."
            response = await respond(request, errors.MethodError(message))
            response.headers["allow"] = allowed
            return response
        return await respond(request, errors.UnknownPathError(explain_unknown_path(path, paths)))

    handlers: dict[Any, Any] = {HTTPException: unrouted, Exception: respond}
    handlers[TwostrokeError] = respond

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        """Load stored responses, and run key refreshes and batches until the application stops."""
        await api.key_refresher.start()
        await api.response_store.load(ended_by_restart)
        await api.batches.start(boundary)
        try:
            yield
        finally:
            await api.batches.stop()
            await api.key_refresher.stop()

    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    boundary = _with_middleware(app, api, routes)
    return boundary


def _with_middleware(app: ASGIApp, api: Api, routes: Sequence[Route]) -> Boundary:
    """Wrap the endpoints in the server's middleware, and return the outermost layer.

    The layers, from the inside out: usage headers, rate limits, API keys, allowed origins, and
    `Boundary`, which handles errors and logs.
    """
    keys = api.options.api_keys
    origins = Origins(api.options)
    model_paths = {*GENERATION_PROTOCOLS, *EMBEDDING_PROTOCOLS, *UTILITY_ENDPOINTS}
    layers: ASGIApp = UsageReporter(app)
    if keys is not None:
        layers = KeyCheck(LimitCheck(layers, model_paths.__contains__), keys)
    return Boundary(
        OriginCheck(layers, origins),
        responses=api.metrics.responses,
        limits=api.options.limits,
        origins=origins,
        observers=api.observers,
        find_endpoint=_endpoint_finder(routes),
    )


def _endpoint_finder(routes: Sequence[Route]) -> Callable[[Scope], str]:
    """Return a function that finds the path template of a request's route, for metrics.

    The function returns "unknown" for a request without a route.
    """
    literal_paths = {route.path for route in routes}

    def find(scope: Scope) -> str:
        if scope["path"] in literal_paths:
            return str(scope["path"])
        matching = (route.path for route in routes if route.matches(scope)[0] is not Match.NONE)
        return next(matching, "unknown")

    return find
