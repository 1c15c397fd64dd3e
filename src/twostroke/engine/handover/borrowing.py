"""The decode engine's side: it has prompts read by prefill engines, and fetches the pages."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from twostroke.core.handover_options import parse_address
from twostroke.engine.handover import choice
from twostroke.engine.handover.peer import Peer
from twostroke.engine.handover_view import BorrowerView
from twostroke.program import BatchShape

if TYPE_CHECKING:
    from twostroke.core.handover_options import HandoverOptions
    from twostroke.core.request import Request
    from twostroke.engine.client import Client
    from twostroke.engine.handover import messages
    from twostroke.schedule.ticket import Ticket

_RECENT_S: Final = 10  # over which the pace is measured
_READ_S: Final = 0.5  # between looks at the pace
_TYPICAL: Final = 1024  # tokens of a prompt in the queue


class Borrower:
    """Decides for each new request where its prompt is read."""

    def __init__(
        self,
        client: Client,
        kind: messages.Kind,
        options: HandoverOptions,
        secret: bytes,
    ) -> None:
        """Connect to the peers of `options`, now or whenever they are there."""
        self._loop, self._pages = client.loop, client.loop.pages
        self._rule, self._kind = options.disaggregate, kind
        self._cost = client.card.cost.per_step()
        self._decisions: Counter[str] = Counter()
        self._paced_s, self._pace = 0.0, 0.0
        addresses = [parse_address(one, "prefill_peers") for one in options.prefill_peers]
        self.peers = [Peer(one, secret, kind, self._loop) for one in addresses]
        self._pages.on_submit.append(self._consider)
        self._pages.on_end.append(self._ended)
        self._pages.on_close.append(self.close)

    def close(self) -> bool:
        """End all transfers and connections."""
        for peer in self.peers:
            peer.close()
        return True

    def view(self) -> BorrowerView:
        """Return what it did, and with whom."""
        with self._pages.lock:
            peers = tuple(peer.view() for peer in self.peers)
            transfers: Counter[str] = Counter()
            for peer in self.peers:
                transfers.update(peer.outcomes)
            return BorrowerView(
                self._rule,
                peers,
                dict(self._decisions),
                dict(transfers),
                sum(peer.num_bytes for peer in self.peers),
                sum(peer.seconds for peer in self.peers),
                sum(peer.fetch_s for peer in self.peers),
            )

    # The loop's lock is held while these are called.

    def _consider(self, ticket: Ticket) -> bool:
        """Begin a transfer for a request that waits, if that pays."""
        if self._rule == "never":
            return False
        there = [peer for peer in self.peers if peer.is_up]
        if not there:
            self._decisions[choice.GONE] += 1
            return False
        transfer = self._pages.expect(ticket)
        if transfer is None:
            self._decisions[choice.SHORT] += 1
            return False
        wanted = self._pages.narrow(transfer, lambda _: True)
        if not wanted:
            self._pages.end(transfer)
            self._decisions[choice.SHORT] += 1
            return False
        if len(wanted) + sum(peer.num_held for peer in self.peers) > self._pages.most_held:
            self._pages.end(transfer)
            self._decisions[choice.FULL] += 1
            return False
        first = transfer.first_place * self._kind.page_size
        end = first + len(transfer.keys) * self._kind.page_size
        work = choice.Work(self._flops(first, end), len(wanted) * self._kind.page_bytes)
        views = [peer.outlook() for peer in there]
        best, seconds = choice.choose(
            self._rule, work, self._here(ticket.request, end - first), views
        )
        self._decisions[choice.HERE if best is None else choice.THERE] += 1
        if best is None:
            self._pages.end(transfer)
            return False
        there[best].begin(ticket.request, transfer, wanted, work.flops, seconds)
        return True

    def _ended(self, request: Request) -> None:
        for peer in self.peers:
            peer.request_ended(request)

    def _flops(self, first: int, end: int) -> float:
        return self._cost.of(BatchShape.prefill(end - first, first)).flops if end > first else 0.0

    def _here(self, request: Request, num_missing: int) -> choice.Here:
        now_s = time.monotonic()
        if now_s - self._paced_s > _READ_S:
            self._paced_s = now_s
            span = self._loop.span(_RECENT_S)
            recent = (span.last.strokes - span.first.strokes).prefill
            total = span.last.strokes.prefill
            self._pace = recent.flops_per_s or total.flops_per_s
        num_tokens, missing = self._pages.backlog()
        away = [one.request for peer in self.peers for one in peer.open.values()]
        num_tokens -= sum(len(one.tokens) for one in (request, *away))
        missing += [one.params.max_tokens or sys.maxsize for one in away]  # they join soon
        queue_flops = max(0, num_tokens) * self._flops(0, _TYPICAL) / _TYPICAL
        step = max(1, self._loop.config.token_budget - len(missing))
        num_steps = -(-num_missing // step)
        return choice.Here(queue_flops, self._pace, num_steps, missing)
