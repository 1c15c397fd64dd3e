"""Rate limits of API keys: refusals have a true retry time, and no client can cheat."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.servers import live_server, post_bytes
from support.waiting import wait_for
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.auth.limits import KeyLimiter, RateLimitError
from twostroke.server.auth.stored_keys import digest
from twostroke.server.http.api_key import Key, KeyLimits
from twostroke.server.http.retry_after import retry_after
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import LiveServer
    from twostroke.server.auth.limits import Spending

KEY = "sk-limited"
BODY = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}


@contextmanager
def limited(folder: Path, **limits: int) -> Iterator[LiveServer]:
    """Start a server whose only API key has these limits."""
    keys = ApiKeys({})
    set_limits(keys, **limits)
    with live_server(folder, ServeOptions(drain_s=1, api_keys=keys)) as server:
        server.http.headers["x-api-key"] = KEY
        yield server
        server.backend.gate.set()
        server.wait_idle()


def set_limits(keys: ApiKeys, **limits: int) -> None:
    key_limits = KeyLimits(**limits)
    keys.replace_stored(
        [Key(id="0123abcd", tenant="anna", digest=digest(KEY.encode()), limits=key_limits)]
    )


def post(server: LiveServer, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return server.http.post(path, json={**BODY, **fields})


def test_requests_over_the_limit_are_429_with_a_true_wait(tmp_path: Path) -> None:
    with limited(tmp_path, requests_per_minute=20) as server:
        first = post(server)
        assert first.headers["x-ratelimit-limit-requests"] == "20"
        assert first.headers["x-ratelimit-remaining-requests"] == "19"
        assert 2.5 < float(first.headers["x-ratelimit-reset-requests"].rstrip("s")) <= 3
        assert "x-ratelimit-limit-tokens" not in first.headers
        while (refused := post(server, max_tokens=1)).status_code == 200:
            pass
        wait = refused.headers["retry-after"]
        assert (refused.status_code, wait in "123") == (429, True)
        assert refused.json()["error"] == {
            "message": "Rate limit reached: this key may use 20 requests a minute. "
            f"Please try again in {wait}s.",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert server.http.get("/v1/models").status_code == 200  # computes nothing
        time.sleep(int(wait))
        assert post(server).status_code == 200


def test_anthropics_paths_have_its_form_and_headers(tmp_path: Path) -> None:
    message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    with limited(tmp_path, requests_per_minute=1, tokens_per_minute=10_000) as server:
        first = server.http.post("/v1/messages", json=message)
        assert first.status_code == 200
        assert first.headers["anthropic-ratelimit-requests-limit"] == "1"
        reset = datetime.fromisoformat(first.headers["anthropic-ratelimit-requests-reset"])
        assert 55 < (reset - datetime.now(UTC)).total_seconds() <= 61
        refused = server.http.post("/v1/messages", json=message)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 55 < int(refused.headers["retry-after"]) <= 60
        assert refused.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert int(refused.headers["anthropic-ratelimit-tokens-remaining"]) > 9900
        assert "x-ratelimit-limit-requests" not in refused.headers


def test_tokens_are_taken_before_and_given_back_after(tmp_path: Path) -> None:
    with limited(tmp_path, tokens_per_minute=60) as server:
        answer = post(server, max_tokens=50)
        used = answer.json()["usage"]["total_tokens"]
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= 60 - used + 1
        begun = post(server, max_tokens=8, stream=True)
        assert begun.status_code == 200
        left = int(begun.headers["x-ratelimit-remaining-tokens"])
        assert left == 0  # 60 - 51 - 9, and what a moment brings
        refused = post(server)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "60 tokens a minute" in refused.json()["error"]["message"]
    with limited(tmp_path, tokens_per_minute=1000) as server:
        token = server.client.card.tokenizer.find("hello")
        bias = {"logit_bias": {str(token): 100}, "temperature": 0}
        answer = post(server, max_tokens=100, stop=["hello"], **bias)
        assert answer.json()["usage"]["completion_tokens"] < 5
        later = post(server, max_tokens=1)
        assert int(later.headers["x-ratelimit-remaining-tokens"]) > 980


def test_many_long_requests_at_once_cannot_pass_a_limit_of_tokens(tmp_path: Path) -> None:
    with limited(tmp_path, tokens_per_minute=60) as server:
        server.backend.gate.clear()
        headers = {"x-api-key": KEY}
        url = f"{server.url}/v1/completions"
        body = {**BODY, "max_tokens": 40, "stream": True}
        codes: list[int] = []

        def send_request() -> None:
            codes.append(httpx.post(url, json=body, headers=headers, timeout=20).status_code)

        threads = [threading.Thread(target=send_request) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(codes) == 10)
        server.backend.gate.set()
        for thread in threads:
            thread.join()
        assert sorted(codes) == [200] * 2 + [429] * 10


def test_parallel_requests_are_counted_until_they_end(tmp_path: Path) -> None:
    with limited(tmp_path, parallel=1) as server:
        server.backend.gate.clear()
        body = {**BODY, "stream": True}
        with server.connect() as connection:
            headers = f"x-api-key: {KEY}\r\n"
            connection.sendall(post_bytes("/v1/completions", body, headers=headers))
            wait_for(lambda: server.num_busy == 1)
            refused = post(server)
            assert refused.status_code == 429
            assert "1 request at the same time" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
        wait_for(lambda: server.num_busy == 0)  # the client has left
        server.backend.gate.set()
        wait_for(lambda: post(server).status_code == 200)


def test_other_limits_hold_at_once(tmp_path: Path) -> None:
    keys = ApiKeys({})
    set_limits(keys, requests_per_minute=1)
    with live_server(tmp_path, ServeOptions(drain_s=1, api_keys=keys)) as server:
        server.http.headers["x-api-key"] = KEY
        others = ("/v1/completions/", "/v1/chat/completions", "/chat/completions", "/tokenize")
        assert post(server).status_code == 200
        headers = {"x-api-key": KEY}
        results = [httpx.post(server.url + path, json=BODY, headers=headers) for path in others]
        assert {answer.status_code for answer in results} == {429}
        set_limits(keys, requests_per_minute=600)
        time.sleep(0.15)
        assert post(server).status_code == 200
        set_limits(keys)
        assert "x-ratelimit-limit-requests" not in post(server).headers


@pytest.mark.parametrize("seed", range(20))
def test_no_behaviour_passes_a_limit_by_more_than_one_request(seed: int) -> None:
    """In any time span, a key uses at most the limit's tokens, a full bucket and one request."""
    rng = random.Random(seed)
    now_s, max_tokens = 0.0, 400
    account = KeyLimiter(lambda: now_s)
    limit = rng.choice((60, 600, 6000))
    account.set(KeyLimits(tokens_per_minute=limit, requests_per_minute=120, parallel=40))
    running: list[tuple[Spending, int]] = []
    ends: list[tuple[float, int]] = []
    begins: list[float] = []
    for _ in range(3000):
        if rng.random() < 0.6:
            refusal = account.refusal()
            if refusal is None:
                spending, need = account.begin(), rng.randint(1, max_tokens)
                begins.append(now_s)
                spending.reserve(need)
                running.append((spending, need))
            elif "same time" not in refusal[0] and rng.random() < 0.2:
                assert refusal[1] > 0
                now_s += refusal[1]
                refused = account.refusal()
                assert refused is None or "same time" in refused[0]  # the time was true
        elif running and rng.random() < 0.5:
            spending, need = running.pop(rng.randrange(len(running)))
            used = rng.randint(0, need)
            spending.end(used)
            ends.append((now_s, used))
        now_s += rng.random() * 0.2
    total = sum(used for _, used in ends) + sum(need for _, need in running)
    assert total <= limit * (1 + now_s / 60) + max_tokens
    for first in range(0, len(begins), 37):
        for last in range(first, len(begins), 41):
            assert last - first <= 120 * (1 + (begins[last] - begins[first]) / 60)


def test_wait_for_a_parallel_request_is_as_long_as_they_run() -> None:
    now_s = 0.0
    account = KeyLimiter(lambda: now_s)
    account.set(KeyLimits(parallel=1))
    for _ in range(60):
        spending = account.begin()
        now_s += 30
        assert account.refusal() is not None
        spending.end(0)
    account.begin()
    assert account.refusal() == (
        "this key may run 1 request at the same time",
        pytest.approx(30, 0.1),
    )


def test_request_that_lost_a_race_for_tokens_is_refused_with_its_own_wait() -> None:
    account = KeyLimiter(lambda: 0.0)
    account.set(KeyLimits(tokens_per_minute=60))
    first, second = account.begin(), account.begin()
    first.reserve(90)
    with pytest.raises(RateLimitError, match="try again in 31s") as caught:
        second.reserve(1)
    assert retry_after(caught.value) == "31"
    second.end(0)
    first.end(60)
    refusal = account.refusal()
    assert refusal is not None
    assert refusal[1] == pytest.approx(1)


def test_refusals_count_under_the_requested_endpoint(tmp_path: Path) -> None:
    wrong = {"x-api-key": "wrong"}
    with limited(tmp_path, requests_per_minute=1) as server:
        assert [post(server).status_code for _ in range(2)] == [200, 429]
        server.http.post("/v1/completions", json=BODY, headers=wrong)
        server.http.get("/v1/files/file-abc", headers=wrong)
        text = server.http.get("/metrics").text
    name = "twostroke_http_responses_total"
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    for endpoint, status in (
        ("/v1/completions", 200),
        ("/v1/completions", 429),
        ("/v1/completions", 401),
        ("/v1/files/{file_id}", 401),
    ):
        assert f'{name}{{endpoint="{endpoint}",status="{status}"}} 1.0' in lines, lines
