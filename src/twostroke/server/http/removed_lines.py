"""Lines that were removed from prompts for the prefix cache: a response header, a metric, a log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from prometheus_client import Counter

from twostroke.core.changing_lines import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry

    from twostroke.server.http.request_context import ServedRequest

HEADER: Final = "twostroke-removed-lines"
_logger = logging.getLogger("twostroke.serve")


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


def header_of(kinds: Iterable[str]) -> bytes:
    """Return the value of the response header `twostroke-removed-lines`."""
    return ", ".join(kinds).encode("ascii")
