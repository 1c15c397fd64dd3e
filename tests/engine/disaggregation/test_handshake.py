"""Engines that do not fit together, or do not share the secret, are refused with a sentence."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support.disaggregation import options, prefill, view
from support.tiny import tiny_of, write_tiny_gguf
from support.waiting import wait_for
from twostroke import LLM
from twostroke.core.distributed_options import DisaggregationOptions
from twostroke.core.errors import PortInUseError, UsageError
from twostroke.core.transport.frames import ConnectionLostError
from twostroke.core.transport.handshake import handshake_as_client, receive_exactly
from twostroke.engine.disaggregation.connection import (
    connect_to_prefill_engine,
    listen_for_decode_engines,
)
from twostroke.engine.disaggregation.messages import KvCacheSpecMessage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.core.transport.connection import Connection
    from twostroke.core.transport.listener import Listener

KIND = KvCacheSpecMessage("m", "f16", 16, (None,), 100, "cpu", False, 1)


def test_each_fact_of_a_kind_is_compared() -> None:
    assert KIND.difference(KIND) is None
    for name in KvCacheSpecMessage.__struct_fields__:
        other = replace(KIND, **{name: "other"})
        assert KIND.difference(other), name


def test_another_format_is_refused_and_prompts_are_read_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("llama"))
    with prefill(path, kv_format="int8") as (_, address):
        disaggregation = DisaggregationOptions("decode", None, (address,), "always")
        with LLM(path, options(disaggregation, kv_format="f16")) as llm:
            wait_for(lambda: view(llm).decode_side.peers[0].state == "refused")
            assert llm.generate(["hello"])
            assert view(llm).decode_side.decisions["gone"] == 1
    assert "has another format of keys and values (--kv-format)" in caplog.text


def test_a_refusal_leaves_no_open_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("llama"))
    with prefill(path, kv_format="int8") as (_, address):
        count = _num_shared()
        assert count, "nothing is shared"
        disaggregation = DisaggregationOptions("decode", None, (address,), "always")
        with LLM(path, options(disaggregation, kv_format="f16")) as llm:
            wait_for(lambda: view(llm).decode_side.peers[0].state == "refused")
            wait_for(lambda: _num_shared() == count)


def _num_shared() -> int:
    """Return how many open files of this process are page memory."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += "memfd:twostroke" in str(link.readlink())
    return count


@pytest.mark.parametrize(("theirs", "word"), [("", "TWOSTROKE_PEER_SECRET"), ("b", "same secret")])
def test_a_stranger_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str, word: str
) -> None:
    monkeypatch.setenv("TWOSTROKE_PEER_SECRET", "a")
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("llama"))
    with prefill(path, "tcp") as (_, address):
        host, port = address.split(":")
        with pytest.raises(ConnectionLostError, match=word):
            connect_to_prefill_engine((host, int(port)), theirs.encode())


@contextmanager
def listening() -> Iterator[tuple[Listener[Any], Event]]:
    """Yield a TCP listener, and an event that is set once a decode engine has proved its secret."""
    proved = Event()

    def serve(connection: Connection[Any]) -> None:
        connection.close()
        proved.set()

    listener = listen_for_decode_engines(("127.0.0.1", 0), b"a", page_file=None, serve=serve)
    with closing(listener):
        yield listener, proved


def test_strangers_that_prove_nothing_are_few_and_keep_nobody_out_later() -> None:
    with listening() as (listener, proved), ExitStack() as stack:
        address = "127.0.0.1", listener.port
        strangers = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(40)]
        is_welcome = [bool(stranger.recv(1)) for stranger in strangers]
        assert sum(is_welcome) == 32, "the others are closed at once"
        for stranger in strangers:
            stranger.close()
        wait_for(lambda: _proves(address))
        assert proved.wait(60)


def test_a_listener_goes_on_after_a_connection_that_could_not_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE] * 3

    def failing(self: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise OSError(failures.pop(), "too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with listening() as (listener, proved):
        assert _proves(("127.0.0.1", listener.port))
        assert proved.wait(60)


def _proves(address: tuple[str, int]) -> bool:
    with socket.create_connection(address, 10) as sock, suppress(OSError):
        handshake_as_client(sock, b"a", (b"decode", b"prefill"))
        return True
    return False


def test_a_peer_that_sends_a_byte_now_and_then_is_given_up() -> None:
    near_end, far_end = socket.socketpair()
    with near_end, far_end:
        near_end.settimeout(0.2)
        stop = Event()

        def drip() -> None:
            while not stop.wait(0.05):
                far_end.send(b"x")

        thread = Thread(target=drip)
        thread.start()
        with pytest.raises(TimeoutError):
            receive_exactly(near_end, 64)
        stop.set()
        thread.join()


def test_an_address_in_use_ends_the_start(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("llama"))
    with prefill(path) as (_, address), pytest.raises(PortInUseError, match="cannot connect to"):
        LLM(path, options(DisaggregationOptions("prefill", address)))


@pytest.mark.parametrize(
    "option_values",
    [
        {"role": "decode"},
        {"prefill_peers": ("a:1",)},
        {"peer_listing": "peers"},
        {"peer_address": "a:1"},
        {"disaggregate": "always"},
        {"role": "prefill", "peer_address": "nowhere"},
        {"role": "prefil"},
    ],
)
def test_options_that_do_not_fit_together_are_refused(option_values: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        DisaggregationOptions(**option_values)  # type: ignore[arg-type]
