"""Who is shown each exchange when it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from twostroke.serve.observe.logs import AccessLog
from twostroke.serve.observe.traces import Traces, exporter

if TYPE_CHECKING:
    from twostroke.serve.observe.exchange import Exchange
    from twostroke.serve.options import ServeOptions


class Watcher(Protocol):
    """Tells somebody of exchanges. It is called on the event loop, and must not wait."""

    def watch(self, exchange: Exchange) -> None:
        """Take note of an exchange that is over."""

    def close(self) -> None:
        """Pass on what is left: no exchange will come any more."""


def build_watchers(options: ServeOptions, version: str) -> list[Watcher]:
    """Return those that `options` ask for.

    Raises:
        UsageError: traces are wanted, and the extra for them is missing.
    """
    watchers: list[Watcher] = []
    if options.otlp_endpoint is not None:
        watchers.append(Traces(exporter(options.otlp_endpoint), version))
    if options.access_log:
        watchers.append(AccessLog())  # behind traces, whose ids it tells
    return watchers
