"""Floods a server with the most expensive bodies of each path, and measures what others notice."""

from __future__ import annotations

import asyncio
import re
import resource
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec

from support.flood_bodies import CostlyBodies
from support.servers import post_bytes
from support.waiting import wait_for
from twostroke.lab.planner.endpoint import Plans
from twostroke.server.http.body_limits import MAX_CONTAINERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.flood_bodies import Body
    from support.servers import LiveServer

KEYS: Final = {"k": "anna", "other": "ben"}
MESSAGES: Final = [{"role": "user", "content": "a"}]
# The fields that each path with a body of JSON needs.
NEEDED: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/responses/compact": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES},
    "/completion": {"prompt": "a", "n_predict": 1},
    "/infill": {"input_prefix": "a", "input_suffix": "", "n_predict": 1},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 1}},
    "/api/show": {"model": "tiny"},
    "/api/pull": {"model": "tiny"},
    "/v1/embeddings": {"input": "a"},
    "/embeddings": {"content": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": MESSAGES},
    "/v1/conversations": {},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": []},
    "/v1/chat/completions/{completion_id}": {"metadata": {}},
    "/v1/uploads": {"purpose": "batch", "filename": "a", "bytes": 5, "mime_type": "text/plain"},
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["a"]},
    "/v1/batches": {"input_file_id": "a", "endpoint": "/v1/completions", "completion_window": "1h"},
    "/v1/messages/batches": {"requests": []},
    "/api/plan": {"device": "L4"},
}
FORMS: Final = ("/v1/files", "/v1/uploads/{upload_id}/parts")
# Paths whose requests have no body that is read: what they compute does not depend on one.
BODILESS: Final = frozenset(
    (
        *("/", "/page/{name:path}", "/openapi.json", "/metrics", "/api/state", "/api/load"),
        "/api/prompts",
        *("/health", "/health/live", "/health/ready", "/health/progress"),
        *("/props", "/slots", "/lora-adapters", "/tokenizer_info"),
        *("/v1/models", "/v1/models/{model:path}", "/api/tags", "/api/ps", "/api/version"),
        *("/api/create", "/api/copy", "/api/push", "/api/delete", "/api/blobs/{digest}"),
        *("/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"),
        "/v1/responses/{response_id}/cancel",
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "/v1/chat/completions/{completion_id}/messages",
        *("/v1/files/{file_id}", "/v1/files/{file_id}/content"),
        *("/v1/uploads/{upload_id}", "/v1/uploads/{upload_id}/cancel"),
        *("/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"),
        *("/v1/messages/batches/{batch_id}", "/v1/messages/batches/{batch_id}/cancel"),
        "/v1/messages/batches/{batch_id}/results",
    )
)
_QUERY: Final = "after=zzzz&limit=9999999999&order=asc&metadata[a]=b&past&model="
_QUERY_BYTES: Final = 30_000  # a server takes headers of 32 KiB
_NUM_ABANDONED: Final = 3
_MOST_HELD: Final = 6  # units in which nobody else is served
_MOST_WAITED: Final = 16  # units of work that another tenant's small request waits for
_RESERVE_BYTES: Final = 96 << 20
_BYTES_FOR_EACH: Final = 12  # of memory, for each byte that was sent


class Pulse:
    """Measures how long an event loop is busy between two callbacks, in processor time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to measure."""
        self.held_s = 0.0
        self._task = asyncio.run_coroutine_threadsafe(self._look(), loop)

    def close(self) -> None:
        """Stop measuring."""
        self._task.cancel()

    async def _look(self) -> None:
        before_s = time.process_time()
        while True:
            await asyncio.sleep(0.002)
            now_s = time.process_time()
            self.held_s, before_s = max(self.held_s, now_s - before_s), now_s


def unit_s() -> float:
    """Return the processor time of the longest step that a server performs at once by design."""
    body, times_s = b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"1]", []
    for _ in range(3):
        began_s = time.thread_time()
        msgspec.json.decode(body)
        times_s.append(time.thread_time() - began_s)
    return max(*times_s, 0.02)


class Cost:
    """The cost of one request; `status` is 0 if the connection was closed without an answer."""

    def __init__(self, status: int, text: str, held_s: float, used_s: float, more_bytes: int):
        """Record the response and the measured costs of a request."""
        self.status, self.text, self.held_s, self.used_s = status, text, held_s, used_s
        self.more_bytes = more_bytes


class Flood:
    """Sends expensive requests to a server, as the tenant anna."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop, document: dict[str, Any]) -> None:
        """Send to a URL whose server runs in `loop`; `document` describes the paths."""
        self.num_competed = 0  # checks of turns that could be judged
        self._document, self._unit_s = document, unit_s()
        self._pulse = Pulse(loop)
        headers = {"authorization": "Bearer k"}
        self._http = httpx.Client(base_url=url, timeout=120, trust_env=False, headers=headers)
        self.wrong: list[str] = []
        self.costs: list[tuple[float, float, str, Body]] = []  # used, held, path

    def close(self) -> None:
        """Close connections."""
        self._pulse.close()
        self._http.close()

    def send(self, path: str, *, num_bytes: int, max_bodies: int, seed: int = 0) -> None:
        """Send up to `max_bodies` bodies to a path, one after another; record each fault."""
        bodies = CostlyBodies(self._document, num_bytes)
        for body in bodies.of(path, NEEDED.get(path, {}), max_bodies=max_bodies, seed=seed):
            self.send_body(path, body)

    def send_body(self, path: str, body: Body) -> None:
        """Send one body to a path, and record faults."""
        cost = self._cost_of("POST", url_of(path), body.data, body.media_type)
        self.costs.append((cost.used_s, cost.held_s, path, body))
        self._check(f"{path}, {body.label}, {len(body.data)} bytes", cost, len(body.data))

    def send_request(self, method: str, path: str) -> None:
        """Send a request without a body, with as long a query as a server takes."""
        query = _QUERY + "z" * (_QUERY_BYTES - len(_QUERY))
        self._check(f"{method} {path}", self._cost_of(method, f"{url_of(path)}?{query}"), 0)

    def _cost_of(self, method: str, url: str, body: bytes = b"", media_type: str = "") -> Cost:
        self._pulse.held_s = 0.0
        before = _reset_peak()
        began_s = time.process_time()
        headers = {"content-type": media_type} if media_type else {}
        try:
            answer = self._http.request(method, url, content=body, headers=headers)
            status, text = answer.status_code, answer.text
        except httpx.HTTPError as error:
            status, text = 0, repr(error)
        time.sleep(0.004)  # so that the pulse has looked
        used_s = time.process_time() - began_s
        return Cost(status, text, self._pulse.held_s, used_s, _peak() - before)

    def _check(self, label: str, cost: Cost, num_bytes: int) -> None:
        if cost.status == 0 or (cost.status >= 500 and cost.status != 501):
            self.wrong.append(f"{label}: {cost.status} {cost.text[:200]}")
        if cost.held_s > (most_s := _MOST_HELD * self._unit_s):
            held_text = f"{cost.held_s:.3f} processor seconds"
            self.wrong.append(f"{label}: nobody else was served for {held_text}, not {most_s:.3f}")
        if cost.more_bytes > (most_bytes := _RESERVE_BYTES + _BYTES_FOR_EACH * num_bytes):
            self.wrong.append(f"{label}: {cost.more_bytes >> 20} MiB, not {most_bytes >> 20}")

    def costliest(self, path: str) -> Body:
        """Return the body of a path that took the most processor time."""
        return max((cost for cost in self.costs if cost[2] == path), key=lambda cost: cost[:2])[3]

    def abandon(self, server: LiveServer, path: str, body: Body) -> None:
        """Send a body several times and disconnect; check that no other tenant waited for it."""
        label, single_s = f"{path}, {body.label}, abandoned", self._single_s(path, body)
        (plans,) = server.api._extensions
        assert isinstance(plans, Plans)
        lines = (server.api._readers._queue, plans._thread._queue)
        headers = "Authorization: Bearer k\r\n"
        data = post_bytes(url_of(path), body.data, headers=headers)
        if body.media_type != "application/json":
            data = data.replace(b"application/json", body.media_type.encode(), 1)
        connections = [server.connect() for _ in range(_NUM_ABANDONED)]
        with self._stream(server) as gaps_s:
            for connection in connections:
                connection.sendall(data)
            other = {"authorization": "Bearer other"}
            with httpx.Client(base_url=server.url, headers=other, timeout=120) as http:
                waits_s = [_wait_s(http, small) for small in ("/tokenize", "/apply-template", path)]
            for connection in connections:
                connection.close()
            left_s = time.process_time()
            wait_for(lambda: all(line._free == line._max_slots for line in lines), 120)
            rest_s = time.process_time() - left_s
        most_s = _MOST_WAITED * self._unit_s
        for name, waited_s in (("a small request", max(waits_s)), ("a stream", max(gaps_s))):
            if waited_s > most_s:
                waited = f"{waited_s:.3f} processor seconds"
                self.wrong.append(
                    f"{label}: {name} of another waited for {waited}, not {most_s:.3f}"
                )
        if rest_s > 1.5 * single_s + most_s:  # the one that was begun, and not the others
            self.wrong.append(f"{label}: {rest_s:.3f} processor seconds after its clients had left")

    def _single_s(self, path: str, body: Body) -> float:
        return next(
            used for used, _, where, cost_body in self.costs if where == path and cost_body is body
        )

    @contextmanager
    def _stream(self, server: LiveServer) -> Iterator[list[float]]:
        """Run a stream of the tenant ben; yield the processor time between its chunks."""
        gaps_s, is_over, has_begun = [0.0], threading.Event(), threading.Event()

        def read() -> None:
            headers = {"authorization": "Bearer other"}
            body = {"prompt": "a", "max_tokens": 480, "stream": True, "ignore_eos": True}
            with httpx.Client(base_url=server.url, headers=headers, timeout=120) as http:
                while not is_over.is_set():
                    with http.stream("POST", "/v1/completions", json=body) as answer:
                        before_s = None
                        for _ in answer.iter_raw():
                            now_s = time.process_time()
                            gaps_s.append(0.0 if before_s is None else now_s - before_s)
                            before_s = now_s
                            has_begun.set()
                            if is_over.is_set():
                                break

        thread = threading.Thread(target=read)
        thread.start()
        try:
            assert has_begun.wait(30)
            yield gaps_s
        finally:
            is_over.set()
            thread.join(60)

    def take_turns(self, server: LiveServer, path: str, body: Body, num_sent: int = 4) -> None:
        """Check that one request of a tenant does not wait for all requests of another tenant.

        It is only judged if two requests of the other tenant still wait when it has arrived. Where
        a body takes longer to send than to be refused, that never happens.
        """
        ends: list[str] = []
        turns = server.api._readers._queue

        def post(key: str) -> None:
            headers = {"authorization": f"Bearer {key}", "content-type": body.media_type}
            url = f"{server.url}{url_of(path)}"
            httpx.post(url, content=body.data, headers=headers, timeout=300, trust_env=False)
            ends.append(KEYS[key])

        threads = [threading.Thread(target=post, args=("k",)) for _ in range(num_sent)]
        for thread in threads:
            thread.start()
        wait_for(lambda: turns.num_waiting("anna") >= 2 or len(ends) > 1, 60)
        threads.append(threading.Thread(target=post, args=("other",)))
        threads[-1].start()
        has_competed = False
        while threads[-1].is_alive():
            has_arrived = turns._num_slots[False, "ben"] + turns.num_waiting("ben") > 0
            has_competed |= has_arrived and turns.num_waiting("anna") >= 2
            time.sleep(0.0005)
        for thread in threads:
            thread.join(300)
        self.num_competed += has_competed
        if has_competed and ends.index("ben") == num_sent:
            self.wrong.append(f"{path}, {body.label}: ben waited for all {num_sent} of anna's")


def url_of(path: str) -> str:
    """Return a path whose parameters have a value."""
    return re.sub(r"\{\w+(:path)?\}", "x", path)


def _wait_s(http: httpx.Client, path: str) -> float:
    """Return the processor time while a small request waits for its answer."""
    began_s = time.process_time()
    if path in FORMS:
        http.get("/v1/files")
    else:
        http.post(url_of(path), json=NEEDED[path])
    return time.process_time() - began_s


def _reset_peak() -> int:
    """Reset the process's peak memory; return its present memory in bytes."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    match = re.search(r"VmHWM:\s+(\d+)", status.read_text())
    return int(match[1]) * 1024 if match is not None else 0
