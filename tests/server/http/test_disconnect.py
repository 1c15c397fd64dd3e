"""Clients that disconnect or stop reading: the server stops their work wherever it is."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.engines import tiny_client
from support.servers import LiveServer, chat_body, live_server, post_bytes
from support.tiny import Tiny
from support.waiting import wait_for
from twostroke.core.request import Hints
from twostroke.core.sampling import SamplingParams
from twostroke.engine.process.served import LocalEngine
from twostroke.server.generation.answer_reuse import ReuseRule, create_answer_reuse
from twostroke.server.generation.job import EncodedJob, Job
from twostroke.server.generation.protocol import ResponseInfo
from twostroke.server.generation.responses import EventStream
from twostroke.server.generation.running import RunningAnswers
from twostroke.server.http.limits import RequestLimits
from twostroke.server.middleware import create_app
from twostroke.server.models.registry import ModelRegistry
from twostroke.server.observability.metrics import ServerMetrics
from twostroke.server.options import ServeOptions
from twostroke.server.protocols.openai.completions_reply import CompletionEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.server.generation.responses import Started

PATH = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_while_queued_is_cancelled(tmp_path: Path, stream: bool) -> None:
    with live_server(tmp_path, max_running=1) as server:
        server.backend.gate.clear()
        first = send_request(server, stream=stream)
        wait_for(lambda: server.client.loop.snapshot().scheduler.num_running == 1)
        second = send_request(server, stream=stream)
        wait_for(lambda: server.client.loop.snapshot().scheduler.num_waiting == 1)
        second.close()
        wait_for(lambda: server.client.loop.snapshot().scheduler.num_waiting == 0)
        assert server.num_busy == 1
        first.close()
        wait_for(lambda: server.num_busy == 0)
        server.backend.gate.set()
        server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_in_prefill_is_cancelled(tmp_path: Path, stream: bool) -> None:
    with live_server(tmp_path, token_budget=32, max_running=4) as server:
        server.backend.gate.clear()
        connection = send_request(
            server, stream=stream, messages=[{"role": "user", "content": "x" * 300}]
        )
        wait_for(lambda: server.backend.num_steps == 1)  # the first of ten chunks
        connection.close()
        wait_for(lambda: server.num_busy == 0)
        server.backend.gate.set()
        server.wait_idle()
        assert server.backend.num_steps == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_client_gone_in_decode_is_cancelled(tmp_path: Path, stream: bool, n: int) -> None:
    with live_server(tmp_path) as server:
        connection = send_request(server, stream=stream, n=n)
        wait_for(lambda: server.backend.num_steps >= 5)
        if stream:
            assert b"200 OK" in connection.recv(4096)
        connection.close()
        server.wait_idle()
        assert server.backend.num_steps < 480


def test_client_gone_before_its_body_is_complete_leaves_nothing(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        connection = server.connect()
        connection.sendall(post_bytes(PATH, chat_body())[:-5])
        connection.close()
        server.wait_idle()
        assert server.chat(max_tokens=1).status_code == 200


def test_disconnect_is_heard_through_any_asgi_server(tmp_path: Path) -> None:
    """Starlette's test transport has no uvicorn: the ASGI message alone must be enough."""

    async def run() -> None:
        with tiny_client(tmp_path) as (client, backend):
            app = create_app(client)
            backend.gate.clear()
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                task = asyncio.create_task(http.post(PATH, json=chat_body(stream=True)))
                await asyncio.to_thread(
                    wait_for, lambda: client.loop.snapshot().scheduler.num_running == 1
                )
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert not client.loop._listeners
            backend.gate.set()

    asyncio.run(run())


def test_reader_that_never_reads_is_cut_off(tmp_path: Path) -> None:
    options = ServeOptions(drain_s=1, limits=RequestLimits(reader_timeout_s=0.4))
    with live_server(tmp_path, options, num_pages=2048, tiny=Tiny(context_length=4096)) as server:
        connection = unread(server)
        wait_for(lambda: server.num_busy > 0)
        wait_for(lambda: server.num_busy == 0)
        server.wait_idle()
        assert is_reset(connection)
        assert server.chat(max_tokens=1).status_code == 200


def test_reader_that_falls_too_far_behind_is_cut_off(tmp_path: Path) -> None:
    options = ServeOptions(drain_s=1, keep_alive_s=0.2, limits=RequestLimits(max_unread=50))
    with live_server(tmp_path, options, num_pages=2048, tiny=Tiny(context_length=4096)) as server:
        connection = unread(server)
        wait_for(lambda: server.num_busy > 0)
        wait_for(lambda: server.num_busy == 0)
        assert is_reset(connection)


def test_silent_stream_is_kept_alive_by_comments(tmp_path: Path) -> None:
    with live_server(tmp_path, ServeOptions(drain_s=1, keep_alive_s=0.1)) as server:
        server.backend.gate.clear()
        with server.http.stream("POST", PATH, json=chat_body(stream=True, max_tokens=2)) as got:
            lines = got.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            server.backend.gate.set()
            rest = [line for line in lines if line.startswith("data")]
        assert rest[-1] == "data: [DONE]"


def test_comment_that_is_not_read_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """A client may stop reading while its stream is silent."""

    async def run() -> None:
        options = ServeOptions(keep_alive_s=0.1, limits=RequestLimits(reader_timeout_s=0.3))
        with tiny_client(tmp_path) as (client, backend):
            backend.gate.clear()
            params = SamplingParams(max_tokens=2)
            job = Job(None, ([5],), params, stream=True)
            tokenizer = client.card.tokenizer
            reply = ResponseInfo("x", 0, "tiny", job, [[5]], tokenizer)
            engine, encoded = LocalEngine(client), EncodedJob([[5]], job.params, Hints())
            metrics = ServerMetrics(ModelRegistry(engine, options))

            async def start() -> Started:
                submit = partial(
                    create_answer_reuse(options, metrics.registry).generate,
                    *(engine, job, encoded, ReuseRule()),
                )
                answers = await RunningAnswers.start(
                    engine, job, encoded=encoded, metrics=metrics, running=set(), submit=submit
                )
                return answers, reply.reader(), None

            stream = EventStream(start, CompletionEncoder(reply), options)

            async def never(_message: Any = None) -> Any:
                await asyncio.Event().wait()

            async with asyncio.timeout(5):
                await stream({"type": "http"}, never, never)
            assert not client.loop._listeners
            backend.gate.set()

    asyncio.run(run())


def send_request(server: LiveServer, **fields: Any) -> socket.socket:
    """Send a request for a long answer, and return its connection."""
    connection = server.connect()
    body = chat_body(ignore_eos=True, **fields)
    connection.sendall(post_bytes(PATH, body))
    return connection


def unread(server: LiveServer) -> socket.socket:
    """Begin a stream of megabytes on a connection with small buffers, without reading it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", server.port))
    body = chat_body(stream=True, n=8, logprobs=True, top_logprobs=20, ignore_eos=True)
    connection.sendall(post_bytes(PATH, body))
    return connection


def is_reset(connection: socket.socket) -> bool:
    """Whether the server closed the connection before the end of the response."""
    received = b""
    try:
        while data := connection.recv(65536):
            received = received[-100:] + data
    except ConnectionResetError:
        return True
    finally:
        connection.close()
    return b"[DONE]" not in received
