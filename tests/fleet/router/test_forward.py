"""Requests are passed on as they are, and lost ones are sent again before their first byte only."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import logging
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.replicas import Exchange, FakeReplica, Loop, hello, live_router
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

_CHAT = "/v1/chat/completions"
_BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


async def cut_in_head(exchange: Exchange) -> None:
    await exchange.say(b"HTTP/1.1 200 OK\r\ncontent-ty")
    exchange.cut()


async def cut_before_first_byte(exchange: Exchange) -> None:
    await exchange.begin_events()
    await asyncio.sleep(0.05)
    exchange.cut()


async def cut_at_once(exchange: Exchange) -> None:
    exchange.cut()


async def nonsense(exchange: Exchange) -> None:
    await exchange.say(b"hello, this is no HTTP\r\n\r\n")


async def stopping(exchange: Exchange) -> None:
    await exchange.answer({"error": {"message": "stopping"}}, 503)


async def cut_in_body(exchange: Exchange) -> None:
    await exchange.begin_events()
    await exchange.chunk(b'data: {"n":1}\n\n')
    await exchange.chunk(b'data: {"n":')
    await asyncio.sleep(0.05)
    exchange.cut()


async def too_short(exchange: Exchange) -> None:
    await exchange.say(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    )
    await asyncio.sleep(0.05)
    exchange.writer.close()


def post(url: str, body: object = _BODY, **options: Any) -> httpx.Response:
    return httpx.post(url + _CHAT, json=body, timeout=20, trust_env=False, **options)


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions?a=b", "/v1/chat/completions?a=b"),
        ("//v1/unknown%20path", "/v1/unknown%20path"),
        ("/v1/unknown%2Fpath", "/v1/unknown%2Fpath"),
    ],
)
def test_replicas_get_the_path_that_was_checked(fakes: Loop, sent: str, received: str) -> None:
    replica = fakes.start(FakeReplica())
    with live_router(replica.url) as router:
        httpx.post(router.url + sent, json=_BODY, timeout=20, trust_env=False)
    assert [exchange.path for exchange in replica.seen] == [received]


@pytest.mark.parametrize(
    "behaviour", [cut_in_head, cut_before_first_byte, cut_at_once, nonsense, stopping]
)
def test_a_request_that_is_lost_before_its_first_byte_is_sent_to_another(
    behaviour: Callable[[Exchange], Any], fakes: Loop
) -> None:
    bad, good = fakes.start(FakeReplica()), fakes.start(FakeReplica())
    bad.behaviour = behaviour
    with live_router(bad.url, good.url, policy="round-robin") as router:
        answers = [post(router.url) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
    assert bad.seen


def test_what_is_lost_after_its_first_byte_ends_with_an_error_event(
    fakes: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "twostroke")
    bad, good = fakes.start(FakeReplica()), fakes.start(FakeReplica())
    bad.behaviour = good.behaviour = cut_in_body
    with live_router(bad.url, good.url, access_log=True) as router:
        answer = post(router.url)
        wait_for(lambda: "'replica_failed'" in str([vars(record) for record in caplog.records]))
    first, error, last, end = answer.text.split("\n\n")
    assert (first, last) == ('data: {"n":1}', "data: [DONE]")  # and no part of the second event
    assert end == ""
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_failed"
    assert len(bad.seen) + len(good.seen) == 1


@pytest.mark.parametrize(
    ("path", "begin", "end"),
    [
        ("/v1/completions", 'data: {"error"', "data: [DONE]"),
        ("/v1/responses", 'data: {"error"', "}"),
        ("/v1/messages", "event: error\ndata: {", "}"),
        ("/completion", 'data: {"error"', "}"),
    ],
)
def test_a_lost_stream_ends_as_its_protocol_ends(
    path: str, begin: str, end: str, fakes: Loop
) -> None:
    bad = fakes.start(FakeReplica())
    bad.behaviour = cut_in_body
    with live_router(bad.url) as router:
        answer = httpx.post(router.url + path, json=_BODY, timeout=20, trust_env=False)
    events = answer.text.removesuffix("\n\n").split("\n\n")[1:]
    assert events[0].startswith(begin)
    assert events[-1].endswith(end)


def test_a_body_that_is_too_short_is_cut_off(fakes: Loop) -> None:
    bad = fakes.start(FakeReplica())
    bad.behaviour = too_short
    with live_router(bad.url) as router, pytest.raises(httpx.RemoteProtocolError):
        post(router.url)


def test_a_request_that_replicas_lose_again_and_again_is_given_up(fakes: Loop) -> None:
    replicas = [fakes.start(FakeReplica()) for _ in range(5)]
    for replica in replicas:
        replica.behaviour = cut_at_once
    with live_router(*(replica.url for replica in replicas)) as router:
        answer = post(router.url)
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "replica_failed"
    assert sum(len(replica.seen) for replica in replicas) <= 4  # it might be what kills them


def test_headers_are_those_of_the_request_without_those_of_the_connection(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    with live_router(replica.url) as router:
        headers = {
            "authorization": "Bearer sk-1",
            "x-request-id": "mine",
            "connection": "keep-alive, x-secret",
            "x-secret": "hop",
            "te": "trailers",
            "x-kept": "yes",
        }
        answer = post(router.url + "", headers=headers, params={"a": "b c"})
    seen = replica.seen[0].headers
    assert replica.seen[0].path == f"{_CHAT}?a=b+c"
    assert (seen["authorization"], seen["x-request-id"], seen["x-kept"]) == (
        "Bearer sk-1",
        "mine",
        "yes",
    )
    assert not {"x-secret", "te", "connection"} & set(seen)
    assert seen["host"] == replica.url.removeprefix("http://")
    assert seen["x-forwarded-for"] == "127.0.0.1"
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert json.loads(replica.seen[0].body) == _BODY


def test_a_client_that_leaves_ends_its_request(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    left: list[float] = []

    async def endless(exchange: Exchange) -> None:
        await exchange.begin_events()
        try:
            while True:
                await exchange.chunk(b"data: {}\n\n")
                await asyncio.sleep(0.01)
        except ConnectionError:
            left.append(time.monotonic())
            raise

    replica.behaviour = endless
    with live_router(replica.url) as router:
        with httpx.stream("POST", router.url + _CHAT, json=_BODY, trust_env=False) as answer:
            next(answer.iter_bytes())
        wait_for(lambda: bool(left))
        wait_for(lambda: router.router.num_running == 0)


def test_connections_are_kept(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    with live_router(replica.url) as router:
        before = replica.num_connections
        for _ in range(5):
            assert post(router.url).status_code == 200
        assert replica.num_connections <= before + 1


def test_a_replicas_own_sentence_says_why_it_is_down(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    replica.health = (403, {"error": {"message": "Not to the name 'a'."}})
    with live_router(replica.url) as router:
        [replica_state] = router.router.fleet.replicas.values()
        assert replica_state.reason == "It says 403: Not to the name 'a'."


def test_no_replica_is_said_in_a_sentence(fakes: Loop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_socket:
        url = f"http://127.0.0.1:{closed_socket.getsockname()[1]}"
    with live_router(url, wait_s=0.1) as router:
        answer = post(router.url)
        health = httpx.get(router.url + "/health", trust_env=False)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "No replica can answer now: of 1, 1 down."
    assert (health.status_code, health.json()["status"]) == (503, "no replica")


def test_a_router_that_stops_lets_nobody_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_socket:
        url = f"http://127.0.0.1:{closed_socket.getsockname()[1]}"
    with live_router(url, wait_s=60.0) as router, ThreadPoolExecutor(1) as pool:
        response = pool.submit(post, router.url)
        wait_for(lambda: router.router.num_running == 1)
        router.abort()
        assert response.result(10).json()["error"]["code"] == "no_replica"


def test_a_request_waits_for_a_replica_that_comes_back(fakes: Loop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_socket:
        port = closed_socket.getsockname()[1]
    with live_router(f"http://127.0.0.1:{port}", wait_s=10.0) as router:
        threading.Timer(0.5, fakes.start, (FakeReplica(), port)).start()
        assert post(router.url).status_code == 200


def test_a_stored_answer_is_asked_of_the_replica_that_stores_it(fakes: Loop) -> None:
    replicas = [fakes.start(FakeReplica()) for _ in range(3)]
    for number, replica in enumerate(replicas):

        async def answer(exchange: Exchange, number: int = number) -> None:
            if exchange.method == "GET" and not exchange.path.endswith(f"resp_{number}"):
                await exchange.answer({"error": {}}, 404)
            else:
                await exchange.answer({"id": f"resp_{number}", "by": number})

        replica.behaviour = answer
    with live_router(*(replica.url for replica in replicas), policy="round-robin") as router:
        ask = lambda **fields: httpx.post(  # noqa: E731
            router.url + "/v1/responses",
            json={"model": "tiny", "input": "x", **fields},
            trust_env=False,
        ).json()
        first = ask()
        for _ in range(4):
            assert ask(previous_response_id=first["id"])["by"] == first["by"]
        assert ask(previous_response_id="resp_2")["by"] == 2  # which this router never saw
        body = httpx.get(router.url + "/v1/responses/resp_1", trust_env=False).json()
        assert body["by"] == 1


def test_a_stored_conversation_is_asked_of_the_replica_that_stores_it(fakes: Loop) -> None:
    replicas = [fakes.start(FakeReplica()) for _ in range(3)]
    for number, replica in enumerate(replicas):

        async def answer(exchange: Exchange, number: int = number) -> None:
            is_lookup = exchange.method == "GET" and "/conv_" in exchange.path
            if is_lookup and f"/conv_{number}" not in exchange.path:
                await exchange.answer({"error": {}}, 404)
            else:
                await exchange.answer({"id": f"conv_{number}", "by": number})

        replica.behaviour = answer
    urls = [replica.url for replica in replicas]
    with (
        live_router(*urls, policy="round-robin") as router,
        httpx.Client(base_url=router.url, trust_env=False) as client,
    ):
        created = client.post("/v1/conversations", json={}).json()
        body = {"model": "tiny", "input": "x"}
        for _ in range(3):
            for conversation in (created["id"], {"id": created["id"]}):
                answered = client.post("/v1/responses", json=body | {"conversation": conversation})
                assert answered.json()["by"] == created["by"]
        for number in range(3):
            path = f"/v1/conversations/conv_{number}"
            for response in (
                client.get(path),
                client.post(path, json={"metadata": {}}),
                client.get(f"{path}/items"),
                client.post(f"{path}/items", json={"items": []}),
                client.get(f"{path}/items/msg_1"),
                client.delete(f"{path}/items/msg_1"),
                client.post("/v1/responses", json=body | {"conversation": f"conv_{number}"}),
            ):
                assert response.json()["by"] == number


def test_a_stored_answer_of_any_length_is_found(fakes: Loop) -> None:
    replicas = [fakes.start(FakeReplica()) for _ in range(2)]
    replicas.sort(key=lambda replica: replica.url)

    async def has_it(exchange: Exchange) -> None:
        await exchange.answer({"id": "resp_1", "text": "x" * 2_000_000})

    async def has_not(exchange: Exchange) -> None:
        await exchange.answer({"error": {}}, 404)

    replicas[0].behaviour, replicas[1].behaviour = has_not, has_it
    with live_router(*(replica.url for replica in replicas)) as router:
        wait_for(lambda: len(router.router.fleet.ready) == 2)
        response = httpx.get(router.url + "/v1/responses/resp_1", trust_env=False)
        assert (response.status_code, len(response.json()["text"])) == (200, 2_000_000)


def test_an_id_that_breaks_lines_is_asked_of_nobody(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    with live_router(replica.url) as router:
        for id_ in ("x HTTP/1.1\r\nx-twostroke-tenant: ben\r\nx:", "../../sleep", "\n"):
            assert post(router.url, _BODY | {"previous_response_id": id_}).status_code == 200
    assert [exchange.method for exchange in replica.seen] == ["POST"] * 3


def test_a_body_that_is_nested_too_deeply_is_for_the_replica_to_refuse(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    deep = "[" * 100_000 + "]" * 100_000
    with live_router(replica.url) as router:
        for body in (deep, f'{{"prompt": {deep}}}', f'{{"options": {{"x": {deep}}}}}'):
            headers = {"content-type": "application/json"}
            url = router.url + "/v1/completions"
            answer = httpx.post(url, content=body, headers=headers, trust_env=False)
            assert answer.status_code == 200
    assert len(replica.seen) == 3


def test_requests_of_a_replica_that_is_cut_off_are_given_up(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())

    async def silent(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.chunk(b'data: {"n":1}\n\n')
        replica.health = None
        await asyncio.sleep(30)

    replica.behaviour = silent
    with live_router(replica.url, eject_s=60) as router:
        [replica_state] = router.router.fleet.replicas.values()
        probe = replica_state.probe
        assert probe is not None
        lost = TimeoutError(errno.ETIMEDOUT, "as the kernel says it")
        lose = functools.partial(probe._loop.call_soon_threadsafe, probe.connection_lost, lost)
        threading.Timer(1.5, lose).start()
        began_s = time.monotonic()
        answer = post(router.url)
        assert time.monotonic() - began_s < 25  # the replica is silent for 30 s
    assert json.loads(answer.text.split("data: ")[-2])["error"]["code"] == "replica_failed"
    assert "cut off" in replica_state.reason


def test_browsers_get_the_page_of_the_fleet(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    with live_router(replica.url) as router:
        page = httpx.get(router.url, headers={"accept": "text/html"}, trust_env=False)
        names = re.findall(r'(?:href|src)="page/([^"]+)"', page.text)
        files = [httpx.get(f"{router.url}/page/{name}", trust_env=False) for name in names]
        about = httpx.get(router.url, trust_env=False)
    assert [file.status_code for file in files] == [200] * len(names)
    assert "page/fleet.js" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert about.json()["replicas"] == 1
    assert not replica.seen


def test_a_replica_that_drains_gets_no_more(fakes: Loop) -> None:
    first, other = fakes.start(FakeReplica()), fakes.start(FakeReplica())
    with live_router(first.url, other.url, policy="round-robin") as router:
        first.health = (503, {"status": "draining"})
        wait_for(lambda: len(router.router.fleet.ready) == 1)
        for _ in range(3):
            assert post(router.url).status_code == 200
        assert not first.seen
        first.health = (200, {"status": "ok"})
        wait_for(lambda: len(router.router.fleet.ready) == 2)


def test_a_body_over_the_limit_is_refused(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    with live_router(replica.url) as router:
        answer = post(router.url, _BODY | {"x": "y" * (9 << 20)})
    assert answer.status_code == 413
    assert not replica.seen


def test_files_are_passed_on_piece_by_piece_to_one_replica(fakes: Loop) -> None:
    replicas = [fakes.start(FakeReplica()) for _ in range(3)]

    async def keep(exchange: Exchange) -> None:
        await exchange.answer({"id": "file-1", "bytes": len(exchange.body)})

    for replica in replicas:
        replica.behaviour = keep
    data = b"z" * (9 << 20)
    with live_router(*(replica.url for replica in replicas)) as router:
        for _ in range(2):
            answer = httpx.post(
                router.url + "/v1/files", files={"file": ("x.jsonl", data)}, trust_env=False
            )
            assert answer.json()["bytes"] > len(data)
        httpx.get(router.url + "/v1/files/file-1", trust_env=False)
    assert sorted(len(replica.seen) for replica in replicas) == [0, 0, 3]


def test_files_are_at_a_server_that_keeps_them(fakes: Loop) -> None:
    replicas = [fakes.start(FakeReplica()) for _ in range(3)]
    for replica in replicas:
        replica.load = {"keeps_files": replica is replicas[2]}
    with live_router(*(replica.url for replica in replicas)) as router:
        for number in range(8):  # tenants
            headers = {"x-api-key": f"sk-{number}"}
            assert httpx.get(router.url + "/v1/files", headers=headers, trust_env=False).is_success
    assert [len(replica.seen) for replica in replicas] == [0, 0, 8]
    with live_router(replicas[0].url) as router:
        refused = httpx.get(router.url + "/v1/files", trust_env=False)
    assert refused.status_code == 404
    assert "No server of this router keeps files" in refused.text


def test_the_default_answer_is_a_stream(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    assert replica.behaviour is hello
    with live_router(replica.url) as router:
        answer = post(router.url)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers.get("transfer-encoding") == "chunked"
