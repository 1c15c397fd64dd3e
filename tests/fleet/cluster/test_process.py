"""An ordinary server as another process: started, started again, drained, and never left alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.commands import SOURCE
from support.tiny import write_tiny_gguf
from support.waiting import wait_for
from twostroke.fleet.cluster import process as fleet_process
from twostroke.fleet.cluster.process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

_ORPHAN = """
import os, sys, time
from twostroke.fleet.cluster.process import ServerProcess
server = ServerProcess(("serve", sys.argv[1], "--in-process"), "127.0.0.1")
while not server.state.is_ready:
    time.sleep(0.05)
print(server.state.pid, flush=True)
os._exit(9)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tiny model."""
    return str(write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))


@contextmanager
def running(*arguments: str, lines: list[str] | None = None) -> Iterator[ServerProcess]:
    say = ([] if lines is None else lines).append
    server = ServerProcess(arguments, "127.0.0.1", log=say)
    try:
        yield server
    finally:
        server.close(10)


def is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_a_server_that_dies_or_freezes_is_started_again(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_process, "_CHECK_TIMEOUT_S", 0.3)
    lines: list[str] = []
    with running("serve", tiny, "--in-process", lines=lines) as server:
        wait_for(lambda: server.state.is_ready)
        first = server.state
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: server.state.trouble != "")
        assert not server.state.is_ready
        assert server.state.trouble == "it was ended by signal 9"
        wait_for(lambda: server.state.is_ready)
        second = server.state
        assert (second.num_starts, second.trouble) == (2, "")
        os.kill(second.pid, signal.SIGSTOP)
        wait_for(lambda: server.state.pid != second.pid and server.state.is_ready)
        assert is_gone(second.pid)
    assert is_gone(server.state.pid)
    assert any("does not answer" in line for line in lines)


def test_a_server_that_drains_by_itself_is_not_started_again(tiny: str, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    with running("serve", tiny, "--in-process", "--drain-notice", str(notice)) as server:
        wait_for(lambda: server.state.is_ready)
        notice.touch()
        wait_for(lambda: server.state.is_ending)
        assert not server.state.was_told_to_end
        wait_for(lambda: not server._thread.is_alive())
        assert is_gone(server.state.pid)
        assert (server.state.num_starts, server.state.is_ready) == (1, False)


def test_starts_that_fail_are_counted() -> None:
    with running("serve", "no-such-model") as server:
        wait_for(lambda: server.state.num_failed_starts >= 2, 60)


def test_the_last_sentence_of_a_server_that_cannot_start_is_kept() -> None:
    with running("serve", "no-such-model") as server:
        wait_for(lambda: server.state.trouble != "")
        assert server.state.trouble.startswith("There is no model 'no-such-model'.")
        assert server.close(5)


def test_a_taken_port_for_decode_engines_is_said_and_not_tried_for_ever(tiny: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with running("serve", tiny, "--role", "prefill", "--peer-address", address) as server:
            wait_for(lambda: server.state.trouble != "")
            assert f"cannot connect to {address}: another program has" in server.state.trouble
            assert server.state.num_starts == 1


def test_a_server_ends_when_the_process_that_watches_it_was_killed(tiny: str) -> None:
    command = [sys.executable, "-c", _ORPHAN, tiny]
    killed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    assert killed.returncode == 9
    wait_for(lambda: is_gone(int(killed.stdout)))


def test_a_server_without_an_address_is_tried_again() -> None:
    server = ServerProcess(("serve", "none"), "203.0.113.1")  # an address of no machine
    try:
        wait_for(lambda: server.state.trouble != "")
        assert server.state.trouble.startswith("it cannot be started: ")
    finally:
        assert server.close(5)
    wait_for(lambda: not server._thread.is_alive())


def test_a_server_that_is_closed_as_it_starts_is_not_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, start = list[subprocess.Popen[bytes]](), subprocess.Popen

    def start_late(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        server._stop.set()
        started.append(start([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[0]

    monkeypatch.setattr(fleet_process, "_free_port", lambda _host: go.wait(10) and 1)
    go = threading.Event()
    server = ServerProcess(("serve", "none"), "127.0.0.1")
    monkeypatch.setattr(subprocess, "Popen", start_late)
    go.set()
    try:
        server._thread.join(10)
        assert not server._thread.is_alive()
        assert started[0].poll() == -signal.SIGTERM
    finally:
        started[0].kill()
