"""A router with records: what keys may use, and whose requests they are."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from functools import partial
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.accounts import BODY, CHAT, SECRET, USAGE, accounting, post, used, whole_response
from support.keys import add, revoke
from support.replicas import Exchange, FakeReplica, Loop
from support.waiting import wait_for
from twostroke.fleet.routing.prompt import read_prompt
from twostroke.server.auth import stored_keys as kept
from twostroke.server.http.api_key import KeyLimits
from twostroke.server.storage import open_database

if TYPE_CHECKING:
    from pathlib import Path


def test_limits_hold_before_a_replica_is_asked(fakes: Loop, tmp_path: Path) -> None:
    replica = fakes.start(FakeReplica())
    replica.behaviour = whole_response({"usage": USAGE})
    limited, text = add(tmp_path, limits=KeyLimits(requests_per_minute=6))
    _, free = add(tmp_path, "free", "ben")
    with accounting(tmp_path, replica.url) as router:
        first = post(router, text)
        assert first.headers["x-ratelimit-remaining-requests"] == "5"
        tried = (post(router, text) for _ in range(20))
        refused = next(answer for answer in tried if answer.status_code != 200)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        num_seen = len(replica.seen)
        assert 6 <= num_seen <= 8  # a bucket, and what came meanwhile
        for path in ("/v1/other", "/tokenize", "/v1/chat/completions/", f"{CHAT}/batch"):
            assert post(router, text, path, x=1).status_code == 429, path
        assert len(replica.seen) == num_seen
        assert post(router, free).status_code == 200
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        with open_database(tmp_path, writes=True) as db:
            kept.change(db, kept.find(db, limited.id), limits=KeyLimits())
        wait_for(lambda: "x-ratelimit-limit-requests" not in post(router, text).headers)
        revoke(tmp_path, limited)
        wait_for(lambda: post(router, text).status_code == 401)


def test_tokens_are_taken_at_admission_and_settled_by_the_answer(
    fakes: Loop, tmp_path: Path
) -> None:
    replica = fakes.start(FakeReplica())
    hold = asyncio.Event()

    async def hold_answer(exchange: Exchange) -> None:
        await hold.wait()
        await exchange.answer({"usage": USAGE})

    replica.behaviour = hold_answer
    _, text = add(tmp_path, limits=KeyLimits(tokens_per_minute=100))
    with accounting(tmp_path, replica.url) as router:
        url, headers = router.url + CHAT, {"x-api-key": text}
        body = {**BODY, "max_tokens": 200}
        codes: list[int] = []

        async def send_request(client: httpx.AsyncClient) -> None:
            codes.append((await client.post(url, json=body, headers=headers)).status_code)

        async def flood() -> None:
            async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
                await asyncio.gather(*[send_request(client) for _ in range(10)])

        thread = threading.Thread(target=asyncio.run, args=[flood()])
        thread.start()
        wait_for(lambda: len(codes) == 9)
        fakes.loop.call_soon_threadsafe(hold.set)
        thread.join()
        assert sorted(codes) == [200] + [429] * 9
        later = post(router, text, max_tokens=1)
        assert later.status_code == 200  # what was not used came back
        assert 60 < int(later.headers["x-ratelimit-remaining-tokens"]) <= 90


@pytest.mark.parametrize(
    ("path", "body", "max_tokens"),
    [
        (CHAT, {}, 1000), (CHAT, {"max_tokens": 7}, 7), (CHAT, {"max_tokens": 9999}, 1000),
        (CHAT, {"max_tokens": "seven"}, 1000), (CHAT, {"n": 1e308}, 1 << 40),
        (CHAT, {"max_tokens": 7, "n": 3, "best_of": 5}, 35),
        ("/v1/completions", {"prompt": "x"}, 16), ("/v1/completions", {"n_predict": -1}, 1000),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 7}, 14),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 7}, 7),
        ("/v1/completions", {"prompt": ['a "b", \\', '\\"', ""], "max_tokens": 7}, 21),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 7}, 14),
        ("/completion", {"prompt": ["a", [1], [2], "b"], "n_predict": 7}, 28),
        ("/completion", {"prompt": [5, "a", 6], "n_predict": 7}, 7),
        ("/v1/responses", {"max_output_tokens": 7, "n": 3, "max_tokens": 1}, 7),
        ("/api/chat", {"options": {"num_predict": 7}}, 7), ("/api/chat", {"n_predict": 7}, 1000),
        ("/v1/rerank", {"max_tokens": 7}, 1000),
    ],
)  # fmt: skip
def test_an_estimate_is_the_most_that_answers_may_have(
    path: str, body: dict[str, Any], max_tokens: int
) -> None:
    prompt = read_prompt(json.dumps(body).encode(), b"")
    assert prompt.max_answer_tokens(path, 1000) == max_tokens


@pytest.mark.parametrize(
    ("path", "body", "max_tokens"),
    [
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 9}, 9), (CHAT, {"n_predict": 1}, 1000),
        (CHAT, {"n_predict": 1, "max_tokens": 7}, 7), (CHAT, {"max_tokens": 0}, 1000),
        ("/v1/completions", {"prompt": "x"}, 1000), ("/completion", {"n_predict": 0}, 1000),
        ("/v1/messages", {"max_tokens": 7}, 7), ("/v1/rerank", {}, 1000),
    ],
)  # fmt: skip
def test_an_estimate_for_servers_of_others_is_the_largest(
    path: str, body: dict[str, Any], max_tokens: int
) -> None:
    prompt = read_prompt(json.dumps(body).encode(), b"")
    assert prompt.max_answer_tokens(path, 1000, is_foreign=True) == max_tokens


def test_classes_hold_for_all_servers_and_are_told_to_ours(fakes: Loop, tmp_path: Path) -> None:
    replica = fakes.start(FakeReplica())
    _, text = add(tmp_path, classes=("default", "flex"), weight=2.5)
    with accounting(tmp_path, replica.url) as router:
        sent_fields = [b'"service_tier": "priority"', b'"priority": -1', b'"priority": "\\u002d1"']
        for field in sent_fields:
            headers = {"x-api-key": text, "content-type": "application/json"}
            body = b'{"prompt": "hello", %s}' % field
            refused = httpx.post(router.url + CHAT, content=body, headers=headers, trust_env=False)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                403,
                "class_not_allowed",
            )
        assert not replica.seen
        assert post(router, text, service_tier="flex").status_code == 200
        _, bulk = add(tmp_path, "bulk", classes=("flex",))
        wait_for(lambda: post(router, bulk).status_code == 200)
        assert post(router, bulk, service_tier="default").status_code == 403
    assert replica.seen[0].headers["x-twostroke-tenant"] == "anna 2.5 default,flex"


def test_batches_are_refused_and_what_is_there_can_be_read(fakes: Loop, tmp_path: Path) -> None:
    replica = fakes.start(FakeReplica())
    replica.load = {"keeps_files": True}
    _, text = add(tmp_path)
    with accounting(tmp_path, replica.url) as router:
        for path in ("/v1/files", "/v1/batches/", "/v1/messages/%62atches"):
            refused = post(router, text, path, x=1)
            assert refused.status_code == 400
            assert "twostroke batch --url" in refused.text
        assert not replica.seen
        headers = {"x-api-key": text}
        assert httpx.get(router.url + "/v1/batches", headers=headers, trust_env=False).is_success
    for load in ({"keeps_files": False}, {"keeps_files": None}):
        replica.load = load
        with accounting(tmp_path, replica.url) as router:
            for method, path in (("GET", "/v1/batches"), ("DELETE", "/v1/files/x")):
                response = httpx.request(
                    method, router.url + path, headers=headers, trust_env=False
                )
                assert (response.status_code, "This router keeps accounts" in response.text) == (
                    400,
                    True,
                )
    assert [exchange.path for exchange in replica.seen] == ["/v1/batches"]


def test_files_of_a_server_that_has_not_answered_yet_are_asked_for_later(
    fakes: Loop, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_socket:
        port = closed_socket.getsockname()[1]
    replica, (_, text) = FakeReplica(), add(tmp_path)
    replica.load = {"keeps_files": True}
    with accounting(tmp_path, f"http://127.0.0.1:{port}") as router:

        def send_request() -> httpx.Response:
            headers = {"x-api-key": text}
            return httpx.get(router.url + "/v1/batches", headers=headers, trust_env=False)

        refused = send_request()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
        fakes.start(replica, port)
        wait_for(lambda: send_request().is_success)


def test_an_answer_in_the_background_is_refused(fakes: Loop, tmp_path: Path) -> None:
    replica = fakes.start(FakeReplica())
    _, text = add(tmp_path)
    with accounting(tmp_path, replica.url) as router:
        for value, status in ((True, 400), ("true", 400), (False, 200), (None, 200)):
            answer = post(router, text, "/v1/responses", input="hello", background=value)
            assert answer.status_code == status, value
            if status == 400:
                assert answer.json()["error"]["param"] == "background"
    assert len(replica.seen) == 2


def test_what_is_for_operators_is_not_passed_on(fakes: Loop, tmp_path: Path) -> None:
    replica = fakes.start(FakeReplica())
    replica.load = {"keeps_files": True}
    _, text = add(tmp_path)
    refused_lines = [
        *("POST /sleep", "GET /slots", "PUT /api/generate", "DELETE /api/delete"),
        *("POST //sleep", "POST /v1/responses/x/../../../sleep", "POST /api/pull"),
        *("GET /v1/models/../../slots", "GET /v1/models/%252e%252e/slots"),
    ]
    passed_lines = ["GET /v1/models/a/b:c", "DELETE /v1/files/x", "HEAD /v1/batches", "GET /props"]
    headers = {"x-api-key": text, "content-type": "application/json"}
    with accounting(tmp_path, replica.url) as router:
        client = HTTPConnection(router.url.removeprefix("http://"))  # sends paths as they are
        for line in refused_lines:
            client.request(*line.split(), body="{}", headers=headers)
            answer = client.getresponse()
            assert (answer.status, b"does not pass on" in answer.read()) == (404, True), line
        client.close()
        assert not replica.seen
        for line in passed_lines:
            method, path = line.split()
            assert httpx.request(method, router.url + path, headers=headers).is_success
    assert len(replica.seen) == len(passed_lines)
    assert used(tmp_path) == []


def test_an_absurd_number_of_answers_holds_nothing_afterwards(fakes: Loop, tmp_path: Path) -> None:
    replica = fakes.start(FakeReplica())
    _, text = add(tmp_path, limits=KeyLimits(tokens_per_minute=1000, parallel=1))
    with accounting(tmp_path, replica.url) as router:
        assert post(router, text, n=1e308).status_code == 200
        wait_for(lambda: post(router, text).status_code == 200)


def test_a_client_that_says_who_it_is_is_not_believed(fakes: Loop, tmp_path: Path) -> None:
    replica = fakes.start(FakeReplica())
    key, text = add(tmp_path)
    lies = {"x-twostroke-tenant": "ben 1000", "x-twostroke-usage": "1"}
    with accounting(tmp_path, replica.url) as router:
        headers = {"x-api-key": text, **lies}
        httpx.post(router.url + CHAT, json=BODY, headers=headers, trust_env=False)
        refused = httpx.post(router.url + CHAT, json=BODY, headers=lies, trust_env=False)
        assert refused.status_code == 401
    [seen] = replica.seen
    assert seen.headers["x-twostroke-tenant"] == "anna 1"
    assert seen.headers["authorization"] == f"Bearer {SECRET}"
    assert "x-twostroke-usage" not in seen.headers
    assert seen.headers["accept-encoding"] == "identity"  # so that usage can be read
    assert text not in str(seen.headers)
    assert [row[0] for row in used(tmp_path)] == [key.id]


def test_a_router_without_replicas_charges_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_socket:
        url = f"http://127.0.0.1:{closed_socket.getsockname()[1]}"
    _, text = add(tmp_path, limits=KeyLimits(tokens_per_minute=100_000))
    with accounting(tmp_path, url) as router:
        long = [{"role": "user", "content": "x" * 40_000}]
        assert post(router, text, messages=long).status_code == 503
        after = post(router, text, max_tokens=1)
        assert int(after.headers["x-ratelimit-remaining-tokens"]) > 99_900
    assert used(tmp_path) == []


def test_requests_that_compute_nothing_take_no_tokens(fakes: Loop, tmp_path: Path) -> None:
    replica = fakes.start(FakeReplica())
    replica.load = {"version": "1"}
    codes: list[int] = []

    async def answer(exchange: Exchange) -> None:
        if (
            exchange.method == "POST" and exchange.path != CHAT
        ):  # while this one runs, another needs its tokens
            request = partial(post, router, text, max_tokens=1)
            codes.append((await asyncio.to_thread(request)).status_code)
        await exchange.answer({"id": "conv_1", "usage": USAGE})

    replica.behaviour = answer
    _, text = add(tmp_path, limits=KeyLimits(tokens_per_minute=1000))
    with accounting(tmp_path, replica.url) as router:
        for path in (
            "/v1/conversations",
            "/v1/conversations/conv_1/items",
            "/v1/responses/resp_1/cancel",
        ):
            assert post(router, text, path, items=["x" * 10_000]).status_code == 200, path
    assert codes == [200, 200, 200]
