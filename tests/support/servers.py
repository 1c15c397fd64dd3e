"""Real servers on free loopback ports, in a thread of the test's process."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from support.engines import tiny_client
from support.openapi_checks import CheckedClient, Description
from support.server_thread import ServerThread
from support.waiting import wait_for
from twostroke.core.frozen import Frozen
from twostroke.engine.process.served import LocalEngine
from twostroke.lab.planner.endpoint import Plans
from twostroke.server.app import Api
from twostroke.server.middleware import build_app
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from support.engines import Backend
    from twostroke.engine.client import Client
    from twostroke.engine.loop import EngineLoop
    from twostroke.server.storage import Records


class LiveServer(Frozen):
    """A running server, with its engine and its API."""

    url: str
    port: int
    api: Api
    client: Client
    backend: Backend
    http: httpx.Client
    thread: ServerThread

    def abort(self) -> None:
        """Cut off all running answers, as a second signal does."""
        self.thread.call(self.api.abort)

    def chat(self, **fields: Any) -> httpx.Response:
        """Post a chat request of one short message, and `fields`."""
        return self.http.post("/v1/chat/completions", json=chat_body(**fields))

    def complete(self, **fields: Any) -> httpx.Response:
        """Post a completion request of one short prompt, and `fields`."""
        return self.http.post("/v1/completions", json={"prompt": "hello", **fields})

    def connect(self) -> socket.socket:
        """Return a TCP connection to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    @property
    def num_busy(self) -> int:
        """The number of answers that the engine still has to deliver."""
        return len(self.client.loop._listeners)

    def wait_idle(self) -> None:
        """Wait until the engine has no requests and no page is held."""
        loop = self.client.loop
        wait_for(lambda: self.num_busy == 0)
        wait_for(lambda: num_unfinished(loop) == 0)
        assert loop.snapshot().scheduler.num_referenced_pages == 0
        wait_for(lambda: self.api.num_running == 0)


def num_unfinished(loop: EngineLoop) -> int:
    """Return how many requests run or wait."""
    stats = loop.snapshot().scheduler
    return stats.num_running + stats.num_waiting


@contextmanager
def live_server(
    folder: Path,
    options: ServeOptions | None = None,
    *,
    records: Records | None = None,
    coalesces: bool = False,
    **engine: Any,
) -> Iterator[LiveServer]:
    """Yield a server of a tiny model; `engine` goes to `tiny_client`.

    Equal requests in flight are computed each by itself, unless `coalesces` is set: tests send
    equal requests to make load.
    """
    options = replace(options or ServeOptions(drain_s=1), coalesces=coalesces)
    with tiny_client(folder, **engine) as (client, backend), ExitStack() as stack:
        local_engine = stack.enter_context(closing(LocalEngine(client)))
        api = Api(local_engine, options, None, records, (Plans,))
        stack.callback(api.close)
        thread = stack.enter_context(closing(ServerThread(build_app(api), api)))
        port, url = thread.port, f"http://127.0.0.1:{thread.port}"
        http = CheckedClient(description_of(api), base_url=url, timeout=120, trust_env=False)
        stack.enter_context(http)
        stack.callback(backend.gate.set)
        yield LiveServer(url, port, api, client, backend, http, thread)


_DESCRIPTIONS: dict[str, Description] = {}


def description_of(api: Api) -> Description:
    """Return the checked OpenAPI document of a server.

    Servers with equal facts share one, since making it takes a while.
    """
    paths = sorted(route.path for route in api.routes())
    facts = repr((api.facts(), paths))
    if facts not in _DESCRIPTIONS:
        _DESCRIPTIONS[facts] = Description(api.description())
    return _DESCRIPTIONS[facts]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], **fields}


def post_bytes(path: str, body: object, *, headers: str = "") -> bytes:
    """Return a whole HTTP request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def read_all(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection; then close it, too."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    connection.close()
    return received


def events(text: str) -> list[Any]:
    """Return the data of a stream's events; the last is "[DONE]"."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts if not part.startswith(":"))
    results = [part.removeprefix("data: ") for part in parts if not part.startswith(":")]
    assert results[-1] == "[DONE]"
    return [json.loads(part) for part in results[:-1]] + ["[DONE]"]
