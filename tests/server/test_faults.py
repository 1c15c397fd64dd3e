"""Overload and failures of the engine, as clients and monitors see them."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from support.servers import chat_body, events, live_server
from support.unreliable import Ranks
from support.waiting import wait_for
from twostroke.server.generation.running import RunningAnswers
from twostroke.server.http.model_names import ModelNames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import httpx

    from support.engines import Backend
    from twostroke.engine.output import Output

PATH = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue_refuses_at_once_with_retry_after(tmp_path: Path, stream: bool) -> None:
    with live_server(tmp_path, max_running=1, max_waiting_requests=2) as server:
        server.backend.gate.clear()
        with ThreadPoolExecutor(3) as pool:
            running = pool.submit(server.chat, max_tokens=1)
            wait_for(lambda: server.client.loop.snapshot().scheduler.num_running == 1)
            waiting = [pool.submit(server.chat, max_tokens=1) for _ in range(2)]
            wait_for(lambda: server.num_busy == 3)
            refused = server.chat(stream=stream)  # the engine computes nothing until it is answered
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
            assert "at most 2 may" in error["message"]
            server.backend.gate.set()
            assert all(future.result().status_code == 200 for future in [running, *waiting])
        server.wait_idle()


def test_several_prompts_are_queued_all_or_none(tmp_path: Path) -> None:
    with live_server(tmp_path, max_running=4, max_waiting_requests=4) as server:
        error = server.complete(prompt=["hello"] * 5, max_tokens=1).json()["error"]
        assert "prompts times n must be at most 4, got 5." in error["message"]  # at any time
        server.wait_idle()
        assert server.complete(prompt=["hello"] * 4, max_tokens=1).status_code == 200


def test_failure_before_the_first_byte_is_a_500(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with live_server(tmp_path) as server:
        hello = server.client.card.tokenizer.encode("hello")
        server.backend.poison = hello[0]
        for stream in (False, True):
            failed = server.chat(stream=stream)
            assert failed.status_code == 500
            error = failed.json()["error"]
            assert error["type"] == "server_error"
            assert error["message"] == "The engine failed on this request."
            [message] = failures(caplog, failed)
            assert message.startswith("The engine failed on this request: ValueError: bad kernel")
        server.wait_idle()
        healthy = server.complete(prompt="world", max_tokens=2)
        assert healthy.status_code == 200


def test_failure_in_mid_stream_is_an_error_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with live_server(tmp_path) as server:
        tokenizer = server.client.card.tokenizer
        hello, a = tokenizer.find("hello"), tokenizer.find("a")
        fields = {"logit_bias": {str(hello): 100}, "temperature": 0, "stream": True, "n": 2}
        with server.http.stream("POST", PATH, json=chat_body(**fields)) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            while "hello" not in next(lines):
                pass
            server.backend.poison = hello
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        *_, error, _ = events("".join(f"{line}\n\n" for line in rest))
        assert error["error"]["type"] == "server_error"
        assert "secret" not in str(rest)
        [message] = failures(caplog, response)
        assert message.startswith("The engine failed on this request: ValueError: bad kernel")
        server.wait_idle()
        assert server.complete(prompt=[a], max_tokens=1).status_code == 200


def test_request_that_poisons_the_batch_fails_alone(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        tokenizer = server.client.card.tokenizer
        bad, good = tokenizer.find("!"), tokenizer.find("a")
        server.backend.poison = bad
        server.backend.gate.clear()
        fields = {"max_tokens": 8, "logit_bias": {str(good): 100}, "temperature": 0}
        with ThreadPoolExecutor(4) as pool:
            answers = [
                pool.submit(server.complete, prompt=[token], **fields)
                for token in (good, bad, good, good)
            ]
            wait_for(lambda: server.num_busy == 4)
            server.backend.gate.set()
            statuses = [answer.result().status_code for answer in answers]
        assert statuses == [200, 500, 200, 200]
        server.wait_idle()


@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/tokenize"])
def test_unexpected_failure_has_the_form_of_the_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with live_server(tmp_path) as server:

        def fail(*_arguments: object) -> None:
            raise ZeroDivisionError("in /secret/path.py")

        with monkeypatch.context() as patch:
            patch.setattr(ModelNames, "find", fail)
            limit = {} if path == "/tokenize" else {"max_tokens": 5}
            failed = server.http.post(path, json=chat_body(**limit))
        assert failed.status_code == 500
        assert "secret" not in failed.text
        error = failed.json()["error"]
        assert error["type"] == ("api_error" if path == "/v1/messages" else "server_error")
        assert server.http.post(PATH, json=chat_body(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/messages", "/v1/responses"])
def test_unexpected_failure_in_mid_stream_is_an_error_event(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
) -> None:
    break_streams(monkeypatch)
    with live_server(tmp_path) as server:
        text = server.http.post(path, json=stream_body(path)).text
        server.wait_idle()
    assert "secret" not in text
    *_, last = (block for block in text.split("\n\n") if block and block != "data: [DONE]")
    data = json.loads(last.partition("data: ")[2])
    if path == "/v1/responses":
        assert data["type"] == "response.failed"
        assert data["response"]["error"]["code"] == "server_error"
        assert data["response"]["output"][0]["status"] == "incomplete"
    else:
        kind = "api_error" if path == "/v1/messages" else "server_error"
        assert data["error"]["type"] == kind
        assert text.endswith("data: [DONE]\n\n") == (path != "/v1/messages")
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().endswith("failed: ZeroDivisionError: in /secret/path.py")


def break_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every answer fail at its end with an unexpected error."""
    outputs = RunningAnswers.__aiter__

    async def breaking(answers: RunningAnswers) -> AsyncIterator[Output]:
        async for output in outputs(answers):
            if output.finish_reason is not None:
                raise ZeroDivisionError("in /secret/path.py")
            yield output

    monkeypatch.setattr(RunningAnswers, "__aiter__", breaking)


def stream_body(path: str) -> dict[str, object]:
    """Return a request of any protocol for a stream of a few tokens."""
    fields: dict[str, object] = {"stream": True, "temperature": 0}
    if path == "/v1/completions":
        return {"prompt": "hello", "max_tokens": 8, **fields}
    if path == "/v1/responses":
        return {"input": "hello", "max_output_tokens": 16, **fields}
    return chat_body(max_tokens=8, **fields)


def test_dead_engine_is_reported(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        assert server.http.get("/health").json() == {"status": "ok", "model": "tiny"}
        server.backend.is_broken = True
        for stream in (False, True):
            failed = server.chat(stream=stream)
            assert failed.status_code == 503
            assert failed.headers["retry-after"] == "1"
            assert failed.json()["error"]["code"] == "engine_stopped"
            assert "zip" not in failed.text
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "stopped"
        assert "twostroke_ready 0.0" in server.http.get("/metrics").text


def test_stalled_engine_is_seen(tmp_path: Path) -> None:
    with live_server(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        server.backend.gate.clear()
        waiting = pool.submit(server.chat, max_tokens=1)
        wait_for(lambda: server.client.loop._heartbeat.busy_since_s is not None)
        server.client.loop._heartbeat.busy_since_s -= 3600
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "stalled"
        server.backend.gate.set()
        assert waiting.result().status_code == 200
        assert server.http.get("/health").status_code == 200


def test_lost_ranks_are_seen_and_streams_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "twostroke.serve")
    made_ranks: list[Ranks] = []

    def lose(backend: Backend) -> None:
        made_ranks.append(Ranks(backend, steps_ahead=1))

    with (
        live_server(tmp_path, prepare=lose, steps_ahead=1) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        expected = server.chat(max_tokens=5, temperature=0).json()["choices"]
        [ranks] = made_ranks
        ranks.gate.clear()
        ranks.chance = 1.0
        waiting = pool.submit(server.chat, max_tokens=5, temperature=0)
        wait_for(lambda: ranks.num_losses == 1)
        ranks.chance = 0.0
        wait_for(lambda: server.http.get("/health").json()["status"] == "recovering")
        assert server.http.get("/health").status_code == 503
        body = server.http.get("/api/state").json()["ranks"]
        assert [(rank["rank"], rank["state"]) for rank in body] == [(0, "ready"), (1, "lost")]
        assert 'twostroke_rank_ready{rank="1"} 0.0' in server.http.get("/metrics").text
        ranks.gate.set()
        assert waiting.result().json()["choices"] == expected
        assert server.http.get("/health").status_code == 200
        messages = [line for line in caplog.messages if line.startswith("GET /health reports")]
        assert [line.split()[3] for line in messages] == ["recovering", "ready"]
        text = server.http.get("/metrics").text
        assert "twostroke_recoveries_total 1.0" in text
        assert 'twostroke_rank_ready{rank="1"} 1.0' in text
        assert 'twostroke_rank_restarts_total{rank="1"} 1.0' in text
        assert 'twostroke_rank_collective_seconds_total{rank="0"} 0.5' in text


def test_abort_sends_an_error_to_every_client(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        server.backend.gate.clear()
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(server.chat, stream=stream) for stream in (False, True)]
            wait_for(lambda: server.num_busy == 2)
            server.abort()
            for answer in answers:
                assert answer.result().status_code == 503
                assert answer.result().json()["error"]["code"] == "engine_stopped"
        server.backend.gate.set()
        server.wait_idle()


def failures(caplog: pytest.LogCaptureFixture, response: httpx.Response) -> list[str]:
    """Return the log lines about the failure of one request."""
    start = f"Request {response.headers['x-request-id']} failed: "
    messages = [record.getMessage() for record in caplog.records]
    return [text.removeprefix(start) for text in messages if text.startswith(start)]
