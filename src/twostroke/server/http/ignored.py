"""Fields without effect, and lines that were removed from prompts: a header, a metric, a log."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from prometheus_client import Counter

from twostroke.core.changing_lines import KINDS
from twostroke.core.frozen import Frozen
from twostroke.server.http.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from prometheus_client import CollectorRegistry

    from twostroke.core.errors import RequestError
    from twostroke.server.http.request_context import ServedRequest

HEADER: Final = "twostroke-ignored"
REMOVED_LINES_HEADER: Final = "twostroke-removed-lines"
OTHER: Final = "other"  # the metric's label for names that clients invent
MAX_IGNORED: Final = 64  # recorded names of one request; the header has the first of them
_MAX_HEADER_NAMES: Final = 20
_MAX_PATH_LENGTH: Final = 80
_MAX_LOGGED_NAMES: Final = 1000  # each of them is logged once
_LIST_INDEX: Final = re.compile(r"\[\d+\]")
_logger = logging.getLogger("twostroke.serve")


class Ignored(Frozen):
    """A field that a request has, but that has no effect on the answer.

    Attributes:
        path: the field's path in the body, such as `messages[3].name`.
        refusal: returns the error that a strict server raises instead; None if even a strict
            server ignores the field.
        is_known: whether the API has the field.
    """

    path: str
    refusal: Callable[[], RequestError] | None = None
    is_known: bool = False

    @classmethod
    def of(cls, error: RequestError, *, is_known: bool = True) -> Ignored:
        """Return the ignored field that `error` names; a strict server raises the error instead."""
        return cls(error.field or "", lambda: error, is_known)

    @property
    def name(self) -> str:
        """The field's path without list indexes, as one ASCII word for logs and headers."""
        path = _LIST_INDEX.sub("[]", self.path[:_MAX_PATH_LENGTH])
        return quote(path, safe="[]'")[:_MAX_PATH_LENGTH]


class IgnoredFields:
    """Reports the ignored fields of requests; a strict server refuses such requests."""

    def __init__(
        self, registry: CollectorRegistry, *, is_strict: bool, effective_names: Collection[str] = ()
    ) -> None:
        """Create the metric that counts ignored request fields.

        Fields named in `effective_names` are not reported, because this server uses them.
        """
        self._is_strict = is_strict
        self._effective_names = effective_names
        self._logged: set[str] = set()
        self._counter = Counter(
            "twostroke_ignored_fields",
            "Requests with a field that was ignored, by field.",
            ("field",),
            registry=registry,
        )

    def note(self, ignored_fields: Iterable[Ignored], served_request: ServedRequest) -> None:
        """Report a request's ignored fields, in a response header, in a metric and in the log.

        Each field is logged once in the process's life, not for each request.

        Raises:
            RequestError: the server is strict and refuses a field.
        """
        for ignored in ignored_fields:
            if ignored.path.rpartition(".")[2] in self._effective_names:
                continue
            if self._is_strict and ignored.refusal is not None:
                raise ignored.refusal()
            name = ignored.name
            if name in served_request.ignored or len(served_request.ignored) == MAX_IGNORED:
                continue
            served_request.ignored.append(name)
            self._counter.labels(name if ignored.is_known else OTHER).inc()
            self._log(ignored, name)

    def _log(self, ignored: Ignored, name: str) -> None:
        if name in self._logged or len(self._logged) == _MAX_LOGGED_NAMES:
            return
        self._logged.add(name)
        level = logging.INFO if ignored.is_known else logging.WARNING
        message = f"{name} has no effect here."  # a known field's refusal may repeat its value
        if not ignored.is_known and ignored.refusal is not None:
            message = str(ignored.refusal())
        _logger.log(level, "Ignored a field, now and from now on: %s", one_line(message))


class RemovedLines:
    """Reports the lines that `--stable-prefix` removes from the prompts of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Create the metric that counts requests with removed lines."""
        self._logged: set[str] = set()
        self._counter = Counter(
            "twostroke_removed_lines",
            "Requests with lines that --stable-prefix removed, by kind.",
            ("kind",),
            registry=registry,
        )
        for kind in KINDS:
            self._counter.labels(kind)  # begins at 0

    def note(self, kinds: Iterable[str], served_request: ServedRequest) -> None:
        """Report the kinds of lines that were removed from a request's prompt.

        The response's header names them, and the log names each kind once.
        """
        served_request.removed_lines = tuple(kinds)
        for kind in served_request.removed_lines:
            self._counter.labels(kind).inc()
            if kind not in self._logged:
                self._logged.add(kind)
                _logger.info(
                    "Lines of the kind %s are removed from prompts (--stable-prefix).", kind
                )


def header_of(names: list[str]) -> bytes:
    """Return the value of the response header `twostroke-ignored`, which lists ignored fields.

    Names are separated by commas. A long list is cut and ends with `...`.
    """
    ellipsis = ["..."] if len(names) > _MAX_HEADER_NAMES else []
    return ", ".join(names[:_MAX_HEADER_NAMES] + ellipsis).encode("ascii")
