"""Recorded traces: what a line has, what is never in it, and shared beginnings of prompts."""

from __future__ import annotations

import errno
import json
import logging
import os
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server
from support.waiting import wait_for
from twostroke.core.errors import UsageError
from twostroke.core.recorded_trace import BLOCK_TOKENS, SharedPrefixes, TracedRequest
from twostroke.lab.simulator import read_trace
from twostroke.server.observability.trace_recorder import TraceRecorder
from twostroke.server.options import ServeOptions
from twostroke.server.storage import trace_file
from twostroke.server.storage.trace_file import TraceFile, check_trace_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PROMPT = list(range(5, 5 + 3 * BLOCK_TOKENS))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _wait_for_lines(path: Path, count: int) -> list[dict[str, Any]]:
    wait_for(lambda: len(_lines(path)) >= count)
    return _lines(path)


def test_an_answer_is_a_line_of_times_and_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with live_server(tmp_path, ServeOptions(drain_s=1, record_trace=trace)) as server:
        response = server.chat(max_tokens=4, ignore_eos=True, service_tier="priority")
        header, line = _wait_for_lines(trace, 2)
    usage = response.json()["usage"]
    assert header.pop("continues") is False
    settings = header.pop("settings")
    assert settings == {"token_budget": 512, "max_running": 256}
    assert header == {"recorded_trace": 1, "block_tokens": BLOCK_TOKENS}
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["output_tokens"] == 4
    assert line["class"] == "priority"
    assert "outcome" not in line  # completed
    assert 0 < line["ttft_s"] <= line["e2e_s"]


def test_no_text_is_in_a_trace_and_lines_are_short(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with live_server(tmp_path, ServeOptions(drain_s=1, record_trace=trace)) as server:
        for _ in range(20):
            server.chat(messages=[{"role": "user", "content": "secret " * 40}], max_tokens=2)
        _wait_for_lines(trace, 21)
    text = trace.read_text()
    assert "secret" not in text
    assert len(text) < 21 * 200


def test_several_answers_share_their_prompt(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with live_server(tmp_path, ServeOptions(drain_s=1, record_trace=trace)) as server:
        server.http.post("/v1/completions", json={"prompt": _PROMPT, "max_tokens": 2, "n": 2})
        _, first, second = _wait_for_lines(trace, 3)
    assert "shared" not in first
    assert second["shared"] == [1, len(_PROMPT)]


def test_a_trace_is_replayed_with_its_shared_beginnings(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    other = [*_PROMPT[: 2 * BLOCK_TOKENS], *range(200, 230)]
    with live_server(tmp_path, ServeOptions(drain_s=1, record_trace=trace)) as server:
        for number, prompt in enumerate((_PROMPT, other, _PROMPT)):
            server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3})
            _wait_for_lines(trace, number + 2)
    arrivals = read_trace(str(trace)).arrivals
    first, second, third = (arrival.tokens(n, 10**9) for n, arrival in enumerate(arrivals))
    assert [arrival.num_prompt for arrival in arrivals] == [len(_PROMPT), len(other), len(_PROMPT)]
    assert first[: 2 * BLOCK_TOKENS] == second[: 2 * BLOCK_TOKENS]
    assert first[2 * BLOCK_TOKENS] != second[2 * BLOCK_TOKENS]
    assert first == third


def test_a_server_that_starts_again_continues_its_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    options = ServeOptions(drain_s=1, record_trace=trace)
    for run in range(2):
        with live_server(tmp_path, options) as server:
            server.http.post("/v1/completions", json={"prompt": _PROMPT, "max_tokens": 3})
            lines = _wait_for_lines(trace, 2 * run + 2)
    assert ["recorded_trace" in line for line in lines] == [True, False, True, False]
    assert "shared" not in lines[3]
    assert len(read_trace(str(trace)).arrivals) == 2


def test_a_disconnected_client_is_recorded_as_such(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with live_server(tmp_path, ServeOptions(drain_s=1, record_trace=trace)) as server:
        body = {"prompt": _PROMPT, "max_tokens": 50, "ignore_eos": True, "stream": True}
        server.backend.gate.clear()
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
        _, line = _wait_for_lines(trace, 2)
        server.backend.gate.set()
    assert line["outcome"] == "cancelled"
    assert "ttft_s" not in line
    assert read_trace(str(trace)).arrivals[0].num_output >= 1


def test_a_full_disk_ends_the_recording_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace = tmp_path / "trace.jsonl"
    real_write = os.write
    with live_server(tmp_path, ServeOptions(drain_s=1, record_trace=trace)) as server:
        size = trace.stat().st_size

        def write_a_part(descriptor: int, text: bytes) -> int:
            return real_write(descriptor, text[:10] if b"arrival_s" in text else text)

        monkeypatch.setattr(trace_file.os, "write", write_a_part)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert server.chat(max_tokens=2).status_code == 200
            wait_for(lambda: any("any further" in record.message for record in caplog.records))
    assert sum("any further" in record.message for record in caplog.records) == 1
    assert trace.stat().st_size == size


def test_a_pipe_that_nobody_reads_ends_the_recording_and_does_not_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tmp_path / "trace"
    os.mkfifo(pipe)
    trace = TraceFile(pipe)
    requests = [TracedRequest(arrival_s=0.0, prompt_tokens=1, output_tokens=1)] * 100

    def fill() -> None:
        for _ in range(1000):
            trace.write(requests)

    writer = Thread(target=fill, daemon=True)
    writer.start()
    writer.join(20)
    assert not writer.is_alive()
    assert not trace.is_open
    assert "not recorded any further" in caplog.text
    assert os.strerror(errno.EINVAL) not in caplog.text


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written") as caught:
        check_trace_file(tmp_path / "missing" / "trace.jsonl")
    assert caught.value.field == "record_trace"


def test_a_file_that_is_no_trace_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("Buy milk.\n")
    with pytest.raises(UsageError, match=r"must be a new file or a recorded trace, .*notes\.txt"):
        check_trace_file(notes)
    assert notes.read_text() == "Buy milk.\n"


def test_two_servers_cannot_record_to_one_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(trace)
    with pytest.raises(UsageError, match=r"another server records to trace\.jsonl"):
        check_trace_file(trace)
    recorder.close()
    check_trace_file(trace)


def _shared(
    prefixes: SharedPrefixes, prompt: Sequence[int], tenant: str = ""
) -> tuple[int, int] | None:
    return prefixes.add(prefixes.hashes(tenant, prompt))


def test_the_longest_shared_beginning_is_found() -> None:
    prefixes = SharedPrefixes()
    assert _shared(prefixes, _PROMPT) is None
    assert _shared(prefixes, [*_PROMPT[: BLOCK_TOKENS + 3], 1, *_PROMPT]) == (1, BLOCK_TOKENS)
    assert _shared(prefixes, [*_PROMPT, 7]) == (2, 3 * BLOCK_TOKENS)
    assert _shared(prefixes, _PROMPT[: BLOCK_TOKENS - 1]) is None
    assert _shared(prefixes, [0, *_PROMPT]) is None


def test_tenants_share_no_beginnings() -> None:
    prefixes = SharedPrefixes()
    _shared(prefixes, _PROMPT, "one")
    assert _shared(prefixes, _PROMPT, "two") is None
    assert _shared(prefixes, _PROMPT, "one") == (2, 3 * BLOCK_TOKENS)


def test_only_recent_blocks_are_remembered() -> None:
    prefixes = SharedPrefixes(max_recent_blocks=4)
    _shared(prefixes, _PROMPT)
    for start in range(1000, 1000 + 40 * BLOCK_TOKENS, BLOCK_TOKENS):
        _shared(prefixes, list(range(start, start + BLOCK_TOKENS)))
    assert _shared(prefixes, _PROMPT) is None
