"""The log: a line for each request, in either format, and no texts of prompts or answers."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server, post_bytes
from support.waiting import wait_for
from twostroke.server.http.logs import logging_to
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import LiveServer

_OPTIONS = ServeOptions(access_log=True, drain_s=1)


class Log:
    """The log of a server in JSON, as a list of entries."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    def entries(self, count: int) -> list[dict[str, Any]]:
        """Wait for this number of entries, and return them."""
        wait_for(lambda: self._stream.getvalue().count("\n") >= count)
        text = self._stream.getvalue()
        assert text.count("\n") == count
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    stream = io.StringIO()
    with logging_to(stream, "json", "info"):
        yield Log(stream)


def test_log_has_a_line_for_a_request(tmp_path: Path, log: Log) -> None:
    with live_server(tmp_path, _OPTIONS) as server:
        response = server.chat(max_tokens=4, ignore_eos=True, n=2, service_tier="flex")
        (entry,) = log.entries(1)
    usage = response.json()["usage"]
    assert entry["request_id"] == response.headers["x-request-id"]
    assert entry["response_id"] == response.json()["id"]
    assert (entry["method"], entry["path"]) == ("POST", "/v1/chat/completions")
    assert (entry["status"], entry["class"], entry["model"]) == (200, "flex", "tiny")
    assert (entry["stream"], entry["choices"]) == (False, 2)
    assert entry["prompt_tokens"] == usage["prompt_tokens"]
    assert entry["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert entry["completion_tokens"] == usage["completion_tokens"] == 8
    assert entry["finish_reasons"] == ["length", "length"]
    assert 0 <= entry["queue_s"] <= entry["ttft_s"] <= entry["e2e_s"] <= entry["duration_s"] + 1e-3
    assert entry["tpot_s"] > 0
    assert entry["client_gone"] is False
    assert (entry["level"], entry["logger"]) == ("info", "twostroke.access")
    assert entry["time"].endswith("Z")
    assert "error" not in entry


def test_the_line_of_embeddings_has_their_tokens(tmp_path: Path, log: Log) -> None:
    with live_server(tmp_path, _OPTIONS) as server:
        server.http.post("/v1/embeddings", json={"input": [[5] * 40, [6]], "service_tier": "flex"})
        fields = {"input": [[5] * 40], "pooling": "last"}
        server.http.post("/v1/embeddings", json=fields)
        first, second = log.entries(2)
    assert (first["model"], first["class"], first["texts"]) == ("tiny", "flex", 2)
    assert (first["prompt_tokens"], first["cached_tokens"]) == (41, 0)
    assert (second["prompt_tokens"], second["cached_tokens"]) == (40, 32)
    assert "completion_tokens" not in first
    assert "finish_reasons" not in first


def test_streams_are_logged_at_their_end(tmp_path: Path, log: Log) -> None:
    with live_server(tmp_path, _OPTIONS) as server:
        server.complete(max_tokens=3, ignore_eos=True, stream=True)
        (entry,) = log.entries(1)
    assert (entry["stream"], entry["completion_tokens"], entry["status"]) == (True, 3, 200)


def test_refused_requests_are_logged_with_their_code(tmp_path: Path, log: Log) -> None:
    with live_server(tmp_path, _OPTIONS) as server:
        server.chat(max_tokens=0)
        server.chat(model="other")
        server.http.get("/nope")
        entries = log.entries(3)
    assert [entry["status"] for entry in entries] == [400, 404, 404]
    assert [entry["error"] for entry in entries[1:]] == ["model_not_found", "unknown_url"]
    assert not any("model" in entry for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_left_is_reported(tmp_path: Path, log: Log, stream: bool) -> None:
    with live_server(tmp_path, _OPTIONS) as server:
        body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": stream}
        with server.connect() as connection:
            connection.sendall(post_bytes("/v1/completions", body))
            if stream:
                connection.recv(1000)
            else:
                wait_for(lambda: server.client.loop.snapshot().scheduler.num_running == 1)
        (entry,) = log.entries(1)
    assert entry["client_gone"] is True
    assert entry["status"] == (200 if stream else 499)
    assert entry["completion_tokens"] < 400
    assert entry["prompt_tokens"] > 0
    assert ("ttft_s" in entry) is (entry["completion_tokens"] > 0)
    assert entry["finish_reasons"] == []


def test_engine_failure_is_logged(tmp_path: Path, log: Log) -> None:
    with live_server(tmp_path, _OPTIONS) as server:
        server.backend.poison = server.client.card.tokenizer.encode("hello")[0]
        server.complete(max_tokens=3, stream=False)
        entries = log.entries(2)
    assert [entry["logger"] for entry in entries] == ["twostroke.serve", "twostroke.access"]
    assert entries[1]["status"] == 500
    assert entries[1]["client_gone"] is False
    assert entries[1]["error"]


def test_log_has_no_text_of_requests(tmp_path: Path, log: Log) -> None:
    with live_server(tmp_path, _OPTIONS) as server:
        server.complete(prompt="hello my secret", max_tokens=2, stop=["password"], user="somebody")
        text = json.dumps(log.entries(2))  # and that `user` is ignored
    for word in ("hello", "secret", "password", "somebody"):
        assert word not in text


def test_request_ids_of_clients_are_used_if_they_are_harmless(tmp_path: Path, log: Log) -> None:
    with live_server(tmp_path, _OPTIONS) as server:
        server.http.get("/v1/models", headers={"x-request-id": "mine-1"})
        server.http.get("/v1/models", headers={"x-request-id": "bad id"})
        first, second = log.entries(2)
    assert first["request_id"] == "mine-1"
    assert second["request_id"].startswith("req-")


@pytest.mark.parametrize("form", ["text", "json"])
def test_path_cannot_add_lines_to_the_log(tmp_path: Path, form: str) -> None:
    stream = io.StringIO()
    path = "/x%0A2030-01-01T00:00:00.000Z%20error%20forged%1b[31m%E2%80%A8y%22%5C"
    with logging_to(stream, form, "info"), live_server(tmp_path, _OPTIONS) as server:
        assert server.http.get(path).status_code == 404
        wait_for(lambda: "\n" in stream.getvalue())
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert len(text.splitlines()) == 1
    assert text.isascii()
    assert "\x1b" not in text


def test_text_is_a_line_of_names_and_values(tmp_path: Path) -> None:
    stream = io.StringIO()
    with logging_to(stream, "text", "info"), live_server(tmp_path, _OPTIONS) as server:
        server.complete(max_tokens=3, ignore_eos=True)
        wait_for(lambda: "\n" in stream.getvalue())
    when, level, message, *rest = stream.getvalue().split()
    assert when.endswith("Z")
    assert (level, message) == ("info", "request")
    figures = dict(part.split("=") for part in rest)
    assert figures["path"] == "/v1/completions"
    assert figures["status"] == "200"
    assert figures["completion_tokens"] == "3"
    assert figures["finish_reasons"] == "length"
    assert figures["client_gone"] == "no"


@pytest.mark.parametrize(("access", "level"), [(False, "info"), (True, "warning")])
def test_lines_can_be_left_out(tmp_path: Path, access: bool, level: str) -> None:
    stream = io.StringIO()
    options = ServeOptions(access_log=access, drain_s=1)
    with logging_to(stream, "text", level), live_server(tmp_path, options) as server:
        server.complete(max_tokens=1)
        server.wait_idle()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("level", ["info", "debug"])
def test_polled_paths_are_logged_at_level_debug(tmp_path: Path, level: str) -> None:
    stream = io.StringIO()
    with logging_to(stream, "text", level), live_server(tmp_path, _OPTIONS) as server:
        for path in ("/health", "/metrics", "/api/state", "/api/plan", "/api/load"):
            server.http.get(path)
        server.http.get("/v1/models")
        wait_for(lambda: "/v1/models" in stream.getvalue())
    assert stream.getvalue().count("\n") == (6 if level == "debug" else 1)


def test_log_line_has_the_traceback() -> None:
    stream = io.StringIO()
    with logging_to(stream, "json", "debug"):
        try:
            int("bad\nnumber")
        except ValueError:
            logging.getLogger("twostroke.serve").exception("It\nfailed.")
    entry = json.loads(stream.getvalue())
    assert entry["message"] == "It\\nfailed."
    assert "ValueError" in entry["trace"]


def test_loggers_are_as_they_were_afterwards() -> None:
    logger = logging.getLogger("twostroke")
    before = logger.level, logger.propagate, list(logger.handlers)
    with logging_to(io.StringIO(), "text", "debug"):
        assert logger.level == logging.DEBUG
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_failing_observer_does_not_fail_the_request(server: LiveServer) -> None:
    class Broken:
        def observe(self, exchange: object) -> None:
            raise RuntimeError

        def close(self) -> None:
            pass

    broken = Broken()
    server.api.observers.append(broken)
    try:
        assert server.complete(max_tokens=1).status_code == 200
    finally:
        server.api.observers.remove(broken)


def test_a_request_that_is_refused_while_the_server_drains_is_one_line(
    tmp_path: Path, log: Log
) -> None:
    with live_server(tmp_path, _OPTIONS) as server:
        server.thread.call(server.api.drain)
        assert server.chat(max_tokens=1).status_code == 503
        assert server.complete(max_tokens=1, stream=True).status_code == 503
        entries = log.entries(2)
    assert [(entry["message"], entry["error"]) for entry in entries] == [
        ("request", "engine_stopped")
    ] * 2
