"""Checks the health of replicas, ejects silent replicas, and finds new ones by DNS or in a file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from twostroke.core.cancellation import wait_until_set
from twostroke.core.errors import UsageError
from twostroke.core.files import read_regular_file
from twostroke.core.message_text import masked_url
from twostroke.fleet.cluster.router_link import read_listed_models
from twostroke.fleet.router.replica_registry import ReplicaFacts, ReplicaState
from twostroke.fleet.router.response import CutOffError, ReplicaError
from twostroke.fleet.router.silence import SilenceTimer
from twostroke.fleet.router.upstream import Address, is_host_name, request_head
from twostroke.fleet.routing.prompt import JSON_ERRORS
from twostroke.server.http.router_messages import ServerLoad

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twostroke.fleet.router.replica_registry import Replica, ReplicaRegistry
    from twostroke.fleet.router.upstream import UpstreamConnection

_MIN_INTERVAL_S: Final = 0.5  # between two checks of a replica
_START_INTERVAL_S: Final = 0.1  # if it is not ready, and requests wait for their model's start
_INTERVAL_PER_REPLICA_S: Final = 0.004  # so that 1,000 replicas take a fraction of a core
_TIMEOUT_S: Final = 2.0
_CUT_OFF_S: Final = 0.5  # of silence after which a host is cut off, not just one connection
_DISCOVER_INTERVAL_S: Final = 2.0
_MAX_BODY_BYTES: Final = 1 << 20
_MAX_MESSAGE_LENGTH: Final = 300
_logger = logging.getLogger("twostroke.router")


class HealthChecker:
    """Checks the health of a router's replicas, adds newly listed replicas, and removes others."""

    def __init__(self, fleet: ReplicaRegistry) -> None:
        """Prepare to check the replicas of `fleet`; its options name URLs, a DNS name or a file.

        Raises:
            UsageError: a URL, the DNS name or the file of replicas is wrong.
        """
        options = fleet.options
        self._fleet = fleet
        self._check_tasks: dict[str, asyncio.Task[None]] = {}
        self._discovery_tasks: list[asyncio.Task[None]] = []
        self._dns_name = _split_name(options.discover) if options.discover else None
        self._listing = options.listing
        self._dns_is_failing = False
        self._urls_by_source = {"options": {Address.of(url).url for url in options.replicas}}
        if self._listing is not None:
            self._urls_by_source["file"] = _read_listing(self._listing)
            if not self._urls_by_source["file"]:
                _logger.warning("%s names no server yet.", self._listing)
        self._model_listing = options.model_listing
        if self._model_listing is not None:
            fleet.set_startable(read_listed_models(self._model_listing))

    async def start(self) -> None:
        """Start the health checks, and wait up to `_TIMEOUT_S` for the replicas' first answers."""
        self._update_replicas()
        if self._dns_name is not None:
            await self._look_up(*self._dns_name)
            self._discovery_tasks.append(asyncio.create_task(self._follow_dns(*self._dns_name)))
        if self._listing is not None:
            self._discovery_tasks.append(asyncio.create_task(self._follow_listing(self._listing)))
        if self._model_listing is not None:
            following = self._follow_models(self._model_listing)
            self._discovery_tasks.append(asyncio.create_task(following))
        first_checks = [replica.was_checked.wait() for replica in self._fleet.replicas.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                await asyncio.gather(*first_checks)

    async def stop(self) -> None:
        """Stop all health checks, and close idle connections to replicas."""
        running = (*self._check_tasks.values(), *self._discovery_tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(
            *self._check_tasks.values(), *self._discovery_tasks, return_exceptions=True
        )
        for replica in self._fleet.replicas.values():
            replica.close()

    async def _keep_checking(self, replica: Replica) -> None:
        """Check a replica's health regularly, until the replica is removed.

        A replica is removed when it is not listed any more and has no running requests.
        """
        fleet = self._fleet
        replica.pool.has_heard()
        silence = SilenceTimer(
            replica.pool,
            fleet.options.eject_s,
            on_silence=lambda: self._note_silence(replica, silence),
            on_ejection=lambda: self._eject(replica, silence),
        )
        try:
            while True:
                interval_s = max(_MIN_INTERVAL_S, _INTERVAL_PER_REPLICA_S * len(fleet.replicas))
                replica.check_now.clear()
                silence.start(interval_s)
                await self._check(replica, silence)
                replica.was_checked.set()
                if not replica.is_listed and not fleet.dispatcher.num_open(replica.index):
                    _logger.info("Replica %s has left.", replica.url)
                    fleet.remove(replica)
                    del self._check_tasks[replica.url]
                    return
                if replica.state is not ReplicaState.READY and fleet.starts.num_waiting:
                    interval_s = _START_INTERVAL_S
                await wait_until_set(replica.check_now, interval_s)
        finally:
            silence.stop()

    async def _check(self, replica: Replica, silence: SilenceTimer) -> None:
        """Check a replica's health once, and set its state and facts.

        `silence` is the replica's timer; an answer stops it.
        """
        fleet, pool = self._fleet, replica.pool
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                state, reason, facts = await self._ask(replica)
        except TimeoutError:
            if silence.is_silent:  # else it sends other answers
                fleet.set_state(replica, ReplicaState.DOWN, _silence_reason(silence))
        except ReplicaError as error:
            fleet.set_state(replica, ReplicaState.DOWN, str(error))
            if not isinstance(error, CutOffError):  # a refusal is no silence
                silence.stop()
            elif silence.silent_s >= _CUT_OFF_S:
                pool.fail(error)
        else:
            silence.stop()
            if facts is not None:
                if state is ReplicaState.READY:
                    disagreement = fleet.disagreement(replica, facts)
                    if disagreement:
                        state, reason = ReplicaState.REFUSED, disagreement
                fleet.set_facts(replica, facts)
            fleet.set_state(replica, state, reason)

    def _note_silence(self, replica: Replica, silence: SilenceTimer) -> None:
        """Mark a silent replica as down, so that it gets no more requests."""
        if replica.state is not ReplicaState.DOWN:
            self._fleet.set_state(replica, ReplicaState.DOWN, _silence_reason(silence))

    def _eject(self, replica: Replica, silence: SilenceTimer) -> None:
        """Fail the running requests of a silent replica, so that other replicas get them."""
        replica.pool.fail(
            ReplicaError(f"{replica.url} has been silent for {silence.silent_s:.0f} s.")
        )

    async def _ask(self, replica: Replica) -> tuple[ReplicaState, str, ReplicaFacts | None]:
        """Ask a replica for its health over HTTP.

        Returns:
            The state, the reason if it is not ready, and the replica's facts; None if unknown.
        """
        key = self._fleet.options.replica_key
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        if not replica.is_foreign:
            status, body = await _probe(replica, "/api/load", headers)
            if self._fleet.router_id.encode() in body:  # requests would go round in circles
                return ReplicaState.REFUSED, "It is this router itself.", None
            if status == 401:
                return ReplicaState.DOWN, _key_hint(key), None
            replica.is_foreign = status == 404
            if status == 200 and (load := _decode_load(body)) is not None:
                return self._apply_load(replica, load)
        is_foreign = replica.is_foreign
        answer = await self._ask_foreign(replica, headers)
        replica.is_foreign = is_foreign  # a slow answer may have counted as silence meanwhile
        return answer

    async def _ask_foreign(
        self, replica: Replica, headers: list[tuple[bytes, bytes]]
    ) -> tuple[ReplicaState, str, ReplicaFacts | None]:
        """Ask a server other than Twostroke for its health, on `/health` and `/v1/models`.

        Returns:
            The state, the reason if it is not ready, and the server's facts; None if unknown.
        """
        status, body = await _probe(replica, "/health", headers)
        reported_state = _status(body)
        if reported_state == "draining":
            return ReplicaState.DRAINING, "It is stopping.", None
        if status >= 400 and status != 404:  # 404: a server without /health
            message = _error_message(body)
            detail = f": {message}" if message else "."
            if reported_state:
                detail = f" ({reported_state})."
            return ReplicaState.DOWN, f"It says {status}{detail}", None
        if replica.facts.models and replica.state is ReplicaState.READY:
            return ReplicaState.READY, "", replica.facts
        status, body = await _probe(replica, "/v1/models", headers)
        if status == 401:
            return ReplicaState.DOWN, _key_hint(self._fleet.options.replica_key), None
        models = _models(body) if status == 200 else ()
        if not models:
            reason = f"It is not a server of models: /v1/models gives {status}."
            return ReplicaState.DOWN, reason, None
        return ReplicaState.READY, "", ReplicaFacts(models, context_length=_context_length(body))

    def _apply_load(
        self, replica: Replica, load: ServerLoad
    ) -> tuple[ReplicaState, str, ReplicaFacts]:
        """Apply a Twostroke server's report of its load.

        Returns:
            The replica's state, the reason if it is not ready, and its facts.
        """
        facts = ReplicaFacts(
            models=load.models,
            epoch=load.epoch,
            version=load.version,
            numerics=load.numerics,
            context_length=load.context_length,
            keeps_files=_value_if_sent(load.keeps_files),
            takes_any_name=_value_if_sent(load.takes_any_name),
            coalesces=_value_if_sent(load.coalesces),
            numerics_by_model=load.numerics_by_model,
        )
        replica.num_prompt_tokens = load.prompt_tokens
        replica.num_cached_tokens = load.cached_tokens
        replica.num_reported = load.running + load.waiting
        replica.work_s = load.work_s
        replica.horizon_s = load.horizon_s
        replica.prefill_per_decode = load.prefill_per_decode
        self._fleet.set_trust(replica, trusts_router=load.trusts_sender is not False)
        if load.epoch == replica.facts.epoch:
            self._fleet.dispatcher.report(
                replica.index, load.work_s, load.horizon_s, num_waiting=load.waiting
            )
        if load.status == "draining":
            return ReplicaState.DRAINING, "It is stopping.", facts
        if load.status != "ok":
            return ReplicaState.DOWN, f"It says that its engine is {load.status}.", facts
        return ReplicaState.READY, "", facts

    async def _follow_dns(self, name: str, port: int) -> None:
        while True:
            await asyncio.sleep(_DISCOVER_INTERVAL_S)
            await self._look_up(name, port)

    async def _look_up(self, name: str, port: int) -> None:
        """Update the list of replicas from the addresses of a DNS name."""
        loop = asyncio.get_running_loop()
        try:
            entries = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError as error:  # a name server that fails must not remove all replicas
            if not self._dns_is_failing:
                reason = error.strerror or str(error)
                _logger.warning("The name %s has no address now: %s.", name, reason)
            self._dns_is_failing = True
            return
        self._dns_is_failing = False
        hosts = {_url_host(socket_address[0]) for *_, socket_address in entries}
        self._urls_by_source["name"] = {f"http://{host}:{port}" for host in hosts}
        self._update_replicas()

    async def _follow_listing(self, path: Path) -> None:
        """Update the list of replicas when the file that names them changes.

        If the file cannot be read, the replicas stay.
        """
        last_warning = ""
        while True:
            await asyncio.sleep(_MIN_INTERVAL_S)
            try:
                urls = await asyncio.to_thread(_read_listing, path)
            except UsageError as error:
                if str(error) != last_warning:
                    last_warning = str(error)
                    _logger.warning("%s The replicas stay as they are.", last_warning)
                continue
            last_warning = ""
            if urls != self._urls_by_source["file"]:
                self._urls_by_source["file"] = urls
                self._update_replicas()

    async def _follow_models(self, path: Path) -> None:
        """Update the models that may have no replica when the file that names them changes.

        If the file cannot be read, the models stay.
        """
        last_warning, last_models = "", read_listed_models(path)
        while True:
            await asyncio.sleep(_MIN_INTERVAL_S)
            try:
                models = await asyncio.to_thread(read_listed_models, path)
            except UsageError as error:
                if str(error) != last_warning:
                    last_warning = str(error)
                    _logger.warning("%s The models stay as they are.", last_warning)
                continue
            last_warning = ""
            if models != last_models:
                last_models = models
                self._fleet.set_startable(models)

    def _update_replicas(self) -> None:
        """Add newly listed servers as replicas, and mark replicas that are not listed any more."""
        fleet = self._fleet
        urls = set[str]().union(*self._urls_by_source.values())
        for url in sorted(urls - set(fleet.replicas)):
            replica = fleet.add(Address.of(url))
            if url not in self._check_tasks:
                self._check_tasks[url] = asyncio.create_task(self._keep_checking(replica))
        for url, replica in fleet.replicas.items():
            is_listed = url in urls
            if is_listed is not replica.is_listed:
                replica.is_listed = is_listed
                replica.check_now.set()


def _silence_reason(silence: SilenceTimer) -> str:
    return f"It has been silent for {silence.silent_s:.0f} s."


async def fetch(
    replica: Replica, path: str, headers: Sequence[tuple[bytes, bytes]]
) -> tuple[int, bytes]:
    """Send a GET request to a replica; return the status and the body. Raises ReplicaError."""
    connection = await replica.pool.take()
    try:
        return await _exchange(connection, replica, path, headers)
    finally:
        connection.release()


async def fetch_status(replica: Replica, path: str, headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Send a GET request to a replica; return the status only. Raises ReplicaError."""
    connection = await replica.pool.take()
    try:
        head = await connection.request(
            request_head(replica.address, "GET", path.encode(), headers, None)
        )
        return head.status
    finally:
        connection.release()


async def _probe(
    replica: Replica, path: str, headers: Sequence[tuple[bytes, bytes]]
) -> tuple[int, bytes]:
    """Send a GET request on the connection that a replica has for health checks only.

    Returns the status and the body. This connection is never idle for long, so it fails first if
    the replica's machine is cut off from the network.
    """
    probe = replica.probe
    if probe is None or not probe.is_usable:
        probe = replica.probe = await replica.pool.take(is_fresh=True)
    try:
        return await _exchange(probe, replica, path, headers)
    finally:
        if not probe.is_reusable:
            probe.close()


async def _exchange(
    connection: UpstreamConnection,
    replica: Replica,
    path: str,
    headers: Sequence[tuple[bytes, bytes]],
) -> tuple[int, bytes]:
    head = await connection.request(
        request_head(replica.address, "GET", path.encode(), headers, None)
    )
    body = bytearray()
    while data := await connection.read():
        body += data
        if len(body) > _MAX_BODY_BYTES:
            raise ReplicaError(f"{replica.url}{path} is larger than {_MAX_BODY_BYTES} bytes.")
    return head.status, bytes(body)


_load_decoder: Final = msgspec.json.Decoder(ServerLoad)


def _key_hint(key: str | None) -> str:
    """Return the reason why a replica that answers 401 is down: it expects another key.

    `key` is the router's key for replicas; None without a key.
    """
    if key is None:
        return "It wants a key: give it and the router the same TWOSTROKE_REPLICA_KEY."
    return "It does not accept the router's TWOSTROKE_REPLICA_KEY: give it the same one."


def _value_if_sent(value: bool | UnsetType) -> bool | None:  # noqa: FBT001 - a field's value
    """Return a field's value in a server's load; None if an older server has not sent the field."""
    return None if value is UNSET else value


def _decode_load(body: bytes) -> ServerLoad | None:
    try:
        return _load_decoder.decode(body)
    except JSON_ERRORS:
        return None


def _status(body: bytes) -> str:
    status = decode_object(body).get("status")
    return status if isinstance(status, str) else ""


def _error_message(body: bytes) -> str:
    """Return the message in an error response in OpenAI's form; empty if there is none."""
    error = decode_object(body).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return message[:_MAX_MESSAGE_LENGTH] if isinstance(message, str) else ""


def _models(body: bytes) -> tuple[str, ...]:
    names = [row.get("id") for row in decode_rows(body)]
    return tuple(sorted({name for name in names if isinstance(name, str)}))


def _context_length(body: bytes) -> int:
    """Return the longest context length of the models that a replica lists; 0 if not listed.

    vLLM lists it as `max_model_len`, llama-server as `meta.n_ctx`.
    """
    lengths = []
    for row in decode_rows(body):
        lengths.append(row.get("max_model_len"))
        if isinstance(row.get("meta"), dict):
            lengths.append(row["meta"].get("n_ctx"))
    valid = [length for length in lengths if isinstance(length, int) and length > 0]
    return max(valid, default=0)


def decode_rows(body: bytes) -> list[dict[str, Any]]:
    """Return the objects in the list `data` of a JSON response; empty if there is no such list."""
    data = decode_object(body).get("data")
    return [row for row in data if isinstance(row, dict)] if isinstance(data, list) else []


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the object in a JSON response; an empty object for any other body."""
    try:
        value = msgspec.json.decode(body)
    except JSON_ERRORS:
        return {}
    return value if isinstance(value, dict) else {}


def _read_listing(path: Path) -> set[str]:
    """Return the replicas' URLs in a file, without comments.

    Raises:
        UsageError: the file cannot be read, or a line is not a URL.
    """
    try:
        lines = read_regular_file(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"The replicas in {path} cannot be read: {reason}.") from None
    urls = set[str]()
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            try:
                urls.add(Address.of(line).url)
            except UsageError:
                raise UsageError(
                    f"{path}, line {number}: '{masked_url(line)}' is not a server's URL."
                ) from None
    return urls


def _url_host(address: str | int) -> str:
    """Return an IP address in the form that URLs use, in which IPv6 addresses have brackets."""
    return f"[{address}]" if ":" in str(address) else str(address)


def _split_name(text: str) -> tuple[str, int]:
    """Return the DNS name and the port in the value of the option `--discover`.

    Raises:
        UsageError: the text is not a name and a port.
    """
    name, _, port = text.removeprefix("http://").rpartition(":")
    name = name.strip("[]")
    if not is_host_name(name) or not port.isdecimal() or not 0 < int(port) < 65536:
        reason = "must be a DNS name and a port, such as replicas.local:8000, got {value}."
        raise UsageError(reason, field="discover", value=repr(masked_url(text)))
    return name, int(port)
