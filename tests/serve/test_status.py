"""What is not generation: models, health, metrics, the root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from support.servers import live_server
from twostroke.engine.hardware import Limits
from twostroke.serve.observe.metrics import Metrics
from twostroke.serve.options import ServeOptions

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from support.servers import LiveServer


def test_models_are_listed_in_openais_form(server: LiveServer) -> None:
    model = {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "twostroke",
        "max_model_len": 512,
    }
    assert server.http.get("/v1/models").json() == {"object": "list", "data": [model]}
    assert server.http.get("/v1/models/tiny").json() == model


def test_model_answers_to_each_of_its_names(tmp_path: Path) -> None:
    options = ServeOptions(model_names=("org/tiny", "default"), drain_s=1)
    with live_server(tmp_path, options) as server:
        listed = server.http.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["org/tiny", "default"]
        assert server.http.get("/v1/models/org/tiny").json()["id"] == "org/tiny"
        for name in ("org/tiny", "default"):
            assert server.chat(model=name, max_tokens=1).json()["model"] == name
        assert server.chat(max_tokens=1).json()["model"] == "org/tiny"
        assert server.chat(model="tiny", max_tokens=1).status_code == 404


def test_root_points_to_the_api(server: LiveServer) -> None:
    body = server.http.get("/").json()
    assert body["model"] == "tiny"
    assert "/v1/chat/completions" in body["endpoints"]


def test_every_response_has_a_request_id(server: LiveServer) -> None:
    ids = {server.http.get(path).headers["x-request-id"] for path in ("/", "/health", "/nope")}
    assert len(ids) == 3


def test_metrics_count_what_happened(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        server.chat(max_tokens=5, n=2, ignore_eos=True)
        server.chat(max_tokens=0)
        server.http.get("/nope/1")
        text = server.http.get("/metrics").text
    found = _samples(text)
    responses = "twostroke_http_responses_total"
    assert found[responses, "/v1/chat/completions", "200"] == 1
    assert found[responses, "/v1/chat/completions", "400"] == 1
    assert found[responses, "unknown", "404"] == 1
    assert found["twostroke_answers_total",] == 2
    assert found["twostroke_completion_tokens_total",] == 10
    assert found["twostroke_time_to_first_token_seconds_count",] == 2
    assert found["twostroke_requests_running",] == 0
    assert found["twostroke_requests_waiting",] == 0
    assert found["twostroke_referenced_pages",] == 0
    assert found["twostroke_ready",] == 1
    assert found["twostroke_step_rows_total", "prefill"] >= 18
    assert found["twostroke_step_time_seconds_total", "decode"] >= 0
    assert found["process_resident_memory_bytes",] > 0


def test_openmetrics_is_spoken_where_asked_for(server: LiveServer) -> None:
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = server.http.get("/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_utilization_is_shown_where_the_limits_are_known(server: LiveServer) -> None:
    server.chat(max_tokens=2)
    body, _ = Metrics(server.client, Limits("portable", 1, 10**6)).expose("")
    assert 'twostroke_mbu{stroke="decode"}' in body.decode()
    assert "twostroke_mbu" not in server.http.get("/metrics").text


def test_sources_of_guesses_may_appear_while_metrics_are_read(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = server.client.loop.speculation
    stats.add("context", 1, 2)
    add_metric = CounterMetricFamily.add_metric

    def add_while_engine_works(*args: Any, **given: Any) -> None:
        stats.add(f"source {len(stats.proposed)}", len(stats.accepted_at) + 1, 24)
        add_metric(*args, **given)

    monkeypatch.setattr(CounterMetricFamily, "add_metric", add_while_engine_works)
    body, _ = Metrics(server.client).expose("")
    assert 'speculation_proposed_tokens_total{source="context"} 2.0' in body.decode()


def _samples(text: str) -> dict[tuple[str, ...], float]:
    """Return values by name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }
