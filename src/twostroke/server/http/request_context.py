"""One request and its response, as errors, logs and traces report it: figures without any text."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import msgspec
    from starlette.types import Scope

    from twostroke.core.errors import Naming, TwostrokeError
    from twostroke.server.http.api_key import Key
    from twostroke.server.http.body_limits import BodyMemory

STATE_KEY: Final = "served"  # in the state of the ASGI scope
LATER: Final = frozenset((408, 429, 503, 529))  # the same request may succeed later
_CLIENT_GONE: Final = 499  # nginx's status for a client that left before its response


class ErrorForm(Frozen):
    """How a protocol reports errors.

    Attributes:
        status: returns the HTTP status of an error.
        body: returns the JSON, from the error, the request's id and the names of fields.
        struct: the type of that JSON.
        id_header: a second header for the request's id.
    """

    status: Callable[[TwostrokeError], int]
    body: Callable[[TwostrokeError, str, Naming], bytes]
    struct: type[msgspec.Struct]
    id_header: bytes | None = None


class Used(Protocol):
    """The tokens that were taken for a request; `cached_tokens` are a part of its prompt's."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed again."""

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answers."""


class RequestWork(Protocol):
    """What is done for a request: by an engine, or by another server."""

    @property
    def num_open(self) -> int:
        """How many answers have not ended."""

    @property
    def used(self) -> Used | None:
        """The tokens that were taken so far; None if it takes none, or was refused."""

    def figures(self) -> dict[str, Any]:
        """Return the figures so far for logs and traces."""


@dataclass(slots=True)
class ServedRequest:
    """The facts of a request; each layer of the server adds those that it finds out.

    Attributes:
        request_id: the client's id, or a new one.
        error_form: how the protocol writes errors.
        method, path, traceparent: as the client sent them.
        began_s, ended_s: times of the monotonic clock.
        tenant: the owner of the API key; empty without.
        key: the key, if the request has one.
        weight: the tenant's share against that of others.
        timeout_s: how long the request may take.
        is_from_router: whether its sender has a router's key, and may name tenants.
        service: the class of service of a request from inside; None for one that chooses.
        field_names: the protocol's names of the engine's fields, for errors; `[]` stands for a
            place in a list, as in `tools[].name`.
        ignored: the names of fields that had no effect.
        endpoint: the route that answers.
        status: 0 until a response begins.
        error: the code of the error that ended the request.
        model, response_id: as the response has them.
        known_model: the server's own name of the model.
        keep_s: how long the model shall stay loaded afterwards, if the request says so.
        running: the work that is done for the request, if any.
        reserve: to be called with the most tokens that the request may need, before it is computed;
            raises if its key may not have them now.
        trace_id: empty without traces.
        arriving: counts the bodies of the server's clients; None for a request from inside.
    """

    request_id: str
    error_form: ErrorForm
    method: str
    path: str
    traceparent: str = ""
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    tenant: str = ""
    key: Key | None = None
    weight: float = 1.0
    is_from_router: bool = False
    timeout_s: float = math.inf
    service: str | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    endpoint: str = "unknown"
    status: int = 0
    error: str | None = None
    model: str = ""
    response_id: str = ""
    known_model: str = ""
    keep_s: float | None = None
    running: RequestWork | None = None
    reserve: Callable[[int], None] = lambda _num_tokens: None
    is_client_gone: bool = False
    trace_id: str = ""
    arriving: BodyMemory | None = None

    def own(self, key: Key) -> None:
        """Note whose request it is."""
        self.tenant, self.key, self.weight = key.tenant, key, key.weight

    @property
    def is_tried_again(self) -> bool:
        """Whether the server sent the request itself, and will again; its runner says why."""
        return self.service is not None and self.status in LATER

    @property
    def used(self) -> Used | None:
        """The tokens that were taken for the request so far; None if there is none to count."""
        return None if self.running is None else self.running.used

    def end(self) -> None:
        """Note the end of the response."""
        self.ended_s = time.monotonic()
        is_cut = self.running is not None and self.running.num_open > 0
        self.is_client_gone = is_cut and self.error is None
        if not self.status or self.status == _CLIENT_GONE:
            self.is_client_gone, self.status = True, _CLIENT_GONE

    def figures(self) -> dict[str, Any]:
        """Return the facts by the names that the access log has for them, without unknown ones."""
        found = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_s": self.ended_s - self.began_s,
            "client_gone": self.is_client_gone,
            "key": (self.key.id or None) if self.key is not None else None,
            "trace_id": self.trace_id or None,
            "error": self.error,
            "response_id": self.response_id or None,
            "model": self.model or None,
            **(self.running.figures() if self.running is not None else {}),
        }
        return {name: value for name, value in found.items() if value is not None}


def served_of(scope: Scope) -> ServedRequest:
    """Return the served request that the outermost layer began."""
    found: ServedRequest = scope["state"][STATE_KEY]
    return found


class Observer(Protocol):
    """Logs or exports requests that are over. It runs on the event loop, and must not block."""

    def observe(self, served: ServedRequest) -> None:
        """Take note of a served request that is over."""

    def close(self) -> None:
        """Send the rest; no request follows."""
