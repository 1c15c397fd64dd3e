"""Fields of requests that have no effect: they are named in a header, counted and logged."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from prometheus_client import Counter

from twostroke.core.frozen import Frozen
from twostroke.server.http.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from prometheus_client import CollectorRegistry

    from twostroke.core.errors import RequestError
    from twostroke.server.http.request_context import ServedRequest

HEADER: Final = "twostroke-ignored"
OTHER: Final = "other"  # the label of names that clients invent
MAX_IGNORED: Final = 64  # of one request; the header names the first of them
_MAX_NAMED: Final = 20
_MAX_PATH_LENGTH: Final = 80
_MAX_LOGGED: Final = 1000  # names that are remembered, so that each is logged once
_PLACE: Final = re.compile(r"\[\d+\]")
_logger = logging.getLogger("twostroke.serve")


class Ignored(Frozen):
    """A field that has no effect on the answer.

    Attributes:
        path: its place in the body, such as `messages[3].name`.
        refusal: makes the error of a strict server; None if that ignores the field, too.
        is_known: whether the protocol has the field.
    """

    path: str
    refusal: Callable[[], RequestError] | None = None
    is_known: bool = False

    @classmethod
    def of(cls, error: RequestError, *, is_known: bool = True) -> Ignored:
        """Return the field of an error that only a strict server raises."""
        return cls(error.field or "", lambda: error, is_known)

    @property
    def name(self) -> str:
        """The path without places in lists, as one word of ASCII for logs and headers."""
        path = _PLACE.sub("[]", self.path[:_MAX_PATH_LENGTH])
        return quote(path, safe="[]'")[:_MAX_PATH_LENGTH]


class IgnoredFields:
    """Counts and logs what requests have in vain; a strict server refuses them."""

    def __init__(
        self, registry: CollectorRegistry, *, is_strict: bool, but: Collection[str] = ()
    ) -> None:
        """Note fields, but not those of the names `but`, which have an effect after all."""
        self._is_strict, self._but = is_strict, but
        self._logged: set[str] = set()
        self._counter = Counter(
            "twostroke_ignored_fields",
            "Requests with a field that was ignored, by field.",
            ("field",),
            registry=registry,
        )

    def note(self, found: Iterable[Ignored], served: ServedRequest) -> None:
        """Note the ignored fields of a request.

        Raises:
            RequestError: the server is strict, and one of them is not accepted.
        """
        for one in found:
            if one.path.rpartition(".")[2] in self._but:
                continue
            if self._is_strict and one.refusal is not None:
                raise one.refusal()
            name = one.name
            if name in served.ignored or len(served.ignored) == MAX_IGNORED:
                continue
            served.ignored.append(name)
            self._counter.labels(name if one.is_known else OTHER).inc()
            self._log(one, name)

    def _log(self, one: Ignored, name: str) -> None:
        if name in self._logged or len(self._logged) == _MAX_LOGGED:
            return
        self._logged.add(name)
        level = logging.INFO if one.is_known else logging.WARNING
        why = f"{name} has no effect here."  # and not the refusal, which may repeat the value
        if not one.is_known and one.refusal is not None:
            why = str(one.refusal())
        _logger.log(level, "Ignored a field, now and from now on: %s", one_line(why))


def header_of(names: list[str]) -> bytes:
    """Return the header's value: names with commas between them, and `...` if there are more."""
    more = ["..."] if len(names) > _MAX_NAMED else []
    return ", ".join(names[:_MAX_NAMED] + more).encode("ascii")
