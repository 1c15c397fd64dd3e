"""Messages arrive whole and in order, strangers are dropped, and nothing waits for the dead."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest

from twostroke.backends.parallel.rank_messages import RankFailed, RankReady, pack, unpack
from twostroke.core.errors import BackendError, PortInUseError
from twostroke.core.transport.channel import (
    Channel,
    ChannelClosedError,
    Listener,
    MessageType,
    connect,
)


@pytest.fixture
def ends():
    one, other = (Channel(sock) for sock in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_messages_of_any_size_arrive_in_order(ends):
    one, other = ends
    bodies = [b"", b"x", bytes(70_000), b"y" * 3_000_000]
    sender = threading.Thread(target=lambda: [one.send(MessageType.FRAME, body) for body in bodies])
    sender.start()
    assert [other.receive(10).body for _ in bodies] == bodies
    sender.join()
    assert other.receive(0) is None


def test_a_closed_channel_is_noticed_by_who_reads_and_by_who_looks(ends):
    one, other = ends
    one.send(MessageType.READY)
    one.close()
    assert other.is_cut()  # although a message is still unread
    assert other.receive(1).kind is MessageType.READY
    with pytest.raises(ChannelClosedError):
        other.receive(1)
    with pytest.raises(ChannelClosedError):
        other.send(MessageType.READY)


def test_heartbeats_to_a_rank_that_does_not_read_wait_for_nothing(ends):
    one, other = ends
    for _ in range(100_000):
        one.beat()
    assert other.receive(1).kind is MessageType.BEAT


@pytest.mark.seeds(3)
def test_what_is_not_a_message_ends_the_channel(seed, ends):
    one, other = ends
    data = bytearray(random.Random(seed).randbytes(64))
    data[4:8] = b"\xff\xff\xff\xff"  # a body of 4 GB
    one._socket.sendall(data)
    with pytest.raises(ChannelClosedError, match="not a message"):
        other.receive(1)


def test_only_who_knows_the_secret_is_let_in(caplog):
    listener = Listener("127.0.0.1", 0, b"secret")
    try:
        with pytest.raises(PortInUseError, match=f"127.0.0.1:{listener.port}"):
            Listener("127.0.0.1", listener.port, b"secret")
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            stranger.sendall(bytes(64))
            with socket.create_connection(("127.0.0.1", listener.port)):  # says nothing
                with pytest.raises(ChannelClosedError, match="has another secret"):
                    connect("127.0.0.1", listener.port, b"another", 5)
                one = connect("127.0.0.1", listener.port, b"secret", 5)
                other = listener.accept(5)
        one.send(MessageType.HELLO, b"it is me")
        assert other.receive(5).body == b"it is me"
        one.close()
        other.close()
        said = "A process at 127.0.0.1 was refused among the ranks: it does not know their secret"
        assert caplog.text.count(said) == 1  # for both
    finally:
        listener.close()
    with pytest.raises(ChannelClosedError, match="Rank 0 does not answer"):
        connect("127.0.0.1", listener.port, b"secret", 0)
    with pytest.raises(ChannelClosedError, match="Rank 0 does not answer"):
        connect("127.0.0.1", listener.port, b"secret", 60, has_listened=True)  # does not wait


def test_bodies_are_checked():
    assert unpack(pack(RankReady(1, 2, 3)), RankReady) == RankReady(1, 2, 3)
    for body in (b"", b"{}", b'{"reason": 1, "kind": "x"}', b"\xff"):
        with pytest.raises(BackendError, match="cannot be read"):
            unpack(body, RankFailed)


def test_a_reader_gives_up_in_time(ends):
    began = time.monotonic()
    assert ends[0].receive(0.05) is None
    assert time.monotonic() - began >= 0.05
