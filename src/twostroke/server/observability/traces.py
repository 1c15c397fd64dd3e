"""OpenTelemetry traces: a span for each request, with spans of its queue, prefill and decode."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from twostroke.core.env import install_command
from twostroke.core.errors import UsageError
from twostroke.core.message_text import masked_url
from twostroke.core.urls import split_http_url
from twostroke.server.models.about import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.output import Timings
    from twostroke.server.http.request_context import ServedRequest

_OTLP_PATH: Final = "/v1/traces"
_TIMEOUT_S: Final = 5.0
_CLOSE_TIMEOUT_S: Final = 2.0  # for sending the last spans
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_ATTRIBUTES: Final = {  # attribute names of a served request's figures
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
    """Check the URL of an OpenTelemetry collector, and return it with OTLP's path.

    The path is only added if the URL has no path.

    Raises:
        UsageError: `url` is not a URL, or the extra `[traces]` is not installed.
    """
    parts = split_http_url(url)
    if parts is None:
        shown_url = ascii(masked_url(url)[:100])
        reason = "must be the address of a collector, such as http://HOST:4318, got {value}."
        raise UsageError(reason, field="otlp_endpoint", value=shown_url)
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401 - only a check that they exist
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        message = f"Traces need OpenTelemetry: {install_command('traces')}."
        raise UsageError(message, field="otlp_endpoint") from None
    return url if parts.path not in {"", "/"} else f"{url.rstrip('/')}{_OTLP_PATH}"


def exporter(url: str) -> SpanExporter:
    """Create the exporter that sends spans to the OpenTelemetry collector at `url`.

    Raises:
        UsageError: `url` is not a URL, or the extra `[traces]` is not installed.
    """
    endpoint = check_endpoint(url)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)


@runtime_checkable
class AnswerWork(Protocol):
    """The work on a request that generates tokens, which has more to trace than embeddings."""

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the request."""

    @property
    def timings(self) -> Timings | None:
        """The times of the answers; None before the first answer has ended."""


class Traces:
    """Creates OpenTelemetry spans of requests that have ended."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Prepare to send spans with `exporter`, in another thread."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = Resource({"service.name": "twostroke", "service.version": VERSION})
        self._provider = TracerProvider(resource=service.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("twostroke", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._epoch_s = time.time() - time.monotonic()

    def observe(self, served_request: ServedRequest) -> None:
        """Create the spans of a POST request that has ended."""
        if served_request.method != "POST":
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        operation = _OPERATIONS.get(served_request.endpoint, "generate_content")
        is_computed = served_request.running is not None
        name = (
            f"{operation} {served_request.model}"
            if is_computed
            else f"POST {served_request.endpoint}"
        )
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract({"traceparent": served_request.traceparent}),
            kind=SpanKind.SERVER,
            attributes=_attributes(served_request, operation),
            start_time=self._ns(served_request.began_s),
        )
        served_request.trace_id = f"{span.get_span_context().trace_id:032x}"
        if served_request.status >= 500:
            span.set_status(Status(StatusCode.ERROR, served_request.error))
        if isinstance(served_request.running, AnswerWork) and (
            timings := served_request.running.timings
        ):
            self._phases(timings, set_span_in_context(span))
        span.end(self._ns(served_request.ended_s))

    def close(self) -> None:
        """Send the remaining spans to the collector, within a few seconds."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)

    def _phases(self, timings: Timings, context: Any) -> None:
        """Create the spans of a request's time in the queue, of its prefill and of its decode."""
        times = (timings.arrival_s, timings.started_s, timings.first_token_s, timings.last_token_s)
        for index, name in enumerate(("queue", "prefill", "decode")):
            start_ns, end_ns = map(self._ns, times[index : index + 2])
            self._tracer.start_span(name, context=context, start_time=start_ns).end(end_ns)

    def _ns(self, at_s: float) -> int:
        """Convert a time of the monotonic clock to Unix time in nanoseconds."""
        return int((self._epoch_s + at_s) * 1e9)


def _attributes(served_request: ServedRequest, operation: str) -> dict[str, Any]:
    figures = served_request.figures()
    attributes = {
        _ATTRIBUTES[name]: value for name, value in figures.items() if name in _ATTRIBUTES
    }
    attributes["http.route"] = served_request.endpoint
    if served_request.running is not None:
        attributes |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "twostroke",
            "gen_ai.request.model": served_request.model,
            "gen_ai.response.model": served_request.model,
        }
    if isinstance(served_request.running, AnswerWork):
        params = served_request.running.params
        values = {f"gen_ai.request.{name}": getattr(params, name) for name in _PARAMS}
        attributes |= {name: value for name, value in values.items() if value is not None}
    return attributes
