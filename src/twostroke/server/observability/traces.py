"""Traces for OpenTelemetry: a span for each request, and in it the queue, prefill and decode.

Spans are made at a request's end, from times that are known by then, so that a running request
costs nothing. A thread of OpenTelemetry's sends them from a bounded queue: spans that cannot be
delivered are dropped. Attributes follow OpenTelemetry's conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/), without any text.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable
from urllib.parse import urlsplit

from twostroke.core.env import install_command
from twostroke.core.errors import UsageError
from twostroke.server.models.about import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.output import Timings
    from twostroke.server.http.request_context import ServedRequest

_PATH: Final = "/v1/traces"
_TIMEOUT_S: Final = 5.0
_CLOSE_S: Final = 2.0  # to send the last spans
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_ATTRIBUTES: Final = {  # of the figures of a served request
    "request_id": "twostroke.request_id",
    "method": "http.request.method",
    "status": "http.response.status_code",
    "client_gone": "twostroke.client_gone",
    "error": "error.type",
    "response_id": "gen_ai.response.id",
    "class": "twostroke.class",
    "stream": "gen_ai.request.stream",
    "choices": "gen_ai.request.choice.count",
    "texts": "twostroke.texts",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "accepted_tokens": "twostroke.usage.accepted_tokens",
    "rejected_tokens": "twostroke.usage.rejected_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "ttft_s": "gen_ai.response.time_to_first_chunk",
    "tpot_s": "twostroke.time_per_output_token",
}
_PARAMS: Final = (
    *("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"),
    "seed",
)


def check_endpoint(url: str) -> str:
    """Return where to send traces: OTLP's path is added to a collector's address without a path.

    Raises:
        UsageError: it is not an address, or the extra `[traces]` is not installed.
    """
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        shown = ascii(url[:100])
        reason = "must be the address of a collector, such as http://HOST:4318, got {value}."
        raise UsageError(reason, field="otlp_endpoint", value=shown)
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401 - only whether they are there
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        message = f"Traces need OpenTelemetry: {install_command('traces')}."
        raise UsageError(message, field="otlp_endpoint") from None
    return url if urlsplit(url).path not in {"", "/"} else f"{url.rstrip('/')}{_PATH}"


def exporter(url: str) -> SpanExporter:
    """Return an exporter to a collector.

    Raises:
        UsageError: as `check_endpoint`.
    """
    endpoint = check_endpoint(url)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)


@runtime_checkable
class AnswerWork(Protocol):
    """Work for a request that draws tokens, unlike embeddings."""

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the request."""

    @property
    def timings(self) -> Timings | None:
        """The times of the answers; None before the first has ended."""


class Traces:
    """Makes spans of exchanges."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Send spans by `exporter`, in another thread."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = Resource({"service.name": "twostroke", "service.version": VERSION})
        self._provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("twostroke", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._epoch_s = time.time() - time.monotonic()

    def observe(self, served: ServedRequest) -> None:
        """Make the spans of a served request that is over; GET and DELETE have none."""
        if served.method != "POST":
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        operation = _OPERATIONS.get(served.endpoint, "generate_content")
        is_run = served.running is not None
        name = f"{operation} {served.model}" if is_run else f"POST {served.endpoint}"
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract({"traceparent": served.traceparent}),
            kind=SpanKind.SERVER,
            attributes=_attributes(served, operation),
            start_time=self._ns(served.began_s),
        )
        served.trace_id = f"{span.get_span_context().trace_id:032x}"
        if served.status >= 500:
            span.set_status(Status(StatusCode.ERROR, served.error))
        if isinstance(served.running, AnswerWork) and (timings := served.running.timings):
            self._phases(timings, set_span_in_context(span))
        span.end(self._ns(served.ended_s))

    def close(self) -> None:
        """Send the remaining spans, within a few seconds."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _phases(self, timings: Timings, context: Any) -> None:
        """Make a span for each part of the answer's time."""
        times = (timings.arrival_s, timings.started_s, timings.first_token_s, timings.last_token_s)
        for place, name in enumerate(("queue", "prefill", "decode")):
            began, ended = map(self._ns, times[place : place + 2])
            self._tracer.start_span(name, context=context, start_time=began).end(ended)

    def _ns(self, at_s: float) -> int:
        """Return a time of the monotonic clock in nanoseconds since 1970."""
        return int((self._epoch_s + at_s) * 1e9)


def _attributes(served: ServedRequest, operation: str) -> dict[str, Any]:
    figures = served.figures()
    found = {_ATTRIBUTES[name]: value for name, value in figures.items() if name in _ATTRIBUTES}
    found["http.route"] = served.endpoint
    if served.running is not None:
        found |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "twostroke",
            "gen_ai.request.model": served.model,
            "gen_ai.response.model": served.model,
        }
    if isinstance(served.running, AnswerWork):
        params = served.running.params
        values = {f"gen_ai.request.{name}": getattr(params, name) for name in _PARAMS}
        found |= {name: value for name, value in values.items() if value is not None}
    return found
