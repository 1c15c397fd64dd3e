"""One prefill engine as its decode engine uses it: the connection and its KV transfers."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import BackendError, TwostrokeError
from twostroke.engine.disaggregation import messages
from twostroke.engine.disaggregation.connection import PeerLostError, RefusedError, connect, meet
from twostroke.engine.disaggregation.messages import WRITTEN
from twostroke.engine.disaggregation.placement import Overhead, PrefillEngineState
from twostroke.engine.disaggregation.transfer_methods import choose_way
from twostroke.engine.disaggregation_stats import PrefillPeerStats

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.engine.disaggregation.connection import PeerConnection
    from twostroke.engine.disaggregation.placement import RemotePrefill
    from twostroke.engine.disaggregation.transfer_methods import OwnPages, TransferMethod
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.loop import EngineLoop
    from twostroke.engine.scheduler.transfers import Transfer

_logger = logging.getLogger("twostroke.handover")

# A transfer is given up after so long without progress, and three times what it should take.
PATIENCE_S = 2.0
_TICK_S: Final = 0.05
_SILENCE_S: Final = 3.0  # of a prefill engine, which reports its load twice a second
_RETRY_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0)  # between attempts to connect
_RATE: Final = 1e9  # bytes/s, until it was measured
_NEW: Final = 0.2  # share of a new measurement


class PrefillPeer:
    """One prefill engine. The loop's lock guards its state; one thread reads, one writes."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        kind: messages.KvCacheSpecMessage,
        loop: EngineLoop,
        own: OwnPages,
        link: str,
    ) -> None:
        """Connect, again and again until it is closed; `link` is a word of `PEER_LINKS`."""
        self.open: dict[int, KvTransfer] = {}
        self._unused: list[KvTransfer] = []  # have ended, and hold pages until their requests start
        self.outcomes: Counter[str] = Counter()
        self.num_bytes, self.seconds, self.expected_s, self.fetch_s = 0, 0.0, 0.0, 0.0
        self._address, self._secret, self._kind = address, secret, kind
        assert loop.pages.memory is not None
        self._pages, self._memory = loop.pages, loop.pages.memory
        self._connection: PeerConnection | None = None
        self._own, self._link, self._num_failed = own, link, 0  # times that NIXL failed in turn
        self._way: TransferMethod | None = None
        self._num_pages = 0
        self._state = "down"
        self._load = messages.PrefillLoad(0.0, 0.0)
        self._heard_s = 0.0
        self._rate, self._overhead = 0.0, Overhead()
        self._ids, self._numbers = itertools.count(1), itertools.count(1)
        self._fetches: dict[int, PageFetch] = {}
        self._to_send: queue.SimpleQueue[messages.Question] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=run, name="twostroke-fetch", daemon=True)
            for run in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_up(self) -> bool:
        """Whether prompts can be sent there."""
        return self._state == "up"

    def close(self) -> None:
        """End all transfers and the connection."""
        self._closing.set()
        self._cut()
        if (way := self._way) is not None:
            way.end()
        for thread in self._threads:
            thread.join()
        with self._pages.lock:
            for one in self._unused:
                self._pages.end(one.transfer)

    def view(self) -> PrefillPeerStats:
        """Return its state."""
        load, (host, port) = self._load, self._address
        link = self._way.title if self._way is not None else ""
        rates = load.queue_flops, load.flops_per_s, self._rate
        overhead_s = self._overhead.seconds(time.monotonic())
        return PrefillPeerStats(
            f"{host}:{port}", self._state, link, len(self.open), *rates, overhead_s
        )

    # The loop's lock is held while these are called.

    def outlook(self) -> PrefillEngineState:
        """Return how busy it is, with what it does not know of yet."""
        unknown = sum(one.flops for one in self.open.values() if one.id > self._load.last_id)
        queue_flops = self._load.queue_flops + unknown
        overhead_s = self._overhead.seconds(time.monotonic())
        return PrefillEngineState(
            queue_flops, self._load.flops_per_s, self._rate or _RATE, overhead_s
        )

    def begin(self, request: Request, chosen: RemotePrefill) -> None:
        """Have it read the prompt of a request."""
        one = begin(next(self._ids), request, chosen, PATIENCE_S, len(self._kind.windows))
        self.open[one.id] = one
        end = chosen.transfer.first_page + len(chosen.transfer.keys)
        tokens = request.tokens[: end * self._kind.page_size]
        self._to_send.put(
            messages.PrefillPrompt(one.id, tokens, request.salt, one.firsts, request.priority)
        )

    def request_ended(self, request: Request) -> None:
        """Abort the transfer of a request that has ended."""
        for one in [one for one in self.open.values() if one.request is request]:
            self._end(one, CANCELLED)
        self._let_go()

    @property
    def num_held(self) -> int:
        """How many pages its transfers hold or will hold."""
        return sum(len(one.keys) for one in (*self.open.values(), *self._unused))

    def _end(self, one: KvTransfer, outcome: str) -> None:
        """Let requests compute what has not arrived, and give the pages back when none writes."""
        del self.open[one.id]
        self._fetches = {n: f for n, f in self._fetches.items() if f.one is not one or f.is_written}
        one.has_ended = True
        if not one.is_finished and outcome != DONE:
            self._to_send.put(messages.Abort(one.id))
        self.outcomes[outcome] += 1
        now_s = time.monotonic()
        took_s = now_s - one.began_s
        self.seconds += took_s
        self.expected_s += one.expected_s
        if outcome == DONE:
            self._overhead.learn(one.expected_s, took_s, now_s)
        self._pages.give_up(one.transfer)
        self._unused.append(one)
        self._let_go()

    def _let_go(self) -> None:
        """Give back pages to which nobody writes, once their request has started or ended."""
        for one in self._unused:
            if not one.num_writing and (one.request.started_s or one.request.is_finished):
                self._pages.end(one.transfer)
        self._unused = [one for one in self._unused if one.transfer.pages]

    def _end_if_done(self, one: KvTransfer) -> None:
        if one.has_ended:
            return
        if not one.transfer.missing:
            self._end(one, DONE)
        elif one.is_finished and not one.num_pending:
            self._end(one, FAULT if one.fault else PARTIAL)

    # The thread that reads.

    def _read(self) -> None:
        attempt = 0
        while not self._closing.is_set():
            try:
                self._meet()
                attempt = 0
                while True:
                    self._take(self._receive())
            except (PeerLostError, BackendError) as error:
                self._lost(error, is_first=not attempt)
            self._closing.wait(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
            attempt += 1

    def _meet(self) -> None:
        """Connect, and see whether both engines have pages of one kind."""
        connection, file = connect(self._address, self._secret)
        self._connection = connection
        if self._closing.is_set():
            connection.cut()
        try:
            self._num_pages = meet(connection, self._kind)
        except PeerLostError:
            if file is not None:
                os.close(file)
            raise
        link = "socket" if self._link == "auto" and self._num_failed > 1 else self._link
        self._way = choose_way(connection, file, self._num_pages, self._own, link)
        self._heard_s = time.monotonic()
        with self._pages.lock:
            self._load = messages.PrefillLoad(0.0, 0.0)
            self._ids = itertools.count(1)
            self._to_send = queue.SimpleQueue()
            self._state = "up"
        title = self._way.title
        _logger.info("Prefill engine %s:%d reads prompts; way of pages: %s.", *self._address, title)

    def _receive(self) -> messages.Answer:
        assert self._connection is not None
        answer: messages.Answer = self._connection.receive()
        self._heard_s = time.monotonic()
        return answer

    def _lost(self, error: TwostrokeError, *, is_first: bool) -> None:
        with self._pages.lock:
            was_up = self.is_up
            self._state = "refused" if isinstance(error, RefusedError) else "down"
            for one in list(self.open.values()):
                self._end(one, LOST)
        if self._way is not None:
            self._num_failed += self._way.is_nixl
            self._way.close()
            self._way = None
        with self._pages.lock:  # nothing writes any more
            for fetch in self._fetches.values():
                fetch.one.num_writing -= fetch.is_written
            self._fetches = {}
            self._let_go()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if (was_up or is_first) and not self._closing.is_set():
            _logger.warning(
                "Prefill engine %s:%d: %s Prompts are read here until it is there.",
                *self._address,
                error,
            )

    def _take(self, answer: messages.Answer) -> None:
        match answer:
            case messages.PrefillLoad():
                self._load = answer
            case messages.Offer():
                self._offered(answer)
            case messages.Content():
                self._arrived(answer)
            case messages.PrefillFinished():
                with self._pages.lock:
                    one = self.open.get(answer.id)
                    if one is not None:
                        one.is_finished, one.fault = True, answer.fault
                        self._end_if_done(one)
            case messages.Welcome() | messages.Refused():
                pass  # a second time

    def _offered(self, offer: messages.Offer) -> None:
        with self._pages.lock:
            one = self.open.get(offer.id)
            if one is None or offer.offer in one.offers:
                number = next(self._numbers)
                self._to_send.put(messages.Fetch(number, offer.id, offer.offer, [], is_last=True))
                return
            one.offers.add(offer.offer)
            one.due_s = time.monotonic() + one.patience_s
            rest = one.choose(offer)
        if not all(0 <= page < self._num_pages for _, _, page in rest):
            raise PeerLostError("A page was offered that cannot be.")
        self._fetch(one, offer.offer, rest)

    def _fetch(self, one: KvTransfer, offer: int, rest: list[tuple[int, PageKey, int]]) -> None:
        """Fetch as many pages of an offer as there is room for, the others after these."""
        assert self._way is not None
        how, is_written = self._way.how, self._way.how == messages.WRITTEN
        with self._pages.lock:
            if one.has_ended:
                return  # and was aborted
            most = self._way.most_pages(self._kind.page_bytes)
            pages = self._pages.take(one.transfer, [key for _, key, _ in rest[:most]])
            part, rest = rest[: len(pages)], rest[len(pages) :]
            if rest and not part:
                self._end(one, NO_ROOM)
                return
            number = next(self._numbers)
            keys = [key for _, key, _ in part]
            self._fetches[number] = PageFetch(one, offer, keys, rest, time.monotonic(), how)
            one.num_pending += 1
            one.num_writing += 1
        try:
            self._way.copy([page for _, _, page in part], self._memory, pages)
        finally:
            if not is_written:
                self._written(one)
        wanted = [at for at, _, _ in part]
        fetch = messages.Fetch(number, one.id, offer, wanted, is_last=not rest, how=how)
        assert self._connection
        self._connection.send(replace(fetch, targets=pages) if is_written else fetch)

    def _arrived(self, content: messages.Content) -> None:
        with self._pages.lock:
            fetch = self._fetches.pop(content.number, None)
            if fetch is not None:
                one, is_sent = fetch.one, content.is_valid and fetch.how == messages.SENT
                pages = [one.transfer.pages[key] for key in fetch.keys] if is_sent else []
                one.num_writing += not fetch.is_written
        if fetch is None:
            self._drain(content.num_bytes)
            return
        try:
            if content.num_bytes != len(pages) * self._kind.page_bytes:
                raise PeerLostError("Pages of another size were sent.")
            for page in pages:
                with self._memory.filling(page) as view:
                    self._receive_into(view)
        finally:
            self._written(one)
        with self._pages.lock:
            one.num_pending -= 1
            if one.has_ended:
                return
            if not content.is_valid:
                self._end(one, LATE)
                return
            self._num_failed = 0
            self._pages.arrive(one.transfer, fetch.keys)
            now_s = time.monotonic()
            one.due_s = now_s + one.patience_s
            self._learn(len(fetch.keys) * self._kind.page_bytes, now_s - fetch.began_s)
            self._end_if_done(one)
            if one.has_ended or not fetch.rest:
                return
        self._fetch(one, fetch.offer, fetch.rest)

    def _learn(self, num_bytes: int, seconds: float) -> None:
        self.num_bytes += num_bytes
        self.fetch_s += seconds
        rate = num_bytes / max(seconds, 1e-6)
        self._rate = rate if not self._rate else self._rate + _NEW * (rate - self._rate)

    def _written(self, one: KvTransfer) -> None:
        with self._pages.lock:
            one.num_writing -= 1
            self._let_go()

    def _receive_into(self, target: memoryview[int]) -> None:
        assert self._connection is not None
        self._connection.receive_into(target)
        self._heard_s = time.monotonic()

    def _drain(self, num_bytes: int) -> None:
        """Read pages that nobody wants any more."""
        scratch = memoryview(bytearray(1 << 16))
        for start in range(0, num_bytes, len(scratch)):
            self._receive_into(scratch[: num_bytes - start])

    # The thread that writes.

    def _write(self) -> None:
        """Send questions, and end what is late, until the peer is closed."""
        while not self._closing.is_set():
            question = None
            to_send = self._to_send
            with suppress(queue.Empty):
                question = to_send.get(timeout=_TICK_S)
            connection = self._connection
            if connection is not None and self.is_up:
                if question is not None and to_send is self._to_send:
                    with suppress(PeerLostError):  # the other thread learns of it
                        connection.send(question)
                if time.monotonic() - self._heard_s > _SILENCE_S:
                    connection.cut()
            self._end_late()

    def _end_late(self) -> None:
        now_s = time.monotonic()
        with self._pages.lock:
            for one in [one for one in self.open.values() if one.due_s < now_s]:
                self._end(one, LATE)
            self._let_go()
            ended = (fetch.one for fetch in self._fetches.values() if fetch.one.has_ended)
            is_stuck = any(one.due_s + PATIENCE_S < now_s for one in ended)
        if is_stuck:
            self._cut()  # nothing writes to the pages then

    def _cut(self) -> None:
        if (connection := self._connection) is not None:
            connection.cut()


# How a transfer ended.
DONE: Final = "done"
PARTIAL: Final = "partial"  # the prefill engine did not have all pages
NO_ROOM: Final = "no_room"
LATE: Final = "late"
LOST: Final = "lost"  # the connection ended
CANCELLED: Final = "cancelled"
FAULT: Final = "fault"  # the prefill engine could not read the prompt
OUTCOMES: Final = (DONE, PARTIAL, NO_ROOM, LATE, LOST, CANCELLED, FAULT)


@dataclass(slots=True, eq=False)
class KvTransfer:
    """A transfer. Until `num_writing` is 0 its pages are not given back."""

    id: int
    request: Request
    transfer: Transfer
    keys: dict[tuple[int, int], PageKey]  # wanted, by group and place
    flops: float
    expected_s: float
    began_s: float
    patience_s: float
    due_s: float
    firsts: tuple[int, ...]  # the first places that are wanted, by group
    offers: set[int] = field(default_factory=set)
    asked: set[PageKey] = field(default_factory=set)
    num_pending: int = 0
    num_writing: int = 0
    is_finished: bool = False  # nothing more is offered
    fault: str | None = None
    has_ended: bool = False

    def choose(self, offer: messages.Offer) -> list[tuple[int, PageKey, int]]:
        """Return what to ask for of an offer: (place in it, key, page there).

        Each page is named once, however often it was offered, and neighbours follow each other.
        """
        named = [
            (at, self.keys.get((group, place)), page)
            for at, (group, place, page) in enumerate(offer.pages)
        ]
        found = {
            key: (at, key, page)
            for at, key, page in named
            if key in self.transfer.missing and key not in self.asked
        }
        self.asked.update(found)
        return sorted(found.values(), key=lambda one: one[2])


def begin(
    id_: int, request: Request, chosen: RemotePrefill, patience_s: float, groups: int
) -> KvTransfer:
    """Return a transfer that begins; it waits for `patience_s` beyond what it should take."""
    transfer, now_s = chosen.transfer, time.monotonic()
    places = {key: place for place, key in enumerate(transfer.keys, transfer.first_page)}
    keys = {(group, places[key]): (group, key) for group, key in chosen.wanted}
    firsts = [transfer.first_page + len(transfer.keys)] * groups
    for group, place in keys:
        firsts[group] = min(firsts[group], place)
    patience_s += 3 * chosen.seconds
    return KvTransfer(
        *(id_, request, transfer, keys, chosen.flops, chosen.seconds),
        *(now_s, patience_s, now_s + patience_s, tuple(firsts)),
    )


@dataclass(slots=True)
class PageFetch:
    """Pages that were asked for, and those of the same offer that follow.

    `how` is a word of `messages`.
    """

    one: KvTransfer
    offer: int
    keys: list[PageKey]
    rest: list[tuple[int, PageKey, int]]  # place in the offer, key, page there
    began_s: float
    how: str

    @property
    def is_written(self) -> bool:
        """Whether its transfer counts it in `num_writing` until its answer comes."""
        return self.how == WRITTEN
