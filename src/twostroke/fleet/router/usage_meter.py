"""Learns what requests use from their answers, which pass by unread.

A server of ours is asked to tell it apart from the answer (`server/auth/usage_header.py`). Of
others it is the `usage` that their protocols have; a stream is asked to have it, and a client that
did not ask gets none of that. Where nothing is said, it is guessed from the sizes of prompt and
answer.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from twostroke.core.json_io import encode_json
from twostroke.fleet.router.response import LostError
from twostroke.fleet.routing.prompt import FALSE, UNREADABLE
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
    from twostroke.server.http.request_context import ServedRequest

_ASKED: Final = frozenset(("/v1/chat/completions", "/v1/completions"))  # whose streams may say it
_MOST_KEPT: Final = 4 << 20  # of an answer that is not streamed
_TOKEN_BYTES: Final = 4
_NEWEST: Final = 0.1  # the weight of the newest answer in the pace
# In a text its quotes would be escaped. llama-server's own protocol says counts where it stops.
_USAGE: Final = re.compile(rb'"usage": ?\{|"stop": ?true')
_ENDS: Final = re.compile(rb"(?<=\n\n)|(?<=\n\r\n)")  # of events
_LAST: Final = b"\n" + MARK
_MOST_LAST: Final = 80  # bytes of that line
_MOST_TOLD: Final = 10**12  # tokens


class ProxyLog:
    """A request on its way through the router, as logs and accounts see it."""

    def __init__(self, meter: UsageMeter | None) -> None:
        """Begin with no replica."""
        self.num_open, self.num_tries = 1, 0
        self.replica: Replica | None = None
        self._meter = meter

    @property
    def used(self) -> ReportedUsage | None:
        """The tokens that were taken so far; None if they are not counted, or it was refused."""
        meter = self._meter
        return meter.used if meter is not None and self.replica is not None else None

    def figures(self) -> dict[str, Any]:
        """Return where the request went, and what it used."""
        url = self.replica.url if self.replica is not None else None
        used = self.used
        counts = {} if used is None else {n: getattr(used, n) for n in used.__struct_fields__}
        return {"replica": url, "tries": self.num_tries, **counts}


class TokenRate:
    """How many tokens of an answer come in a second, with all waiting."""

    def __init__(self) -> None:
        """Begin without any."""
        self.per_s = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take in an answer."""
        newest = num_tokens / max(seconds, 1e-3)
        self.per_s += (_NEWEST if self.per_s else 1.0) * (newest - self.per_s)


class UsageMeter:
    """The usage of one request. Bytes of its answer are searched, and parsed only at its end."""

    def __init__(self, num_prompt: int, most: int, pace: TokenRate) -> None:
        """Begin with a guess of the prompt's tokens, and the most tokens of its answers."""
        self._began_s, self._most, self._pace = time.monotonic(), most, pace
        self._guess = ReportedUsage(num_prompt)
        self._used: ReportedUsage | None = self._guess
        self._is_told = self._is_final = self._strips = self._has_begun = False
        self._end = b"\n\n"
        self._num_events = self._num_bytes = 0
        self._body: list[bytes] = []
        self._last = b""  # events
        self.take: Callable[[bytes], bytes] = bytes

    @property
    def used(self) -> ReportedUsage | None:
        """What was used so far; None if the request was refused."""
        used = self._used
        if used is None or self._is_final:
            return used
        num_output = self._num_events  # an event is about a token
        if not self._has_begun:  # the work is done unseen
            elapsed_s = time.monotonic() - self._began_s
            num_output = min(self._most, int(self._pace.per_s * elapsed_s))
        num_output = max(used.completion_tokens, num_output)
        return ReportedUsage(used.prompt_tokens, used.cached_tokens, num_output)

    def restart(self) -> None:
        """Forget what a replica has answered that did not take the request."""
        self._used, self._has_begun = self._guess, False

    def begin(self, head: Head, *, is_silent: bool = False, strips: bool = False) -> None:
        """Take in the head of the answer, after which `take` takes its bytes.

        `is_silent` says that an answer that tells nothing used nothing; `strips`, that the client
        did not ask for the usage, and shall not get it.
        """
        told = read_usage(head.value(USAGE_HEADER))
        ends = STREAMS.get(head.media_type)
        self._is_told, self._is_final = told is not None, told is not None and ends is None
        is_free = told is None and (head.status >= 400 or is_silent)
        self._used = None if is_free else self._guess
        # A stream whose constraint is not compiled yet does not know its prompt.
        if told is not None and (told.prompt_tokens or self._is_final):
            self._used = told
        self._strips, self._has_begun = strips, ends is not None
        if ends is not None:
            self._end = ends[0]
        if self._is_final or self._used is None:
            self.take = bytes
        elif ends is None:
            self.take = self._take_body
        else:
            self.take = self._take_told if self._is_told else self._take_events

    def finish(self, served: ServedRequest) -> None:
        """Take in the end of the answer; one that has failed is not counted."""
        self._settle(served)
        used = self.used
        if used is not None and used.completion_tokens and served.error is None:
            self._pace.note(used.completion_tokens, time.monotonic() - self._began_s)

    def _settle(self, served: ServedRequest) -> None:
        if self._is_final or self._used is None:
            return
        if self._is_told:  # and did not tell at its end
            served.error = LostError.code
        elif self._last:
            for part in _parts(self._last.splitlines()) if self._used is self._guess else ():
                self._note(part)
            self._is_final = self._used is not self._guess
        else:
            parts = _parts([b"".join(self._body)])
            found = [] if any(one.says_first for one in parts) else list(map(_spent, parts))
            found = [one for one in found if one is not None]
            sums = [
                sum(getattr(one, name) for one in found) for name in ReportedUsage.__struct_fields__
            ]
            num_output = min(self._most, self._num_bytes // _TOKEN_BYTES)
            guess = ReportedUsage(self._guess.prompt_tokens, 0, num_output)
            self._used, self._is_final = ReportedUsage(*sums) if found else guess, True

    def _take_told(self, data: bytes) -> bytes:
        """Take events of a server of ours, and its last line away."""
        at = data.rfind(_LAST, -_MOST_LAST) + 1
        if at or data.startswith(MARK):
            self._used, self._is_final = read_usage(data[at + len(MARK) :]), True
            data = data[:at]
        self._num_events += data.count(self._end)
        return data

    def _take_events(self, data: bytes) -> bytes:
        """Take events of another server."""
        self._num_events += data.count(self._end) or data.count(b"\n\r\n")
        self._last = data
        has_mark = b'"usage"' in data or b'"stop"' in data
        if not has_mark or not _USAGE.search(data):
            return data
        rest: list[bytes] = []
        for event in _ENDS.split(data):
            parts = _parts(event.splitlines()) if _USAGE.search(event) else []
            for part in parts:
                self._note(part)
            is_own = self._strips and any(bytes(part.choices) == b"[]" for part in parts)
            rest += [] if is_own else [event]
        return b"".join(rest)

    def _take_body(self, data: bytes) -> bytes:
        """Take a part of an answer that is not streamed."""
        self._num_bytes += len(data)
        self._body.append(data)
        if self._num_bytes > _MOST_KEPT:
            self._body.clear()
        return data

    def _note(self, part: _Part) -> None:
        """Take the usage of an event: that so far, or llama-server's, of one of the answers."""
        found, before = _spent(part), self._used
        if found is None or before is None:
            return
        if before is self._guess:
            self._used = found
            return
        names, join = ReportedUsage.__struct_fields__, sum if bytes(part.timings) else max
        self._used = ReportedUsage(*(join((getattr(before, n), getattr(found, n))) for n in names))


def asking(body: bytes, path: str) -> bytes | None:
    """Return a body that asks for the usage at the end of its stream; None if it need not be."""
    if path not in _ASKED:
        return None
    try:
        fields = _fields.decode(body)
        options = _options.decode(fields.get("stream_options", b"null")) or {}
    except UNREADABLE:
        return None  # its server says what is wrong
    is_stream = bytes(fields.get("stream", b"")) not in FALSE
    if not is_stream or options.get("include_usage") is True:
        return None
    asked: dict[str, Any] = {**fields, "stream_options": options | {"include_usage": True}}
    return encode_json(asked)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageFields(msgspec.Struct):
    """OpenAI's and Anthropic's usage."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    total_tokens: int | None = None  # alone, where nothing is written

    def spent(self) -> ReportedUsage:
        details = self.prompt_tokens_details or self.input_tokens_details
        beside = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        output = self.completion_tokens or self.output_tokens or 0
        rest = max(0, (self.total_tokens or 0) - output)
        prompt = (self.prompt_tokens or self.input_tokens or rest) + beside
        cached = (details.cached_tokens if details else self.cache_read_input_tokens) or 0
        return _bounded(prompt, cached, output)


class _Inner(msgspec.Struct):
    usage: _UsageFields | None = None


class _Part(msgspec.Struct):
    """A body or an event: that of llama-server and of Ollama have the counts in themselves."""

    usage: _UsageFields | None = None
    response: _Inner | str | None = None
    message: _Inner | str | None = None
    choices: Raw = Raw()
    timings: Raw = Raw()  # llama-server's, with the end of each answer
    tokens_evaluated: int | None = None
    tokens_predicted: int | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None

    @property
    def says_first(self) -> bool:
        """Whether it is llama-server's, with several answers and the usage of the first."""
        return bool(bytes(self.timings)) and bytes(self.choices).count(b'"finish_reason":') > 1


_fields: Final = msgspec.json.Decoder(dict[str, Raw])
_options: Final = msgspec.json.Decoder(dict[str, Any] | None)
_bodies: Final = msgspec.json.Decoder(list[_Part] | _Part)


def _parts(texts: list[bytes]) -> list[_Part]:
    """Return the objects of a body, or of the lines of events; what is not JSON has none."""
    parts: list[_Part] = []
    for text in texts:
        try:
            found = _bodies.decode(text.removeprefix(b"data:"))
        except UNREADABLE:
            continue
        parts += found if isinstance(found, list) else [found]
    return parts


def _spent(part: _Part) -> ReportedUsage | None:
    """Return the usage that an object says, if it does."""
    inner = [one.usage for one in (part.response, part.message) if isinstance(one, _Inner)]
    usage = next((one for one in (part.usage, *inner) if one is not None), None)
    if usage is not None:
        return usage.spent()
    prompt = part.tokens_evaluated if part.tokens_evaluated is not None else part.prompt_eval_count
    output = part.tokens_predicted or part.eval_count or 0
    return None if prompt is None else _bounded(prompt, 0, output)


def _bounded(*counts: int) -> ReportedUsage:
    """Return counts of another server, which has -1 for unknown ones, as the records can add up."""
    return ReportedUsage(*(min(max(0, one), _MOST_TOLD) for one in counts))
