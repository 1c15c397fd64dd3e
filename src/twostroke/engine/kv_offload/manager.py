"""`OffloadManager`: fetches pages from tiers before requests start, and writes used pages."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.engine.counters import TierTotals
from twostroke.engine.kv_offload.tier import PageValue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.kv_offload.tier import KvCacheSpec, OffloadTier
    from twostroke.engine.pool_access import PoolAccess
    from twostroke.engine.scheduler.request_state import RequestState
    from twostroke.engine.scheduler.transfers import Transfer

    Seconds = Callable[[int, int], float]  # that computing tokens[start:end] of a prompt takes

_logger = logging.getLogger("twostroke.engine")

_LEAST_S: Final = 0.1  # of computing that is worth a look at tiers
_MOST_LOSS: Final = 0.04  # of the seconds that computing takes: what a transfer may lose
_LEAST_SLACK_S: Final = 0.05  # or a twentieth of the computing: threads may have to wait as long
_NUM_FETCHING: Final = 4  # transfers at the same time
_WINDOW: Final = 4  # pages that are fetched, and written, together; the first comes alone
_MEMORY_S: Final = 60.0  # after which a slow tier is tried again
_NEW_SHARE: Final = 0.2  # of a new time in the mean
_MOST_OFFERS: Final = 1000  # that wait to be written
_MOST_SEEN: Final = 1 << 17  # keys whose second computing is recognized
_BUSY_SHARE: Final = 0.1  # of the time in which pages are written while requests run
_TOUCH_S: Final = 60.0  # between two notes of a page's use
_FLUSH_S: Final = 3.0  # at the end, in which pages are still written
_CLOSE_S: Final = 1.0  # after which a tier is left that does not answer


class _MeasuredTier:
    """A tier with its counts, and how long it takes for a page."""

    def __init__(self, tier: OffloadTier) -> None:
        self.tier = tier
        self.counts: dict[str, float] = {}
        self._lock = threading.Lock()
        self._page_s = 0.0
        self._known_until_s = 0.0

    def add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self.counts[name] = self.counts.get(name, 0) + count

    def took(self, read_s: float) -> None:
        """Learn from a page that was read."""
        if not read_s:
            return
        with self._lock:
            known, self._page_s = self._page_s, read_s
            if time.monotonic() < self._known_until_s and known:
                self._page_s = known + _NEW_SHARE * (read_s - known)
            self._known_until_s = time.monotonic() + _MEMORY_S

    def page_s(self) -> float:
        """Return the seconds for a page; 0 if they were not measured lately."""
        return self._page_s if time.monotonic() < self._known_until_s else 0.0

    def totals(self) -> TierTotals:
        pages, num_bytes = self.tier.size() or (None, None)
        with self._lock:
            counts = {k: v if k.endswith("_s") else int(v) for k, v in self.counts.items()}
        return TierTotals(
            self.tier.title,
            pages_stored=pages,
            bytes_stored=num_bytes,
            **counts,  # type: ignore[arg-type]
        )


class _Offer(Frozen):
    """Pages to write: those from the place `first` on of a sequence that begins with `keys`.

    They were used at `used_s` by a sequence of `num_places` that is to stay for `keep_s`.
    """

    keys: list[bytes]
    first: int
    num_places: int
    used_s: float
    keep_s: float


class _PageLoad(Frozen):
    """A request's transfer, when it began, and the seconds that it may lose."""

    ticket: RequestState
    transfer: Transfer
    began_s: float
    slack_s: float


class OffloadManager:
    """Implements `PageWatcher`, and moves pages between an engine's pool and its tiers.

    A request whose computing takes long enough waits for pages that a tier has, if these are
    expected in half of the time that computing them takes, and the first one in half of what may be
    lost. The wait ends when it has lost a small share of the request's computing more than the
    pages that have arrived save. Pages are written when they are used or computed a second time, or
    at once for requests that want them kept.
    """

    def __init__(
        self,
        pages: PoolAccess,
        kind: KvCacheSpec,
        tiers: Sequence[OffloadTier],
        seconds: Seconds,
        is_measured: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin; `pages` ends it. Until `is_measured`, computing takes longer than `seconds`."""
        self._pages, self._kind, self._seconds = pages, kind, seconds
        self._is_measured = is_measured
        self._tiers = [_MeasuredTier(tier) for tier in tiers]
        for tier in self._tiers:
            tier.took(tier.tier.probe())
        self._size = kind.groups.page_size
        self._num_groups = len(kind.groups.windows)
        self._asked: SimpleQueue[_PageLoad | None] = SimpleQueue()
        self._bringing: set[Transfer] = set()  # those that were asked for and have not ended
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._touched: OrderedDict[bytes, float] = OrderedDict()  # when, by key of the last place
        self._offers: deque[_Offer] = deque(maxlen=_MOST_OFFERS)
        self._has_offers = threading.Event()
        self._is_closing = False
        work = [(self._write_all, "twostroke-pages")]
        work += [(self._bring_all, "twostroke-fetch")] * _NUM_FETCHING
        self._threads = [threading.Thread(target=do, name=name, daemon=True) for do, name in work]
        for thread in self._threads:
            thread.start()
        pages.on_submit.insert(0, self._submitted)  # before other engines are asked to compute
        pages.on_close.append(self.close)
        pages.count, pages.flush = self.totals, self.flush
        pages.scheduler.prefix_cache.watcher = self

    def totals(self) -> tuple[TierTotals, ...]:
        """Return the counts of each tier; any thread may call it."""
        return tuple(tier.totals() for tier in self._tiers)

    def flush(self, within_s: float) -> bool:
        """Wait until all offered pages are written; False if that fails, or takes longer."""
        until_s = time.monotonic() + within_s
        while self._offers or self._has_offers.is_set():
            if time.monotonic() > until_s:
                return False
            time.sleep(0.01)
        return all(tier.tier.is_writable for tier in self._tiers)

    def close(self) -> bool:
        """Write what was offered, for a moment at most, and end all transfers.

        Return whether they have ended: a tier that does not answer may still use their pages.
        """
        if not self._is_closing:
            self.flush(_FLUSH_S)
        self._is_closing = True
        self._has_offers.set()
        for _ in range(_NUM_FETCHING):
            self._asked.put(None)
        until_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _logger.warning("The page cache does not answer; the engine ends without it.")
            return False
        for tier in self._tiers:
            tier.tier.close()
        return True

    # Called under the loop's lock.

    def on_prefix_hit(self, ticket: RequestState, num_places: int) -> None:
        """Offer the pages that a request starts with, unless that was done a moment ago."""
        chain, keep_s = ticket.chain, ticket.request.hints.keep_s
        if chain is None:
            return
        last, now_s = chain.keys[num_places - 1], time.monotonic()
        if not keep_s and now_s - self._touched.get(last, -_TOUCH_S) < _TOUCH_S:
            return
        self._touched[last] = now_s
        if len(self._touched) > _MOST_OFFERS:
            self._touched.popitem(last=False)
        self._offer(chain.keys[:num_places], 0, num_places, keep_s)

    def on_computed(self, ticket: RequestState, first: int, last: int) -> None:
        """Offer pages that a request has computed, if they were before or it wants them kept."""
        chain, request = ticket.chain, ticket.request
        if chain is None:
            return
        keys = chain.keys[first:last]
        num_again = 0
        for key in keys:
            if key in self._seen:
                num_again += 1
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        num_whole = request.num_prompt // self._size if request.hints.keep_s else 0
        count = max(num_again, min(last, num_whole) - first)
        if count > 0:
            num_places = max(first + count, num_whole)
            self._offer(chain.keys[: first + count], first, num_places, request.hints.keep_s)

    def _offer(self, keys: list[bytes], first: int, num_places: int, keep_s: float) -> None:
        self._offers.append(_Offer(keys, first, num_places, time.time(), keep_s))
        self._has_offers.set()

    def _submitted(self, ticket: RequestState) -> bool:
        """Let a request that was queued wait for pages, if computing them takes long."""
        whole_s = self._seconds(0, len(ticket.request.tokens))
        is_hanging = any(transfer.is_dropped for transfer in self._bringing)
        if (whole_s < _LEAST_S and self._is_measured()) or is_hanging or self._is_closing:
            return False
        slack_s = max(_MOST_LOSS * whole_s, min(_LEAST_SLACK_S, whole_s / 20))
        if not self._is_measured():
            slack_s = max(_LEAST_S, whole_s / 2)
        transfer = self._pages.expect(ticket, slack_s)
        if transfer is None:
            return False
        self._bringing.add(transfer)
        self._asked.put(_PageLoad(ticket, transfer, time.monotonic(), slack_s))
        return True

    # Called by the fetching threads.

    def _bring_all(self) -> None:
        while (asked := self._asked.get()) is not None:
            transfer = asked.transfer
            try:
                self._fetch(transfer, asked.began_s, asked.slack_s)
            except Exception:
                _logger.exception("Pages could not be brought; they are computed.")
            finally:
                with self._pages.lock:
                    self._bringing.discard(transfer)
                    self._pages.end(transfer)
                    self._pages.submitted(asked.ticket, self._submitted)

    def _fetch(self, transfer: Transfer, began_s: float, slack_s: float) -> None:
        if transfer.is_dropped or self._is_closing:
            return
        where = self._find(transfer)
        wanted = self._pages.narrow(transfer, where.__contains__)
        if not wanted or transfer.is_dropped:
            return
        place_of = {key: transfer.first_page + at for at, key in enumerate(transfer.keys)}
        start = transfer.first_page * self._size
        last = place_of[wanted[-1][1]] + 1
        all_s = self._seconds(start, last * self._size)
        tiers = {where[key] for key in wanted}
        expected_s = sum(where[key].page_s() for key in wanted)
        most_s = all_s / 2 if self._is_measured() else all_s
        if expected_s > most_s or where[wanted[0]].page_s() > slack_s / 2:
            for tier in tiers:
                tier.add(slow=1)
            return
        for tier in tiers:
            tier.add(hits=1)
        at, saved_s = 0, 0.0
        while at < len(wanted) and not transfer.is_dropped and not self._is_closing:
            part = wanted[at : at + (_WINDOW if at else 1)]
            count = self._fetch_some(transfer, part, where)
            at += count
            if count:
                end = (place_of[part[count - 1][1]] + 1) * self._size
                saved_s = all_s if at == len(wanted) else self._seconds(start, end)
                transfer.expires_at_s = began_s + saved_s + slack_s
            if count < len(part):
                break
        took_s = time.monotonic() - began_s
        for tier in tiers:
            tier.add(saved_s=(saved_s - took_s) / len(tiers), slow=int(transfer.is_dropped))

    def _find(self, transfer: Transfer) -> dict[PageKey, _MeasuredTier]:
        """Return the tier of each page of a transfer that one of them has."""
        groups = range(self._num_groups)
        names = {self._kind.name((g, key)): (g, key) for key in transfer.keys for g in groups}
        where: dict[PageKey, _MeasuredTier] = {}
        for tier in self._tiers:
            missing = [name for name, key in names.items() if key not in where]
            if missing:
                tier.add(lookups=1)
                where |= {names[name]: tier for name in tier.tier.find(missing)}
        return where

    def _fetch_some(
        self, transfer: Transfer, part: Sequence[PageKey], where: dict[PageKey, _MeasuredTier]
    ) -> int:
        """Bring pages, in order; return how many came."""
        memory, count = self._pages.memory, 0
        assert memory is not None
        pages = self._pages.take(transfer, part)
        for key, page in zip(part, pages, strict=False):
            tier, began_s = where[key], time.perf_counter()
            if transfer.is_dropped:
                break
            with memory.filling(page) as view:
                is_there = tier.tier.fetch(self._kind.name(key), view)
            if not is_there:
                break
            took_s = time.perf_counter() - began_s
            tier.took(took_s)
            tier.add(pages_read=1, bytes_read=memory.page_bytes, read_s=took_s)
            count += 1
        self._pages.arrive(transfer, part[:count])
        return count

    # Called by the writing thread.

    def _write_all(self) -> None:
        while True:
            self._has_offers.wait()
            if self._is_closing:
                return
            if not self._offers:
                self._has_offers.clear()
                if self._offers or self._is_closing:  # which came between
                    self._has_offers.set()
                continue
            try:
                self._write(self._offers.popleft())
            except Exception:
                _logger.exception("Pages could not be written.")

    def _write(self, offer: _Offer) -> None:
        memory = self._pages.memory
        assert memory is not None
        with self._pages.lock:  # after the step that has computed the pages, and was measured
            saved_s = self._seconds(0, offer.num_places * self._size) / offer.num_places
        worth = PageValue(saved_s, offer.first, offer.used_s, offer.keep_s)
        for start in range(offer.first, len(offer.keys), _WINDOW):
            if self._is_closing:
                return
            began_s = time.monotonic()
            place_of = {
                key: start + at for at, key in enumerate(offer.keys[start : start + _WINDOW])
            }
            groups = range(self._num_groups)
            lease = self._pages.lease([(g, key) for key in place_of for g in groups])
            try:
                for (group, key), page in lease.pages.items():
                    place = place_of[key]
                    before = self._kind.name((group, offer.keys[place - 1])) if place else b""
                    its_worth = replace(worth, place=place, before=before)
                    content = memory.read(page)
                    for tier in self._tiers:
                        self._write_page(tier, (group, key), content, its_worth)
            finally:
                self._pages.release(lease)
            if self._pages.scheduler.has_work:
                time.sleep((time.monotonic() - began_s) * (1 / _BUSY_SHARE - 1))
        self._pages.touch(offer.keys)  # a lease leaves its pages younger than those before them

    def _write_page(
        self, tier: _MeasuredTier, key: PageKey, page: memoryview, worth: PageValue
    ) -> None:
        began_s = time.perf_counter()
        if tier.tier.offer(self._kind.name(key), page, worth):
            took_s = time.perf_counter() - began_s
            tier.add(pages_written=1, bytes_written=len(page), write_s=took_s)
