"""The records of a stream: removed from what the client gets, and kept for another replica."""

from __future__ import annotations

import random

import pytest

from twostroke.fleet.router.kept_stream import KeptStream, StreamMemory
from twostroke.fleet.router.replica_registry import Replica, ReplicaFacts
from twostroke.fleet.router.response import Head
from twostroke.fleet.router.upstream import Address

BODY = b'{"stream":true}'
HEADERS = [(b"content-type", b"text/event-stream"), (b"x-twostroke-resume", b"1")]
UNITS = [
    b"data: one\n\n: twostroke-record QQ==\n\n",
    b"data: two\n\ndata: three\n\n: twostroke-record Qg==\n\n",
    b": twostroke-record Qw==\n\n",
    b"data: [DONE]\n\n: twostroke-record RA==\n\n",
]
EVENTS = b"data: one\n\ndata: two\n\ndata: three\n\ndata: [DONE]\n\n"


@pytest.fixture
def replica() -> Replica:
    import asyncio

    async def make() -> Replica:
        return Replica(Address.of("http://127.0.0.1:1"), 0)

    replica = asyncio.run(make())
    replica.facts = ReplicaFacts(("tiny",), version="1", numerics="a")
    return replica


def begun(replica: Replica, memory: StreamMemory | None = None) -> KeptStream:
    stream = KeptStream(BODY, memory or StreamMemory())
    stream.message(replica)
    stream.begin(Head(200, HEADERS), replica, "tiny")
    return stream


@pytest.mark.parametrize("seed", range(20))
def test_events_pass_with_their_records_however_they_are_cut(replica: Replica, seed: int) -> None:
    rng, whole = random.Random(seed), b"".join(UNITS)
    stream, sent = begun(replica), b""
    while whole:
        size = rng.randint(1, 30)
        data, whole = whole[:size], whole[size:]
        sent += stream.take(data, is_last=False)
        assert EVENTS.startswith(sent)
    assert sent + stream.take(b"", is_last=True) == EVENTS
    message = b"\n".join([BODY, b"QQ==", b"Qg==", b"Qw==", b"RA=="])
    assert stream.message(replica) == (message, [(b"x-twostroke-resume", b"%d" % len(BODY))])


def test_events_without_their_record_are_not_passed(replica: Replica) -> None:
    stream = begun(replica)
    assert stream.take(UNITS[0] + b"data: two\n\n", is_last=False) == b"data: one\n\n"
    assert stream.can_continue
    assert stream.take(b": keep-alive\n\n", is_last=False) == b""
    stream.message(replica)
    stream.begin(Head(200, HEADERS), replica, "tiny")
    assert stream.take(b": keep-alive\n\n", is_last=False) == b": keep-alive\n\n"
    assert stream.take(UNITS[1], is_last=False) == b"data: two\n\ndata: three\n\n"


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 9, 20])
def test_records_after_a_large_event_are_not_passed(replica: Replica, cut: int) -> None:
    """An event that is too large to be held goes to the client before its record has come."""
    memory = StreamMemory()
    stream = begun(replica, memory)
    event = b"data: " + b"x" * (9 << 20) + b"\n\n"
    whole = event + b": twostroke-record QQ==\n\n" + UNITS[1]
    sent = stream.take(whole[: len(event) + cut], is_last=False)
    sent += stream.take(whole[len(event) + cut :], is_last=False)
    assert sent + stream.take(b"", is_last=True) == event + b"data: two\n\ndata: three\n\n"
    assert not stream.can_continue
    assert memory.num_bytes == 0


def test_the_error_of_a_replica_that_gives_up_is_not_passed(replica: Replica) -> None:
    stream = begun(replica)
    lost = b'data: {"error":1}\n\n: twostroke-lost engine_died\n\n: twostroke-usage 1 2 3\n\n'
    assert stream.take(UNITS[0] + lost, is_last=False) == b"data: one\n\n"
    assert stream.lost_code == b"engine_died"
    assert stream.take(b"", is_last=True) == b""


def test_only_replicas_with_the_same_arithmetic_suit(replica: Replica) -> None:
    stream = begun(replica)
    other = ReplicaFacts(("tiny",), version="1", numerics="b")
    stream.take(UNITS[0], is_last=False)
    assert stream.suits(replica, "tiny")
    replica.facts = other
    assert not stream.suits(replica, "tiny")


def test_a_stream_that_has_content_without_records_stays(replica: Replica) -> None:
    stream = KeptStream(BODY, StreamMemory())
    assert stream.message(replica) == (BODY, [(b"x-twostroke-resume", b"new")])
    stream.begin(Head(200, HEADERS[:1]), replica, "tiny")
    assert stream.take(b": keep-alive\n\n", is_last=False)
    assert stream.can_continue
    assert stream.take(b"data: one\n\n", is_last=False)
    assert not stream.can_continue


def test_memory_is_bounded_and_given_back(replica: Replica) -> None:
    memory = StreamMemory(len(BODY) + 4)
    stream, other = begun(replica, memory), KeptStream(BODY, memory)
    assert stream.can_continue
    assert not other.can_continue
    assert stream.take(UNITS[0], is_last=False)
    assert stream.can_continue
    assert stream.take(UNITS[1], is_last=False) == b"data: two\n\ndata: three\n\n"
    assert not stream.can_continue
    assert memory.num_bytes == 0
    stream.release()
    assert memory.num_bytes == 0
