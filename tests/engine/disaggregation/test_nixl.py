"""KV pages that NIXL moves: with a stand-in, and with the real NIXL where it is installed."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import sys
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support import fake_nixl
from support.disaggregation import (
    NIXL_LINKS,
    SAMPLED,
    SECRET,
    answers,
    check_clean,
    decode,
    options,
    pair,
    prefill,
    random_prompts,
    scripted_prefill,
    view,
)
from support.disaggregation_faults import run_round
from support.tiny import tiny_of, write_tiny_gguf
from support.waiting import wait_for
from twostroke import LLM
from twostroke.core.distributed_options import DisaggregationOptions
from twostroke.core.errors import UsageError
from twostroke.engine.disaggregation import (
    messages,
    nixl,
)
from twostroke.engine.disaggregation import (
    prefill_connection as peer,
)
from twostroke.engine.disaggregation import (
    transfer_methods as ways,
)
from twostroke.engine.disaggregation.nixl import NixlProcess, NixlProcessError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from twostroke.core.transport.connection import Connection

TITLES = {"nixl-read": "NIXL, read", "nixl-write": "NIXL, written"}
is_real = pytest.mark.skipif(nixl.obstacle() is not None, reason=nixl.INSTALL)


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_PEER_SECRET", SECRET)


_SIZE, _COUNT = 1 << 18, 256


@pytest.fixture
def pages() -> Iterator[list[tuple[int, Any]]]:
    """Yield the files of two engines' pages and views of them; only the first is not zero."""
    with ExitStack() as stack:
        results = []
        for value in (1, 0):
            file = os.memfd_create("pages")
            stack.callback(os.close, file)
            os.ftruncate(file, _SIZE * _COUNT)
            view_ = np.frombuffer(mmap.mmap(file, _SIZE * _COUNT), np.uint8)
            view_[:] = value
            results.append((file, view_.reshape(_COUNT, _SIZE)))
        yield results


def _check_tokens(folder: Path, link: str, family: str) -> None:
    path = write_tiny_gguf(folder / "m.gguf", tiny_of(family))
    prompts = random_prompts(random.Random(1), 12)
    with LLM(path, options()) as alone:
        expected = answers(alone, prompts, SAMPLED)
    with pair(path, link) as (first, second):
        assert answers(second, prompts, SAMPLED) == expected
        decode_side = view(second).decode_side
        assert decode_side.peers[0].link == TITLES[link]
        assert set(decode_side.transfers) == {"done"}
        assert decode_side.transfers["done"] >= 8
        for llm in (first, second):
            check_clean(llm)


@pytest.mark.parametrize(("link", "family"), [("nixl-read", "gemma3"), ("nixl-write", "llama")])
def test_the_tokens_are_those_of_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, family: str
) -> None:
    fake_nixl.use_fake_nixl(monkeypatch)
    _check_tokens(tmp_path, link, family)


@pytest.mark.parametrize(
    ("link", "seconds", "title"),
    [
        ("auto", (1.0, 2.0, 3.0), "socket"),
        ("auto", (1.0, 0.9, 0.9), "socket"),
        ("auto", (2.0, 1.0, 3.0), "NIXL, read"),
        ("auto", (3.0, 2.0, 1.0), "NIXL, written"),
        ("nixl", (2.0, 1.0), "NIXL, written"),
        ("socket", (), "socket"),
    ],
)
def test_the_way_that_is_measured_to_be_faster_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    link: str,
    seconds: tuple[float, ...],
    title: str,
) -> None:
    fake_nixl.use_fake_nixl(monkeypatch)
    left = list(seconds)

    def measure(probe: Callable[[], None]) -> float:
        probe()
        return left.pop(0)

    monkeypatch.setattr(ways, "_min_seconds", measure)
    path = write_tiny_gguf(tmp_path / "m.gguf")
    with prefill(path, "tcp") as (_, address), decode(path, address, peer_link=link) as llm:
        assert view(llm).decode_side.peers[0].link == title
        assert not left
        assert answers(llm, [list(range(3, 60))], SAMPLED)
        assert view(llm).decode_side.transfers == {"done": 1}


def test_without_nixl_there_auto_takes_the_socket_and_nixl_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_nixl.use_fake_nixl(monkeypatch)
    path = write_tiny_gguf(tmp_path / "m.gguf")
    prefill_options = DisaggregationOptions("prefill", "127.0.0.2:0", peer_link="socket")
    with LLM(path, options(prefill_options)) as first:
        address = f"127.0.0.2:{view(first).prefill_side.port}"
        with decode(path, address, peer_link="auto") as llm:
            assert view(llm).decode_side.peers[0].link == "socket"
        decode_options = DisaggregationOptions("decode", None, (address,), "always", "nixl")
        with LLM(path, options(decode_options)) as llm:
            wait_for(lambda: view(llm).decode_side.peers[0].state == "refused")
            assert llm.generate(["hello"])
    assert "does not move pages by NIXL: its --peer-link is socket" in caplog.text


def test_nixl_that_is_not_installed_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "obstacle", lambda: nixl.INSTALL)
    path = write_tiny_gguf(tmp_path / "m.gguf")
    prefill_options = DisaggregationOptions("prefill", "127.0.0.2:0", peer_link="nixl")
    with pytest.raises(UsageError, match=r"cannot be nixl\. NIXL is not installed: run pip"):
        LLM(path, options(prefill_options))


# The program of a NIXL process that says where it is reached, and reads nothing afterwards.
_STUCK_PROGRAM = """
import socket, sys, time
from twostroke.core.transport.connection import Connection
from twostroke.engine.disaggregation.messages import NixlAddress
from twostroke.engine.disaggregation.nixl import RECEIVED_BY_NIXL_PROCESS, AgentOpened

connection = Connection(socket.socket(fileno=int(sys.argv[1])), RECEIVED_BY_NIXL_PROCESS)
connection.send(AgentOpened(NixlAddress(b"x", 0, 0)))
time.sleep(600)
"""


@pytest.mark.parametrize("method", ["connect", "move", "probe"])
@pytest.mark.parametrize("is_large", [False, True])
def test_a_nixl_process_that_is_stuck_is_killed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, is_large: bool
) -> None:
    """A small message waits in the socket unread; a large one cannot even be sent."""
    (tmp_path / "stuck_nixl.py").write_text(_STUCK_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(nixl, "obstacle", lambda: None)
    monkeypatch.setattr(nixl, "_ENTRY", "stuck_nixl")
    monkeypatch.setattr(nixl, "_SEND_TIMEOUT_S", 1)
    process = NixlProcess(0, _COUNT, _SIZE)
    count = 10_000_000 if is_large else 1
    calls: dict[str, Callable[[], None]] = {
        "connect": lambda: process.connect(messages.NixlAddress(bytes(count), 0, 0), 0.5),
        "move": lambda: process.move([1] * count, [1] * count, 0.5, is_write=True),
        "probe": lambda: process.probe(0.5, is_write=False),
    }
    reason = "took no message for 1 s" if is_large and method != "probe" else r"longer than 0\.5 s"
    with pytest.raises(NixlProcessError, match=reason):
        calls[method]()
    assert process._process.poll() is not None


def test_nixl_that_fails_twice_in_turn_is_replaced_by_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nixl.use_fake_nixl(monkeypatch, lambda: "fails")
    monkeypatch.setattr(peer, "STALL_TIMEOUT_S", 0.5)
    seconds = itertools.cycle((3, 1, 2))  # the second one is that of reading
    monkeypatch.setattr(ways, "_min_seconds", lambda _: next(seconds))
    path = write_tiny_gguf(tmp_path / "m.gguf")
    prompts = random_prompts(random.Random(3), 3)
    with LLM(path, options()) as alone:
        expected = answers(alone, prompts, SAMPLED)
    with prefill(path, "tcp") as (_, address), decode(path, address, peer_link="auto") as llm:
        for prompt, tokens in zip(prompts, expected, strict=True):
            wait_for(lambda: view(llm).decode_side.peers[0].state == "up")
            assert answers(llm, [prompt], SAMPLED) == [tokens]
        assert view(llm).decode_side.peers[0].link == "socket"
        assert view(llm).decode_side.transfers == {"lost": 2, "done": 1}


def test_pages_that_a_peer_may_write_are_held_until_the_carrier_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: list[tuple[int, Any]]
) -> None:
    fake_nixl.use_fake_nixl(monkeypatch)
    monkeypatch.setattr(peer, "STALL_TIMEOUT_S", 0.3)
    peer_process = fake_nixl.FakeNixlProcess(pages[0][0], _COUNT, _SIZE)
    targets: list[int] = []

    def answer(connection: Connection[Any], question: Any) -> None:
        match question:
            case messages.NixlJoin():
                connection.send(messages.NixlJoined(peer_process.address))
            case messages.NixlProbe():
                connection.send(messages.Content(question.number, is_valid=True))
            case messages.PrefillPrompt():
                connection.send(messages.Offer(question.id, 1, [(0, n, n) for n in range(6)]))
            case messages.FetchPages():
                targets.extend(question.targets)  # and nothing more is heard

    path, prompt = write_tiny_gguf(tmp_path / "m.gguf"), list(range(3, 103))
    with LLM(path, options()) as alone:
        expected = answers(alone, [prompt], SAMPLED)
    with (
        scripted_prefill(answer, "127.0.0.2") as address,
        decode(path, address, peer_link="nixl-write") as llm,
    ):
        transfers = llm.engine.client.loop.pages.scheduler.prefix_cache.transfers
        held_counts, close = list[int](), fake_nixl.FakeNixlProcess.close

        def note(process: fake_nixl.FakeNixlProcess) -> None:
            held_counts.append(transfers.num_held_pages)
            close(process)

        monkeypatch.setattr(fake_nixl.FakeNixlProcess, "close", note)
        assert answers(llm, [prompt], SAMPLED) == expected
        wait_for(lambda: bool(held_counts))
        assert held_counts[0] == len(targets) == 6
        assert view(llm).decode_side.transfers == {"late": 1}
        check_clean(llm)


@is_real
@pytest.mark.parametrize("link", NIXL_LINKS)
def test_the_tokens_are_those_of_one_engine_with_the_real_one(tmp_path: Path, link: str) -> None:
    _check_tokens(tmp_path, link, "llama")


@is_real
@pytest.mark.seeds(2)
def test_faults_cost_time_and_no_request_with_the_real_one(seed: int, tmp_path: Path) -> None:
    run_round(seed, tmp_path, Counter(), NIXL_LINKS)


@is_real
@pytest.mark.parametrize("is_write", [False, True])
@pytest.mark.parametrize(("end_index", "how"), [(0, "stop"), (1, "stop"), (0, "kill"), (1, "kill")])
def test_nothing_is_written_once_a_carrier_is_closed(
    pages: list[tuple[int, Any]], is_write: bool, end_index: int, how: str
) -> None:
    every = range(_COUNT)
    both = [NixlProcess(file, _COUNT, _SIZE) for file, _ in pages]
    prefill_side, decode_side = both
    try:
        prefill_side.connect(decode_side.address, 5)
        decode_side.connect(prefill_side.address, 5)
        mover = prefill_side if is_write else decode_side
        mover.move([3, 1], [0, 2], 5, is_write=is_write)
        target = pages[1][1]
        assert target[[0, 2] if is_write else [3, 1]].all()
        target[:] = 0
        process = both[end_index]._process
        signal_ = signal.SIGSTOP if how == "stop" else signal.SIGKILL
        threading.Timer(0.01, process.send_signal, (signal_,)).start()
        with suppress(NixlProcessError):
            mover.move(every, every, 1, is_write=is_write)
        decode_side.close()
        before = target.copy()
        process.send_signal(signal.SIGCONT)
        with suppress(NixlProcessError):
            prefill_side.move(every, every, 1, is_write=True)
        assert (target == before).all()
    finally:
        for link_end in both:
            link_end.close()
