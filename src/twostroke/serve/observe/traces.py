"""Traces for OpenTelemetry: a span for each request, and in it the queue, prefill and decode.

Spans are made when a request is over, from times that are known by then, so that a running request
costs nothing. They are sent by a thread of OpenTelemetry's own, out of a bounded queue: what cannot
be delivered is dropped. Attributes are OpenTelemetry's conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/); no text is among them.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from twostroke.core.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from twostroke.engine.output import Timings
    from twostroke.serve.observe.exchange import Embedded, Exchange, Generated

_PATH: Final = "/v1/traces"
_TIMEOUT_S: Final = 5.0
_CLOSE_S: Final = 2.0  # for what is left, at the end
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_SAME_NAME: Final = (
    *("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"),
    "seed",
)


def check_endpoint(url: str) -> str:
    """Return where to send traces: a collector's address gets OTLP's path where it has none.

    Raises:
        UsageError: it is no address, or the extra `[traces]` is not installed.
    """
    if not _is_address(url):
        shown = ascii(url[:100])
        reason = "must be the address of a collector, such as http://HOST:4318, got {value}."
        raise UsageError(reason, field="otlp_endpoint", value=shown)
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401 - only whether they are there
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        message = "Traces need OpenTelemetry: pip install 'twostroke[traces]'."
        raise UsageError(message, field="otlp_endpoint") from None
    return url if urlsplit(url).path not in {"", "/"} else f"{url.rstrip('/')}{_PATH}"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def exporter(url: str) -> SpanExporter:
    """Return what sends spans to a collector.

    Raises:
        UsageError: as `check_endpoint`.
    """
    endpoint = check_endpoint(url)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)


class Traces:
    """Makes spans of exchanges."""

    def __init__(self, exporter: SpanExporter, version: str = "unknown") -> None:
        """Hand spans to `exporter`, in a thread beside."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = Resource({"service.name": "twostroke", "service.version": version})
        self._provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("twostroke", version)
        self._propagator = TraceContextTextMapPropagator()
        self._epoch_s = time.time() - time.monotonic()

    def watch(self, exchange: Exchange) -> None:
        """Make the spans of an exchange, unless it only asked how the server is."""
        if exchange.method != "POST":
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        generated = exchange.generated
        span = self._tracer.start_span(
            _name(exchange),
            context=self._propagator.extract({"traceparent": exchange.traceparent}),
            kind=SpanKind.SERVER,
            attributes=_attributes(exchange),
            start_time=self._ns(exchange.began_s),
        )
        exchange.trace_id = f"{span.get_span_context().trace_id:032x}"
        if exchange.status >= 500:
            span.set_status(Status(StatusCode.ERROR, exchange.error))
        timings = generated.timings if generated is not None else None
        if timings is not None:
            self._phases(timings, set_span_in_context(span))
        span.end(self._ns(exchange.ended_s))

    def close(self) -> None:
        """Send what is left, within a few seconds."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _phases(self, timings: Timings, inside: Any) -> None:
        """Make a span for each part of the answer's time."""
        times = (timings.arrival_s, timings.started_s, timings.first_token_s, timings.last_token_s)
        for place, name in enumerate(("queue", "prefill", "decode")):
            began_s, ended_s = times[place : place + 2]
            child: Span = self._tracer.start_span(
                name, context=inside, start_time=self._ns(began_s)
            )
            child.end(self._ns(ended_s))

    def _ns(self, at_s: float) -> int:
        """Return a time of the monotonic clock in nanoseconds since 1970."""
        return int((self._epoch_s + at_s) * 1e9)


def _name(exchange: Exchange) -> str:
    asked = exchange.generated or exchange.embedded
    if asked is None:
        return f"{exchange.method} {exchange.endpoint}"
    return f"{_operation(exchange)} {asked.model}"


def _operation(exchange: Exchange) -> str:
    return _OPERATIONS.get(exchange.endpoint, "generate_content")


def _attributes(exchange: Exchange) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": exchange.method,
        "http.route": exchange.endpoint,
        "http.response.status_code": exchange.status,
        "twostroke.request_id": exchange.request_id,
        "twostroke.client_gone": exchange.is_client_gone,
    }
    if exchange.error is not None:
        found["error.type"] = exchange.error
    if exchange.generated is not None:
        found |= _generated(exchange, exchange.generated)
    if exchange.embedded is not None:
        found |= _embedded(exchange, exchange.embedded)
    return found


def _model(exchange: Exchange, name: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": _operation(exchange),
        "gen_ai.provider.name": "twostroke",
        "gen_ai.request.model": name,
        "gen_ai.response.model": name,
    }


def _embedded(exchange: Exchange, embedded: Embedded) -> dict[str, Any]:
    return _model(exchange, embedded.model) | {
        "gen_ai.usage.input_tokens": embedded.vectors.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": embedded.vectors.num_cached,
        "twostroke.class": embedded.service,
        "twostroke.texts": embedded.vectors.num_texts,
    }


def _generated(exchange: Exchange, generated: Generated) -> dict[str, Any]:
    usage, params = generated.usage, generated.params
    found: dict[str, Any] = {
        **_model(exchange, generated.model),
        "gen_ai.response.id": generated.response_id,
        "gen_ai.request.choice.count": generated.num_choices,
        "gen_ai.request.stream": generated.is_stream,
        "gen_ai.usage.input_tokens": generated.num_prompt,
        "gen_ai.usage.output_tokens": generated.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": generated.num_cached,
        "gen_ai.response.finish_reasons": [reason.value for reason in generated.ends],
        "twostroke.class": generated.service,
        "twostroke.usage.accepted_tokens": usage.accepted_tokens,
        "twostroke.usage.rejected_tokens": usage.rejected_tokens,
    }
    for name in _SAME_NAME:
        if (value := getattr(params, name)) is not None:
            found[f"gen_ai.request.{name}"] = value
    if generated.ttft_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = generated.ttft_s
    if generated.tpot_s is not None:
        found["twostroke.time_per_output_token"] = generated.tpot_s
    return found
