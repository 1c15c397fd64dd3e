"""Traces: spans of requests, and collectors that answer, are gone, or are no collectors at all."""

from __future__ import annotations

import gzip
import socket
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server, post_bytes
from support.waiting import wait_for
from twostroke.core.errors import UsageError
from twostroke.server.observability.traces import Traces, check_endpoint
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import LiveServer

needs_extra = pytest.mark.skipif(
    find_spec("opentelemetry") is None, reason="needs the extra [traces]"
)
_PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@needs_extra
def test_a_request_is_a_span_with_its_parts(server: LiveServer) -> None:
    with _traced(server) as spans:
        response = server.chat(max_tokens=4, ignore_eos=True, service_tier="priority", seed=3)
        result = spans(4)
    root = result["chat tiny"]
    attributes = root.attributes
    usage = response.json()["usage"]
    assert root.parent is None
    assert root.kind.name == "SERVER"
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "twostroke"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "tiny"
    assert attributes["gen_ai.response.id"] == response.json()["id"]
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.request.max_tokens"] == 4
    assert attributes["gen_ai.request.seed"] == 3
    assert attributes["http.route"] == "/v1/chat/completions"
    assert attributes["http.response.status_code"] == 200
    assert attributes["twostroke.class"] == "priority"
    assert attributes["twostroke.request_id"] == response.headers["x-request-id"]
    parts = [result[name] for name in ("queue", "prefill", "decode")]
    for part in parts:
        assert part.parent.span_id == root.context.span_id
        assert part.context.trace_id == root.context.trace_id
    assert root.start_time <= parts[0].start_time
    for before, after in pairwise(parts):
        assert before.start_time <= before.end_time == after.start_time <= after.end_time
    assert parts[2].end_time <= root.end_time
    assert abs(root.start_time / 1e9 - time.time()) < 60


@needs_extra
def test_embeddings_are_a_span_with_their_tokens(server: LiveServer) -> None:
    with _traced(server) as spans:
        fields = {"input": ["hello", "hello there"], "service_tier": "flex"}
        response = server.http.post("/v1/embeddings", json=fields)
        attributes = spans(1)["embeddings tiny"].attributes
    assert attributes["gen_ai.operation.name"] == "embeddings"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "tiny"
    assert attributes["gen_ai.usage.input_tokens"] == response.json()["usage"]["prompt_tokens"]
    assert attributes["twostroke.texts"] == 2
    assert attributes["twostroke.class"] == "flex"


@needs_extra
def test_spans_join_the_trace_of_their_client(server: LiveServer) -> None:
    with _traced(server) as spans:
        server.http.post("/v1/completions", json={"prompt": "hello"}, headers=_PARENT)
        root = spans(4)["text_completion tiny"]
    assert f"{root.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"


@needs_extra
@pytest.mark.parametrize("parent", ["", "rubbish", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_invalid_traceparent_starts_a_new_trace(server: LiveServer, parent: str) -> None:
    with _traced(server) as spans:
        server.http.post(
            "/v1/completions", json={"prompt": "hello"}, headers={"traceparent": parent}
        )
        root = spans(4)["text_completion tiny"]
    assert root.parent is None
    assert root.context.trace_id


@needs_extra
def test_refused_request_is_a_span_without_parts(server: LiveServer) -> None:
    with _traced(server) as spans:
        server.chat(model="other")
        server.http.get("/health")
        result = spans(1)
    span = result["POST /v1/chat/completions"]
    assert span.attributes["error.type"] == "model_not_found"
    assert span.status.status_code.name == "UNSET"  # the client's fault, as conventions have it


@needs_extra
def test_failures_of_the_server_are_errors_of_the_span(tmp_path: Path) -> None:
    with live_server(tmp_path) as server, _traced(server) as spans:
        server.backend.poison = server.client.card.tokenizer.encode("hello")[0]
        server.complete(max_tokens=3)
        span = spans(1)["text_completion tiny"]
    assert span.status.status_code.name == "ERROR"


@needs_extra
def test_client_that_left_is_reported(server: LiveServer) -> None:
    with _traced(server) as spans:
        body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with server.connect() as connection:
            connection.sendall(post_bytes("/v1/completions", body))
            connection.recv(1000)
        span = spans(1)["text_completion tiny"]
    assert span.attributes["twostroke.client_gone"] is True
    assert span.attributes["gen_ai.usage.output_tokens"] < 400


@needs_extra
def test_spans_have_no_text_of_requests(server: LiveServer) -> None:
    with _traced(server) as spans:
        server.complete(prompt="hello my secret", max_tokens=2, stop=["password"], user="somebody")
        text = "".join(span.to_json() for span in spans(4).values())
    for word in ("hello", "secret", "password", "somebody"):
        assert word not in text


@needs_extra
def test_spans_arrive_at_a_collector(tmp_path: Path) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with _collector() as (url, bodies):
        options = ServeOptions(otlp_endpoint=url, drain_s=1)
        with live_server(tmp_path, options) as server:
            server.complete(max_tokens=2)
        server.api.close()
        wait_for(lambda: bool(bodies))
    path, body = bodies[0]
    assert path == "/v1/traces"
    request = ExportTraceServiceRequest.FromString(body)
    (resource,) = request.resource_spans
    named = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert named["service.name"] == "twostroke"
    names = [span.name for span in resource.scope_spans[0].spans]
    assert sorted(names) == ["decode", "prefill", "queue", "text_completion tiny"]


@needs_extra
def test_missing_collector_does_not_fail_requests(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    options = ServeOptions(otlp_endpoint=f"http://127.0.0.1:{port}", drain_s=1)
    with live_server(tmp_path, options) as server:
        for _ in range(5):
            assert server.complete(max_tokens=2).status_code == 200
        began_s = time.monotonic()
        server.api.close()
        assert time.monotonic() - began_s < 10


@needs_extra
def test_address_without_a_path_gets_the_otlp_path() -> None:
    assert check_endpoint("http://localhost:4318") == "http://localhost:4318/v1/traces"
    assert check_endpoint("http://localhost:4318/") == "http://localhost:4318/v1/traces"
    assert check_endpoint("https://c.example/otlp/x") == "https://c.example/otlp/x"


@pytest.mark.parametrize(
    "url", ["", "localhost:4318", "ftp://x", "http://", "grpc://x:4317", "http://[", "http://x:y"]
)
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="must be the address of a collector"):
        check_endpoint(url)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match=r"pip install '.+\[traces\]'"):
        check_endpoint("http://localhost:4318")


@contextmanager
def _traced(server: LiveServer) -> Iterator[Any]:
    """Yield a function that waits for a number of spans, and returns them by name."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    traces = Traces(exporter)

    def spans(count: int) -> dict[str, Any]:
        def has_come() -> bool:
            traces._provider.force_flush()
            return len(exporter.get_finished_spans()) >= count

        wait_for(has_come)
        results = {span.name: span for span in exporter.get_finished_spans()}
        assert len(results) == count
        return results

    server.api.observers.append(traces)
    try:
        yield spans
    finally:
        server.api.observers.remove(traces)
        traces.close()


@contextmanager
def _collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Yield a collector's address, and the list of requests that it receives."""
    bodies: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            bodies.append((self.path, body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
