"""Delivery of outputs from the engine's thread to their readers."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.engine.output import Output

    Addressed = list[tuple["Mailbox", Output]]


class Mailbox(Frozen):
    """Where the outputs of a generation go.

    `put` takes an output. `carry(put_all, outputs)` has `put_all(outputs)` called, once for all of
    a step's outputs with equal `carry`: an event loop's `call_soon_threadsafe` does so in its
    thread. Without it, `put` is called in any thread.
    """

    put: Callable[[Output], None]
    carry: Callable[[Callable[[Addressed], None], Addressed], Any] | None = None


def deliver(outputs: Addressed) -> None:
    """Put outputs into mailboxes; each event loop is woken once, not once for each output."""
    carried: defaultdict[Any, Addressed] = defaultdict(list)
    for addressed in outputs:
        mailbox, output = addressed
        if mailbox.carry is None:
            mailbox.put(output)
        else:
            carried[mailbox.carry].append(addressed)
    for carry, together in carried.items():
        with suppress(RuntimeError):  # the event loop was closed, and its readers with it
            carry(_put_all, together)


def _put_all(outputs: Addressed) -> None:
    for mailbox, output in outputs:
        mailbox.put(output)
