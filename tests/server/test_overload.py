"""Timeouts of requests, and when refused clients may retry."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from support.servers import chat_body, events, live_server, num_unfinished
from support.waiting import wait_for
from twostroke.core.errors import OverloadedError
from twostroke.core.sampling import SamplingParams
from twostroke.engine.client import Caller
from twostroke.server.generation.job import Job, with_spent_time
from twostroke.server.http.error_forms import error_form
from twostroke.server.http.request_context import ServedRequest
from twostroke.server.http.retry_after import RetryAfter, retry_after
from twostroke.server.options import Objective, ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import LiveServer

_HEADER = "x-request-timeout"


def _send_request(
    server: LiveServer, timeout: str, path: str = "/v1/chat/completions", **fields: object
):
    body = chat_body(**{"max_tokens": 2, **fields})
    return httpx.post(server.url + path, json=body, headers={_HEADER: timeout}, timeout=20)


def test_a_wrong_timeout_is_refused_with_a_sentence(server: LiveServer) -> None:
    for wrong in (
        "0",
        "-1",
        "soon",
        "",
        "nan",
        "inf",
        "1e3",
        "86401",
        "9" * 400,
        "5 s",
        "0x1",
        "1.",
    ):
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            answer = _send_request(server, wrong, path)
            assert answer.status_code == 400, wrong
            sentence = "x-request-timeout must be a number of seconds above 0 and up to 86400."
            assert sentence in answer.text
    for right in ("30", "0030.5", "86400"):
        assert _send_request(server, right).status_code == 200
    texts = {"input": ["a b", "c"]}
    answer = httpx.post(server.url + "/v1/embeddings", json=texts, headers={_HEADER: "x"})
    assert answer.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_expires_in_the_queue_never_runs(tmp_path: Path, stream: bool) -> None:
    with live_server(tmp_path, max_running=1) as server:
        server.backend.gate.clear()
        with ThreadPoolExecutor(4) as pool:
            running = pool.submit(server.chat, max_tokens=3)
            wait_for(lambda: server.client.loop.snapshot().scheduler.num_running == 1)
            paths = ("/v1/chat/completions", "/v1/messages")
            queued = [
                pool.submit(_send_request, server, "1", path, stream=stream) for path in paths
            ]
            wait_for(lambda: num_unfinished(server.client.loop) == 3)
            time.sleep(1.05)
            server.backend.gate.set()
            answers = [future.result() for future in queued]
            assert running.result().status_code == 200
        assert [answer.status_code for answer in answers] == [504] * 2
        sentence = "The request was not run: its turn did not come within its timeout of 1 s."
        assert all(sentence in answer.text for answer in answers)
        assert answers[0].json()["error"]["code"] == "deadline_exceeded"
        assert answers[1].json()["error"]["type"] == "timeout_error"
        server.wait_idle()
        totals = server.client.loop.snapshot().services["default"]
        assert totals.answers == 1
        assert server.api.metrics.failures._value.get() == 0, "it is no failure of the engine"


def test_a_running_answer_ends_at_its_timeout(tmp_path: Path) -> None:
    with live_server(tmp_path) as server, ThreadPoolExecutor(2) as pool:
        server.backend.pause_s = 0.05
        futures = [
            pool.submit(_send_request, server, "3", max_tokens=50, ignore_eos=True, stream=stream)
            for stream in (False, True)
        ]
        begun_s = time.monotonic()
        running = server.client.loop.view
        wait_for(
            lambda: [bool(request.num_output) for request in running().running] == [True, True]
        )
        server.backend.gate.clear()
        time.sleep(max(0.0, begun_s + 3.3 - time.monotonic()))
        server.backend.gate.set()
        whole_response, stream = (future.result() for future in futures)
        assert whole_response.status_code == 504
        sentence = "The request was stopped: it took longer than its timeout of 3 s."
        assert whole_response.json()["error"]["message"] == sentence
        *_, failed, _ = events(stream.text)
        assert failed["error"]["message"] == sentence
        server.wait_idle()


def test_a_timeout_counts_from_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout includes a slow body, compiling a constraint, and waiting for a start."""
    with live_server(tmp_path) as server:
        body = json.dumps(chat_body(max_tokens=3)).encode()
        headers = {"content-type": "application/json", _HEADER: "0.3"}

        def slow_body() -> Iterator[bytes]:
            yield body[:10]
            time.sleep(0.5)
            yield body[10:]

        path = "/v1/chat/completions"
        answer = server.http.post(path, content=slow_body(), headers=headers)
        compile_, responses = server.client.grammars.compile, [answer]
        slow = lambda *arguments: time.sleep(0.5) or compile_(*arguments)  # noqa: E731
        monkeypatch.setattr(server.client.grammars, "compile", slow)
        responses.append(_send_request(server, "0.3", guided_regex="a", max_tokens=3))
        for response in responses:
            assert response.status_code == 504
            sentence = "The request was stopped: it took longer than its timeout of 0.3 s."
            assert response.json()["error"]["message"] == sentence
        server.backend.pause_s = 0.1
        num_before = server.backend.num_steps
        late_response = _send_request(server, "1.5", guided_regex="b{90}", max_tokens=40)
        assert late_response.status_code == 504
        assert "its timeout of 1.5 s" in late_response.json()["error"]["message"]
        server.wait_idle()
        assert server.backend.num_steps - num_before < 30  # an answer of 40 tokens takes 40 steps


def test_a_job_says_how_much_of_its_timeout_is_over_when_it_is_begun() -> None:
    form = error_form({"path": "/v1/completions", "headers": []})
    served_request = ServedRequest(
        "r", form, "POST", "/v1/completions", began_s=time.monotonic() - 30
    )
    job = with_spent_time(Job(None, ("a",), SamplingParams(), Caller(timeout_s=60)), served_request)
    assert 30 <= job.caller.spent_s < 60


def test_a_service_tier_is_refused_by_its_objective_once_a_rate_is_measured(tmp_path: Path) -> None:
    options = ServeOptions(objectives=(Objective("ttft", 0.5, "flex"),))
    with live_server(tmp_path, options, max_running=1, token_budget=8) as server:
        with ThreadPoolExecutor(12) as pool:
            server.backend.pause_s = 0.05
            requests = [pool.submit(server.chat, max_tokens=4, ignore_eos=True) for _ in range(12)]
            wait_for(lambda: server.client.loop.snapshot().services["default"].answers == 2)
            refused = server.chat(service_tier="flex")
            assert refused.status_code == 429
            assert "this request may wait 0.5 s" in refused.json()["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            accepted = pool.submit(server.chat, max_tokens=1, service_tier="priority")
            assert accepted.result().status_code == 200
            server.backend.pause_s = 0.0
            assert {future.result().status_code for future in requests} == {200}
        server.wait_idle()


def test_a_draining_server_says_how_long_it_drains(tmp_path: Path) -> None:
    with live_server(tmp_path, ServeOptions(drain_s=7)) as server:
        server.thread.call(server.api.drain)
        refused = server.chat()
        assert refused.status_code == 503
        assert 7 <= int(refused.headers["retry-after"]) <= 9
        server.api.is_draining = False


def test_refused_clients_come_back_one_after_another() -> None:
    now_s = 100.0
    returns = RetryAfter(lambda: now_s)
    room_times = []
    for _ in range(10):
        error = OverloadedError("full", room_s=3.0, turn_s=2.0)
        returns.put_off(error, "default")
        room_times.append(error.facts["room_s"])
    assert room_times == [3.0 + 2.0 * index for index in range(10)]
    other = OverloadedError("full", room_s=3.0, turn_s=2.0)
    returns.put_off(other, "flex")
    assert other.facts["room_s"] == 3.0
    now_s += 23.0
    later = OverloadedError("full", room_s=3.0, turn_s=2.0)
    returns.put_off(later, "default")
    assert later.facts["room_s"] == 3.0
    spread = []
    for _ in range(1000):
        error = OverloadedError("full", room_s=3.0, turn_s=2.0)
        returns.put_off(error, "default")
        spread.append(error.facts["room_s"])
    assert 3 <= min(spread) < 5
    assert 46 < max(spread) <= 48
    assert 400 < sum(room_s < 25.5 for room_s in spread[30:]) < 570, "evenly"
    unknown = OverloadedError("full", room_s=None, turn_s=None)
    returns.put_off(unknown, "new")
    assert retry_after(unknown) == "1"


def test_times_to_come_back_are_true_bounded_and_differ() -> None:
    for room_s, min_s, max_s in ((0.0, 1, 1), (0.3, 1, 1), (20.0, 20, 25), (1e9, 48, 60)):
        retry_times = {int(retry_after(OverloadedError("full", room_s=room_s))) for _ in range(300)}
        assert min_s <= min(retry_times) <= max(retry_times) <= max_s
        assert len(retry_times) == 1 or {min_s + 1, max_s} <= retry_times
    assert retry_after(OverloadedError("full")) == "1"
