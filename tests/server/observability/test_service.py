"""Service tiers and timings: what requests may ask for, and what responses report."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from support.refusals import refused
from support.servers import events, live_server
from support.waiting import wait_for
from twostroke.core.request import SERVICE_TIERS
from twostroke.core.sampling import SamplingParams
from twostroke.server.protocols.common.fields import TIERS

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer

_PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
_PATHS = ("/v1/chat/completions", "/v1/completions")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("path", _PATHS)
def test_response_has_the_class_of_service(server: LiveServer, path: str, tier: str) -> None:
    response = _post(server, path, service_tier=tier).json()
    assert response["service_tier"] == TIERS[tier]
    assert response["service_tier"] in SERVICE_TIERS


@pytest.mark.parametrize("path", _PATHS)
def test_every_event_of_a_stream_tells_it(server: LiveServer, path: str) -> None:
    text = _post(server, path, service_tier="flex", stream=True).text
    assert {event["service_tier"] for event in events(text)[:-1]} == {"flex"}


@pytest.mark.parametrize("fields", [{}, {"service_tier": None}])
@pytest.mark.parametrize("path", _PATHS)
def test_response_without_service_tier_has_no_class(
    server: LiveServer, path: str, fields: dict[str, Any]
) -> None:
    assert "service_tier" not in _post(server, path, **fields).json()
    assert "service_tier" not in _post(server, path, stream=True, **fields).text


def test_responses_tell_their_class(server: LiveServer) -> None:
    for tier, expected_tier in ((None, "default"), ("priority", "priority")):
        body = {"input": "hello", "max_output_tokens": 2, "service_tier": tier}
        assert server.http.post("/v1/responses", json=body).json()["service_tier"] == expected_tier


def test_an_unknown_class_is_ignored_or_refused_with_the_nearest(
    server: LiveServer, strict: LiveServer
) -> None:
    message = refused(strict.chat(service_tier="priorty"), 400, "service_tier")
    assert "Did you mean 'priority'?" in message
    for tier in ("x" * 10_000, "", 1):
        assert refused(strict.chat(service_tier=tier), 400, "service_tier")
        assert server.chat(service_tier=tier, max_tokens=1).json().get("service_tier") is None


def test_priority_goes_first_and_flex_last(tmp_path: Path) -> None:
    with live_server(tmp_path, max_running=1) as server:
        server.backend.gate.clear()
        stats, tokens = server.client.loop.snapshot, [5] * 4
        first = server.client.generate(tokens, _PARAMS)
        wait_for(lambda: stats().scheduler.num_running == 1)
        order: list[str] = []
        threads = []
        for index, tier in enumerate(("flex", "default", "priority")):
            threads.append(_in_thread(server, tier, order))
            wait_for(lambda expected=index + 1: stats().scheduler.num_waiting == expected)
        server.backend.gate.set()
        first.wait()
        for thread in threads:
            thread.join(10)
    assert order == ["priority", "default", "flex"]


def test_explicit_priority_overrides_the_class(tmp_path: Path) -> None:
    with live_server(tmp_path, max_running=1) as server:
        server.backend.gate.clear()
        stats, order = server.client.loop.snapshot, list[str]()
        first = server.client.generate([5] * 4, _PARAMS)
        wait_for(lambda: stats().scheduler.num_running == 1)
        threads = [_in_thread(server, "priority", order)]
        wait_for(lambda: stats().scheduler.num_waiting == 1)
        threads.append(_in_thread(server, "flex", order, priority=-5))
        wait_for(lambda: stats().scheduler.num_waiting == 2)
        server.backend.gate.set()
        first.wait()
        for thread in threads:
            thread.join(10)
    assert order == ["flex", "priority"]


@pytest.mark.parametrize("stream", [False, True])
def test_messages_report_timings_on_request(server: LiveServer, stream: bool) -> None:
    body = {
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": stream,
        "temperature": 0,
    }
    plain = server.http.post("/v1/messages", json=body).text
    timed = server.http.post("/v1/messages", json=body | {"return_timings": True}).text
    assert "timings" not in plain
    if stream:
        data = [line[6:] for line in timed.splitlines() if line.startswith("data: ")]
        last = next(json.loads(event) for event in data if '"message_delta"' in event)
    else:
        last = json.loads(timed)
    timings = last["timings"]
    assert 0 <= timings["queue_s"] <= timings["ttft_s"] <= timings["e2e_s"]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_report_timings_on_request(server: LiveServer, stream: bool) -> None:
    fields = {"max_tokens": 1, "stream": stream}
    text = server.complete(return_timings=True, **fields).text
    last = events(text)[-2] if stream else json.loads(text)
    timings = last["choices"][0]["timings"]
    assert timings["ttft_s"] == timings["e2e_s"] > 0
    assert timings["tpot_s"] is timings["decode_tokens_per_s"] is None


def _post(server: LiveServer, path: str, **fields: Any) -> Any:
    fields |= {"max_tokens": 2}
    return server.chat(**fields) if "chat" in path else server.complete(**fields)


def _in_thread(server: LiveServer, tier: str, order: list[str], **fields: Any) -> Any:
    def send_request() -> None:
        server.complete(max_tokens=20, ignore_eos=True, service_tier=tier, **fields)
        order.append(tier)

    thread = threading.Thread(target=send_request)
    thread.start()
    return thread
