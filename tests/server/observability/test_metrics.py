"""Prometheus's metrics, and that the documents and the dashboard describe them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.servers import live_server
from twostroke.backends.interface import RankFacts, RankState
from twostroke.backends.machine_limits import MachineLimits
from twostroke.core.request import SERVICE_TIERS
from twostroke.engine.counters import TierTotals
from twostroke.engine.disaggregation_stats import (
    DecodeSideStats,
    DisaggregationStats,
    PrefillEngineStats,
    PrefillSideStats,
)
from twostroke.server.generation.answer_reuse import create_answer_reuse
from twostroke.server.http.ignored import IgnoredFields, RemovedLines
from twostroke.server.observability.metrics import ServerMetrics
from twostroke.server.options import Objective, ServeOptions

if TYPE_CHECKING:
    from support.servers import LiveServer

_ROOT = Path(__file__).parents[3]
_DOCUMENT = _ROOT / "docs/operations/observability.md"
_DASHBOARD = _ROOT / "docs/operations/grafana/twostroke.json"

_PEER = PrefillEngineStats("there:7800", "up", "socket", 1, 0.0, 1e9, 1e9, 0.005)
_HANDOVER = DisaggregationStats(
    "decode",
    PrefillSideStats(7800, 1, 0, 2, 30, 1),
    DecodeSideStats(
        "auto", (_PEER,), {"there": 3, "here": 1}, {"done": 2, "lost": 1}, 10**6, 2.0, 1.9, 0.5
    ),
)
_EVERYTHING = (Objective("ttft", 0.5), Objective("tpot", 0.05, "priority"))


def test_metrics_count_requests_and_tokens(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        server.chat(max_tokens=5, n=2, ignore_eos=True)
        server.chat(max_tokens=0)
        server.http.get("/nope/1")
        text = server.http.get("/metrics").text
    result = _samples(text)
    responses = "twostroke_http_responses_total"
    assert result[responses, "/v1/chat/completions", "200"] == 1
    assert result[responses, "/v1/chat/completions", "400"] == 1
    assert result[responses, "unknown", "404"] == 1
    assert result["twostroke_answers_total", "default", "length"] == 2
    assert result["twostroke_answers_total", "flex", "length"] == 0
    assert result["twostroke_completion_tokens_total", "default"] == 10
    assert result["twostroke_prompt_tokens_total", "default"] > 0
    for name, count in (
        ("time_to_first_token", 2),
        ("queue", 2),
        ("request", 2),
        ("time_per_output_token", 2),
        ("inter_token_latency", 8),
    ):
        assert result[f"twostroke_{name}_seconds_count", "default"] == count
    assert result["twostroke_prefix_cache_asked_tokens_total",] > 0
    assert result["twostroke_rows_per_step_count", "decode"] >= 4
    assert result["twostroke_pages",] == 256
    assert result["twostroke_requests_running",] == 0
    assert result["twostroke_requests_waiting",] == 0
    assert result["twostroke_referenced_pages",] == 0
    assert result["twostroke_ready",] == 1
    assert result["twostroke_step_rows_total", "prefill"] >= 18
    assert result["twostroke_step_time_seconds_total", "decode"] >= 0
    assert result["process_resident_memory_bytes",] > 0


def test_embeddings_are_counted_apart_from_answers(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        fields = {"input": [[5, 6, 7], [8]], "service_tier": "flex"}
        assert server.http.post("/v1/embeddings", json=fields).status_code == 200
        result = _samples(server.http.get("/metrics").text)
    assert result["twostroke_embedded_texts_total", "flex"] == 2
    assert result["twostroke_embedded_tokens_total", "flex"] == 4
    assert result["twostroke_embedded_texts_total", "default"] == 0
    assert result["twostroke_answers_total", "flex", "length"] == 0
    assert result["twostroke_prompt_tokens_total", "flex"] == 0
    for name in ("queue", "request"):
        assert result[f"twostroke_{name}_seconds_count", "flex"] == 0


def test_openmetrics_is_sent_on_request(server: LiveServer) -> None:
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = server.http.get("/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_utilization_is_shown_if_the_limits_are_measured(server: LiveServer) -> None:
    server.chat(max_tokens=2)
    body, _ = asyncio.run(
        ServerMetrics(server.api.models, MachineLimits("portable", 1, 10**6)).expose("")
    )
    assert 'twostroke_mbu{stroke="decode"}' in body.decode()
    assert "twostroke_mbu" not in server.http.get("/metrics").text


def test_llama_servers_metrics_exist_with_their_option(server: LiveServer, tmp_path: Path) -> None:
    assert "llamacpp" not in server.http.get("/metrics").text
    with live_server(tmp_path, ServeOptions(drain_s=1, llama_metrics=True)) as other:
        other.chat(max_tokens=3, ignore_eos=True)
        result = _samples(other.http.get("/metrics").text)
    assert result["llamacpp:prompt_tokens_total",] == 18
    assert result["llamacpp:tokens_predicted_total",] == 3
    assert result["llamacpp:n_decode_total",] == 3
    assert result["llamacpp:requests_processing",] == result["llamacpp:requests_deferred",] == 0
    assert result["llamacpp:prompt_tokens_seconds",] > 0
    assert result["llamacpp:predicted_tokens_seconds",] > 0


@pytest.mark.parametrize("tier", ["auto", "flex", "priority"])
def test_classes_of_service_are_counted_separately(tmp_path: Path, tier: str) -> None:
    service = "default" if tier == "auto" else tier
    with live_server(tmp_path) as server:
        server.chat(max_tokens=3, ignore_eos=True, service_tier=tier)
        result = _samples(server.http.get("/metrics").text)
    for service_tier in SERVICE_TIERS:
        count = int(service_tier == service)
        assert result["twostroke_answers_total", service_tier, "length"] == count
        assert result["twostroke_completion_tokens_total", service_tier] == 3 * count
        assert result["twostroke_inter_token_latency_seconds_count", service_tier] == 2 * count


def test_histograms_are_complete(server: LiveServer) -> None:
    server.chat(max_tokens=3, ignore_eos=True)
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    histograms = [family for family in families if family.type == "histogram"]
    assert len(histograms) == 6
    for family in histograms:
        by_label: dict[str, list[Any]] = {}
        for sample in family.samples:
            label = sample.labels.get("class", sample.labels.get("stroke", ""))
            by_label.setdefault(label, []).append(sample)
        for samples in by_label.values():
            counts = [s.value for s in samples if s.name.endswith("_bucket")]
            total = next(s.value for s in samples if s.name.endswith("_count"))
            assert counts == sorted(counts)
            assert samples[len(counts) - 1].labels["le"] == "+Inf"
            assert counts[-1] == total


def test_objectives_are_counted_and_goodput_is_shown(tmp_path: Path) -> None:
    objectives = (Objective("ttft", 60.0), Objective("tpot", 1e-9, "flex"))
    with live_server(tmp_path, ServeOptions(objectives=objectives, drain_s=1)) as server:
        server.chat(max_tokens=3, ignore_eos=True)
        server.chat(max_tokens=3, ignore_eos=True, service_tier="flex")
        result = _samples(server.http.get("/metrics").text)
    answers = "twostroke_objective_answers_total"
    assert result[answers, "default", "ttft", "met"] == 1
    assert result[answers, "default", "all", "met"] == 1
    assert result[answers, "flex", "ttft", "met"] == 1
    assert result[answers, "flex", "tpot", "missed"] == 1
    assert result[answers, "flex", "all", "missed"] == 1
    assert (answers, "default", "tpot", "met") not in result
    assert result["twostroke_good_tokens_total", "default"] == 3
    assert result["twostroke_good_tokens_total", "flex"] == 0
    assert result["twostroke_objective_limit_seconds", "flex", "tpot"] == 1e-9


def test_document_lists_exactly_the_metrics(server: LiveServer) -> None:
    ours = {(family.name, family.type) for family in _ours(server)}
    rows = re.findall(r"^\| `(twostroke_\w+)` \| (\w+) \|", _DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == {
        (f"{name}_total" if kind == "counter" else name, kind) for name, kind in ours
    }


def test_hand_overs_are_counted(server: LiveServer) -> None:
    results = {
        (sample.name.removeprefix("twostroke_handover_"), *sample.labels.values()): sample.value
        for family in _families(server)
        for sample in family.samples
        if family.name.startswith("twostroke_handover_")
    }
    assert results["prompts_total", "there"] == 3
    assert results["prompts_total", "gone"] == 0
    assert results["transfers_total", "lost"] == 1
    assert results["bytes_total",] == 10**6
    assert results["peer_up", "there:7800"] == 1
    assert results["prefill_per_decode",] > 0
    assert results["leases_late_total",] == 1


def test_document_has_the_labels_of_every_metric(server: LiveServer) -> None:
    text = _DOCUMENT.read_text()
    for family in _ours(server):
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        row = re.search(rf"^\| `{name}` \| \w+ \| ([^|]*) \|", text, re.MULTILINE)
        assert row is not None
        assert set(re.findall(r"`(\w+)`", row[1])) == labels, name


def test_dashboard_asks_for_metrics_that_exist(server: LiveServer) -> None:
    metric_names = {sample.name for family in _families(server) for sample in family.samples}
    dashboard = json.loads(_DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) > 10
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            names = re.findall(r"\b(?:twostroke|process)_\w+", target["expr"])
            assert names, target["expr"]
            assert set(names) <= metric_names, set(names) - metric_names
            assert target["expr"].count("(") == target["expr"].count(")")


def test_scrape_example_names_the_right_path(server: LiveServer) -> None:
    (path,) = re.findall(r"metrics_path: (\S+)", _DOCUMENT.read_text())
    assert server.http.get(path).status_code == 200


def _ours(server: LiveServer) -> list[Any]:
    """Return the metric families of Twostroke, without the library's creation times."""
    return [
        family
        for family in _families(server)
        if family.name.startswith("twostroke_") and not family.name.endswith("_created")
    ]


def _families(server: LiveServer) -> list[Any]:
    """Return every metric family that a server can have."""
    server.chat(max_tokens=2)
    stats = server.client.loop.speculator.stats
    stats.accepted["ngram"], stats.proposed["ngram"], stats.accepted_at[0] = 1, 2, 1
    metrics = ServerMetrics(server.api.models, MachineLimits("portable", 1, 10**6), _EVERYTHING)
    metrics.responses.labels("/v1/models", "200").inc()
    RemovedLines(metrics.registry)
    create_answer_reuse(server.api.options, metrics.registry)
    ignored = IgnoredFields(metrics.registry, is_strict=False)
    ignored._counter.labels("store").inc()
    metrics.checks.labels("valid").inc()
    metrics.misses.labels("uniqueItems").inc()
    with pytest.MonkeyPatch.context() as patch:
        rank = RankState(RankFacts(1, "here", 1, 2, 3), "ready")
        patch.setattr(server.client.loop, "ranks", lambda: [rank])
        patch.setattr(
            server.client.loop.pages,
            "count",
            lambda: (TierTotals("disk", pages_stored=1, bytes_stored=1),),
        )
        patch.setattr(server.client, "disaggregation_stats", lambda: _HANDOVER)
        return list(text_string_to_metric_families(asyncio.run(metrics.expose(""))[0].decode()))


def _samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the values of samples by name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }
