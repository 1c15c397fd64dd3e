"""Messages arrive whole and in order, strangers are dropped, and nothing waits for the dead."""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from support.waiting import wait_for
from twostroke.core.frozen import Frozen
from twostroke.core.transport.connection import Connection
from twostroke.core.transport.frames import ConnectionLostError, InvalidMessageError, MessageFormat
from twostroke.core.transport.listener import (
    AuthenticationError,
    Listener,
    LocalSocket,
    SharedSecret,
    connect,
    connect_locally,
)


class Text(Frozen, array_like=True, tag=1):
    """A message."""

    text: str


FORMAT = MessageFormat(Text, takes_bytes=True)
NO_BYTES = MessageFormat(Text)
SIDES = (b"one", b"other")


@pytest.fixture(params=[0.0, 0.0008])
def ends(request):
    first_end, other = (
        Connection(sock, FORMAT, spin_s=request.param) for sock in socket.socketpair()
    )
    yield first_end, other
    first_end.close()
    other.close()


def test_messages_and_bytes_of_any_size_arrive_in_order(ends):
    first_end, other = ends
    bodies = [b"", b"x", bytes(70_000), b"y" * 3_000_000]

    def send():
        for body in bodies:
            first_end.send_bytes(body)
            first_end.send(Text(body.decode()))

    sender = threading.Thread(target=send)
    sender.start()
    for body in bodies:
        assert other.receive(10) == body
        assert other.receive(10) == Text(body.decode())
    sender.join()
    assert other.receive(0) is None


def test_buffers_after_a_message_are_filled_and_no_byte_is_lost(ends):
    first_end, other = ends
    sizes = [1, 70_000, 5, 1_000_000, *[3] * 200]  # more than one system call takes
    buffers = [bytes([index % 256]) * size for index, size in enumerate(sizes)]

    def send():
        first_end.send(Text("pages"), map(memoryview, buffers))
        first_end.send(Text("end"))

    sender = threading.Thread(target=send)
    sender.start()
    assert other.receive() == Text("pages")
    for expected in buffers:
        page = bytearray(len(expected))
        other.receive_into(memoryview(page))
        assert page == expected
    assert other.receive() == Text("end")
    sender.join()


def test_a_closed_connection_is_noticed_by_receive_and_is_cut(ends):
    first_end, other = ends
    first_end.send(Text("last"))
    first_end.close()
    assert other.is_cut()  # although a message is still unread
    assert other.receive(1) == Text("last")
    with pytest.raises(ConnectionLostError):
        other.receive(1)
    with pytest.raises(ConnectionLostError):
        other.send(Text(""))
    with pytest.raises(ConnectionLostError):
        other.receive_into(memoryview(bytearray(1)))


def test_messages_to_a_process_that_does_not_read_wait_for_nothing(ends):
    first_end, other = ends
    for _ in range(100_000):
        first_end.try_send(Text("beat"))
    assert other.receive(1) == Text("beat")


def test_a_process_that_does_not_read_for_too_long_is_given_up():
    ours, theirs = socket.socketpair()
    with closing(Connection(ours, FORMAT, send_timeout_s=1)) as connection, theirs:
        with pytest.raises(ConnectionLostError):
            connection.send(Text("x" * 10_000_000))
        assert connection.is_cut()


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\x7f", b"\x03\0\0\0\x92\x02\xa0", b"\x01\0\0\0\xc1"]
)
def test_what_is_not_a_message_is_refused(ends, data):
    ends[0].send_frame(data + bytes(64))
    with pytest.raises(InvalidMessageError):
        ends[1].receive(1)


def test_bytes_are_refused_where_only_messages_are_expected():
    ours, theirs = socket.socketpair()
    with (
        closing(Connection(ours, NO_BYTES)) as first_end,
        closing(Connection(theirs, NO_BYTES)) as other,
    ):
        first_end.send_bytes(b"x")
        with pytest.raises(InvalidMessageError, match="at most"):
            other.receive(1)


@pytest.mark.seeds(3)
def test_messages_arrive_however_their_bytes_are_cut(seed):
    rng = random.Random(seed)
    expected = [Text("x" * rng.randrange(300)) for _ in range(50)]
    data = b"".join(map(FORMAT.frame, expected))
    ours, theirs = socket.socketpair()
    with closing(Connection(ours, FORMAT)) as connection, theirs:
        messages = []
        while data:
            size = rng.randrange(1, 400)
            theirs.sendall(data[:size])
            data = data[size:]
            messages += connection.receive_arrived(10)
        assert messages == expected


def test_a_reader_gives_up_in_time(ends):
    began_s = time.monotonic()
    assert ends[0].receive(0.05) is None
    assert list(ends[0].receive_arrived(0.05)) == []
    assert time.monotonic() - began_s >= 0.1


def listen(secret, refused, **options):
    return Listener(
        ("127.0.0.1", 0),
        secret,
        open_connection=lambda sock: Connection(sock, FORMAT),
        on_refused=lambda host, error: refused.append((host, isinstance(error, PermissionError))),
        **options,
    )


def test_only_a_process_that_knows_the_secret_can_connect():
    secret = SharedSecret(b"secret", SIDES, "A_SECRET")
    refused = []
    with closing(listen(secret, refused)) as listener:
        address = "127.0.0.1", listener.port
        with socket.create_connection(address) as stranger:
            stranger.sendall(bytes(64))
            with socket.create_connection(address):  # says nothing
                for _ in range(2):
                    with pytest.raises(AuthenticationError):
                        connect(address, SharedSecret(b"another", SIDES, "A_SECRET"))
                with pytest.raises(AuthenticationError):  # the sides are exchanged
                    connect(address, SharedSecret(b"secret", SIDES[::-1], "A_SECRET"))
                first_end = Connection(connect(address, secret), FORMAT)
                other = listener.accept(5)
        with closing(first_end), closing(other):
            first_end.send(Text("it is me"))
            assert other.receive(5) == Text("it is me")
        assert refused[:1] == [("127.0.0.1", True)]
        assert refused.count(("127.0.0.1", True)) == 1  # for all strangers of a host
    with pytest.raises(OSError, match="refused"):
        connect(address, secret)


def test_without_a_secret_only_processes_of_the_same_user_can_connect():
    refused = []
    nothing = SharedSecret(b"", SIDES, "A_SECRET")
    with Path("/dev/null").open() as shared_file:
        local = LocalSocket("twostroke-test", shared_file.fileno())
        with closing(listen(nothing, refused, local=local)) as listener:
            with pytest.raises(AuthenticationError):
                connect(("127.0.0.1", listener.port), nothing)
            sock, file = connect_locally(local, listener.port)
            with (
                closing(Connection(sock, FORMAT)) as first_end,
                closing(listener.accept(5)) as other,
            ):
                other.send(Text("welcome"))
                assert first_end.receive(5) == Text("welcome")
            assert file is not None
            assert os.path.sameopenfile(file, shared_file.fileno())
            os.close(file)
            wait_for(lambda: bool(refused))  # the listener's thread reports it
    assert refused == [("127.0.0.1", True)]


def test_a_connection_that_was_not_accepted_is_closed_with_its_listener():
    secret = SharedSecret(b"secret", SIDES, "A_SECRET")
    with closing(listen(secret, [])) as listener:
        connection = Connection(connect(("127.0.0.1", listener.port), secret), FORMAT)
    with closing(connection):
        assert select.select([connection], [], [], 10)[0]
        with pytest.raises(ConnectionLostError):
            connection.receive(10)
