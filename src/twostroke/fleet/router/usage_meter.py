"""Measures the token usage of forwarded requests from their answers.

Twostroke servers report the usage in a header or a last line that the router removes
(`server/auth/usage_header.py`). Other servers report the `usage` of their protocols: the router
asks for it in streams, and removes it again if the client did not ask. If an answer reports
nothing, the usage is estimated from the sizes of prompt and answer.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, structs

from twostroke.core.json_io import encode_json
from twostroke.fleet.router.response import LostError
from twostroke.fleet.routing.prompt import FALSE_VALUES, JSON_ERRORS
from twostroke.server.auth.usage_header import (
    MARK,
    STREAMS,
    USAGE_HEADER,
    ReportedUsage,
    read_usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.fleet.router.replica_registry import Replica
    from twostroke.fleet.router.response import Head
    from twostroke.fleet.routing.prompt import RoutedPrompt
    from twostroke.server.http.request_context import ServedRequest

# Paths whose streams end with the usage only if `stream_options.include_usage` asks for it.
_PATHS_WITH_USAGE_OPTION: Final = frozenset(("/v1/chat/completions", "/v1/completions"))
_MAX_KEPT_BYTES: Final = 4 << 20  # of an answer that is not streamed
_TOKEN_BYTES: Final = 4  # the average of English text
_NEW_WEIGHT: Final = 0.1  # of the newest answer in the token rate
# Cannot occur inside a JSON string, whose quotes are escaped. llama-server's own protocol reports
# the counts in the event with `"stop": true`.
_USAGE: Final = re.compile(rb'"usage": ?\{|"stop": ?true')
_EVENT_ENDS: Final = re.compile(rb"(?<=\n\n)|(?<=\n\r\n)")
_USAGE_LINE_START: Final = b"\n" + MARK
_MAX_USAGE_LINE_BYTES: Final = 80
_MAX_REPORTED_TOKENS: Final = 10**12


class ProxyLog:
    """The progress of a forwarded request, which the access log and the usage records read.

    Attributes:
        num_open: answers that have not ended.
        num_tries: the number of attempts that have failed.
        replica: the replica to which the request was last sent; None if it was sent to an upstream.
        upstream: the name of the upstream to which the request was last sent; empty if it was sent
            to a replica.
        prompt: the facts that routing has read from the body; None if no model answers.
        first_byte_s: monotonic time of the first byte of a stream; None before it.
    """

    def __init__(self, meter: UsageMeter | None) -> None:
        """Create the log of a request that was not sent yet; `meter` measures the answer."""
        self.num_open = 1
        self.num_tries = 0
        self.replica: Replica | None = None
        self.upstream = ""
        self.prompt: RoutedPrompt | None = None
        self.first_byte_s: float | None = None
        self._meter = meter

    @property
    def used(self) -> ReportedUsage | None:
        """The tokens that the request has used so far.

        None if the router does not record usage, or the request was refused.
        """
        meter = self._meter
        was_sent = self.replica is not None or bool(self.upstream)
        return meter.used if meter is not None and was_sent else None

    def figures(self) -> dict[str, Any]:
        """Return the request's fields of the access log: replica or upstream, failures, usage."""
        url = self.replica.url if self.replica is not None else None
        used = self.used
        counts = {} if used is None else structs.asdict(used)
        if used is not None and not used.cache_write_tokens:
            del counts["cache_write_tokens"]
        facts = {"replica": url, "upstream": self.upstream or None, "tries": self.num_tries}
        return facts | counts


class TokenRate:
    """The average speed of recent answers in output tokens per second.

    From this rate and the elapsed time, the router estimates how many tokens a request without
    streaming has used so far. Only the last attempt of a request counts.

    Attributes:
        per_s: the average; 0.0 without measurements.
    """

    def __init__(self) -> None:
        """Create an average without measurements."""
        self.per_s = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Add an answer of `num_tokens` that took `seconds` to the average."""
        newest = num_tokens / max(seconds, 1e-3)
        self.per_s += (_NEW_WEIGHT if self.per_s else 1.0) * (newest - self.per_s)


class UsageMeter:
    """Counts the tokens of one request while the replica's answer passes through the router.

    A stream is searched for usage, and only events with usage are parsed. An answer that is not
    streamed is parsed at its end.

    Attributes:
        max_output: the maximum number of output tokens.
        take: called with each part of the answer; returns the bytes for the client.
    """

    def __init__(self, num_prompt: int, max_output: int, token_rate: TokenRate) -> None:
        """Start the measurement of a request.

        Args:
            num_prompt: the estimated number of prompt tokens.
            max_output: the maximum number of output tokens.
            token_rate: the average speed of answers, for estimates.
        """
        self._attempt_began_s = time.monotonic()
        self.max_output = max_output
        self._token_rate = token_rate
        self._estimate = ReportedUsage(num_prompt)
        self._used: ReportedUsage | None = self._estimate
        self._has_usage_header = False
        self._is_final = False
        self._lacks_usage = False
        self._strips_usage = False
        self._is_streaming = False
        self._event_end = b"\n\n"
        self._num_events = 0
        self._num_bytes = 0
        self._body: list[bytes] = []
        self._last_events = b""
        self.take: Callable[[bytes], bytes] = bytes

    @property
    def used(self) -> ReportedUsage | None:
        """The tokens used so far, estimated while the answer arrives; None if refused."""
        used = self._used
        if used is None or self._is_final:
            return used
        num_output = self._num_events  # an event has about one token
        if not self._is_streaming:  # nothing comes before the end: estimate by the time
            elapsed_s = time.monotonic() - self._attempt_began_s
            num_output = min(self.max_output, int(self._token_rate.per_s * elapsed_s))
        num_output = max(used.completion_tokens, num_output)
        return structs.replace(used, completion_tokens=num_output)

    @property
    def is_estimated(self) -> bool:
        """Whether `used` is an estimate, since no server has reported the whole usage."""
        return self._used is not None and (self._lacks_usage or not self._is_final)

    def restart(self, *, is_continued: bool = False) -> None:
        """Prepare for another attempt, after a server has refused or lost the request.

        The tokens of earlier attempts do not count, unless the new attempt continues their stream.
        """
        self._attempt_began_s = time.monotonic()
        self._used = self._estimate
        self._is_streaming = self._is_final = self._lacks_usage = False
        if not is_continued:
            self._num_events = self._num_bytes = 0
            self._body.clear()
            self._last_events = b""

    def begin(
        self, head: Head, *, is_free_if_silent: bool = False, strips_usage: bool = False
    ) -> None:
        """Read the head of the replica's response, and set `take` for its body.

        Args:
            head: the head of the response.
            is_free_if_silent: whether an answer without a usage header has used no tokens.
            strips_usage: whether to remove the usage from the stream, for a client that did not
                ask for it.
        """
        reported = read_usage(head.value(USAGE_HEADER))
        event_ends = STREAMS.get(head.media_type)
        self._has_usage_header = reported is not None
        self._is_final = reported is not None and event_ends is None
        is_free = reported is None and (head.status >= 400 or is_free_if_silent)
        self._used = None if is_free else self._estimate
        # A stream whose constraint is not compiled yet does not know its prompt.
        if reported is not None and (reported.prompt_tokens or self._is_final):
            self._used = reported
        self._strips_usage = strips_usage
        self._is_streaming = event_ends is not None
        if event_ends is not None:
            self._event_end = event_ends[0]
        if self._is_final or self._used is None:
            self.take = bytes
        elif event_ends is None:
            self.take = self._take_body
        elif self._has_usage_header:
            self.take = self._take_own_events
        else:
            self.take = self._take_foreign_events

    def finish(self, context: ServedRequest) -> None:
        """Determine the final usage at the answer's end; learn the token rate if it succeeded."""
        self._settle(context)
        used = self.used
        if used is not None and used.completion_tokens and context.error is None:
            elapsed_s = time.monotonic() - self._attempt_began_s
            self._token_rate.record(used.completion_tokens, elapsed_s)

    def _settle(self, context: ServedRequest) -> None:
        """Determine the request's final usage; estimate it if the answer did not report it.

        If a Twostroke server's stream lacks its last line with the usage, the stream was cut off:
        the request then counts as lost (`context.error`).
        """
        if self._is_final or self._used is None:
            return
        if self._has_usage_header:  # the line with the usage is missing
            context.error = LostError.code
        elif self._last_events:
            if self._used is self._estimate:
                for part in _parse_parts(self._last_events.splitlines()):
                    self._add(part)
            self._is_final = self._used is not self._estimate
        else:
            parts = _parse_parts([b"".join(self._body)])
            usages: list[ReportedUsage] = []
            if not any(part.has_usage_of_first_answer for part in parts):
                usages = [usage for usage in map(_usage_of, parts) if usage is not None]
            if usages:
                self._used = ReportedUsage(
                    sum(usage.prompt_tokens for usage in usages),
                    sum(usage.cached_tokens for usage in usages),
                    sum(usage.completion_tokens for usage in usages),
                    sum(usage.cache_write_tokens for usage in usages),
                )
            else:
                num_output = min(self.max_output, self._num_bytes // _TOKEN_BYTES)
                self._used = ReportedUsage(self._estimate.prompt_tokens, 0, num_output)
                self._lacks_usage = True
            self._is_final = True

    def _take_own_events(self, data: bytes) -> bytes:
        """Count the events of a Twostroke server's stream; remove the last line with the usage."""
        position = data.rfind(_USAGE_LINE_START, -_MAX_USAGE_LINE_BYTES) + 1
        if position or data.startswith(MARK):
            self._used = read_usage(data[position + len(MARK) :])
            self._is_final = True
            data = data[:position]
        self._num_events += data.count(self._event_end)
        return data

    def _take_foreign_events(self, data: bytes) -> bytes:
        """Read the usage from the stream of a server other than Twostroke.

        The usage event is removed if only the router asked for it.
        """
        self._num_events += data.count(self._event_end) or data.count(b"\n\r\n")
        self._last_events = data
        has_mark = b'"usage"' in data or b'"stop"' in data
        if not has_mark or not _USAGE.search(data):
            return data
        kept_events: list[bytes] = []
        for event in _EVENT_ENDS.split(data):
            parts = _parse_parts(event.splitlines()) if _USAGE.search(event) else []
            for part in parts:
                self._add(part)
            has_only_usage = any(bytes(part.choices) == b"[]" for part in parts)
            if not (self._strips_usage and has_only_usage):
                kept_events.append(event)
        return b"".join(kept_events)

    def _take_body(self, data: bytes) -> bytes:
        """Keep a part of an answer that is not streamed; its usage is read at the end."""
        self._num_bytes += len(data)
        self._body.append(data)
        if self._num_bytes > _MAX_KEPT_BYTES:
            self._body.clear()
        return data

    def _add(self, part: _Part) -> None:
        """Add the usage that an event of a stream reports to the usage of the request.

        Usually an event reports the usage of the whole stream so far. An event of llama-server
        reports the usage of one answer, so the usages of several answers are summed.
        """
        usage, previous = _usage_of(part), self._used
        if usage is None or previous is None:
            return
        if previous is self._estimate:
            self._used = usage
            return
        combine = sum if bytes(part.timings) else max
        self._used = ReportedUsage(
            combine((previous.prompt_tokens, usage.prompt_tokens)),
            combine((previous.cached_tokens, usage.cached_tokens)),
            combine((previous.completion_tokens, usage.completion_tokens)),
            combine((previous.cache_write_tokens, usage.cache_write_tokens)),
        )


def with_usage_option(body: bytes, path: str) -> bytes | None:
    """Return a request's body with the option by which its stream ends with the usage.

    The router sends this body to servers other than Twostroke. None if the body needs no change.
    """
    if path not in _PATHS_WITH_USAGE_OPTION:
        return None
    try:
        fields = _fields_decoder.decode(body)
        options = _options_decoder.decode(fields.get("stream_options", b"null")) or {}
    except JSON_ERRORS:
        return None  # the server will answer with an error
    is_stream = bytes(fields.get("stream", b"")) not in FALSE_VALUES
    if not is_stream or options.get("include_usage") is True:
        return None
    changed: dict[str, Any] = {**fields, "stream_options": options | {"include_usage": True}}
    return encode_json(changed)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageFields(msgspec.Struct):
    """The usage object of OpenAI's or Anthropic's protocol, in a response or an event."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    total_tokens: int | None = None  # the only field, if there is no output

    def total(self) -> ReportedUsage:
        """Return the token counts of the usage object, in the same form for both protocols.

        Anthropic's prompt tokens do not include cached tokens, so the cached tokens are added.
        """
        details = self.prompt_tokens_details or self.input_tokens_details
        written = self.cache_creation_input_tokens or 0
        cache_tokens = (self.cache_read_input_tokens or 0) + written
        output = self.completion_tokens or self.output_tokens or 0
        remaining = max(0, (self.total_tokens or 0) - output)
        prompt = (self.prompt_tokens or self.input_tokens or remaining) + cache_tokens
        cached = (details.cached_tokens if details else self.cache_read_input_tokens) or 0
        return _bounded(prompt, cached, output, written)


class _UsageHolder(msgspec.Struct):
    """An object inside a stream's event, such as `response` or `message`, that may have `usage`."""

    usage: _UsageFields | None = None


class _Part(msgspec.Struct):
    """A response body or an event of a stream, with the fields that report usage.

    llama-server and Ollama have the token counts as fields of the body itself.
    """

    usage: _UsageFields | None = None
    response: _UsageHolder | str | None = None
    message: _UsageHolder | str | None = None
    choices: Raw = Raw()
    timings: Raw = Raw()  # llama-server's, with the end of each answer
    tokens_evaluated: int | None = None
    tokens_predicted: int | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None

    @property
    def has_usage_of_first_answer(self) -> bool:
        """Whether a body of llama-server has several answers, but only the first answer's usage."""
        return bool(bytes(self.timings)) and bytes(self.choices).count(b'"finish_reason":') > 1


_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_options_decoder: Final = msgspec.json.Decoder(dict[str, Any] | None)
_part_decoder: Final = msgspec.json.Decoder(list[_Part] | _Part)


def _parse_parts(texts: list[bytes]) -> list[_Part]:
    """Return the JSON objects in a response body or in a stream's lines; skip other lines."""
    parts: list[_Part] = []
    for text in texts:
        try:
            value = _part_decoder.decode(text.removeprefix(b"data:"))
        except JSON_ERRORS:
            continue
        parts += value if isinstance(value, list) else [value]
    return parts


def _usage_of(part: _Part) -> ReportedUsage | None:
    """Return the token counts that a body or an event reports; None if it reports none."""
    holders = [
        holder for holder in (part.response, part.message) if isinstance(holder, _UsageHolder)
    ]
    for usage in (part.usage, *(holder.usage for holder in holders)):
        if usage is not None:
            return usage.total()
    prompt = part.tokens_evaluated if part.tokens_evaluated is not None else part.prompt_eval_count
    output = part.tokens_predicted or part.eval_count or 0
    return None if prompt is None else _bounded(prompt, 0, output)


def _bounded(prompt: int, cached: int, output: int, written: int = 0) -> ReportedUsage:
    """Return token counts of another server, limited to a valid range.

    Some servers report -1 for unknown counts.
    """
    return ReportedUsage(
        min(max(0, prompt), _MAX_REPORTED_TOKENS),
        min(max(0, cached), _MAX_REPORTED_TOKENS),
        min(max(0, output), _MAX_REPORTED_TOKENS),
        min(max(0, written), _MAX_REPORTED_TOKENS),
    )
