"""Sends a request to an API, and passes the answer on to the client in the same protocol.

Nothing is sent to the client before a complete JSON answer, or the first event of a stream with
content, has arrived and was checked. Until then another upstream or a replica can answer.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import RequestError
from twostroke.fleet.router.api_events import ApiEvents, check_whole_answer, error_message
from twostroke.fleet.router.api_request import api_body, api_headers, is_stream
from twostroke.fleet.router.response import FailedReplicaError, Head, ReplicaError
from twostroke.fleet.router.upstream import request_head
from twostroke.fleet.router.upstream_state import UpstreamError, status_error, unreachable
from twostroke.fleet.router.usage_meter import with_usage_option
from twostroke.server.http.errors import ClientGoneError, GatewayError

if TYPE_CHECKING:
    from msgspec import Raw

    from twostroke.fleet.router.overflow_file import BoughtModel
    from twostroke.fleet.router.proxied_request import ProxiedRequest
    from twostroke.fleet.router.upstream_state import Upstream

UPSTREAM_HEADER: Final = b"x-twostroke-upstream"
_STREAM_TYPE: Final = b"text/event-stream"
_JSON_TYPE: Final = b"application/json"
_MEDIA_TYPE: Final = re.compile(rb"[a-z]{1,20}/[a-z0-9.+-]{1,40}")  # that may be shown
_MAX_ERROR_BYTES: Final = 1 << 20
_MAX_ERROR_S: Final = 5.0  # in which the body of an error must come; its status is enough
_MAX_PREPARING_BYTES: Final = 1 << 20  # of comments and events before the first content
_MAX_ANSWER_BYTES: Final = 64 << 20
_CUT_OFF: Final = "It closed the connection before the end of its answer."


class LostAnswerError(GatewayError):
    """An upstream broke off an answer whose beginning the client has; it cannot be continued."""

    http_status = 502
    code = "upstream_failed"


class RefusedByUpstreamError(RequestError):
    """An upstream refuses a request, and no server here has its model."""

    code = "upstream_refused"


class ApiExchange:
    """One attempt to let an upstream answer a request.

    Attributes:
        is_charged: whether the answer has begun, so that the upstream charges for the request.
        may_be_computed: whether the upstream may have computed the request without an answer, for
            example because it was silent too long. It may then charge for the request, too.
    """

    def __init__(
        self, request: ProxiedRequest, upstream: Upstream, bought: BoughtModel, via: bytes
    ) -> None:
        """Prepare an attempt; `via` is the value of the header that names this router."""
        self._request = request
        self._upstream = upstream
        self._bought = bought
        self._via = via
        self._key = ""
        self._strips_usage = False
        self._sent_s = 0.0
        self.is_charged = self.may_be_computed = False

    async def run(self, fields: dict[str, Raw]) -> None:
        """Send the request with these fields to the upstream, and the answer to the client.

        Raises:
            UpstreamError: the upstream did not answer, and nothing was sent to the client yet.
            LostAnswerError: the upstream broke off its answer.
            ClientGoneError: the client has disconnected.
        """
        request, upstream = self._request, self._upstream
        request.log.replica, request.log.upstream = None, upstream.name
        request.context.known_model = f"{upstream.name}/{self._bought.model}"
        if request.meter is not None:
            request.meter.restart()
        head = await self._send(fields)
        if head.status != 200:
            self.may_be_computed = False
            await self._refuse(head)
        if request.meter is not None:
            clean_head = Head(200, [(b"content-type", head.media_type)])
            request.meter.begin(clean_head, strips_usage=self._strips_usage)
        is_streamed = is_stream(fields)
        expected_type = _STREAM_TYPE if is_streamed else _JSON_TYPE
        if head.media_type != expected_type:
            self.may_be_computed = head.media_type in {_STREAM_TYPE, _JSON_TYPE}
            is_shown = _MEDIA_TYPE.fullmatch(head.media_type) is not None
            media_type = head.media_type.decode() if is_shown else "another type"
            reason = f"It answers with {media_type}, not {expected_type.decode()}."
            raise UpstreamError(reason, "nonsense")
        if head.value(b"content-encoding") not in {b"", b"identity"}:
            raise UpstreamError("It compresses its answer, unasked.", "nonsense")
        if is_streamed:
            await self._pass_stream()
        else:
            await self._pass_whole()

    async def _send(self, fields: dict[str, Raw]) -> Head:
        """Send the request, and return the head of the response.

        If an idle connection turns out to be closed, the request is sent over a new connection.
        """
        request, upstream = self._request, self._upstream
        spec, scope = upstream.spec, self._request.scope
        path = scope["path"]
        body = api_body(fields, path, spec, self._bought)
        if (body_with_usage := with_usage_option(body, path)) is not None:
            body, self._strips_usage = body_with_usage, True
        self._key = upstream.key()
        headers = api_headers(scope, spec, self._key, self._via)
        message = request_head(upstream.pool.address, "POST", spec.target, headers, len(body))
        while True:
            try:
                connection = request.connection = await upstream.pool.take()
            except ReplicaError as error:
                raise unreachable(error) from None
            if request.has_left:
                raise ClientGoneError("The client left before its request was sent.")
            self._sent_s = request.sent_s = time.monotonic()
            if request.meter is not None:
                request.meter.restart()  # no time before counts as time of the upstream
            self.may_be_computed = True
            try:
                async with asyncio.timeout(spec.read_timeout):
                    return await connection.request(message, body)
            except TimeoutError:
                raise self._silence() from None
            except ReplicaError as error:
                if connection.num_requests == 1 or connection.has_answered:
                    # A machine that acknowledges nothing may not have the request.
                    self.may_be_computed = isinstance(error, FailedReplicaError)
                    raise UpstreamError(_without_address(error), "nonsense") from None
            self.may_be_computed = False
            connection.release()
            request.connection = None
            upstream.pool.close_idle()

    async def _refuse(self, head: Head) -> None:
        """Read the body of a response with an error status, and raise the error for it.

        Raises it also if the body is incomplete.
        """
        body = bytearray()
        with suppress(UpstreamError, TimeoutError):
            async with asyncio.timeout(_MAX_ERROR_S):
                while len(body) <= _MAX_ERROR_BYTES and (data := await self._read()):
                    body += data
        error = status_error(head, bytes(body), self._bought)
        if error.kind == "key" and self._key != self._upstream.key():
            raise UpstreamError("It does not accept its earlier key any more.", "key", 0.0)
        if error.kind == "refused":
            message = error_message(bytes(body), self._key)
            error.request_error = RefusedByUpstreamError(
                "The API that has this model refuses the request: {message}", message=message
            )
        raise error

    async def _pass_whole(self) -> None:
        """Send an answer that is not streamed to the client, once it is complete."""
        request = self._request
        body = bytearray()
        while data := await self._read():
            body += data
            if len(body) > _MAX_ANSWER_BYTES:
                raise UpstreamError("Its answer is larger than 64 MiB.", "nonsense")
        self.may_be_computed = False  # unless this is an answer
        check_whole_answer(bytes(body), self._upstream.spec.protocol)
        self.is_charged = True
        data = bytes(body) if request.meter is None else request.meter.take(bytes(body))
        await request.respond(self._client_head(_JSON_TYPE), data)

    async def _pass_stream(self) -> None:
        """Send a stream of events to the client, once its first event with content has arrived.

        Raises:
            UpstreamError: the stream has ended, or failed, before an event with content.
            LostAnswerError: the stream has failed later, or has ended before its last event.
        """
        request, upstream = self._request, self._upstream
        events = ApiEvents(upstream.spec.protocol)
        data = await self._first_events(events)
        self.is_charged = True
        upstream.record_first_token(time.monotonic() - self._sent_s)
        await request.begin_upstream_response(self._client_head(_STREAM_TYPE))
        try:
            await self._pass_events(events, data)
        except UpstreamError as error:
            upstream.record_failure(error, self._bought)
            reason = "The API that wrote this answer broke it off before its end."
            raise LostAnswerError(reason) from None
        await request.end_response(request.splitter.take(b"", is_last=True))

    async def _first_events(self, events: ApiEvents) -> bytes:
        """Return the bytes of a stream up to its first event with content.

        Raises:
            UpstreamError: the stream has ended before that event, or has an error.
        """
        data = b""
        while not events.has_content:
            received = await self._read()
            data += events.take(received)
            if events.fault is not None:
                self.may_be_computed = False
                raise events.fault
            if not received and not events.has_content:
                raise UpstreamError(_CUT_OFF, "nonsense")
            if len(data) > _MAX_PREPARING_BYTES and not events.has_content:
                raise UpstreamError("Its stream begins with 1 MiB without content.", "nonsense")
        return data

    async def _pass_events(self, events: ApiEvents, data: bytes) -> None:
        """Send `data`, and the events that follow, to the client.

        Raises:
            UpstreamError: the stream has ended before its last event, or has an error.
        """
        request = self._request
        is_open = True
        while True:
            if data := request.splitter.take(data):
                await request.send({"type": "http.response.body", "body": data, "more_body": True})
            if events.fault is not None:
                raise events.fault
            if not is_open:
                break
            try:
                received = await self._read()
            except UpstreamError:
                if events.is_complete:  # only the end of the body is missing
                    break
                raise
            is_open = bool(received)
            data = events.take(received)
        if not events.is_complete:
            raise UpstreamError(_CUT_OFF, "nonsense")

    async def _read(self) -> bytes:
        """Return the next part of the answer's body; empty at its end."""
        connection = self._request.connection
        assert connection is not None
        try:
            async with asyncio.timeout(self._upstream.spec.read_timeout):
                return await connection.read()
        except TimeoutError:
            raise self._silence() from None
        except ReplicaError as error:
            raise UpstreamError(_without_address(error), "nonsense") from None

    def _silence(self) -> UpstreamError:
        seconds = self._upstream.spec.read_timeout
        return UpstreamError(f"It has been silent for {seconds:g} s.", "timeout")

    def _client_head(self, media_type: bytes) -> Head:
        """Return the head of the response to the client, without headers of the upstream."""
        headers = [(b"content-type", media_type), (UPSTREAM_HEADER, self._upstream.name.encode())]
        if media_type == _STREAM_TYPE:
            headers.append((b"cache-control", b"no-cache"))
        return Head(200, headers)


def _without_address(error: ReplicaError) -> str:
    """Return an error's message without the address of the upstream."""
    text = str(error)
    return _CUT_OFF if text.endswith("closed the connection.") else text.replace("replica", "API")
