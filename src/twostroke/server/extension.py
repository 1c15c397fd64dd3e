"""Further paths of a server, which its caller adds: the planner's, for example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import msgspec
    from starlette.routing import Route

    from twostroke.backends.machine_limits import MachineLimits
    from twostroke.engine.process.served import ServedEngine
    from twostroke.server.http.ignored import Ignored
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.openapi.operation import RouteDescription
    from twostroke.server.options import ServeOptions

    NoteIgnored = Callable[[list[Ignored], ServedRequest], None]


class Extension(Protocol):
    """Routes with their descriptions for the OpenAPI document."""

    @property
    def bodies(self) -> Mapping[str, type[msgspec.Struct]]:
        """The structs of request bodies, by path."""

    @property
    def operations(self) -> Mapping[tuple[str, str], RouteDescription]:
        """The descriptions, by method and path."""

    def routes(self, options: ServeOptions, note_ignored: NoteIgnored) -> Sequence[Route]:
        """Return the routes; `note_ignored` takes the fields of a request without effect."""

    def close(self) -> None:
        """Free threads, after the last request."""


# Makes an extension for an engine, the name of its model and the limits of the machine.
ExtensionFactory: TypeAlias = "Callable[[ServedEngine, str, MachineLimits | None], Extension]"
