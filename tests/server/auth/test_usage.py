"""Usage in the database agrees with the usage in responses, and outlives the server."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from support.keys import add, keyed_server
from support.servers import LiveServer, post_bytes
from support.waiting import wait_for
from twostroke.server.auth import usage
from twostroke.server.auth.key_refresher import KeyRefresher
from twostroke.server.auth.usage import Amount, Owner, UsageBook, amounts
from twostroke.server.storage import Records, RecordsError, open_database

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELLO = [{"role": "user", "content": "hello"}]
LONG = "hello " * 40


@contextmanager
def counting(tmp_path: Path, **options: Any) -> Iterator[LiveServer]:
    """Start a server that stores the usage of one key in tmp_path / "records"."""
    folder = tmp_path / "records"
    key, text = add(folder)
    with keyed_server(folder, tmp_path, **options) as server:
        server.http.headers["x-api-key"] = text
        yield server
    assert [amount.owner.key for amount in used(tmp_path)] in ([], [key.id])


def used(tmp_path: Path) -> list[Amount]:
    with open_database(tmp_path / "records") as db:
        return amounts(db, "0000", "9999")


def has_requests(tmp_path: Path, number: int) -> bool:
    return [amount.requests for amount in used(tmp_path)] == [number]


# Each returns input, cached and output tokens as a client reads them.
def openai(usage: Any) -> tuple[int, int, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached, usage["completion_tokens"]


def anthropic(usage: Any) -> tuple[int, int, int]:
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached, usage["output_tokens"]


def responses(usage: Any) -> tuple[int, int, int]:
    cached = usage["input_tokens_details"]["cached_tokens"]
    return usage["input_tokens"], cached, usage["output_tokens"]


CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5}, openai),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5, "n": 3}, openai),
    ("/v1/completions", {"prompt": LONG, "max_tokens": 7, "ignore_eos": True}, openai),
    ("/v1/completions", {"prompt": [LONG, "hello"], "max_tokens": 3, "n": 2}, openai),
    ("/v1/completions", {"prompt": "a", "max_tokens": 30, "stop": ["e", "o"]}, openai),
    ("/v1/completions", {"prompt": LONG, "echo": True, "max_tokens": 0}, openai),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 5}, anthropic),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 16}, responses),
]


def test_usage_is_that_of_the_answers(tmp_path: Path) -> None:
    expected = [0, 0, 0]
    with counting(tmp_path) as server:
        for path, body, read in CASES * 2:
            answer = server.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            counts = read(answer.json()["usage"])
            expected = [old + new for old, new in zip(expected, counts, strict=True)]
        assert server.http.post("/v1/completions", json={"prompt": "a", "n": -1}).status_code == 400
        assert server.http.post("/tokenize", json={"prompt": "a"}).status_code == 200
    [amount] = used(tmp_path)
    assert list(amount[1:]) == [2 * len(CASES), *expected]
    assert expected[1] > 0
    assert (amount.owner.tenant, amount.owner.model, amount.owner.is_batch) == (
        "anna",
        "tiny",
        False,
    )


def test_embeddings_and_streams_count(tmp_path: Path) -> None:
    with counting(tmp_path) as server:
        embedding_usage = server.http.post(
            "/v1/embeddings", json={"input": ["hello", LONG]}
        ).json()["usage"]
        body = {"prompt": "hello", "max_tokens": 6, "ignore_eos": True, "stream": True}
        assert server.http.post("/v1/completions", json=body).status_code == 200
    [amount] = used(tmp_path)
    assert amount.output == 6
    assert amount.requests == 2
    assert amount.input > embedding_usage["prompt_tokens"]


def test_a_request_whose_client_left_counts_and_a_failed_request_does_not(tmp_path: Path) -> None:
    with counting(tmp_path) as server:
        server.backend.gate.clear()
        headers = f"x-api-key: {server.http.headers['x-api-key']}\r\n"
        body = {"prompt": "hello", "max_tokens": 6, "stream": True}
        with server.connect() as connection:
            connection.sendall(post_bytes("/v1/completions", body, headers=headers))
            wait_for(lambda: server.num_busy == 1)
        wait_for(lambda: server.num_busy == 0)
        server.backend.gate.set()
        server.backend.poison = server.client.card.tokenizer.find("hello")
        failed = server.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
        assert failed.status_code == 500
    [amount] = used(tmp_path)
    assert (amount.requests, amount.output) == (1, 0)
    assert amount.input > 0


def test_request_that_its_timeout_stopped_counts_what_was_generated(tmp_path: Path) -> None:
    with counting(tmp_path) as server:
        server.backend.pause_s = 0.25
        body = {"prompt": "hello", "max_tokens": 60, "stream": True, "ignore_eos": True}
        headers = {"x-request-timeout": "3"}
        with server.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            lines = response.iter_lines()
            assert "text" in next(lines)
            assert "deadline_exceeded" in "".join(lines)
    [amount] = used(tmp_path)
    assert amount.requests == 1
    assert 0 < amount.output < 60


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG, "max_tokens": 6}),
        ("/v1/embeddings", {"input": LONG}),
    ],
)
def test_prompt_counts_that_its_timeout_stopped_once_it_had_begun(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    narrow = {"token_budget": 8, "max_running": 8}
    with counting(tmp_path, engine=narrow) as server, ThreadPoolExecutor(2) as threads:
        server.backend.gate.clear()  # of a step, after which timeouts are looked at

        def send(timeout_s: str) -> str:
            headers = {"x-request-timeout": timeout_s}
            return server.http.post(path, json=body, headers=headers).text

        begun = threads.submit(send, "1.5")
        wait_for(lambda: server.num_busy == 1)
        unrun = threads.submit(send, "0.5")
        wait_for(lambda: server.num_busy == 2)
        time.sleep(1.7)
        server.backend.gate.set()
        assert "was stopped" in begun.result()
        assert "was not run" in unrun.result()
    [amount] = used(tmp_path)
    assert (amount.requests, amount.output) == (1, 0)
    assert amount.input > 20


def test_usage_is_written_while_the_server_runs_and_added_up(tmp_path: Path) -> None:
    with counting(tmp_path) as server:
        body = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True}
        for number in (1, 2):
            server.http.post("/v1/completions", json=body)
            wait_for(partial(has_requests, tmp_path, number))


def test_usage_waits_for_records_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = Records(tmp_path)
    usage_book = UsageBook("tiny")
    owner = Owner("2026-11-26", "0123abcd", "anna", "tiny", is_batch=False)
    usage_book.put_back({owner: [1, 2, 3, 4]})

    class Failing:
        read = records.read

        async def write(self, _work: Any) -> None:
            raise RecordsError("The disk is full.")

    async def work() -> None:
        failing = KeyRefresher(Failing(), None, usage_book)  # type: ignore[arg-type]
        await failing.start()
        for writes in (True, False, True):  # a read that succeeds between is not the end of it
            await failing._refresh(failing._records, writes=writes)  # type: ignore[arg-type]
        await failing.stop()
        assert caplog.text.count("Usage waits: The disk is full.") == 1
        assert caplog.text.count("Usage that was not written is lost.") == 1
        usage_book.put_back({owner: [1, 1, 1, 1]})
        good = KeyRefresher(records, None, usage_book)
        await good.start()
        await good.stop()

    asyncio.run(work())
    records.close()
    with open_database(tmp_path, writes=True) as db:
        assert amounts(db, "2026-11-26", "2026-11-26") == [Amount(owner, 2, 3, 4, 5)]
        usage.add(db, {owner: [1, 0, 0, 0]})
        assert amounts(db, "2026-11-26", "9999") == [Amount(owner, 3, 3, 4, 5)]
        assert amounts(db, "2026-11-27", "9999") == []


def test_usage_that_no_database_takes_does_not_end_upkeep(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = Records(tmp_path)
    usage_book = UsageBook("tiny")
    owner = Owner("2026-11-26", "0123abcd", "anna", "tiny", is_batch=False)

    async def work() -> None:
        refresher = KeyRefresher(records, None, usage_book)
        await refresher.start()
        for count in (1 << 70, 1):
            usage_book.put_back({owner: [count, 0, 0, 0]})
            await refresher._refresh(records, writes=True)
        await refresher.stop()

    asyncio.run(work())
    records.close()
    assert "OverflowError" in caplog.text
    with open_database(tmp_path, writes=True) as db:
        assert amounts(db, "2026-11-26", "2026-11-26") == [Amount(owner, 1, 0, 0, 0)]


def test_days_are_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    usage_book = UsageBook("tiny")
    monkeypatch.setattr("time.time", lambda: 86_400 * 20_000 - 1)
    assert usage_book._today() == "2024-10-03"
    monkeypatch.setattr("time.time", lambda: 86_400 * 20_000)
    assert usage_book._today() == "2024-10-04"
