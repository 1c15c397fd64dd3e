"""Reads a client's request: its body, model and limits, and the replica that must answer it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from starlette.requests import Request

from twostroke.core.errors import RequestError
from twostroke.core.message_text import counted_noun
from twostroke.core.request import DEFAULT_SERVICE_TIER, SERVICE_TIERS
from twostroke.fleet.router.equal_requests import equal_key
from twostroke.fleet.router.health_checker import fetch_status
from twostroke.fleet.router.paths import (
    COMPUTED_PATHS,
    ENGINELESS_PATHS,
    FILE_REFERENCE,
    NO_BACKGROUND,
    NO_BATCHES,
    NO_RECORDS,
    PROMPT_ONLY_PATHS,
    STORED_ID,
    STORED_PATH,
    BatchPathError,
    is_file_path,
    is_harmless,
    stored_path,
)
from twostroke.fleet.router.proxied_request import ProxiedRequest, credentials
from twostroke.fleet.router.replica_registry import hash_text
from twostroke.fleet.router.usage_meter import TokenRate, UsageMeter
from twostroke.fleet.routing.prompt import RoutedPrompt, key_without_prompt, read_prompt
from twostroke.server.http.api_key import CLASSES
from twostroke.server.http.errors import BodySizeError, UnknownPathError
from twostroke.server.http.limits import read_json
from twostroke.server.http.request_context import served_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from twostroke.fleet.router.engine_killers import Killers
    from twostroke.fleet.router.replica_registry import Replica, ReplicaRegistry
    from twostroke.fleet.router.trace_recorder import RouterTraceRecorder

_FORM_OVERHEAD_BYTES: Final = 64 * 1024  # of a form, besides its file


class RequestReader:
    """Reads and admits the requests that a router forwards."""

    def __init__(
        self,
        fleet: ReplicaRegistry,
        killers: Killers,
        *,
        keeps_usage: bool,
        measures_usage: bool = False,
        trace: RouterTraceRecorder | None = None,
    ) -> None:
        """Create a reader for requests to the replicas of `fleet`.

        `killers` knows the contents that are refused because they kill engines. With `keeps_usage`,
        the router enforces the limits of API keys, and measures the usage of each request; with
        `measures_usage`, it only measures usage. `trace` records the requests.
        """
        self._measures_usage = measures_usage or trace is not None
        self._trace = trace
        self._fleet = fleet
        self._killers = killers
        self._keeps_usage = keeps_usage
        self._token_rate = TokenRate()

    async def read(self, scope: Scope, receive: Receive, send: Send) -> ProxiedRequest:
        """Read a client's request, and check that the router may forward it.

        Raises:
            TwostrokeError: the body cannot be read, the request's content kills engines, or the
                limits of its key or the router do not allow it.
        """
        method, path = scope["method"], scope["path"]
        if self._keeps_usage:
            _check_path(method, path)
        if method == "POST" and path in COMPUTED_PATHS:
            request, stored_id = await self._read_computed(scope, receive, send)
        else:
            request, stored_id = await self._read_other(scope, receive, send)
        await request.context.admit()
        may_start = self._fleet.starts.model_for(method, path, request.model) is not None
        if stored_id and (self._fleet.ready or not may_start):
            request.only_replica = await self._find_stored(stored_id, scope)
        return request

    async def _read_computed(
        self, scope: Scope, receive: Receive, send: Send
    ) -> tuple[ProxiedRequest, str]:
        """Read a request that a model answers, such as a chat request.

        Returns:
            The request, and the id of the stored answer that it continues; the id is empty if it
            continues none. If the request names a stored file, its `only_replica` is the replica
            that stores the file.
        """
        path, salt = scope["path"], _salt(scope)
        body = await read_json(Request(scope, receive), self._fleet.options.limits)
        stable_prefix = self._fleet.options.stable_prefix
        if self._trace is None:
            prompt = read_prompt(body, salt, stable_prefix=stable_prefix)
        else:
            trace = partial(self._trace.read, served_of(scope).tenant)
            prompt = read_prompt(body, salt, stable_prefix=stable_prefix, trace=trace)
        content = b""
        if path not in ENGINELESS_PATHS:
            model = self._fleet.listed_name(prompt.model)
            content = await self._killers.check_body(body, model)
        request = ProxiedRequest(
            scope,
            receive,
            send,
            body=body,
            key=prompt.key,
            model=prompt.model,
            meter=self._admit(prompt, scope),
        )
        request.log.prompt = prompt
        request.content = content
        if content:
            request.equal_key = equal_key(path, served_of(scope).tenant, body, scope["headers"])
        request.in_background = _is_in_background(prompt, path)
        names_file = FILE_REFERENCE.search(body) is not None
        request.may_overflow = not prompt.previous and not names_file
        if not prompt.previous and names_file:
            request.only_replica = self._file_replica(salt)
        return request, prompt.previous

    async def _read_other(
        self, scope: Scope, receive: Receive, send: Send
    ) -> tuple[ProxiedRequest, str]:
        """Read a request that no model answers, for example about stored answers, files or batches.

        Returns:
            The request, and the id of the stored answer in its path; the id is empty if the path
            has none.
        """
        path, method, salt = scope["path"], scope["method"], _salt(scope)
        file_replica = self._require_file_replica(salt) if is_file_path(path) else None
        http_request = Request(scope, receive)
        body = await self._body(http_request)
        key = key_without_prompt(salt)
        meter: UsageMeter | None = None
        if self._keeps_usage and method == "POST":
            if isinstance(body, bytes):
                prompt = read_prompt(body, salt)
            else:  # a form, whose size is not known yet
                prompt = RoutedPrompt(key, num_tokens=0)
            meter = self._admit(prompt, scope)
        stored = STORED_PATH.fullmatch(path)
        _, _, model = path.partition("/v1/models/")
        request = ProxiedRequest(
            scope,
            receive,
            send,
            body=body,
            key=key,
            model=model or http_request.query_params.get("model", ""),
            meter=meter,
        )
        request.may_resend = method in {"GET", "HEAD"}
        request.only_replica = file_replica
        return request, stored[1] if stored is not None else ""

    async def _find_stored(self, id_: str, scope: Scope) -> Replica:
        """Return the replica that stores the answer or conversation with this id.

        Asks all ready replicas if the router does not know it. If no replica stores it, returns any
        replica, which will answer 404.

        Raises:
            NoReplicaError: no replica is ready.
        """
        remembered = self._fleet.stored_at(id_)
        if remembered is not None:
            return remembered
        ready = self._fleet.ready
        if not ready:
            raise self._fleet.no_replica_error()
        if not STORED_ID.fullmatch(id_):  # clients can send any text
            return ready[0]
        headers = credentials(scope, self._fleet.options.replica_key)
        lookups = [fetch_status(replica, stored_path(id_), headers) for replica in ready]
        statuses = await asyncio.gather(*lookups, return_exceptions=True)
        for replica, status in zip(ready, statuses, strict=True):
            if status == 200:
                self._fleet.set_stored_at(id_, replica)
                return replica
        return ready[0]

    def _admit(self, prompt: RoutedPrompt, scope: Scope) -> UsageMeter | None:
        """Check a request against the limits of its key, and return the meter of its usage.

        Returns None if the request is free, or if the router neither keeps usage nor records a
        trace.

        Raises:
            ClassError: the key does not allow the requested service tier.
            RequestError: the request runs in the background, so its usage would stay unknown.
            RateLimitError: the key has no tokens left.
        """
        context, path = served_of(scope), scope["path"]
        if path in ENGINELESS_PATHS:
            return None
        if not self._keeps_usage:
            return self._meter(prompt, path) if self._measures_usage else None
        if path not in COMPUTED_PATHS and not self._has_foreign:  # Twostroke computes nothing there
            return None
        if context.key is not None:
            service_tier = (
                prompt.service_tier if prompt.service_tier in CLASSES else DEFAULT_SERVICE_TIER
            )
            priority = SERVICE_TIERS[service_tier] if prompt.priority is None else prompt.priority
            is_named = prompt.service_tier not in {"", "auto"}
            context.key.resolve_service_tier(service_tier, priority, is_named=is_named)
        if _is_in_background(prompt, path):
            raise RequestError(NO_BACKGROUND, field="background")
        meter = self._meter(prompt, path)
        context.reserve(prompt.num_tokens + meter.max_output)
        return meter

    def _meter(self, prompt: RoutedPrompt, path: str) -> UsageMeter:
        """Return the meter of a request's usage at any replica."""
        max_output = 0
        if path not in PROMPT_ONLY_PATHS:
            length = self._fleet.context_length
            max_output = prompt.max_answer_tokens(path, length, is_foreign=self._has_foreign)
        return UsageMeter(prompt.num_tokens, max_output, self._token_rate)

    @property
    def _has_foreign(self) -> bool:
        """Whether any of the replicas is a server other than Twostroke."""
        return any(replica.is_foreign for replica in self._fleet.replicas.values())

    def _require_file_replica(self, salt: bytes) -> Replica:
        """Return the replica that keeps the files and batches of a tenant.

        Raises:
            BatchPathError: no replica separates tenants, which a router with records needs.
            UnknownPathError: no replica keeps files.
        """
        replica = self._file_replica(salt)
        if replica is not None:
            return replica
        raise BatchPathError(NO_BATCHES) if self._keeps_usage else UnknownPathError(NO_RECORDS)

    def _file_replica(self, salt: bytes) -> Replica | None:
        """Return the replica that keeps a tenant's files; None if no replica keeps files."""
        return self._fleet.file_replica(hash_text(salt.hex()), needs_tenants=self._keeps_usage)

    async def _body(self, request: Request) -> bytes | AsyncIterator[bytes]:
        """Return the body of a request that no model answers.

        Returns the whole body as bytes; if the body is a form, which may have a large file, returns
        an iterator of its parts.

        Raises:
            BodySizeError: the body is too large.
        """
        length = request.headers.get("content-length", "")
        is_form = request.headers.get("content-type", "").startswith("multipart/")
        limits = self._fleet.options.limits
        if is_form:
            if length.isdecimal() and int(length) > limits.max_file_bytes + _FORM_OVERHEAD_BYTES:
                raise BodySizeError(
                    f"The body is larger than {counted_noun(limits.max_file_bytes, 'byte')}."
                )
            return _body_parts(request, limits.max_file_bytes + _FORM_OVERHEAD_BYTES)
        if not length and "transfer-encoding" not in request.headers:
            return b""
        return await read_json(request, limits)


def _is_in_background(prompt: RoutedPrompt, path: str) -> bool:
    """Return whether a replica responds to a request before it has computed the answer."""
    return prompt.in_background and path == "/v1/responses"


async def _body_parts(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise BodySizeError(f"The body is larger than {counted_noun(max_bytes, 'byte')}.")
        if part:
            yield part


def _check_path(method: str, path: str) -> None:
    """Check that a request cannot bypass the limits of keys, which a router with usage enforces.

    Raises:
        BatchPathError: the path uploads files or begins batches.
        UnknownPathError: the request could control a server, or bypass limits.
    """
    if method == "POST" and is_file_path(path):
        raise BatchPathError(NO_BATCHES)
    if not is_harmless(method, path):
        reason = "it could control a server, or bypass the limits of keys"
        raise UnknownPathError(f"This router does not pass on {method} {path}: {reason}.")


def _salt(scope: Scope) -> bytes:
    """Return the bytes that separate a tenant's prompts and files from other tenants.

    These bytes are the tenant's name, or else the API key that the client sends; empty without a
    key.
    """
    tenant = served_of(scope).tenant
    if tenant:
        return tenant.encode()
    for name, value in scope["headers"]:
        if name in {b"authorization", b"x-api-key"}:
            return bytes(value)
    return b""
