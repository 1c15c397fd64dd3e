"""The decode engine's side: it has prompts read by prefill engines, and fetches the pages."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from twostroke.core.distributed_options import parse_address
from twostroke.engine.disaggregation.placement import PrefillPlacement
from twostroke.engine.disaggregation.prefill_peer import PrefillPeer
from twostroke.engine.disaggregation.transfer_methods import OwnPages
from twostroke.engine.disaggregation_stats import DecodeSideStats

if TYPE_CHECKING:
    from twostroke.core.distributed_options import DisaggregationOptions
    from twostroke.core.request import Request
    from twostroke.engine.client import Client
    from twostroke.engine.disaggregation import messages
    from twostroke.engine.scheduler.request_state import RequestState

_RECENT_S: Final = 10  # over which the pace is measured
_READ_S: Final = 0.5  # between looks at the pace


class DecodeSide:
    """Decides for each new request where its prompt is read."""

    def __init__(
        self,
        client: Client,
        kind: messages.KvCacheSpecMessage,
        options: DisaggregationOptions,
        secret: bytes,
        file: int | None = None,
    ) -> None:
        """Connect to the peers of `options`, now or whenever they are there.

        `file` is the open file of this engine's pages, if NIXL may move them.
        """
        self._file = file
        self._loop, self._pages = client.loop, client.loop.pages
        self._chooser = PrefillPlacement(
            options.disaggregate,
            self._pages.scheduler,
            client.card.cost.per_step(),
            kind.page_size,
            kind.page_bytes,
        )
        self._paced_s = self._known_pace = 0.0
        addresses = [parse_address(one, "prefill_peers") for one in options.prefill_peers]
        own = OwnPages(file, self._loop.facts.num_pages, kind.page_bytes)
        given = secret, kind, self._loop, own, options.peer_link
        self.peers = [PrefillPeer(one, *given) for one in addresses]
        self._pages.on_submit.append(self._consider)
        self._pages.on_end.append(self._ended)
        self._pages.on_close.append(self.close)

    def close(self) -> bool:
        """End all transfers and connections."""
        for peer in self.peers:
            peer.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        return True

    def view(self) -> DecodeSideStats:
        """Return what it did, and with whom."""
        with self._pages.lock:
            peers = tuple(peer.view() for peer in self.peers)
            transfers: Counter[str] = Counter()
            for peer in self.peers:
                transfers.update(peer.outcomes)
            return DecodeSideStats(
                self._chooser.rule,
                peers,
                dict(self._chooser.decisions),
                dict(transfers),
                sum(peer.num_bytes for peer in self.peers),
                sum(peer.seconds for peer in self.peers),
                sum(peer.expected_s for peer in self.peers),
                sum(peer.fetch_s for peer in self.peers),
            )

    # The loop's lock is held while these are called.

    def _consider(self, ticket: RequestState) -> bool:
        """Begin a transfer for a request that waits, if that pays."""
        there = [peer for peer in self.peers if peer.is_up]
        away = [one.request for peer in self.peers for one in peer.open.values()]
        num_held = sum(peer.num_held for peer in self.peers)
        views = [peer.outlook() for peer in there]
        chosen = self._chooser.consider(ticket, views, away, num_held, self._pace())
        self._pages.lock.notify_all()  # claims may have been dropped
        if chosen is None:
            return False
        there[chosen.index].begin(ticket.request, chosen)
        return True

    def _ended(self, request: Request) -> None:
        for peer in self.peers:
            peer.request_ended(request)

    def _pace(self) -> float:
        now_s = time.monotonic()
        if now_s - self._paced_s > _READ_S:
            self._paced_s = now_s
            span = self._loop.span(_RECENT_S)
            recent = (span.last.strokes - span.first.strokes).prefill
            self._known_pace = recent.flops_per_s or span.last.strokes.prefill.flops_per_s
        return self._known_pace
