"""The prefill engine's side: it reads prompts for decode engines, and lends them the pages."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from twostroke.engine.handover.connection import PeerListener
from twostroke.engine.handover.guest import Guest
from twostroke.engine.handover.nixl import Carrier, CarrierError
from twostroke.engine.handover_view import LenderView
from twostroke.program import BatchShape

if TYPE_CHECKING:
    from twostroke.engine.client import Client
    from twostroke.engine.handover import messages
    from twostroke.engine.handover.connection import Connection

_RECENT_S: Final = 10  # over which the pace is measured


class Lender:
    """Serves all decode engines that connect."""

    def __init__(
        self,
        client: Client,
        kind: messages.Kind,
        address: tuple[str, int],
        secret: bytes,
        memory: int | None,
        link: str = "auto",
    ) -> None:
        """Listen at `address`; `memory` is the open file of the pages, if they are shared.

        `link` is a word of `PEER_LINKS`.
        """
        self.client, self.kind = client, kind
        self.loop, self.pages = client.loop, client.loop.pages
        self.num_prompts = self.num_lent = self.num_late = 0
        self._memory, self._link = memory, link
        self._cost = client.card.cost.per_step()
        self._guests: set[Guest] = set()
        self._listener = PeerListener(address, secret, memory, self._serve)
        self.pages.on_close.append(self.close)

    def close(self) -> bool:
        """End all connections and leases."""
        self._listener.close()
        for guest in list(self._guests):
            guest.cut()
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None
        return True

    def view(self) -> LenderView:
        """Return what it does now."""
        with self.pages.lock:
            reading = sum(len(guest.readings) for guest in self._guests)
            return LenderView(
                self._listener.port,
                len(self._guests),
                reading,
                self.num_prompts,
                self.num_lent,
                self.num_late,
            )

    def flops(self, first: int, end: int) -> float:
        """Return the work of reading a prompt's tokens from `first` to `end`."""
        return self._cost.of(BatchShape.prefill(end - first, first)).flops if end > first else 0.0

    def load(self) -> tuple[float, float]:
        """Return the work that waits or is being done, and the pace of prefill."""
        span = self.loop.span(_RECENT_S)
        recent = (span.last.strokes - span.first.strokes).prefill
        pace = recent.flops_per_s or self.loop.snapshot().strokes.prefill.flops_per_s
        with self.pages.lock:
            readings = [one for guest in self._guests for one in guest.readings.values()]
            open_ = [one.request for one in readings if not one.has_ended]
            counts = [(one.num_computed, one.num_prompt) for one in open_]
        return sum(self.flops(*count) for count in counts), pace

    def open_carrier(self) -> Carrier:
        """Return a new carrier of the pages.

        Raises:
            CarrierError: NIXL is not to be used, or does not work here.
        """
        if self._link == "socket":
            raise CarrierError("its --peer-link is socket.")
        if self._memory is None:
            raise CarrierError("its pages cannot be shared.")
        return Carrier(self._memory, self.loop.facts.num_pages, self.kind.page_bytes)

    def _serve(self, connection: Connection) -> None:
        guest = Guest(self, connection)
        with self.pages.lock:
            self._guests.add(guest)
        try:
            guest.serve()
        finally:
            with self.pages.lock:
                self._guests.discard(guest)
