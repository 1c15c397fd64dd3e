"""A store that is away, slow, flushed or wrong: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.accounts import USAGE, post, whole_response
from support.replicas import FakeReplica
from support.shared_routers import add_key, sharing_router, used
from support.stores import missing, store
from support.waiting import wait_for
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.fleet.shared_records.limit_check import SharedSpending
from twostroke.fleet.shared_records.records import SharedRecords
from twostroke.fleet.shared_records.script import PREFIX
from twostroke.fleet.shared_records.store import (
    StoreConnection,
    StoreError,
    check_scripts,
    keeps_nothing,
    open_store,
)
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.http.api_key import KeyLimits
from twostroke.server.http.errors import OPENAI
from twostroke.server.http.request_context import ServedRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.replicas import LiveRouter, Loop
    from support.stores import Store

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def replica(fakes: Loop) -> FakeReplica:
    fake = FakeReplica()
    fake.behaviour = whole_response({"choices": [], "usage": USAGE})
    return fakes.start(fake)


def messages(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [text for record in caplog.records if words in (text := record.getMessage())]


def is_away(router: LiveRouter) -> bool:
    records = router.router.shared_records
    assert records is not None
    return records.is_away


def test_a_frozen_store_costs_little_time_and_no_count(
    redis_store: Store, replica: FakeReplica, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    stored_key, key = add_key(redis_store, limits=KeyLimits(requests_per_minute=6))
    routers = [
        stack.enter_context(sharing_router(redis_store, replica.url, max_wait_s=0.2))
        for _ in range(2)
    ]
    assert post(routers[0], key).status_code == 200
    with redis_store.frozen():
        alone = [post(routers[0], key).status_code for _ in range(7)]
        alone += [post(routers[1], key).status_code for _ in range(7)]
    # Each router goes on with the whole limit, as it knew it last.
    assert alone == [200] * 5 + [429] * 2 + [200] * 6 + [429]
    wait_for(lambda: used(redis_store) == [(stored_key.id, 12, 12 * 9, 0, 12 * 4)])
    wait_for(lambda: not any(map(is_away, routers)))
    assert len(messages(caplog, "is away")) == 2
    # The limit holds for both together again.
    assert post(routers[0], key).status_code == post(routers[1], key).status_code == 429


def test_a_store_that_goes_away_under_load_gets_all_counts_when_it_is_back(
    tmp_path: Path, replica: FakeReplica
) -> None:
    num_answered = 0
    lock, is_over = threading.Lock(), threading.Event()

    def client(router: LiveRouter, key: str) -> None:
        nonlocal num_answered
        while not is_over.is_set():
            assert post(router, key).status_code == 200
            with lock:
                num_answered += 1

    durable = ("--appendonly", "yes", "--appendfsync", "always")
    with ExitStack() as stack:
        first = stack.enter_context(store(tmp_path, *durable))
        stored_key, key = add_key(first, limits=KeyLimits(parallel=100))
        routers = [
            stack.enter_context(sharing_router(first, replica.url, max_wait_s=0.2))
            for _ in range(2)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(4))
        clients = [pool.submit(client, routers[number % 2], key) for number in range(4)]
        for _ in range(2):
            time.sleep(0.3)
            first.process.kill()
            first.process.wait()
            time.sleep(0.5)
            first = stack.enter_context(store(tmp_path, *durable, port=first.port))
            wait_for(lambda: not any(map(is_away, routers)))
        is_over.set()
        for done in clients:
            done.result()
        assert num_answered > 10
        expected = [(stored_key.id, num_answered, 9 * num_answered, 0, 4 * num_answered)]
        wait_for(lambda: used(first) == expected)


def test_keys_are_stored_again_after_the_data_were_removed(
    redis_store: Store, replica: FakeReplica, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    stored_key, key = add_key(redis_store, limits=KeyLimits(requests_per_minute=4))
    routers = [stack.enter_context(sharing_router(redis_store, replica.url)) for _ in range(2)]
    assert [post(router, key).status_code for router in routers] == [200, 200]
    redis_store.client().flushall()
    wait_for(lambda: len(messages(caplog, "were removed: 1 API key was stored again")) == 1)
    wait_for(lambda: len(redis_store.client().keys(PREFIX + "lease:*")) == 2)
    assert [post(router, key).status_code for router in routers] == [200, 200]
    assert used(redis_store) == [(stored_key.id, 2, 18, 0, 8)]
    # The limits have gone on from what the routers knew.
    assert post(routers[0], key).status_code == 429
    with open_store(redis_store.url) as client:
        assert client.hlen(PREFIX + "keys") == 1


def test_keys_are_stored_again_although_another_router_started_with_the_empty_store(
    redis_store: Store, replica: FakeReplica, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    _, key = add_key(redis_store)
    router = stack.enter_context(sharing_router(redis_store, replica.url))
    assert post(router, key).status_code == 200
    new_router = redis_store.client().pipeline()
    new_router.flushall().set(PREFIX + "identity", "new").execute()
    wait_for(lambda: len(messages(caplog, "were removed: 1 API key was stored again")) == 1)
    assert redis_store.client().hlen(PREFIX + "keys") == 1
    assert redis_store.client().get(PREFIX + "identity") == b"new"
    assert post(router, key).status_code == 200


def test_a_key_that_is_added_before_the_routers_notice_lost_data_removes_no_other_key(
    redis_store: Store, replica: FakeReplica, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    _, key = add_key(redis_store)
    routers = [stack.enter_context(sharing_router(redis_store, replica.url)) for _ in range(2)]
    assert [post(router, key).status_code for router in routers] == [200, 200]
    with redis_store.client().pipeline() as quick:  # as `keys add` writes to an empty store
        quick.flushall()
        quick.set(PREFIX + "begun", "1", ex=60).set(PREFIX + "identity", "new")
        quick.execute()
    _, new_key = add_key(redis_store, "other", "ben")
    client = redis_store.client()
    wait_for(lambda: client.hlen(PREFIX + "keys") == 2)
    wait_for(lambda: all(post(router, new_key).status_code == 200 for router in routers))
    assert [post(router, key).status_code for router in routers] == [200, 200]
    assert messages(caplog, "were removed: 1 API key was stored again")
    assert not messages(caplog, "has other data")


def test_a_key_marks_an_empty_store_and_no_other(redis_store: Store) -> None:
    client = redis_store.client()
    add_key(redis_store)
    assert 0 < client.ttl(PREFIX + "begun") <= 60
    client.delete(PREFIX + "begun")
    add_key(redis_store, "other")
    assert not client.exists(PREFIX + "begun")


@pytest.mark.parametrize("damage", ["type", "field", "missing field", "nan", "inf", "empty text"])
def test_damaged_limits_go_on_from_what_the_routers_know(
    redis_store: Store,
    replica: FakeReplica,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    limits = KeyLimits(requests_per_minute=6, tokens_per_minute=1000)
    stored_key, key = add_key(redis_store, limits=limits)
    routers = [stack.enter_context(sharing_router(redis_store, replica.url)) for _ in range(2)]
    for router in routers:
        assert [post(router, key).status_code for _ in range(2)] == [200, 200]
    client, entry = redis_store.client(), PREFIX + f"limits:{stored_key.id}"
    if damage == "type":
        client.delete(entry)
        client.set(entry, "damaged")
    elif damage == "missing field":
        client.hdel(entry, "at")
    else:
        value = {"field": "damaged", "empty text": ""}.get(damage, damage)
        client.hset(entry, "requests:level", value)
    # The router that was used last knows best.
    assert [post(routers[1], key).status_code for _ in range(3)] == [200, 200, 429]
    assert post(routers[0], key).status_code == 429
    assert client.hget(entry, "requests:size") == b"6"
    wait_for(lambda: used(redis_store) == [(stored_key.id, 6, 6 * 9, 0, 6 * 4)])
    assert len(messages(caplog, f"The limits of key {stored_key.id} in the store")) == 1
    assert not messages(caplog, "is away")


_ENTRIES = (
    *("identity", "change", "keys", "routers", "last-used", "usage-days", "usage:DAY"),
    *("cost-days", "reserved"),
)


@pytest.mark.parametrize("entry", _ENTRIES)
def test_an_entry_of_another_type_is_named_and_costs_no_count(
    redis_store: Store,
    replica: FakeReplica,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
    entry: str,
) -> None:
    stored_key, key = add_key(redis_store, limits=KeyLimits(parallel=10))
    router = stack.enter_context(sharing_router(redis_store, replica.url, max_wait_s=0.5))
    assert post(router, key).status_code == 200
    wait_for(lambda: used(redis_store) == [(stored_key.id, 1, 9, 0, 4)])
    client = redis_store.client()
    day = client.smembers(PREFIX + "usage-days").pop().decode()
    name, copy = PREFIX + entry.replace("DAY", day), PREFIX + "copy"
    if client.exists(name):
        client.rename(name, copy)
    client.rpush(name, "damaged")
    assert post(router, key).status_code == 200
    wait_for(lambda: is_away(router))
    assert post(router, key).status_code == 200
    assert len(messages(caplog, f"its entry {name.removeprefix(PREFIX)} is damaged")) == 1
    if client.exists(copy):
        client.rename(copy, name)
    else:
        client.delete(name)
    wait_for(lambda: not is_away(router))
    wait_for(lambda: used(redis_store) == [(stored_key.id, 3, 27, 0, 12)])


@pytest.mark.parametrize("command", ["evalsha", "type", "hset", "hincrby", "sadd", "hgetall"])
def test_a_store_that_forbids_a_command_costs_no_count(
    redis_store: Store,
    replica: FakeReplica,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
    command: str,
) -> None:
    stored_key, key = add_key(redis_store, limits=KeyLimits(requests_per_minute=4))
    router = stack.enter_context(sharing_router(redis_store, replica.url, max_wait_s=0.5))
    assert post(router, key).status_code == 200
    wait_for(lambda: used(redis_store) == [(stored_key.id, 1, 9, 0, 4)])
    redis_store.client().execute_command("ACL", "SETUSER", "default", f"-{command}")
    assert post(router, key).status_code == 200
    wait_for(lambda: is_away(router))
    assert [post(router, key).status_code for _ in range(3)] == [200, 200, 429]
    assert len(messages(caplog, "is away")) == 1
    assert len(messages(caplog, "is away (its access rules forbid a command: ")) == 1
    redis_store.client().execute_command("ACL", "SETUSER", "default", f"+{command}")
    wait_for(lambda: not is_away(router))
    wait_for(lambda: used(redis_store) == [(stored_key.id, 4, 36, 0, 16)])


def test_a_router_does_not_start_with_a_store_that_forbids_scripts(redis_store: Store) -> None:
    redis_store.client().execute_command("ACL", "SETUSER", "default", "-evalsha")
    with (
        pytest.raises(UsageError, match="access rules forbid a command"),
        open_store(redis_store.url) as client,
    ):
        check_scripts(client)


class HeldConnection(StoreConnection):
    """A connection that holds replies back.

    Attributes:
        gate: is set while replies pass.
        is_holding: whether a reply waits.
    """

    def __init__(self, url: str) -> None:
        """Let replies pass."""
        super().__init__(url)
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_holding = False

    async def run(self, batch: dict[str, Any]) -> list[Any]:
        reply = await super().run(batch)
        self.is_holding = not self.gate.is_set()
        await self.gate.wait()
        self.is_holding = False
        return reply


def test_a_request_that_was_admitted_alone_while_a_reply_was_late_is_counted_later(
    redis_store: Store,
) -> None:
    key, _ = add_key(redis_store, limits=KeyLimits(parallel=1, tokens_per_minute=1000))
    entry = PREFIX + f"limits:{key.id}"

    async def run() -> None:
        keys = ApiKeys.read(None, None, shared=[key])
        assert keys is not None
        connection = HeldConnection(redis_store.url)
        records = SharedRecords(connection, keys, "secret", max_wait_s=0.05)
        await records.start()
        connection.gate.clear()
        await asyncio.to_thread(wait_for, lambda: connection.is_holding)
        request = ServedRequest("r", OPENAI, "POST", "/v1/completions", key=key)
        await records.count(request)
        assert records.is_away
        spending = SharedSpending(records, request)
        spending.reserve(900)
        await spending.admit()
        connection.gate.set()
        await asyncio.to_thread(wait_for, lambda: not records.is_away)
        client = redis_store.client()
        [name] = [name for name in client.hkeys(entry) if name.startswith(b"open:")]
        assert client.hget(entry, name) == b"1"
        spending.end()
        await records.stop()
        assert float(client.hget(entry, "tokens:level")) > 900

    asyncio.run(asyncio.wait_for(run(), 20))


def test_another_secret_or_other_keys_are_reported(
    redis_store: Store, replica: FakeReplica, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    router = stack.enter_context(sharing_router(redis_store, replica.url, api_key="first"))

    def warning() -> str:
        health = httpx.get(router.url + "/health", trust_env=False).json()
        return str(health.get("warning", ""))

    with sharing_router(redis_store, replica.url, api_key="second"):
        wait_for(lambda: "has other keys in --api-keys or TWOSTROKE_API_KEY" in warning())
    wait_for(lambda: not warning())
    with sharing_router(redis_store, replica.url, api_key="first", secret="other"):
        wait_for(lambda: "has another TWOSTROKE_REPLICA_KEY" in warning())
    assert len(messages(caplog, "TWOSTROKE_REPLICA_KEY")) == 2  # once at each router


def test_days_of_usage_follow_the_clock_of_the_store(
    redis_store: Store, replica: FakeReplica, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    _, key = add_key(redis_store, limits=KeyLimits(requests_per_minute=2))
    routers = [
        stack.enter_context(
            sharing_router(redis_store, replica.url, clock=lambda error=error: time.time() + error)
        )
        for error in (0, 40 * 86_400)
    ]
    assert [post(router, key).status_code for router in routers] == [200, 200]
    assert post(routers[1], key).status_code == 429
    assert [row[1:] for row in used(redis_store)] == [(2, 18, 0, 8)]  # of one day
    assert len(messages(caplog, "differ by 3456000 s")) == 1


def batch(number: int, **fields: Any) -> dict[str, Any]:
    facts = {"router": "dying", "number": number, "lease_ms": 300, "num_keys": 0, "ops": []}
    return facts | fields


SYNC = {
    "sync": True,
    "digests": "00000000",
    "identity": "a",
    "known_identity": "",
    "begun_s": 60,
    "keys": {},
}


def test_usage_that_is_sent_again_counts_once_and_a_late_batch_does_nothing(
    redis_store: Store,
) -> None:
    rows = [("2026-11-30", [('requests ["k","t","m",false]', "1")])]
    usage = {"number": 1, "rows": rows, "uses": {}}

    async def run() -> list[int]:
        connection = StoreConnection(redis_store.url)
        batches = (
            batch(2, usage=usage, **SYNC),
            batch(3, usage=usage),
            batch(1, usage=usage | {"number": 2}),
            batch(4, usage=usage | {"number": 2}),
        )
        replies = [(await connection.run(fields))[1] for fields in batches]
        await connection.disconnect()
        return replies

    assert asyncio.run(run()) == [1, 1, 0, 1]
    assert used(redis_store) == [("k", 2, 0, 0, 0)]


def test_a_damaged_count_does_not_stop_other_counts(redis_store: Store) -> None:
    owner = '["k","t","m",false]'
    redis_store.client().hset(PREFIX + "usage:2026-11-30", f"input {owner}", "damaged")
    rows = [("2026-11-30", [(f"input {owner}", "9"), (f"requests {owner}", "1")])]

    async def run() -> None:
        connection = StoreConnection(redis_store.url)
        usage = {"number": 1, "rows": rows, "uses": {}}
        assert (await connection.run(batch(1, usage=usage, **SYNC)))[1] == 1
        await connection.disconnect()

    asyncio.run(run())
    counts = redis_store.client().hgetall(PREFIX + "usage:2026-11-30")
    assert counts == {f"input {owner}".encode(): b"damaged", f"requests {owner}".encode(): b"1"}


def test_a_dead_router_gives_back_what_its_requests_held(
    redis_store: Store, replica: FakeReplica, stack: ExitStack
) -> None:
    stored_key, key = add_key(redis_store, limits=KeyLimits(parallel=1, tokens_per_minute=100))
    operation = {
        "key": stored_key.id, "kind": "admit", "requests_per_minute": 0,
        "tokens_per_minute": 100, "parallel": 1, "held": 5000,
    }  # fmt: skip

    async def die() -> str:
        connection = StoreConnection(redis_store.url)
        reply = await connection.run(batch(1, **SYNC) | {"ops": [operation]})
        await connection.disconnect()
        result: str = reply[6][0][0].decode()
        return result

    router = stack.enter_context(sharing_router(redis_store, replica.url))
    assert asyncio.run(die()) == "admitted"
    wait_for(lambda: post(router, key, max_tokens=1).status_code == 200)


@contextmanager
def fake_redis(info: bytes) -> Iterator[str]:
    """Yield the URL of a server that answers INFO, and every other command with an error."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(4096):
                    is_info = b"INFO" in data.upper() and b"SETINFO" not in data.upper()
                    answer = (
                        b"$%d\r\n%b\r\n" % (len(info), info) if is_info else b"-ERR unknown\r\n"
                    )
                    connection.sendall(answer * max(1, data.count(b"*")))

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"


def refusal(url: str) -> str:
    with pytest.raises(TwostrokeError) as caught, open_store(url):
        pass
    assert isinstance(caught.value, UsageError | StoreError)
    text = caught.value.sentence(lambda field: f"--{field}")
    assert "\n" not in text
    return text


def test_a_store_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    assert refusal("http://host") == "--store must be a URL such as rediss://HOST:6379/0."
    assert "does not answer" in refusal("redis://127.0.0.1:1")
    with fake_redis(b"redis_version:4.0.14\r\nrole:master\r\n") as url:
        assert "version 4.0.14 of Redis" in refusal(url)
    with fake_redis(b"redis_version:7.4.0\r\nrole:master\r\ncluster_enabled:1\r\n") as url:
        assert "is a node of a Redis Cluster" in refusal(url)
    with store(tmp_path, "--requirepass", "right") as closed:
        wrong = refusal(closed.url.replace("://", "://:wrong@"))
        assert "refuses: " in wrong
        assert ":wrong@" not in wrong
        assert "refuses: " in refusal(closed.url)
    evicting = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with store(tmp_path, *evicting) as full:
        assert "set the policy to noeviction" in refusal(full.url)
        with store(tmp_path, "--replicaof", "127.0.0.1", str(full.port)) as copy:
            assert "read-only replica" in refusal(copy.url)


def test_a_store_that_keeps_nothing_on_its_disk_is_noticed(tmp_path: Path) -> None:
    for options, is_volatile in (((), True), (("--appendonly", "yes"), False)):
        with store(tmp_path, *options) as running, open_store(running.url) as client:
            assert keeps_nothing(client) is is_volatile


def test_a_full_store_counts_later(
    redis_store: Store, replica: FakeReplica, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    stored_key, key = add_key(redis_store, limits=KeyLimits(requests_per_minute=10))
    router = stack.enter_context(sharing_router(redis_store, replica.url))
    client = redis_store.client()
    client.config_set("maxmemory", 1)
    wait_for(lambda: is_away(router))
    assert post(router, key).status_code == 200
    assert used(redis_store) == []
    client.config_set("maxmemory", 0)
    wait_for(lambda: used(redis_store) == [(stored_key.id, 1, 9, 0, 4)])
    assert len(messages(caplog, "maxmemory")) == 1


def test_metrics_show_the_store(redis_store: Store, replica: FakeReplica) -> None:
    _, key = add_key(redis_store)
    with sharing_router(redis_store, replica.url) as router:
        url, headers = router.url + "/metrics", {"x-api-key": key}
        text = httpx.get(url, headers=headers, trust_env=False).text
    assert "twostroke_router_store_up 1.0" in text
    assert "twostroke_router_store_unwritten_requests 0.0" in text
    assert "twostroke_router_store_seconds_count" in text
