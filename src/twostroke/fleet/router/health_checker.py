"""Asks replicas how they are, ejects those that do not answer, and finds new ones by DNS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping  # noqa: TC003 - msgspec reads it
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from twostroke.core.cancellation import wait_until_set
from twostroke.core.errors import UsageError
from twostroke.core.files import read_regular_file
from twostroke.core.frozen import Frozen
from twostroke.fleet.router.replica_registry import ReplicaFacts, ReplicaState
from twostroke.fleet.router.response import CutOffError, ReplicaError
from twostroke.fleet.router.upstream import Address, is_name, request_head
from twostroke.fleet.routing.prompt import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twostroke.fleet.router.replica_registry import Replica, ReplicaRegistry
    from twostroke.fleet.router.upstream import UpstreamConnection

_EVERY_S: Final = 0.5
_PER_REPLICA_S: Final = 0.004  # so that a thousand take a fraction of a core
_ANSWER_S: Final = 2.0
_CUT_OFF_S: Final = 0.5  # of silence: one connection that is cut off need not be all
_DISCOVER_S: Final = 2.0
_MOST_BYTES: Final = 1 << 20
_MOST_TEXT: Final = 300
_logger = logging.getLogger("twostroke.router")


class HealthChecker:
    """Looks after the replicas of a fleet while a router runs."""

    def __init__(self, fleet: ReplicaRegistry) -> None:
        """Look after `fleet`, whose options name the replicas."""
        self._fleet = fleet
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._finding: list[asyncio.Task[None]] = []
        self._name = _split(fleet.options.discover) if fleet.options.discover else None
        self._listing, self._misses_name = fleet.options.listing, False
        # Which servers there are, by who says so.
        self._known = {"options": {Address.of(url).url for url in fleet.options.replicas}}
        if self._listing is not None:
            self._known["file"] = _listed(self._listing)

    async def start(self) -> None:
        """Begin, and give the replicas a moment to answer."""
        self._take_in()
        if self._name is not None:
            await self._find(*self._name)
            self._finding.append(asyncio.create_task(self._discover(*self._name)))
        if self._listing is not None:
            self._finding.append(asyncio.create_task(self._reread(self._listing)))
        asked = [one.was_asked.wait() for one in self._fleet.replicas.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await asyncio.gather(*asked)

    async def stop(self) -> None:
        """Stop looking."""
        tasks = [*self._tasks.values(), *self._finding]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self._fleet.replicas.values():
            replica.close()

    def _follow(self, replica: Replica) -> None:
        if replica.url not in self._tasks:
            self._tasks[replica.url] = asyncio.create_task(self._look_after(replica))

    async def _look_after(self, replica: Replica) -> None:
        """Ask a replica again and again, until it is neither listed nor busy nor there."""
        fleet = self._fleet
        replica.pool.has_heard()
        while True:
            replica.look.clear()
            await self._look(replica)
            replica.was_asked.set()
            is_over = not fleet.dispatcher.num_open(replica.place)
            if not replica.is_listed and is_over:
                _logger.info("Replica %s has left.", replica.url)
                fleet.drop(replica)
                del self._tasks[replica.url]
                return
            pause_s = max(_EVERY_S, _PER_REPLICA_S * len(fleet.replicas))
            await wait_until_set(replica.look, pause_s)

    async def _look(self, replica: Replica) -> None:
        """Ask a replica once, and note what follows."""
        fleet, pool = self._fleet, replica.pool
        try:
            async with asyncio.timeout(_ANSWER_S):
                state, reason, facts = await self._ask(replica)
        except TimeoutError:
            silent_s = asyncio.get_running_loop().time() - pool.heard_s
            if silent_s < _ANSWER_S:  # it sends answers, but not this one
                return
            reason = f"It has been silent for {silent_s:.0f} s."
            fleet.set(replica, ReplicaState.DOWN, reason)
            if silent_s >= fleet.options.eject_s - _EVERY_S:
                pool.fail(ReplicaError(f"{replica.url} has been silent for {silent_s:.0f} s."))
        except ReplicaError as error:
            fleet.set(replica, ReplicaState.DOWN, str(error))
            silent_s = asyncio.get_running_loop().time() - pool.heard_s
            if isinstance(error, CutOffError) and silent_s >= _CUT_OFF_S:
                pool.fail(error)
        else:
            if facts is not None:
                if state is ReplicaState.READY and (why := fleet.stranger(replica, facts)):
                    state, reason = ReplicaState.REFUSED, why
                fleet.learn(replica, facts)
            fleet.set(replica, state, reason)

    async def _ask(self, replica: Replica) -> tuple[ReplicaState, str, ReplicaFacts | None]:
        """Return how a replica says that it is, why, and what it is."""
        key = self._fleet.options.replica_key
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        if not replica.is_foreign:
            status, body = await _probe(replica, "/api/load", headers)
            is_itself = self._fleet.mark.encode() in body  # requests would go round in circles
            if status == 401 or is_itself:
                why = "It is this router itself." if is_itself else _wants_key(key)
                return ReplicaState.REFUSED if is_itself else ReplicaState.DOWN, why, None
            replica.is_foreign = status == 404
            if status == 200 and (said := _load(body)) is not None:
                return self._take(replica, said)
        status, body = await _probe(replica, "/health", headers)
        state = _status(body)
        if state == "draining":
            return ReplicaState.DRAINING, "It is stopping.", None
        if status >= 400 and status != 404:  # 404: a server without it
            why = f" ({state})." if state else f": {text}" if (text := _message(body)) else "."
            return ReplicaState.DOWN, f"It says {status}{why}", None
        if replica.facts.models and replica.state is ReplicaState.READY:
            return ReplicaState.READY, "", replica.facts
        status, body = await _probe(replica, "/v1/models", headers)
        if status == 401:
            return ReplicaState.DOWN, _wants_key(key), None
        models = _models(body) if status == 200 else ()
        if not models:
            return (
                ReplicaState.DOWN,
                f"It is not a server of models: /v1/models gives {status}.",
                None,
            )
        return ReplicaState.READY, "", ReplicaFacts(models, context_length=_context_length(body))

    def _take(self, replica: Replica, said: ServerLoad) -> tuple[ReplicaState, str, ReplicaFacts]:
        """Take in what a server of ours says of its queue and its cache."""
        facts = ReplicaFacts(
            said.models,
            said.epoch,
            said.version,
            said.numerics,
            said.context_length,
            said.keeps_files,
            said.takes_any_name,
            said.numerics_by_model,
        )
        replica.num_prompt_tokens, replica.num_cached_tokens = (
            said.prompt_tokens,
            said.cached_tokens,
        )
        replica.work_s, replica.horizon_s = said.work_s, said.horizon_s
        replica.prefill_per_decode = said.prefill_per_decode
        self._fleet.note_trust(replica, trusts_router=said.trusts_sender is not False)
        if said.epoch == replica.facts.epoch:
            self._fleet.dispatcher.report(replica.place, said.work_s, said.horizon_s)
        if said.status == "draining":
            return ReplicaState.DRAINING, "It is stopping.", facts
        if said.status != "ok":
            return ReplicaState.DOWN, f"It says that its engine is {said.status}.", facts
        return ReplicaState.READY, "", facts

    async def _discover(self, name: str, port: int) -> None:
        while True:
            await asyncio.sleep(_DISCOVER_S)
            await self._find(name, port)

    async def _find(self, name: str, port: int) -> None:
        """Take in the addresses of a name, and let go those that it has no more."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError as error:  # a name server that fails must not empty the fleet
            if not self._misses_name:
                why = error.strerror or str(error)
                _logger.warning("The name %s has no address now: %s.", name, why)
            self._misses_name = True
            return
        self._misses_name = False
        self._known["name"] = {f"http://{_host(one[4][0])}:{port}" for one in found}
        self._take_in()

    async def _reread(self, path: Path) -> None:
        """Follow the changes of a file; one that cannot be read must not empty the fleet."""
        said = ""
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                urls = await asyncio.to_thread(_listed, path)
            except UsageError as error:
                if str(error) != said:
                    said = str(error)
                    _logger.warning("%s The replicas stay as they are.", said)
                continue
            said = ""
            if urls != self._known["file"]:
                self._known["file"] = urls
                self._take_in()

    def _take_in(self) -> None:
        """Follow all servers that are known, and let go those that nobody names any more."""
        fleet, urls = self._fleet, set[str]().union(*self._known.values())
        for url in sorted(urls - set(fleet.replicas)):
            self._follow(fleet.add(Address.of(url)))
        for url, replica in fleet.replicas.items():
            is_listed = url in urls
            if is_listed is not replica.is_listed:
                replica.is_listed = is_listed
                replica.look.set()


Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # that sums of them can be counted in


class ServerLoad(Frozen):
    """What `GET /api/load` of a server of ours says."""

    status: str
    epoch: str
    models: tuple[str, ...]
    version: str
    numerics: str
    work_s: Seconds
    prompt_tokens: int
    cached_tokens: int
    horizon_s: Seconds | None
    context_length: int = 0
    prefill_per_decode: float | None = None
    keeps_files: bool | None = None  # older versions do not say it, nor the next
    trusts_sender: bool | None = None
    takes_any_name: bool | None = None
    numerics_by_model: Mapping[str, str] = {}


async def fetch(
    replica: Replica, path: str, headers: Sequence[tuple[bytes, bytes]]
) -> tuple[int, bytes]:
    """Return status and body of a GET; raises ReplicaError."""
    connection = await replica.pool.take()
    try:
        return await _exchange(connection, replica, path, headers)
    finally:
        connection.release()


async def fetch_status(replica: Replica, path: str, headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Return the status of a GET, whose body may be of any length; raises ReplicaError."""
    connection = await replica.pool.take()
    try:
        connection.send(request_head(replica.address, "GET", path.encode(), headers, None))
        return (await connection.head()).status
    finally:
        connection.release()


async def _probe(
    replica: Replica, path: str, headers: Sequence[tuple[bytes, bytes]]
) -> tuple[int, bytes]:
    """Do as `fetch`, on a connection that is kept: one that is cut off is found out soonest."""
    probe = replica.probe
    if probe is None or not probe.is_usable:
        probe = replica.probe = await replica.pool.take(is_fresh=True)
    try:
        return await _exchange(probe, replica, path, headers)
    finally:
        if not probe.is_over:
            probe.close()


async def _exchange(
    connection: UpstreamConnection,
    replica: Replica,
    path: str,
    headers: Sequence[tuple[bytes, bytes]],
) -> tuple[int, bytes]:
    connection.send(request_head(replica.address, "GET", path.encode(), headers, None))
    head = await connection.head()
    body = bytearray()
    while data := await connection.read():
        body += data
        if len(body) > _MOST_BYTES:
            raise ReplicaError(f"{replica.url}{path} is larger than {_MOST_BYTES} bytes.")
    return head.status, bytes(body)


_loads: Final = msgspec.json.Decoder(ServerLoad)


def _wants_key(shown: str | None) -> str:
    if shown is None:
        return "It wants a key: give it and the router the same TWOSTROKE_REPLICA_KEY."
    return "It does not accept the router's TWOSTROKE_REPLICA_KEY: give it the same one."


def _load(body: bytes) -> ServerLoad | None:
    try:
        return _loads.decode(body)
    except UNREADABLE:
        return None


def _status(body: bytes) -> str:
    found = decoded(body)
    status = found.get("status")
    return status if isinstance(status, str) else ""


def _message(body: bytes) -> str:
    """Return the sentence of an error of OpenAI's form; empty if it is none."""
    error = decoded(body).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return message[:_MOST_TEXT] if isinstance(message, str) else ""


def _models(body: bytes) -> tuple[str, ...]:
    names = [row.get("id") for row in rows(body)]
    return tuple(sorted({name for name in names if isinstance(name, str)}))


def _context_length(body: bytes) -> int:
    """Return the longest context that the rows of models say, as vLLM's and llama-server's do."""
    meta = [row["meta"] for row in rows(body) if isinstance(row.get("meta"), dict)]
    given = [row.get("max_model_len") for row in rows(body)] + [one.get("n_ctx") for one in meta]
    return max((one for one in given if isinstance(one, int) and one > 0), default=0)


def rows(body: bytes) -> list[dict[str, Any]]:
    """Return the objects in `data` of a list; none of what is not one."""
    data = decoded(body).get("data")
    return [row for row in data if isinstance(row, dict)] if isinstance(data, list) else []


def decoded(body: bytes) -> dict[str, Any]:
    """Return an object of JSON; an empty one for anything else."""
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return {}
    return found if isinstance(found, dict) else {}


def _listed(path: Path) -> set[str]:
    """Return the URLs in a file, without comments; raises UsageError."""
    try:
        lines = read_regular_file(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"The replicas in {path} cannot be read: {why}.") from None
    urls = set[str]()
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            try:
                urls.add(Address.of(line).url)
            except UsageError:
                raise UsageError(
                    f"{path}, line {number}: '{line}' is not a server's URL."
                ) from None
    return urls


def _host(address: str | int) -> str:
    return f"[{address}]" if ":" in str(address) else str(address)


def _split(text: str) -> tuple[str, int]:
    """Return a name and its port; raises UsageError."""
    name, _, port = text.removeprefix("http://").rpartition(":")
    name = name.strip("[]")
    if not is_name(name) or not port.isdecimal() or not 0 < int(port) < 65536:
        reason = "must be a DNS name and a port, such as replicas.local:8000, got {value}."
        raise UsageError(reason, field="discover", value=repr(text))
    return name, int(port)
