"""Delivery of outputs from the engine's thread to their callers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.engine.output import Output

    Wake = Callable[[Callable[[], None]], object]


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Where a generation's outputs go.

    `put` takes an output. `wake(f)` has `f` run in the thread where `put` may be called
    (`loop.call_soon_threadsafe`); None means that any thread may call `put`.
    """

    put: Callable[[Output], None]
    wake: Wake | None = None


def post(mail: list[tuple[Mailbox, Output]]) -> None:
    """Deliver a step's outputs; each event loop is woken once a step, not once a request."""
    parcels: dict[Wake, list[tuple[Mailbox, Output]]] = {}
    last: Wake | None = None  # most wake the same loop as the one before
    parcel: list[tuple[Mailbox, Output]] = []
    for letter in mail:
        wake = letter[0].wake
        if wake is None:
            letter[0].put(letter[1])
            continue
        if wake != last:
            last, parcel = wake, parcels.setdefault(wake, [])
        parcel.append(letter)
    for wake, parcel in parcels.items():
        try:
            wake(partial(_put_all, parcel))
        except RuntimeError:  # the event loop was closed, and its readers with it
            continue


def _put_all(parcel: list[tuple[Mailbox, Output]]) -> None:
    for mailbox, output in parcel:
        mailbox.put(output)
