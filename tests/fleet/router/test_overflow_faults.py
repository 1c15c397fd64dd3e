"""Upstreams that fail: nothing is lost or doubled, and no client or log sees the key."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.overflowing import NOBODY, begin, overflow_router, post, side
from support.replicas import Exchange, FakeReplica, Loop, live_router
from support.vendors import (
    CHAT,
    HELLO,
    KEY,
    MESSAGES,
    FakeVendor,
    chat_events,
    message_events,
    overflow_file,
    send_events,
    start_vendor,
    with_status,
)
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST = {"id": "chatcmpl-v", "choices": [{"index": 0, "delta": {"content": "bou"}}]}
ERROR = {"error": {"message": f"about {KEY}", "type": "server_error"}}


def test_a_refused_key_takes_the_upstream_out_of_use_and_is_said_once(
    vendor: FakeVendor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "twostroke.router")
    vendor.key = "another"
    with overflow_router(tmp_path, vendor) as router:
        answers = [post(router) for _ in range(3)]
        facts = side(router)
        assert [answer.status_code for answer in answers] == [503] * 3
        assert len(vendor.seen) == 1
        assert facts["state"] == "paused"
        assert "401" in facts["reason"]
        shown = "".join(answer.text + str(answer.headers) for answer in answers) + json.dumps(facts)
        assert KEY not in shown + caplog.text
        said = [record for record in caplog.records if "does not accept its key" in record.message]
        assert len(said) == 1
        vendor.key = "new-key"
        time.sleep(1.1)  # the file is looked at once a second
        (tmp_path / "vendor.key").write_text("new-key")
        assert post(router).status_code == 200
        assert side(router)["state"] == "ready"


def test_a_refusal_of_the_earlier_key_does_not_count_against_the_new_one(
    vendor: FakeVendor, fakes: Loop, tmp_path: Path
) -> None:
    release = asyncio.Event()

    async def refuse_late(exchange: Exchange) -> None:
        if len(vendor.seen) == 1:
            await release.wait()
        await vendor.answer(exchange)

    vendor.behaviour = refuse_late
    with overflow_router(tmp_path, vendor) as router:
        first = begin(router)
        wait_for(lambda: len(vendor.seen) == 1)
        vendor.key = "new-key"
        time.sleep(1.1)
        (tmp_path / "vendor.key").write_text("new-key")
        assert post(router).status_code == 200
        fakes.loop.call_soon_threadsafe(release.set)
        assert first() == 503
        assert post(router).status_code == 200
        assert side(router)["state"] == "ready"


@pytest.mark.parametrize("end", ["cut", "close", "silence"])
@pytest.mark.parametrize(("status", "kind"), [(401, "key"), (429, "busy"), (400, "refused")])
def test_an_error_whose_body_is_cut_is_known_by_its_status(
    status: int, kind: str, end: str, vendor: FakeVendor, tmp_path: Path
) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.say(b'HTTP/1.1 %d No\r\ncontent-length: 99\r\n\r\n{"err' % status)
        if end == "cut":
            exchange.cut()
        elif end == "close":
            exchange.writer.close()
        else:
            await silent(exchange)

    vendor.behaviour = behave
    with overflow_router(tmp_path, vendor, upstream={"read_timeout": 0.3}) as router:
        assert post(router).status_code == 503
        assert side(router)["failed"] == {kind: 1}
        assert (side(router)["requests"], side(router)["cost"]) == (0, 0)


@pytest.mark.parametrize("status", [402, 401])
def test_accounts_without_credit_count_as_refused_keys(
    status: int, vendor: FakeVendor, tmp_path: Path
) -> None:
    vendor.behaviour = with_status(status)
    with overflow_router(tmp_path, vendor) as router:
        assert [post(router).status_code for _ in range(2)] == [503, 503]
        assert side(router)["failed"] == {"key": 1}


def test_openais_status_of_an_empty_account_is_no_rate_limit(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    vendor.behaviour = with_status(429, {"error": {"code": "insufficient_quota"}})
    with overflow_router(tmp_path, vendor) as router:
        post(router)
        assert side(router)["failed"] == {"key": 1}


@pytest.mark.parametrize("status", [429, 503, 529])
@pytest.mark.parametrize("form", ["seconds", "date", "missing", "nonsense"])
def test_a_busy_upstream_is_left_alone_for_the_time_that_it_names(
    status: int, form: str, vendor: FakeVendor, tmp_path: Path
) -> None:
    wait = {
        "seconds": "retry-after: 600\r\n",
        "date": f"retry-after: {formatdate(time.time() + 600, usegmt=True)}\r\n",
        "missing": "",
        "nonsense": "retry-after: soon\r\n",
    }[form]
    vendor.behaviour = with_status(status, headers=wait)
    with overflow_router(tmp_path, vendor) as router:
        assert [post(router).status_code for _ in range(2)] == [503, 503]
        [upstream] = router.router.overflow.upstreams
        wait_s = upstream.wait_s(upstream.spec.models["tiny"])
    assert len(vendor.seen) == 1
    assert (500 < wait_s <= 600) if form in {"seconds", "date"} else (0 < wait_s <= 10)


def test_a_busy_upstream_is_used_again_after_its_time(vendor: FakeVendor, tmp_path: Path) -> None:
    vendor.behaviour = with_status(429, headers="retry-after: 0.2\r\n")
    with overflow_router(tmp_path, vendor) as router:
        assert post(router).status_code == 503
        vendor.behaviour = vendor.answer
        time.sleep(0.25)
        assert post(router).status_code == 200


def unknown_model(folder: Path, vendor: FakeVendor, **fields: Any) -> Path:
    models = {"huge": {"model": "big-1", "input": 1, "output": 1}}
    return overflow_file(
        folder, vendor, when=("unknown_model",), upstream={"models": models, **fields}
    )


@pytest.fixture
def replica(fakes: Loop) -> FakeReplica:
    replica = FakeReplica()
    replica.load = {"takes_any_name": False}
    fakes.start(replica)
    return replica


def test_clients_of_models_that_only_an_upstream_has_get_errors_of_ours(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    path = unknown_model(tmp_path, vendor)
    with live_router(replica.url, overflow=path) as router:
        vendor.behaviour = with_status(400, {"error": {"message": f"No {KEY} in {{field}}"}})
        refused = post(router, model="huge")
        vendor.behaviour = with_status(429, headers="retry-after: 7\r\n")
        busy = [post(router, model="huge"), post(router, model="huge")]
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "upstream_refused"
    assert "No *** in {field}" in refused.json()["error"]["message"]
    assert [answer.status_code for answer in busy] == [429, 429]
    assert {answer.headers["retry-after"] for answer in busy} <= {"6", "7"}
    assert len(vendor.seen) == 2


def test_a_key_that_is_refused_is_a_503_for_a_model_that_only_the_upstream_has(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    vendor.key = "another"
    with live_router(replica.url, overflow=unknown_model(tmp_path, vendor)) as router:
        answers = [post(router, model="huge") for _ in range(2)]
    assert [answer.json()["error"]["code"] for answer in answers] == ["no_upstream"] * 2
    assert [answer.status_code for answer in answers] == [503] * 2
    assert KEY not in "".join(answer.text for answer in answers)


def test_a_wrong_name_of_a_model_pauses_only_this_model(vendor: FakeVendor, tmp_path: Path) -> None:
    async def answer(exchange: Exchange) -> None:
        if json.loads(exchange.body)["model"] == "wrong":
            await exchange.answer({"error": {}}, 404)
        else:
            await vendor.answer(exchange)

    vendor.behaviour = answer
    price = {"input": 1, "output": 1}
    models = {"tiny": {"model": "big-1", **price}, "typo": {"model": "wrong", **price}}
    with overflow_router(tmp_path, vendor, upstream={"models": models}) as router:
        assert [post(router, model="typo").status_code for _ in range(2)] == [503, 503]
        assert post(router).status_code == 200
        assert "wrong" in side(router)["reason"]
    assert len(vendor.seen) == 2


async def html(exchange: Exchange) -> None:
    body = b"<html>Welcome</html>"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n"
    await exchange.say(head % len(body) + body)


async def no_http(exchange: Exchange) -> None:
    await exchange.say(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")
    exchange.writer.close()


async def nothing(exchange: Exchange) -> None:
    exchange.writer.close()


async def cut(exchange: Exchange) -> None:
    exchange.cut()


async def gzip(exchange: Exchange) -> None:
    await exchange.answer(b"\x1f\x8b", headers="content-encoding: gzip\r\n")


async def silent(exchange: Exchange) -> None:
    await asyncio.sleep(20)


async def redirect(exchange: Exchange) -> None:
    await exchange.answer(b"", 302, "location: http://127.0.0.1:1/\r\n")


def stream_of(*data: bytes) -> Callable[[Exchange], Any]:
    async def behave(exchange: Exchange) -> None:
        await send_events(exchange, *data)

    return behave


def whole(value: object) -> Callable[[Exchange], Any]:
    async def behave(exchange: Exchange) -> None:
        await exchange.answer(value)

    return behave


STARTS: dict[str, tuple[bool, Callable[[Exchange], Any]]] = {
    "html": (False, html),
    "html in place of a stream": (True, html),
    "no http": (False, no_http),
    "nothing": (True, nothing),
    "cut": (False, cut),
    "compressed": (False, gzip),
    "silent": (False, silent),
    "silent stream": (True, silent),
    "redirect": (False, redirect),
    "no json": (False, whole(b"hello")),
    "a list": (False, whole([1])),
    "no choices": (False, whole({"id": "x"})),
    "an error with status 200": (False, whole(ERROR)),
    "a stream that is not asked for": (False, stream_of(*chat_events(FIRST))),
    "no stream": (True, whole({"choices": []})),
    "no events": (True, stream_of(b"hello\n\n")),
    "events without JSON": (True, stream_of(b"data: hello\n\n")),
    "an empty stream": (True, stream_of()),
    "comments only": (True, stream_of(b": waiting\n\n")),
    "an error as first event": (True, stream_of(*chat_events(ERROR))),
    "done at once": (True, stream_of(b"data: [DONE]\n\n")),
}


# The upstream may have computed something: it has taken the request, and has not said that it
# cannot answer.
CHARGED = {
    *("nothing", "cut", "compressed", "silent", "silent stream", "a stream that is not asked for"),
    *("no stream", "an empty stream", "comments only", "done at once"),
}


@pytest.mark.parametrize("case", STARTS)
def test_before_the_first_byte_another_upstream_answers(
    case: str, fakes: Loop, tmp_path: Path
) -> None:
    is_streamed, behaviour = STARTS[case]
    vendors = [start_vendor(fakes), start_vendor(fakes)]
    vendors[0].behaviour = behaviour
    with overflow_router(tmp_path, *vendors, upstream={"read_timeout": 0.3}) as router:
        answer = post(router, stream=is_streamed)
        wait_for(lambda: side(router)["running"] == 0)
        facts = side(router)
    assert answer.headers["x-twostroke-upstream"] == "vendor2"
    assert answer.text.count("bou") == 1
    assert [len(each.seen) for each in vendors] == [1, 1]
    is_charged = case in CHARGED
    assert facts["requests"] == facts["estimated_requests"] == int(is_charged)
    assert (facts["cost"] > 0) is is_charged
    assert facts["estimated_cost"] == facts["cost"]
    assert sum(facts["failed"].values()) == 1


def test_an_error_before_any_content_of_a_message_is_not_shown(fakes: Loop, tmp_path: Path) -> None:
    vendors = [start_vendor(fakes), start_vendor(fakes)]
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    error_event = b"event: error\ndata: " + json.dumps(overloaded).encode() + b"\n\n"
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    vendors[0].behaviour = stream_of(message_events()[0], ping, error_event)
    with overflow_router(tmp_path, *vendors, upstream={"protocol": "anthropic"}) as router:
        answer = post(router, MESSAGES, stream=True, max_tokens=5)
    assert answer.headers["x-twostroke-upstream"] == "vendor2"
    assert answer.text.count("message_start") == 2  # the name and the type of one event


@pytest.mark.parametrize("fault", ["close", "cut", "error", "nonsense", "silence", "end"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_after_the_first_byte_a_stream_ends_with_an_error_of_its_protocol(
    fault: str, path: str, fakes: Loop, tmp_path: Path
) -> None:
    vendors = [start_vendor(fakes), start_vendor(fakes)]
    begin = chat_events(FIRST) if path == CHAT else message_events()[:4]

    async def behave(exchange: Exchange) -> None:
        await exchange.begin_events()
        for event in begin:
            await exchange.chunk(event)
        await asyncio.sleep(0.1)  # until the client has these events
        if fault == "close":
            exchange.writer.close()
        elif fault == "cut":
            await exchange.chunk(b'data: {"half')
            exchange.cut()
        elif fault == "error":
            await exchange.chunk(
                b'data: {"type":"error","error":{"message":"%s"}}\n\n' % KEY.encode()
            )
        elif fault == "nonsense":
            await exchange.chunk(b"<html>\n\n")
        elif fault == "silence":
            await silent(exchange)
        else:
            await exchange.say(b"0\r\n\r\n")

    vendors[0].behaviour = behave
    protocol = "openai" if path == CHAT else "anthropic"
    fields = {"protocol": protocol, "read_timeout": 0.3}
    file = overflow_file(tmp_path, *vendors, upstream=fields)
    with live_router(NOBODY, overflow=file) as router:
        answer = post(router, path, stream=True, max_tokens=5)
        wait_for(lambda: side(router)["requests"] == 1)
        facts = side(router)
    assert answer.headers["x-twostroke-upstream"] == "vendor1"
    assert answer.text.startswith(b"".join(begin).decode())
    rest = answer.text[len(b"".join(begin)) :]
    if path == CHAT:
        data, done, empty = rest.split("\n\n")
        assert (done, empty) == ("data: [DONE]", "")
        assert json.loads(data.removeprefix("data: "))["error"]["code"] == "upstream_failed"
    else:
        assert rest.startswith("event: error\ndata: ")
        assert json.loads(rest.split("data: ")[1])["error"]["type"] == "api_error"
    assert KEY not in answer.text
    assert vendors[1].seen == []
    assert facts["cost"] > 0  # what came is charged
    assert (facts["estimated_requests"], facts["estimated_cost"]) == (1, facts["cost"])
    assert facts["running"] == 0


def test_events_that_come_with_a_fault_are_passed_on(vendor: FakeVendor, tmp_path: Path) -> None:
    [event] = chat_events(FIRST)

    async def behave(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.chunk(event)
        await asyncio.sleep(0.1)
        await exchange.chunk(event + event + chat_events(ERROR)[0] + event)

    vendor.behaviour = behave
    with overflow_router(tmp_path, vendor) as router:
        answer = post(router, stream=True)
    assert answer.content.startswith(3 * event + b'data: {"error"')
    assert answer.content.count(event) == 3


def test_what_a_client_left_is_charged_and_ends_at_the_vendor(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    closed: list[bool] = []

    async def endless(exchange: Exchange) -> None:
        await exchange.begin_events()
        try:
            while True:
                await exchange.chunk(chat_events(FIRST)[0])
                await asyncio.sleep(0.01)
        except ConnectionError:
            closed.append(True)
            raise

    vendor.behaviour = endless
    with overflow_router(tmp_path, vendor) as router:
        body = {**HELLO, "stream": True}
        with httpx.stream("POST", router.url + CHAT, json=body, trust_env=False) as answer:
            next(answer.iter_bytes())
        wait_for(lambda: bool(closed))
        wait_for(lambda: side(router)["requests"] == 1)
        assert side(router)["output_tokens"] > 0


def test_an_idle_connection_that_was_closed_costs_nothing(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    async def answer_once(exchange: Exchange) -> None:
        await vendor.answer(exchange)
        exchange.writer.transport.close()

    vendor.behaviour = answer_once
    with overflow_router(tmp_path, vendor) as router:
        assert [post(router).status_code for _ in range(3)] == [200] * 3
    assert len(vendor.seen) == 3


@pytest.mark.parametrize(
    ("url", "word"),
    [("https://vendor.invalid", "cannot be reached"), (NOBODY, "refused")],
)
def test_an_upstream_that_cannot_be_reached_is_named_once(
    url: str, word: str, vendor: FakeVendor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with overflow_router(tmp_path, vendor, upstream={"url": url}) as router:
        assert [post(router).status_code for _ in range(3)] == [503] * 3
        assert side(router)["failed"] == {"unreachable": 1}
        assert word in side(router)["reason"]
    assert caplog.text.count("Upstream vendor1 fails") == 1


def test_certificates_are_checked(fakes: Loop, tmp_path: Path) -> None:
    trusted, other = certificate(tmp_path, "127.0.0.1"), certificate(tmp_path, "other.example")
    cases = {"own": (trusted, trusted), "system": (trusted, ""), "name": (other, other)}
    statuses = {}
    for name, (served, accepted) in cases.items():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(served)
        vendor = start_vendor(fakes, context)
        path = overflow_file(tmp_path, vendor, upstream={"ca_file": str(accepted)})
        with live_router(NOBODY, overflow=path, wait_s=0.05) as router:
            statuses[name] = (post(router).status_code, side(router)["reason"])
        assert len(vendor.seen) == (name == "own")
    assert statuses["own"] == (200, "")
    for name in ("system", "name"):
        assert statuses[name][0] == 503
        assert "its certificate is not trusted" in statuses[name][1]


def certificate(folder: Path, host: str) -> Path:
    """Write a certificate that signs itself, with its key."""
    x509 = pytest.importorskip("cryptography.x509")
    import datetime as dt
    import ipaddress

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    is_address = host[0].isdigit()
    other_name = x509.IPAddress(ipaddress.ip_address(host)) if is_address else x509.DNSName(host)
    now = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([other_name]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{host}.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return path


def test_a_router_that_is_its_own_upstream_is_named(
    vendor: FakeVendor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with overflow_router(tmp_path, vendor) as router:
        upstream = router.router.overflow.upstreams[0]
        upstream.pool.address = upstream.pool.address.of(router.url)
        statuses = [post(router).status_code for _ in range(3)]
        facts = side(router)
    assert statuses == [503] * 3
    assert facts["failed"] == {"loop": 1}
    assert "this router itself" in facts["reason"]
    assert caplog.text.count("this router itself, or") == 1


@pytest.mark.parametrize("content", [None, "", "two keys", "schlüssel"])
def test_a_key_file_that_is_lost_takes_the_upstream_out_of_use(
    content: str | None, vendor: FakeVendor, tmp_path: Path
) -> None:
    with overflow_router(tmp_path, vendor) as router:
        assert post(router).status_code == 200
        time.sleep(1.1)
        key_file = tmp_path / "vendor.key"
        key_file.unlink()
        if content is not None:
            key_file.write_text(content)
        assert post(router).status_code == 503
        assert "vendor.key" in side(router)["reason"]
        key_file.write_text(KEY)
        time.sleep(1.1)
        assert post(router).status_code == 200
    assert len(vendor.seen) == 2


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"grammar": "root ::= 'a'"}, ("grammar", "leave it out")),
        (CHAT, {"skip_special_tokens": False}, ("skip_special_tokens", "leave it out")),
        (CHAT, {"store": True}, ("store", "leave it out")),
        ("/v1/completions", {"prompt": "hello"}, ("answers /v1/chat/completions only",)),
        (MESSAGES, {"max_tokens": 5}, ("answers /v1/chat/completions only",)),
    ],
)
def test_what_only_our_servers_know_is_named_for_a_model_that_only_an_upstream_has(
    path: str,
    fields: dict[str, Any],
    words: tuple[str, ...],
    vendor: FakeVendor,
    replica: FakeReplica,
    tmp_path: Path,
) -> None:
    file = unknown_model(tmp_path, vendor)
    with live_router(replica.url, overflow=file) as router:
        refused = post(router, path, model="huge", **fields)
        missing = post(router, path, model="huger", **fields)
        hidden = post(router, path, {"x-twostroke-overflow": "never"}, model="huge", **fields)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400
    assert "'huge'" in message
    assert all(word in message for word in words)
    assert [missing.status_code, hidden.status_code] == [404, 404]
    assert vendor.seen == []


def test_reasoning_that_a_server_here_has_signed_is_named_and_not_the_messages(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    file = unknown_model(tmp_path, vendor, protocol="anthropic")
    block = {"type": "thinking", "thinking": "", "signature": "twostroke-reasoning:abc"}
    history = [{"role": "assistant", "content": [block]}, {"role": "user", "content": "on"}]
    with live_router(replica.url, overflow=file) as router:
        refused = post(router, MESSAGES, model="huge", max_tokens=5, messages=history)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400
    assert "leave out the thinking blocks of earlier answers" in message
    assert "leave it out" not in message
    assert vendor.seen == []


def test_an_api_cannot_continue_an_answer_that_a_server_here_stores(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    file = unknown_model(tmp_path, vendor)
    with live_router(replica.url, overflow=file) as router:
        refused = post(router, model="huge", previous_response_id="resp_1")
    assert refused.status_code == 400
    assert "that a server here stores: send its text" in refused.json()["error"]["message"]
    assert [each for each in replica.seen if each.path == CHAT] == vendor.seen == []


def test_no_upstream_is_used_while_the_spending_of_the_day_is_not_known(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    with overflow_router(tmp_path, vendor) as router:
        book = router.router.overflow.costs
        book._is_day_read = False
        assert post(router).status_code == 503
        assert (side(router)["state"], vendor.seen) == ("paused", [])
        assert "cannot be read" in side(router)["reason"]
        health = httpx.get(f"{router.url}/health", trust_env=False)
        assert health.status_code == 503
        book._is_day_read = True
        assert post(router).status_code == 200
