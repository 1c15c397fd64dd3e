"""A decode engine's connection to one prefill engine, and the KV transfers over it."""

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

from twostroke.core.errors import BackendError, TwostrokeError
from twostroke.core.request import NO_STATE
from twostroke.core.transport.frames import ConnectionLostError
from twostroke.engine.disaggregation import messages
from twostroke.engine.disaggregation.connection import (
    RefusedError,
    check_spec,
    connect_to_prefill_engine,
)
from twostroke.engine.disaggregation.placement import PrefillEngineState, TransferOverhead
from twostroke.engine.disaggregation.transfer_methods import choose_transfer_method
from twostroke.engine.disaggregation_stats import PrefillEngineStats

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.core.transport.connection import Connection
    from twostroke.engine.disaggregation.placement import RemotePrefill
    from twostroke.engine.disaggregation.transfer_methods import NixlMemory, TransferMethod
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.loop import EngineLoop
    from twostroke.engine.scheduler.transfers import Transfer

_logger = logging.getLogger("twostroke.handover")

# Outcomes of transfers, as metrics call them.
DONE: Final = "done"
PARTIAL: Final = "partial"  # the prefill engine did not have all pages
NO_ROOM: Final = "no_room"  # the decode engine had no room for the pages
TIMED_OUT: Final = "late"
LOST: Final = "lost"  # the connection ended
CANCELLED: Final = "cancelled"  # the request ended
FAULT: Final = "fault"  # the prefill engine could not compute the prompt
OUTCOMES: Final = (DONE, PARTIAL, NO_ROOM, TIMED_OUT, LOST, CANCELLED, FAULT)

# A transfer ends after this time and three times its expected duration without progress.
STALL_TIMEOUT_S = 2.0
_POLL_S: Final = 0.05
_MAX_SILENCE_S: Final = 3.0  # of a prefill engine, which sends its load twice a second
_RETRY_PAUSES_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0)  # between attempts to connect
_DEFAULT_BYTES_PER_S: Final = 1e9  # speed of fetching without measurements
_NEW_WEIGHT: Final = 0.2  # of a new measurement in the moving average
_SCRATCH_BYTES: Final = 1 << 16


@dataclass(slots=True, frozen=True)
class OfferedPage:
    """An offered KV page: its index in the offer, its key, and its number in the prefill engine."""

    index: int
    key: PageKey
    page: int


@dataclass(slots=True, eq=False)
class KvTransfer:
    """The KV pages of one prompt on their way from a prefill engine.

    Attributes:
        id: the number of the prompt in the connection.
        request: the request that waits for the pages.
        transfer: the claims on the pages, and the pages allocated for them.
        keys: keys of the pages to fetch, by cache group and index in the prompt.
        first_pages: index of the first page to fetch, for each cache group.
        flops: work of the missing part of the prompt.
        expected_s: expected duration.
        began_s: time at which the transfer began.
        stall_timeout_s: maximum time without progress.
        due_s: time by which the next progress must come.
        offers: numbers of the received offers.
        requested: keys of the pages that have been requested.
        num_pending: number of fetches that were not answered yet.
        num_writing: number of fetches that may still write to this engine's pages. The pages are
            not released before this is 0.
        is_finished: whether no more pages will be offered.
        fault: why the prefill engine could not compute the prompt.
        has_ended: whether an outcome has been recorded.
    """

    id: int
    request: Request
    transfer: Transfer
    keys: dict[tuple[int, int], PageKey]
    first_pages: tuple[int, ...]
    flops: float
    expected_s: float
    began_s: float
    stall_timeout_s: float
    due_s: float
    offers: set[int] = field(default_factory=set)
    requested: set[PageKey] = field(default_factory=set)
    num_pending: int = 0
    num_writing: int = 0
    is_finished: bool = False
    fault: str | None = None
    has_ended: bool = False

    @classmethod
    def begin(
        cls, id_: int, request: Request, remote_prefill: RemotePrefill, *, num_groups: int
    ) -> KvTransfer:
        """Return a KV transfer that begins now; `num_groups` is the number of cache groups."""
        transfer = remote_prefill.transfer
        index_by_key = {key: index for index, key in enumerate(transfer.keys, transfer.first_page)}
        keys = {(group, index_by_key[key]): (group, key) for group, key in remote_prefill.page_keys}
        first_pages = [transfer.first_page + len(transfer.keys)] * num_groups
        for group, index in keys:
            first_pages[group] = min(first_pages[group], index)
        now_s = time.monotonic()
        stall_timeout_s = STALL_TIMEOUT_S + 3 * remote_prefill.seconds
        return cls(
            id=id_,
            request=request,
            transfer=transfer,
            keys=keys,
            first_pages=tuple(first_pages),
            flops=remote_prefill.flops,
            expected_s=remote_prefill.seconds,
            began_s=now_s,
            stall_timeout_s=stall_timeout_s,
            due_s=now_s + stall_timeout_s,
        )

    def select(self, offer: messages.Offer) -> list[OfferedPage]:
        """Return the offered KV pages to fetch, sorted so that neighbours in memory are adjacent.

        Each page is requested once, however often it is offered.

        Pages that the transfer does not need are left out.
        """
        selected: dict[PageKey, OfferedPage] = {}
        for index, (group, page_index, page) in enumerate(offer.pages):
            key = self.keys.get((group, page_index))
            if key is not None and key in self.transfer.missing and key not in self.requested:
                selected[key] = OfferedPage(index, key, page)
        self.requested.update(selected)
        return sorted(selected.values(), key=lambda offered: offered.page)


@dataclass(slots=True)
class PageFetch:
    """A fetch of KV pages that the prefill engine has not answered.

    Attributes:
        transfer: the transfer to which the pages belong.
        offer: the number of the offer.
        keys: the pages of this fetch.
        remaining: pages of the same offer to fetch next.
        began_s: time at which the fetch began.
        mode: how the pages get here: `COPIED`, `SENT` or `WRITTEN` (`messages.py`).
        is_state: whether the fetch is for the snapshot of an `OfferState` instead of pages.
    """

    transfer: KvTransfer
    offer: int
    keys: list[PageKey]
    remaining: list[OfferedPage]
    began_s: float
    mode: str
    is_state: bool = False

    @property
    def is_written(self) -> bool:
        """Whether the prefill engine may write pages into this engine until it has answered."""
        return self.mode == messages.WRITTEN


class PrefillEngineConnection:
    """A decode engine's end of the connection to one prefill engine, with its KV transfers.

    The prefill engine's end is a `DecodeEngineConnection` (prefill_side.py): each end has the name
    of the engine to which it leads.

    The loop's lock guards the state. One thread receives, another one sends.

    Attributes:
        transfers: transfers that have not ended, by number.
        outcomes: number of ended transfers by outcome.
        num_bytes: bytes fetched.
        seconds, expected_s: total duration of ended transfers, measured and expected.
        fetch_s: total time of fetches.
        is_retired: whether the prefill engine gets no more prompts, as it is not listed any more.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        *,
        spec: messages.KvCacheSpecMessage,
        loop: EngineLoop,
        nixl_memory: NixlMemory,
        link: str,
    ) -> None:
        """Connect to a prefill engine, and reconnect until `close`.

        `spec` is the format of this engine's pages, which the prefill engine must share. `link` is
        one of `PEER_LINKS`: how pages may be fetched.
        """
        assert loop.pages.memory is not None
        self.transfers: dict[int, KvTransfer] = {}
        self.outcomes: Counter[str] = Counter()
        self.num_bytes = 0
        self.seconds = 0.0
        self.expected_s = 0.0
        self.fetch_s = 0.0
        self.is_retired = False
        self._address = address
        self._secret = secret
        self._spec = spec
        self._pages = loop.pages
        self._memory = loop.pages.memory
        self._nixl_memory = nixl_memory
        self._link = link
        self._num_nixl_failures = 0  # since the last success
        self._ended_transfers: list[KvTransfer] = []  # hold pages until their requests start
        self._fetches: dict[int, PageFetch] = {}
        self._ids = itertools.count(1)
        self._fetch_numbers = itertools.count(1)
        self._connection: Connection[messages.PrefillMessage] | None = None
        self._method: TransferMethod | None = None
        self._num_pages = 0
        self._state = "down"
        self._load = messages.PrefillLoad(0.0, 0.0)
        self._last_message_s = 0.0
        self._bytes_per_s = 0.0
        self._overhead = TransferOverhead()
        self._to_send: queue.SimpleQueue[messages.DecodeMessage] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=run, name="twostroke-fetch", daemon=True)
            for run in (self._run_receiver, self._run_sender)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_up(self) -> bool:
        """Whether prompts can be sent to the prefill engine."""
        return self._state == "up" and not self.is_retired

    @property
    def is_unused(self) -> bool:
        """Whether no KV transfer from the prefill engine runs or holds pages."""
        return not self.transfers and not self._ended_transfers

    def close(self) -> None:
        """End all KV transfers and the connection to the prefill engine."""
        self._closing.set()
        self._cut()
        if (method := self._method) is not None:
            method.end()
        for thread in self._threads:
            thread.join()
        with self._pages.lock:
            for transfer in self._ended_transfers:
                self._pages.end(transfer.transfer)

    def stats(self) -> PrefillEngineStats:
        """Return the state of the connection to the prefill engine, and measured speeds."""
        host, port = self._address
        return PrefillEngineStats(
            address=f"{host}:{port}",
            state=self._state,
            link=self._method.title if self._method is not None else "",
            num_open=len(self.transfers),
            queue_flops=self._load.queue_flops,
            flops_per_s=self._load.flops_per_s,
            bytes_per_s=self._bytes_per_s,
            overhead_s=self._overhead.seconds(time.monotonic()),
        )

    # The caller of these methods holds the loop's lock.

    def load(self) -> PrefillEngineState:
        """Return the prefill engine's load: its last report, and the prompts sent since then."""
        unreported_flops = sum(
            transfer.flops
            for transfer in self.transfers.values()
            if transfer.id > self._load.last_id
        )
        return PrefillEngineState(
            queue_flops=self._load.queue_flops + unreported_flops,
            flops_per_s=self._load.flops_per_s,
            bytes_per_s=self._bytes_per_s or _DEFAULT_BYTES_PER_S,
            overhead_s=self._overhead.seconds(time.monotonic()),
        )

    def begin(self, request: Request, remote_prefill: RemotePrefill) -> None:
        """Send a request's prompt to the prefill engine, and begin the transfer of its KV pages."""
        transfer = KvTransfer.begin(
            next(self._ids), request, remote_prefill, num_groups=len(self._spec.windows)
        )
        self.transfers[transfer.id] = transfer
        num_pages = remote_prefill.transfer.first_page + len(remote_prefill.transfer.keys)
        self._to_send.put(
            messages.PrefillPrompt(
                id=transfer.id,
                tokens=request.tokens[: num_pages * self._spec.page_size],
                salt=request.salt,
                first_pages=transfer.first_pages,
                priority=request.priority,
            )
        )

    def request_ended(self, request: Request) -> None:
        """Abort the KV transfer of a request that has ended."""
        for transfer in list(self.transfers.values()):
            if transfer.request is request:
                self._end(transfer, CANCELLED)
        self._release_pages()

    @property
    def num_held_pages(self) -> int:
        """The number of this engine's KV pages that all transfers hold or will hold."""
        return sum(
            len(transfer.keys) for transfer in (*self.transfers.values(), *self._ended_transfers)
        )

    def _end(self, transfer: KvTransfer, outcome: str) -> None:
        """End a KV transfer: requests compute the missing pages, and unused pages are released.

        `outcome` is one of `OUTCOMES`, such as `DONE`, and is counted.
        """
        del self.transfers[transfer.id]
        self._fetches = {
            number: fetch
            for number, fetch in self._fetches.items()
            if fetch.transfer is not transfer or fetch.is_written
        }
        transfer.has_ended = True
        if not transfer.is_finished and outcome != DONE:
            self._to_send.put(messages.Abort(transfer.id))
        self.outcomes[outcome] += 1
        now_s = time.monotonic()
        took_s = now_s - transfer.began_s
        self.seconds += took_s
        self.expected_s += transfer.expected_s
        if outcome == DONE:
            self._overhead.learn(transfer.expected_s, took_s, now_s)
        self._pages.drop(transfer.transfer)
        self._ended_transfers.append(transfer)
        self._release_pages()

    def _release_pages(self) -> None:
        """Release KV pages that ended transfers hold and no fetch can write to any more.

        A transfer keeps its pages until its request has started or ended, so that the request finds
        them in the cache.
        """
        for transfer in self._ended_transfers:
            request = transfer.request
            if not transfer.num_writing and (request.started_s or request.is_finished):
                self._pages.end(transfer.transfer)
        self._ended_transfers = [
            transfer
            for transfer in self._ended_transfers
            if transfer.transfer.pages or transfer.transfer.state_slot != NO_STATE
        ]

    def _end_if_done(self, transfer: KvTransfer) -> None:
        if transfer.has_ended:
            return
        if transfer.transfer.is_complete:
            self._end(transfer, DONE)
        elif transfer.is_finished and not transfer.num_pending:
            self._end(transfer, FAULT if transfer.fault else PARTIAL)

    # The receiving thread.

    def _run_receiver(self) -> None:
        attempt = 0
        while not self._closing.is_set():
            try:
                self._connect()
                attempt = 0
                while True:
                    self._handle(self._receive())
            except BackendError as error:
                self._disconnected(error, is_first=not attempt)
            self._closing.wait(_RETRY_PAUSES_S[min(attempt, len(_RETRY_PAUSES_S) - 1)])
            attempt += 1

    def _connect(self) -> None:
        """Connect to the prefill engine, compare the formats of KV pages, and choose a method.

        The method is how pages are fetched: shared memory, NIXL or the socket.
        """
        connection, shared_file = connect_to_prefill_engine(self._address, self._secret)
        self._connection = connection
        if self._closing.is_set():
            connection.cut()
        try:
            self._num_pages = check_spec(connection, self._spec)
        except ConnectionLostError:
            if shared_file is not None:
                os.close(shared_file)
            raise
        avoids_nixl = self._link == "auto" and self._num_nixl_failures > 1
        self._method = choose_transfer_method(
            connection,
            shared_file,
            num_pages=self._num_pages,
            nixl_memory=self._nixl_memory,
            link="socket" if avoids_nixl else self._link,
        )
        self._last_message_s = time.monotonic()
        with self._pages.lock:
            self._load = messages.PrefillLoad(0.0, 0.0)
            self._ids = itertools.count(1)
            self._to_send = queue.SimpleQueue()
            self._state = "up"
        _logger.info(
            "Prefill engine %s:%d is connected; KV transfer method: %s.",
            *self._address,
            self._method.title,
        )

    def _receive(self) -> messages.PrefillMessage:
        assert self._connection is not None
        message: messages.PrefillMessage = self._connection.receive()
        self._last_message_s = time.monotonic()
        return message

    def _disconnected(self, error: TwostrokeError, *, is_first: bool) -> None:
        """End all KV transfers, because the connection was lost or could not be made.

        `is_first` says that no connection was tried before; the error is logged then.
        """
        with self._pages.lock:
            was_up = self.is_up
            self._state = "refused" if isinstance(error, RefusedError) else "down"
            for transfer in list(self.transfers.values()):
                self._end(transfer, LOST)
        if self._method is not None:
            self._num_nixl_failures += self._method.is_nixl
            self._method.close()
            self._method = None
        with self._pages.lock:  # nothing writes to the pages any more
            for fetch in self._fetches.values():
                fetch.transfer.num_writing -= fetch.is_written
            self._fetches = {}
            self._release_pages()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if (was_up or is_first) and not self._closing.is_set():
            _logger.warning(
                "Prefill engine %s:%d: %s This engine prefills all prompts until it is connected.",
                *self._address,
                error,
            )

    def _handle(self, message: messages.PrefillMessage) -> None:
        match message:
            case messages.PrefillLoad():
                self._load = message
            case messages.Offer():
                self._handle_offer(message)
            case messages.OfferState():
                self._handle_state_offer(message)
            case messages.Content():
                self._handle_content(message)
            case messages.PrefillFinished():
                with self._pages.lock:
                    transfer = self.transfers.get(message.id)
                    if transfer is not None:
                        transfer.is_finished = True
                        transfer.fault = message.fault
                        self._end_if_done(transfer)
            case messages.Welcome() | messages.Refused():
                pass  # a duplicate

    def _handle_offer(self, offer: messages.Offer) -> None:
        with self._pages.lock:
            transfer = self.transfers.get(offer.id)
            if transfer is None or offer.number in transfer.offers:
                self._decline(offer)
                return
            transfer.offers.add(offer.number)
            transfer.due_s = time.monotonic() + transfer.stall_timeout_s
            selected = transfer.select(offer)
        if not all(0 <= offered.page < self._num_pages for offered in selected):
            raise ConnectionLostError("The prefill engine offered a page that does not exist.")
        self._fetch(transfer, offer.number, selected)

    def _decline(self, offer: messages.Offer | messages.OfferState) -> None:
        """Let the prefill engine release an offer; nothing is fetched from the offer."""
        self._to_send.put(
            messages.FetchPages(
                number=next(self._fetch_numbers),
                id=offer.id,
                offer=offer.number,
                indices=[],
                is_last=True,
            )
        )

    def _handle_state_offer(self, offer: messages.OfferState) -> None:
        """Fetch an offered snapshot, unless the transfer needs none or there is no room."""
        with self._pages.lock:
            transfer = self.transfers.get(offer.id)
            if transfer is None or offer.number in transfer.offers:
                self._decline(offer)
                return
            transfer.offers.add(offer.number)
            transfer.due_s = time.monotonic() + transfer.stall_timeout_s
            claims = transfer.transfer
            is_needed = claims.missing_state is not None and claims.state_slot == NO_STATE
            if not is_needed or offer.num_pages != claims.num_pages:
                self._decline(offer)
                return
            if self._pages.allocate_state(claims) == NO_STATE:
                self._end(transfer, NO_ROOM)
                return
            number = next(self._fetch_numbers)
            self._fetches[number] = PageFetch(
                transfer=transfer,
                offer=offer.number,
                keys=[],
                remaining=[],
                began_s=time.monotonic(),
                mode=messages.SENT,
                is_state=True,
            )
            transfer.num_pending += 1
            self._to_send.put(messages.FetchState(number, offer.id, offer.number))

    def _fetch(self, transfer: KvTransfer, offer: int, selected: list[OfferedPage]) -> None:
        """Fetch the selected KV pages for which there is room; fetch the other pages afterwards.

        `offer` is the number of the prefill engine's offer that has the pages.
        """
        method = self._method
        assert method is not None
        is_written = method.mode == messages.WRITTEN
        with self._pages.lock:
            if transfer.has_ended:
                return  # the prefill engine has been sent an `Abort`
            max_pages = method.max_pages(self._spec.page_bytes)
            keys = [offered.key for offered in selected[:max_pages]]
            targets = self._pages.allocate(transfer.transfer, keys)
            fetched, remaining = selected[: len(targets)], selected[len(targets) :]
            if remaining and not fetched:
                self._end(transfer, NO_ROOM)
                return
            number = next(self._fetch_numbers)
            self._fetches[number] = PageFetch(
                transfer=transfer,
                offer=offer,
                keys=[offered.key for offered in fetched],
                remaining=remaining,
                began_s=time.monotonic(),
                mode=method.mode,
            )
            transfer.num_pending += 1
            transfer.num_writing += 1
        try:
            method.copy([offered.page for offered in fetched], self._memory, targets)
        finally:
            if not is_written:
                self._stop_writing(transfer)
        assert self._connection
        self._connection.send(
            messages.FetchPages(
                number=number,
                id=transfer.id,
                offer=offer,
                indices=[offered.index for offered in fetched],
                is_last=not remaining,
                mode=method.mode,
                targets=targets if is_written else [],
            )
        )

    def _handle_content(self, content: messages.Content) -> None:
        """Handle the answer to a fetch: index its KV pages, and fetch the offer's next pages."""
        with self._pages.lock:
            fetch = self._fetches.pop(content.number, None)
            if fetch is not None:
                transfer = fetch.transfer
                transfer.num_writing += not fetch.is_written
        if fetch is None:
            self._skip(content.num_bytes)
            return
        try:
            self._receive_content(content, fetch)
        finally:
            self._stop_writing(transfer)
        with self._pages.lock:
            transfer.num_pending -= 1
            if transfer.has_ended:
                return
            if not content.is_valid:
                self._end(transfer, TIMED_OUT)
                return
            self._num_nixl_failures = 0
            num_bytes = len(fetch.keys) * self._spec.page_bytes
            if fetch.is_state:
                self._pages.add_state(transfer.transfer)
                num_bytes = content.num_bytes
            else:
                self._pages.add_arrived(transfer.transfer, fetch.keys)
            now_s = time.monotonic()
            transfer.due_s = now_s + transfer.stall_timeout_s
            self._learn_speed(num_bytes, now_s - fetch.began_s)
            self._end_if_done(transfer)
            if transfer.has_ended or not fetch.remaining:
                return
        self._fetch(transfer, fetch.offer, fetch.remaining)

    def _receive_content(self, content: messages.Content, fetch: PageFetch) -> None:
        """Receive the bytes of a fetch into its KV pages, or into the slot of its snapshot.

        Raises:
            ConnectionLostError: the number of bytes is not the size of the pages.
        """
        claims = fetch.transfer.transfer
        memory, targets = self._memory, [claims.pages[key] for key in fetch.keys]
        if fetch.is_state:
            assert self._pages.state_memory is not None
            memory, targets = self._pages.state_memory, [claims.state_slot]
        if not content.is_valid or fetch.mode != messages.SENT:
            targets = []
        if content.num_bytes != len(targets) * memory.page_bytes:
            raise ConnectionLostError("The prefill engine sent pages of another size.")
        for target in targets:
            with memory.filling(target) as view:
                self._receive_into(view)

    def _learn_speed(self, num_bytes: int, seconds: float) -> None:
        self.num_bytes += num_bytes
        self.fetch_s += seconds
        bytes_per_s = num_bytes / max(seconds, 1e-6)
        if self._bytes_per_s:
            self._bytes_per_s += _NEW_WEIGHT * (bytes_per_s - self._bytes_per_s)
        else:
            self._bytes_per_s = bytes_per_s

    def _stop_writing(self, transfer: KvTransfer) -> None:
        with self._pages.lock:
            transfer.num_writing -= 1
            self._release_pages()

    def _receive_into(self, target: memoryview[int]) -> None:
        assert self._connection is not None
        self._connection.receive_into(target)
        self._last_message_s = time.monotonic()

    def _skip(self, num_bytes: int) -> None:
        """Receive the KV pages of a transfer that has ended, and throw them away."""
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        for start in range(0, num_bytes, len(scratch)):
            self._receive_into(scratch[: num_bytes - start])

    # The sending thread.

    def _run_sender(self) -> None:
        """Send queued messages to the prefill engine; end transfers that make no progress.

        This is the sending thread's function; it returns at `close`.
        """
        while not self._closing.is_set():
            message = None
            to_send = self._to_send
            with suppress(queue.Empty):
                message = to_send.get(timeout=_POLL_S)
            connection = self._connection
            if connection is not None and self.is_up:
                if message is not None and to_send is self._to_send:
                    with suppress(ConnectionLostError):  # the receiving thread gets an error, too
                        connection.send(message)
                if time.monotonic() - self._last_message_s > _MAX_SILENCE_S:
                    connection.cut()
            self._end_late_transfers()

    def _end_late_transfers(self) -> None:
        now_s = time.monotonic()
        with self._pages.lock:
            overdue = [transfer for transfer in self.transfers.values() if transfer.due_s < now_s]
            for transfer in overdue:
                self._end(transfer, TIMED_OUT)
            self._release_pages()
            ended_transfers = [
                fetch.transfer for fetch in self._fetches.values() if fetch.transfer.has_ended
            ]
            is_stuck = any(transfer.due_s + STALL_TIMEOUT_S < now_s for transfer in ended_transfers)
        if is_stuck:
            self._cut()  # after that nothing writes to the pages

    def _cut(self) -> None:
        if (connection := self._connection) is not None:
            connection.cut()
