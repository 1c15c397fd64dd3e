"""Fake replicas, which do what a test tells them, and routers before them."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from support.server_thread import ServerThread
from twostroke.fleet.router.app import Router, build_app
from twostroke.fleet.router.options import RouteOptions

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterator

    from twostroke.fleet.shared_records.records import SharedRecords
    from twostroke.server.storage import Records

    Behaviour = Callable[["Exchange"], Awaitable[None]]


LOAD = {
    "status": "ok", "epoch": "1", "version": "1", "numerics": "1", "work_s": 0.0,
    "prompt_tokens": 0, "cached_tokens": 0, "horizon_s": None,
}  # fmt: skip


class Exchange:
    """One request to a fake replica, and the methods to answer it."""

    def __init__(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        """Hold the request's head and body, and the connection's writer."""
        first, *lines = head.split("\r\n")
        self.method, self.path, _ = first.split(" ")
        pairs = [line.split(": ", 1) for line in lines if line]
        self.headers = {name.lower(): value for name, value in pairs}
        self.body, self.writer = body, writer

    async def say(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, value: object, status: int = 200, headers: str = "") -> None:
        """Send a complete response with a JSON body."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}"
        await self.say(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def begin_events(self) -> None:
        """Send the head of a stream of events."""
        await self.say(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    async def chunk(self, data: bytes) -> None:
        """Send a chunk."""
        await self.say(b"%x\r\n%s\r\n" % (len(data), data))

    def cut(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()


class FakeReplica:
    """A server whose behaviour a test sets by path; `seen` are the requests to other paths.

    `lists` are the requests for its list of models.

    `models` are its models, `row` has additional fields of their rows; `health` is its status, None
    if it does not say it. With `load` it is a Twostroke server that reports this load.
    """

    def __init__(self, *models: str) -> None:
        """Serve the given models, or the model `tiny`."""
        self.models, self.row = models or ("tiny",), dict[str, Any]()
        self.health: tuple[int, dict[str, Any]] | None = (200, {"status": "ok"})
        self.load: dict[str, Any] | None = None
        self.behaviour: Behaviour = hello
        self.seen: list[Exchange] = []
        self.lists: list[Exchange] = []
        self.num_connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = next(
                    (int(line[15:]) for line in head.lower().split("\r\n")
                     if line.startswith("content-length:")), 0
                )  # fmt: skip
                exchange = Exchange(head, await reader.readexactly(length), writer)
                await self._answer(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.path == "/health":
            if self.health is None:
                await asyncio.sleep(60)
            else:
                await exchange.answer(self.health[1], self.health[0])
        elif exchange.path == "/v1/models":
            self.lists.append(exchange)
            rows = [{"id": name, "object": "model", **self.row} for name in self.models]
            await exchange.answer({"object": "list", "data": rows})
        elif exchange.path == "/api/load" and self.load is not None:
            await exchange.answer(LOAD | {"models": self.models} | self.load)
        elif exchange.path == "/api/load":
            await exchange.answer({"error": "unknown"}, 404)
        else:
            self.seen.append(exchange)
            await self.behaviour(exchange)


async def hello(exchange: Exchange) -> None:
    """Answer a request with a short stream."""
    await exchange.begin_events()
    await exchange.chunk(b'data: {"id":"chatcmpl-1"}\n\n')
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.say(b"0\r\n\r\n")


class Loop:
    """An event loop in a thread, for fake servers."""

    def __init__(self) -> None:
        """Start the thread."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._servers: list[asyncio.Server] = []
        self._thread.start()

    def start(
        self, replica: FakeReplica, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> FakeReplica:
        """Let a replica listen, with TLS if there is a context; sets its URL."""

        async def listen() -> asyncio.Server:
            return await asyncio.start_server(replica.serve, "127.0.0.1", port, ssl=tls)

        server = asyncio.run_coroutine_threadsafe(listen(), self.loop).result(10)
        self._servers.append(server)
        scheme = "http" if tls is None else "https"
        replica.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return replica

    def close(self) -> None:
        """End all replicas, and the thread."""

        async def end() -> None:
            for server in self._servers:
                server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class LiveRouter:
    """A router that runs in a thread."""

    def __init__(self, router: Router, thread: ServerThread) -> None:
        """Hold a router, and the thread in which it runs."""
        self.url, self.router, self._thread = f"http://127.0.0.1:{thread.port}", router, thread

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which it runs."""
        return self._thread.loop

    def abort(self) -> None:
        """Cut off all requests, as a second signal does."""
        self._thread.call(self.router.abort)


@contextmanager
def live_router(
    *urls: str,
    records: Records | None = None,
    shared_records: SharedRecords | None = None,
    **options: Any,
) -> Iterator[LiveRouter]:
    """Yield a running router before the servers at `urls`."""
    options = {"drain_s": 1.0, "wait_s": 1.0, **options}
    router = Router(RouteOptions(replicas=urls, **options), records, shared_records)
    with closing(router), closing(ServerThread(build_app(router), router)) as thread:
        yield LiveRouter(router, thread)
