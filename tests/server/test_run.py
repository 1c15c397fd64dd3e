"""The server as a process: addresses, signals and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.server_thread import ServerThread
from support.servers import chat_body, post_bytes
from support.waiting import wait_for
from twostroke.core.errors import PortInUseError, UsageError
from twostroke.server.http.server import bind
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Receive, Scope, Send

TESTS = Path(__file__).resolve().parent.parent
PATH = "/v1/chat/completions"


def test_taken_port_is_one_clear_sentence() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"Port {port} on 127.0.0.1 is already in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "word"),
    [
        ("no.such.host.invalid", 0, "--host"),
        ("8.8.8.8", 0, "--host"),
        ("\x00", 0, "--host"),
        ("a" * 300, 0, "--host"),
    ],
)
def test_address_that_cannot_be_bound_names_the_knob(host: str, port: int, word: str) -> None:
    with pytest.raises(PortInUseError) as caught:
        bind(host, port)
    assert word in str(caught.value)


@pytest.mark.parametrize("port", [-1, 65536])
def test_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(UsageError, match="port must be from 0 to 65535"):
        bind("127.0.0.1", port)


def test_taken_port_ends_the_process(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as listening_socket:
        port = str(listening_socket.getsockname()[1])
        done = subprocess.run(
            command(tmp_path, port, "1"),
            env=environment(),
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == PortInUseError.exit_code
    assert done.stdout.count(b"\n") == 1
    assert b"already in use" in done.stdout
    assert done.stderr == b""


@pytest.fixture
def heeds_hangups() -> Iterator[None]:
    """Let processes heed SIGHUP even if the tests run under nohup, which processes inherit."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, handler)


@pytest.mark.usefixtures("heeds_hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_lets_running_requests_finish(tmp_path: Path, number: int) -> None:
    with served_process(tmp_path, "60", "paced") as (process, url):
        body = chat_body(
            max_tokens=40,
            ignore_eos=True,
            stream=True,
            stream_options={"include_usage": True},
        )
        with httpx.stream("POST", url + PATH, json=body, timeout=60, trust_env=False) as answer:
            events = answer.iter_lines()
            first = next(events)
            process.send_signal(number)
            *_, usage, done = (line for line in (first, *events) if line)
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 40
        assert done == "data: [DONE]"
        assert process.wait(120) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "draining 1\n"
        assert process.stderr is not None
        assert process.stderr.read() == ""


def has_arrived(url: str) -> bool:
    """Whether a request has reached the engine, running or waiting."""
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    return bool(re.search(r"^twostroke_requests_(running|waiting) [1-9]", metrics, re.MULTILINE))


def test_signal_starts_a_batch_that_waits_to_be_full(tmp_path: Path) -> None:
    with served_process(tmp_path, "20", "static") as (process, url), ThreadPoolExecutor(1) as pool:
        body = chat_body(max_tokens=4)
        answer = pool.submit(httpx.post, url + PATH, json=body, timeout=60, trust_env=False)
        wait_for(lambda: has_arrived(url))
        assert not answer.done()
        process.terminate()
        assert answer.result().status_code == 200
        assert process.wait(120) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_limit_or_second_signal_cuts_off(tmp_path: Path, stream: bool, twice: bool) -> None:
    drain_s = "60" if twice else "0.5"
    with (
        served_process(tmp_path, drain_s, "stuck") as (process, url),
        ThreadPoolExecutor(1) as pool,
    ):
        body = chat_body(stream=stream)
        answer = pool.submit(httpx.post, url + PATH, json=body, timeout=60, trust_env=False)
        wait_for(lambda: has_arrived(url))
        process.send_signal(signal.SIGTERM)
        if twice:  # once the first was heard, since a process sees two at the same time as one
            wait_for(lambda: httpx.get(url + "/health", trust_env=False).status_code == 503)
            process.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 503
        assert "The server is stopping" in answer.result().json()["error"]["message"]
        assert process.wait(120) == 1


def test_draining_server_says_so_until_the_last_answer_is_out(tmp_path: Path) -> None:
    with (
        served_process(tmp_path, "60", "stuck") as (process, url),
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as idle,
    ):
        answer = pool.submit(httpx.post, url + PATH, json=chat_body(), timeout=60, trust_env=False)
        wait_for(lambda: has_arrived(url))
        assert idle.get("/health").json()["status"] == "ok"
        process.terminate()
        wait_for(lambda: httpx.get(url + "/health", trust_env=False).status_code == 503)
        assert idle.get("/health").json()["status"] == "draining"  # on its open connection
        late_response = idle.post(PATH, json=chat_body())
        assert "The server is stopping" in late_response.json()["error"]["message"]
        for refused in (idle.get("/health"), late_response):
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["connection"] == "close"
        assert int(late_response.headers["retry-after"]) > 10  # the rest of the drain
        slow = post_bytes(PATH, chat_body())
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
            connection.sendall(slow[:-5])  # refused without waiting for the rest
            assert connection.recv(100).startswith(b"HTTP/1.1 503")
        assert not answer.done()
        process.terminate()
        assert answer.result().status_code == 503
        assert process.wait(120) == 1


def test_client_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with served_process(tmp_path, "0.5") as (process, url):
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(post_bytes(PATH, chat_body())[:-5])
            time.sleep(0.2)
            process.terminate()
            assert process.wait(120) == 0


def test_nothing_listens_after_the_end(tmp_path: Path) -> None:
    with served_process(tmp_path, "1") as (process, url):
        process.terminate()
        assert process.wait(120) == 0
        port = int(url.rpartition(":")[2])
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_server_of_a_test_that_does_not_stop_says_why_it_waits() -> None:
    end = asyncio.Event()

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await end.wait()

    application: Any = SimpleNamespace(options=ServeOptions(), is_draining=False)
    server = ServerThread(app, application)
    with pytest.raises(AssertionError, match=r"await end\.wait"):
        server.close(0.5)
    assert server.loop is not None
    server.loop.call_soon_threadsafe(end.set)
    server.close()


def test_crowd_of_new_connections_is_taken_a_few_at_a_time() -> None:
    counts: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})

    application: Any = SimpleNamespace(options=ServeOptions(), is_draining=False)
    server = ServerThread(app, application)
    connections = server._server.server_state.connections

    async def watch() -> None:
        time.sleep(0.3)  # noqa: ASYNC251 - the crowd comes while nothing is taken
        while len(connections) < 40:
            counts.append(len(connections))
            await asyncio.sleep(0)
        counts.append(len(connections))

    assert server.loop is not None
    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    watching.result(20)
    for connection in crowd:
        connection.close()
    server.close()
    steps = [now - before for before, now in pairwise(counts)]
    assert sum(steps) == 40
    assert max(steps) <= 8


def test_second_signal_cuts_off_requests_that_no_engine_has_accepted(tmp_path: Path) -> None:
    with served_process(tmp_path, "60", "away") as (process, url), ThreadPoolExecutor(1) as pool:
        body = chat_body(stream=True)
        answer = pool.submit(httpx.post, url + PATH, json=body, timeout=60, trust_env=False)
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        process.terminate()
        assert process.stdout.readline() == "draining 1\n"
        process.terminate()
        assert answer.result().status_code == 503
        assert "The server is stopping" in answer.result().json()["error"]["message"]
        assert process.wait(120) == 1


@contextmanager
def served_process(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a running server process and its URL; the process ends afterwards."""
    process = subprocess.Popen(
        command(folder, "0", *arguments),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.communicate()
        assert httpx.get(url + "/health", trust_env=False).status_code == 200
        yield process, url
    finally:
        process.kill()
        process.communicate()


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(TESTS / "support" / "serve_tiny.py"), str(folder), *arguments]


def environment() -> dict[str, str]:
    paths = [str(TESTS), str(TESTS.parent / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
