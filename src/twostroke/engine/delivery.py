"""Delivery of outputs from the engine's thread to their readers."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable

    from twostroke.engine.output import Output


class Mailbox(Frozen):
    """Where the outputs of a generation go.

    `put` takes an output. It is called in the thread of `event_loop`; without one, in any thread.
    """

    put: Callable[[Output], None]
    event_loop: AbstractEventLoop | None = None


def deliver(outputs: list[tuple[Mailbox, Output]]) -> None:
    """Put outputs into mailboxes; each event loop is woken once, not once for each output."""
    by_loop: defaultdict[AbstractEventLoop, list[tuple[Mailbox, Output]]] = defaultdict(list)
    for addressed in outputs:
        mailbox, output = addressed
        if mailbox.event_loop is None:
            mailbox.put(output)
        else:
            by_loop[mailbox.event_loop].append(addressed)
    for event_loop, batch in by_loop.items():
        with suppress(RuntimeError):  # the event loop was closed, and its readers with it
            event_loop.call_soon_threadsafe(_put_all, batch)


def _put_all(outputs: list[tuple[Mailbox, Output]]) -> None:
    for mailbox, output in outputs:
        mailbox.put(output)
