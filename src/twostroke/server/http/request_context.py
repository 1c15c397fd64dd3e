"""The facts of one request for errors, logs and traces, without text of prompts or answers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import msgspec
    from starlette.types import Scope

    from twostroke.core.errors import Naming, TwostrokeError
    from twostroke.server.http.api_key import Key
    from twostroke.server.http.body_limits import BodyMemory

STATE_KEY: Final = "served"  # in the state of the ASGI scope
RETRYABLE_STATUSES: Final = frozenset((408, 429, 503, 529))  # a retry may succeed later
_CLIENT_GONE: Final = 499  # nginx's status for a client that disconnects before its response


class ErrorForm(Frozen):
    """How a protocol writes its error responses.

    Attributes:
        status: returns the HTTP status of an error.
        body: returns the JSON body, from the error, the request's id and the names of fields.
        struct: the type of the JSON body.
        id_header: another response header with the request's id.
    """

    status: Callable[[TwostrokeError], int]
    body: Callable[[TwostrokeError, str, Naming], bytes]
    struct: type[msgspec.Struct]
    id_header: bytes | None = None


class TokenUsage(Protocol):
    """The numbers of tokens that a request has used; `prompt_tokens` include `cached_tokens`."""

    @property
    def prompt_tokens(self) -> int:
        """The number of the request's prompt tokens."""

    @property
    def cached_tokens(self) -> int:
        """The number of the request's prompt tokens that came from the prefix cache."""

    @property
    def completion_tokens(self) -> int:
        """The number of the request's answer tokens."""


class RequestWork(Protocol):
    """The work on a request's answers, in an engine or in another server.

    Logs, traces, metrics and limits read its token counts.
    """

    @property
    def num_open(self) -> int:
        """The number of the request's answers that have not ended."""

    @property
    def used(self) -> TokenUsage | None:
        """The prompt and answer tokens that the request has used so far.

        None for a request that runs no model, or that was refused.
        """

    def figures(self) -> dict[str, Any]:
        """Return the request's current token counts and times for logs and traces."""


async def _do_nothing() -> None:
    """Do nothing, for a request whose limits and usage are not shared."""


@dataclass(slots=True)
class ServedRequest:
    """The facts of one HTTP request and its response, which each layer of the server completes.

    Attributes:
        request_id: the client's id, or a new one.
        error_form: the form of the protocol's errors.
        method, path, traceparent: as the client sent them.
        client_path: the path without doubled slashes and a doubled `/v1`, before aliases.
        began_s, ended_s: monotonic times of the request's start and end.
        tenant: the owner of the API key; empty without a key.
        key: the request's API key, if it has one.
        weight: the tenant's weight in fair queues.
        timeout_s: how long the request may take.
        is_from_router: whether the sender has a router's key, and may name tenants.
        service_tier: the service tier of an internal request; None if the request itself names one.
        field_names: the protocol's names of the engine's fields, for errors; `[]` stands for a list
            index, as in `tools[].name`.
        ignored: the names of request fields that have no effect.
        removed_lines: the kinds of lines that were removed from the prompt.
        endpoint: the path of the route that answers.
        status: the HTTP status; 0 until a response begins.
        error: the code of the error that ended the request.
        model, response_id: as the response has them.
        known_model: the server's own name of the model.
        keep_s: seconds that the model stays loaded after the request, if the request says so.
        running: the work on the request, if it has started.
        reserve: called before the request is computed, with the maximum number of tokens that
            it may use; raises if the key's limits do not allow them now.
        admit: awaited by a router before it forwards the request; raises if limits that several
            routers share do not allow it now.
        settle: awaited by a router before it sends the end of the response; returns when the
            request's usage is in the shared store, or cannot be written there soon.
        holds_end: whether the end of a response is held back until `settle` has returned.
        is_usage_counted: whether `settle` has counted the usage of the request.
        is_client_gone: whether the client disconnected before the end of the response.
        trace_id: the id of the trace; empty without traces.
        resume_header: the header by which a trusted router asks for stream records, with which
            another server can continue the stream; else empty.
        stream_records: records of the stream's earlier part, which a router has added to the body.
        body_memory: counts the bytes of clients' bodies; None for an internal request.
        answer_source: returns where the answers come from, an `AnswerSource`.
    """

    request_id: str
    error_form: ErrorForm
    method: str
    path: str
    traceparent: str = ""
    client_path: str = ""
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    tenant: str = ""
    key: Key | None = None
    weight: float = 1.0
    is_from_router: bool = False
    timeout_s: float = math.inf
    service_tier: str | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    removed_lines: tuple[str, ...] = ()
    endpoint: str = "unknown"
    status: int = 0
    error: str | None = None
    model: str = ""
    response_id: str = ""
    known_model: str = ""
    keep_s: float | None = None
    running: RequestWork | None = None
    reserve: Callable[[int], None] = lambda _num_tokens: None
    admit: Callable[[], Awaitable[None]] = _do_nothing
    settle: Callable[[], Awaitable[None]] = _do_nothing
    holds_end: bool = False
    is_usage_counted: bool = False
    is_client_gone: bool = False
    trace_id: str = ""
    resume_header: str = ""
    stream_records: list[bytes] = field(default_factory=list)
    body_memory: BodyMemory | None = None
    answer_source: Callable[[], str] = lambda: "computed"

    def set_owner(self, key: Key) -> None:
        """Note the request's API key, and take the tenant and its weight from the key."""
        self.key = key
        self.tenant = key.tenant
        self.weight = key.weight

    @property
    def is_tried_again(self) -> bool:
        """Whether this is a batch request that was refused for now, and will be sent again."""
        return self.service_tier is not None and self.status in RETRYABLE_STATUSES

    @property
    def used(self) -> TokenUsage | None:
        """The prompt and answer tokens that the request has used so far.

        None for a request that runs no model, or that was refused.
        """
        return None if self.running is None else self.running.used

    def end(self) -> None:
        """Note when the response ended, and whether the client disconnected before the end."""
        self.ended_s = time.monotonic()
        is_cut = self.running is not None and self.running.num_open > 0
        self.is_client_gone = is_cut and self.error is None
        if not self.status or self.status == _CLIENT_GONE:
            self.is_client_gone = True
            self.status = _CLIENT_GONE

    def figures(self) -> dict[str, Any]:
        """Return the request's facts for the access log, by name, without missing values."""
        figures = {
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
        return {name: value for name, value in figures.items() if value is not None}


def served_of(scope: Scope) -> ServedRequest:
    """Return the facts of a request, which the outermost ASGI layer has put into its scope."""
    served_request: ServedRequest = scope["state"][STATE_KEY]
    return served_request


class Observer(Protocol):
    """Gets each request that has ended, for the access log, usage counts or traces.

    Its methods run on the event loop, and must not block.
    """

    def observe(self, served_request: ServedRequest) -> None:
        """Log, count or export a request whose response has ended."""

    def close(self) -> None:
        """Send all buffered reports, because the server stops and no request follows."""
