"""`OffloadManager`: fetches pages from tiers before requests start, and writes used pages."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from itertools import pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.core.request import NO_STATE
from twostroke.engine.counters import TierTotals
from twostroke.engine.kv_offload.rules import (
    MAX_OFFERS,
    MIN_PREFILL_S,
    ComputedPages,
    RecentUses,
    is_worth_loading,
    max_loss_s,
)
from twostroke.engine.kv_offload.tier import PageValue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.kv_offload.tier import KvCacheSpec, OffloadTier
    from twostroke.engine.pool_access import PoolAccess
    from twostroke.engine.scheduler.request_state import RequestState
    from twostroke.engine.scheduler.transfers import Transfer

    PrefillSeconds = Callable[[int, int], float]  # to prefill tokens[start:end] of a prompt

_logger = logging.getLogger("twostroke.engine")

_MAX_DELAY_RATIO: Final = 4.0  # of the expected time to load a snapshot and its pages
_NUM_FETCH_THREADS: Final = 4
_WINDOW_PAGES: Final = 4  # pages fetched or written together; the first page comes alone
_READ_TIME_AGE_S: Final = 60.0  # after which a tier that was slow is tried again
_NEW_WEIGHT: Final = 0.2  # of a new measurement in the moving average
_MAX_WRITE_TIME_RATIO: Final = 0.1  # of the time while requests run
_FLUSH_TIMEOUT_S: Final = 3.0  # at the end, for pages that wait to be written
_CLOSE_TIMEOUT_S: Final = 1.0  # for a tier that does not answer


class OffloadManager:
    """Loads KV pages from disk or Redis before requests start, and stores used pages there.

    A queued request with a long prefill waits for stored pages if loading them is expected to take
    at most half as long as computing them, and if the first page is expected within half of the
    time that may be lost. The wait ends when it has lasted longer than the prefill time that the
    loaded pages save, plus a small part of the whole prefill time. Pages are stored when they are
    used or computed a second time, and at once for requests with `keep_s`. The scheduler reports
    used pages by the methods of `PageWatcher`.

    In models with recurrent layers, a snapshot of the recurrent states is stored with its page. A
    request loads the snapshot after its longest stored prefix, and the pages before it. Since pages
    alone save nothing then, the wait may last four times as long as loading is expected to take,
    and at most half as long as computing, once the first page has arrived.
    """

    def __init__(
        self,
        pages: PoolAccess,
        spec: KvCacheSpec,
        tiers: Sequence[OffloadTier],
        *,
        prefill_s: PrefillSeconds,
        is_measured: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start the threads that load and store KV pages; they end when `pages` is closed.

        `prefill_s(start, end)` predicts the seconds to prefill tokens[start:end] of a prompt.
        `spec` is the format of the pages, and `tiers` are asked in order. Until `is_measured`
        returns True, a prefill is assumed to take longer than predicted.
        """
        self._pages = pages
        self._spec = spec
        self._prefill_s = prefill_s
        self._is_measured = is_measured
        self._tiers = [_MeasuredTier(tier) for tier in tiers]
        for tier in self._tiers:
            tier.record_read(tier.tier.probe())
        self._page_size = spec.groups.page_size
        windows = spec.groups.windows
        self._main_group = (
            windows.index(None) if None in windows else 0
        )  # snapshots follow its pages
        self._num_groups = len(spec.groups.windows)
        self._loads: SimpleQueue[_PageLoad | None] = SimpleQueue()
        self._transfers: set[Transfer] = set()  # that have not ended
        self._computed = ComputedPages()
        self._uses = RecentUses()
        self._offers: deque[_Offer] = deque(maxlen=MAX_OFFERS)
        self._has_offers = threading.Event()
        self._is_closing = False
        runs = [(self._run_writer, "twostroke-pages")]
        runs += [(self._run_fetcher, "twostroke-fetch")] * _NUM_FETCH_THREADS
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for run, name in runs]
        for thread in self._threads:
            thread.start()
        pages.on_submit.insert(0, self._on_submit)  # before other engines are asked to compute
        pages.on_close.append(self.close)
        pages.count = self.totals
        pages.flush = self.flush
        pages.scheduler.prefix_cache.watcher = self

    def totals(self) -> tuple[TierTotals, ...]:
        """Return the counts of each KV offload tier. Any thread may call this."""
        return tuple(tier.totals() for tier in self._tiers)

    def flush(self, within_s: float) -> bool:
        """Wait until all offered KV pages are written to the tiers.

        Returns False if a write fails or `within_s` seconds are over.
        """
        deadline_s = time.monotonic() + within_s
        while self._offers or self._has_offers.is_set():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.01)
        return all(tier.tier.is_writable for tier in self._tiers)

    def close(self) -> bool:
        """Store the queued KV pages, for a few seconds at most, and stop all threads.

        Returns False if a tier does not answer. The tier may then still use the pool's pages.
        """
        if not self._is_closing:
            self.flush(_FLUSH_TIMEOUT_S)
        self._is_closing = True
        self._has_offers.set()
        for _ in range(_NUM_FETCH_THREADS):
            self._loads.put(None)
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _logger.warning("The page cache does not answer; the engine ends without it.")
            return False
        for tier in self._tiers:
            tier.tier.close()
        return True

    # The caller of these methods holds the loop's lock.

    def on_prefix_hit(self, state: RequestState, num_pages: int) -> None:
        """Queue a request's cached pages to be stored in the tiers, if not done recently."""
        chain, keep_s = state.chain, state.request.hints.keep_s
        if chain is None:
            return
        if self._uses.add(chain.keys[num_pages - 1], time.monotonic(), always=keep_s > 0):
            self._offer(chain.keys[:num_pages], 0, num_pages, keep_s, first_state=num_pages - 1)

    def on_computed(self, state: RequestState, first: int, end: int) -> None:
        """Queue KV pages that a request has computed for storing.

        Only pages that were computed for the second time, or that belong to a request with
        `keep_s`, are stored.
        """
        chain, request = state.chain, state.request
        if chain is None:
            return
        num_seen = self._computed.add(chain.keys[first:end])
        num_kept = request.num_prompt // self._page_size if request.hints.keep_s else 0
        count = max(num_seen, min(end, num_kept) - first)
        if count > 0:
            num_pages = max(first + count, num_kept)
            keys, keep_s = chain.keys[: first + count], request.hints.keep_s
            self._offer(keys, first, num_pages, keep_s, first_state=first)

    def _offer(
        self, keys: list[bytes], first: int, num_pages: int, keep_s: float, *, first_state: int = 0
    ) -> None:
        offer = _Offer(
            keys=keys,
            first=first,
            num_pages=num_pages,
            used_s=time.time(),
            keep_s=keep_s,
            first_state=first_state,
        )
        self._offers.append(offer)
        self._has_offers.set()

    def _on_submit(self, state: RequestState) -> bool:
        """Start loading a queued request's stored KV pages, if its prefill would be long.

        Returns whether the request waits for the pages.
        """
        prefill_s = self._prefill_s(0, len(state.request.tokens))
        is_hanging = any(transfer.is_dropped for transfer in self._transfers)
        if (prefill_s < MIN_PREFILL_S and self._is_measured()) or is_hanging or self._is_closing:
            return False
        may_lose_s = max_loss_s(prefill_s)
        if not self._is_measured():
            may_lose_s = max(MIN_PREFILL_S, prefill_s / 2)
        transfer = self._pages.begin(state, may_lose_s)
        if transfer is None:
            return False
        self._transfers.add(transfer)
        self._loads.put(_PageLoad(state, transfer, time.monotonic(), may_lose_s))
        return True

    # The fetching threads.

    def _run_fetcher(self) -> None:
        while (load := self._loads.get()) is not None:
            transfer = load.transfer
            try:
                self._fetch(transfer, load.began_s, load.slack_s)
            except Exception:
                _logger.exception("Pages could not be fetched; they are computed.")
            finally:
                with self._pages.lock:
                    self._transfers.discard(transfer)
                    self._pages.end(transfer)
                    self._pages.on_request_queued(load.state, self._on_submit)

    def _fetch(self, transfer: Transfer, began_s: float, slack_s: float) -> None:
        """Load the KV pages that a waiting request lacks, in order, while that saves time.

        `began_s` is the time at which the wait began, on the monotonic clock. `slack_s` is the
        number of seconds that may be lost if loading turns out to be slower than prefill.
        """
        if transfer.is_dropped or self._is_closing:
            return
        sources = self._find(transfer)
        missing = self._pages.select_missing(
            transfer, sources.pages.__contains__, sources.states.__contains__
        )
        if transfer.is_complete or transfer.is_dropped or transfer.num_pages is None:
            return
        start, end = (n * self._page_size for n in (transfer.first_page, transfer.num_pages))
        prefill_s = self._prefill_s(start, end)
        tiers = {sources.pages[key] for key in missing}
        expected_s = sum(sources.pages[key].page_s() for key in missing)
        if transfer.missing_state is not None:
            state_tier = sources.states[transfer.missing_state]
            tiers.add(state_tier)
            expected_s += state_tier.state_s(self._spec)
        max_expected_s = prefill_s / 2 if self._is_measured() else prefill_s
        first_page_s = sources.pages[missing[0]].page_s() if missing else 0.0
        if not is_worth_loading(
            expected_s,
            first_page_s=first_page_s,
            max_expected_s=max_expected_s,
            slack_s=slack_s,
        ):
            for tier in tiers:
                tier.add(slow=1)
            return
        for tier in tiers:
            tier.add(hits=1)
        if self._pages.state_memory is None:
            saved_s = self._fetch_pages(transfer, missing, sources, began_s + slack_s)
        else:
            allowed_s = min(_MAX_DELAY_RATIO * expected_s or max_expected_s, max_expected_s)
            has_all = self._fetch_all(transfer, missing, sources, allowed_s + slack_s)
            saved_s = prefill_s if has_all else 0.0
        took_s = time.monotonic() - began_s
        for tier in tiers:
            tier.add(saved_s=(saved_s - took_s) / len(tiers), slow=int(transfer.is_dropped))

    def _fetch_pages(
        self, transfer: Transfer, missing: list[PageKey], sources: _Sources, expires_at_s: float
    ) -> float:
        """Load missing KV pages in order; return the prefill seconds that they save.

        The transfer expires at `expires_at_s` plus the prefill seconds that the pages loaded so far
        save.
        """
        index_by_key = {key: index for index, key in enumerate(transfer.keys, transfer.first_page)}
        saved_s = 0.0
        for window in _windows(missing):
            if transfer.is_dropped or self._is_closing:
                break
            count = self._fetch_window(transfer, window, sources)
            if count:
                end_page = index_by_key[window[count - 1][1]] + 1
                saved_s = self._prefill_s(
                    transfer.first_page * self._page_size, end_page * self._page_size
                )
                transfer.expires_at_s = expires_at_s + saved_s
            if count < len(window):
                break
        return saved_s

    def _fetch_all(
        self, transfer: Transfer, missing: list[PageKey], sources: _Sources, within_s: float
    ) -> bool:
        """Load missing KV pages and the snapshot after them; return whether all have arrived.

        The first page is loaded alone, because it shows whether the tier works. The transfer
        expires `within_s` seconds after the first page has arrived.
        """
        windows = _windows(missing)
        for window in windows[:1]:
            if self._fetch_window(transfer, window, sources) < len(window):
                return False
        transfer.expires_at_s = time.monotonic() + within_s
        if transfer.missing_state is not None and not self._fetch_state(transfer, sources):
            return False
        for window in windows[1:]:
            if transfer.is_dropped or self._is_closing:
                return False
            if self._fetch_window(transfer, window, sources) < len(window):
                return False
        return True

    def _find(self, transfer: Transfer) -> _Sources:
        """Find a request's missing KV pages, and snapshots after them, in the tiers.

        Returns, for each stored page and snapshot, the first tier that has it.
        """
        page_by_name = {
            self._spec.name((group, key)): (group, key)
            for key in transfer.keys
            for group in range(self._num_groups)
        }
        state_by_name: dict[bytes, bytes] = {}
        if self._pages.state_memory is not None:
            state_by_name = {self._spec.state_name(key): key for key in transfer.keys}
        sources = _Sources({}, {})
        missing = [*page_by_name, *state_by_name]
        for tier in self._tiers:
            if not missing:
                break
            tier.add(lookups=1)
            names = tier.tier.find(missing)
            sources.pages.update({page_by_name[n]: tier for n in names if n in page_by_name})
            sources.states.update({state_by_name[n]: tier for n in names if n in state_by_name})
            missing = [name for name in missing if name not in names]
        return sources

    def _fetch_window(
        self, transfer: Transfer, window: Sequence[PageKey], sources: _Sources
    ) -> int:
        """Load the KV pages `window` from their tiers into the pool, until one fails.

        Returns the number of loaded pages.
        """
        memory, count = self._pages.memory, 0
        assert memory is not None
        pages = self._pages.allocate(transfer, window)
        for key, page in zip(window, pages, strict=False):
            tier, began_s = sources.pages[key], time.perf_counter()
            if transfer.is_dropped:
                break
            with memory.filling(page) as view:
                is_fetched = tier.tier.fetch(self._spec.name(key), view)
            if not is_fetched:
                break
            took_s = time.perf_counter() - began_s
            tier.record_read(took_s)
            tier.add(pages_read=1, bytes_read=memory.page_bytes, read_s=took_s)
            count += 1
        self._pages.add_arrived(transfer, window[:count])
        return count

    def _fetch_state(self, transfer: Transfer, sources: _Sources) -> bool:
        """Load the snapshot that a transfer brings from its tier into a slot.

        Returns False if there is no room for the snapshot, or if loading fails.
        """
        memory, key = self._pages.state_memory, transfer.missing_state
        assert memory is not None
        assert key is not None
        slot = self._pages.allocate_state(transfer)
        if slot == NO_STATE:
            return False
        tier, began_s = sources.states[key], time.perf_counter()
        with memory.filling(slot) as view:
            is_fetched = tier.tier.fetch(self._spec.state_name(key), view)
        if is_fetched:
            took_s = time.perf_counter() - began_s
            tier.record_state_read(took_s)
            tier.add(bytes_read=memory.page_bytes, read_s=took_s)
            self._pages.add_state(transfer)
        return is_fetched

    # The writing thread.

    def _run_writer(self) -> None:
        while True:
            self._has_offers.wait()
            if self._is_closing:
                return
            if not self._offers:
                self._has_offers.clear()
                if self._offers or self._is_closing:  # since the check above
                    self._has_offers.set()
                continue
            try:
                self._write(self._offers.popleft())
            except Exception:
                _logger.exception("Pages could not be written.")

    def _write(self, offer: _Offer) -> None:
        """Store KV pages in all tiers, if they are still in the pool."""
        memory = self._pages.memory
        assert memory is not None
        with self._pages.lock:  # after the step that has computed the pages, and was measured
            saved_s = self._prefill_s(0, offer.num_pages * self._page_size) / offer.num_pages
        value = PageValue(
            saved_s=saved_s, index=offer.first, used_s=offer.used_s, keep_s=offer.keep_s
        )
        for start in range(offer.first, len(offer.keys), _WINDOW_PAGES):
            if self._is_closing:
                return
            began_s = time.monotonic()
            window = offer.keys[start : start + _WINDOW_PAGES]
            index_by_key = {key: index for index, key in enumerate(window, start)}
            groups = range(self._num_groups)
            lease = self._pages.lease([(group, key) for key in index_by_key for group in groups])
            try:
                for (group, key), page in lease.pages.items():
                    index = index_by_key[key]
                    previous_name = (
                        self._spec.name((group, offer.keys[index - 1])) if index else b""
                    )
                    page_value = replace(value, index=index, previous_name=previous_name)
                    content = memory.read(page)
                    for tier in self._tiers:
                        self._write_page(tier, self._spec.name((group, key)), content, page_value)
            finally:
                self._pages.release(lease)
            if self._pages.state_memory is not None:
                for index in range(max(start, offer.first_state), start + len(window)):
                    self._write_state(offer, index, value)
            if self._pages.scheduler.has_work:
                took_s = time.monotonic() - began_s
                time.sleep(took_s * (1 / _MAX_WRITE_TIME_RATIO - 1))
        # A lease makes its pages younger than the pages before them, which must be evicted last.
        self._pages.touch(offer.keys)

    def _write_state(self, offer: _Offer, index: int, value: PageValue) -> None:
        """Store the snapshot after a page of an offer in all tiers, if there is one."""
        memory, keys = self._pages.state_memory, offer.keys
        assert memory is not None
        lease = self._pages.lease_state(keys[index])
        if lease is None:
            return
        try:
            with self._pages.lock:
                num_before = self._pages.num_pages_before(keys, index + 1)
                saved_s = self._prefill_s(
                    num_before * self._page_size, (index + 1) * self._page_size
                )
            state_value = replace(
                value,
                saved_s=saved_s,
                index=index + 1,
                previous_name=self._spec.name((self._main_group, keys[index])),
            )
            content = memory.read(lease.state_slot)
            for tier in self._tiers:
                self._write_page(tier, self._spec.state_name(keys[index]), content, state_value)
        finally:
            self._pages.release(lease)

    def _write_page(
        self, tier: _MeasuredTier, name: bytes, page: memoryview, value: PageValue
    ) -> None:
        """Store a KV page, or a snapshot, in a tier."""
        began_s = time.perf_counter()
        if tier.tier.offer(name, page, value):
            took_s = time.perf_counter() - began_s
            is_page = len(page) == self._spec.page_bytes
            tier.add(pages_written=int(is_page), bytes_written=len(page), write_s=took_s)


def _windows(page_keys: list[PageKey]) -> list[list[PageKey]]:
    """Split a list of pages into windows that are loaded together; the first has a single page."""
    starts = [0, *range(1, len(page_keys), _WINDOW_PAGES), len(page_keys)]
    return [page_keys[start:end] for start, end in pairwise(starts) if start < end]


class _MeasuredTier:
    """A KV offload tier, its counts for metrics, and the time that it takes to read a page."""

    def __init__(self, tier: OffloadTier) -> None:
        self.tier = tier
        self.counts: dict[str, float] = {}
        self._lock = threading.Lock()
        self._page_s = 0.0
        self._state_s = 0.0
        self._measured_until_s = 0.0  # when the measurement of pages is too old

    def add(self, **counts: float) -> None:
        """Add to the tier's counts, which are named by the arguments."""
        with self._lock:
            for name, count in counts.items():
                self.counts[name] = self.counts.get(name, 0) + count

    def record_read(self, read_s: float) -> None:
        """Update the average time to read a page with a measured time; 0 means not measured."""
        if not read_s:
            return
        with self._lock:
            average_s, self._page_s = self._page_s, read_s
            if time.monotonic() < self._measured_until_s and average_s:
                self._page_s = average_s + _NEW_WEIGHT * (read_s - average_s)
            self._measured_until_s = time.monotonic() + _READ_TIME_AGE_S

    def page_s(self) -> float:
        """Return the average seconds to read a page from the tier; 0 if not measured recently."""
        return self._page_s if time.monotonic() < self._measured_until_s else 0.0

    def record_state_read(self, read_s: float) -> None:
        """Record how long the last read of a snapshot of the recurrent states took."""
        self._state_s = read_s

    def state_s(self, spec: KvCacheSpec) -> float:
        """Return the expected seconds to read a snapshot; 0 if the tier was not measured recently.

        Before a snapshot was read, its time is estimated from the average time of a page and the
        sizes.
        """
        page_s = self.page_s()
        measured_s = self._state_s if page_s else 0.0
        return measured_s or page_s * spec.state_bytes / max(1, spec.page_bytes)

    def totals(self) -> TierTotals:
        """Return the tier's counts, for metrics."""
        num_pages, num_bytes = self.tier.size() or (None, None)
        with self._lock:
            counts = {
                name: count if name.endswith("_s") else int(count)
                for name, count in self.counts.items()
            }
        return TierTotals(
            self.tier.title,
            pages_stored=num_pages,
            bytes_stored=num_bytes,
            **counts,  # type: ignore[arg-type]
        )


class _Sources(NamedTuple):
    """For a request's missing KV pages and snapshots: the tier that each can be loaded from."""

    pages: dict[PageKey, _MeasuredTier]
    states: dict[bytes, _MeasuredTier]


class _Offer(Frozen):
    """KV pages of a sequence that wait to be stored in the tiers.

    Attributes:
        keys: keys of the sequence up to the last page to write.
        first: index of the first page to write.
        num_pages: a page's value is the mean prefill time of this number of the sequence's first
            pages.
        used_s: time of the use, in seconds since 1970.
        keep_s: how many seconds after the use the pages must stay.
        first_state: index of the first page whose snapshot is stored, too.
    """

    keys: list[bytes]
    first: int
    num_pages: int
    used_s: float
    keep_s: float
    first_state: int


class _PageLoad(Frozen):
    """A queued task: load a waiting request's KV pages from the tiers.

    `slack_s` is the number of seconds that loading may lose against computing the pages.
    """

    state: RequestState
    transfer: Transfer
    began_s: float
    slack_s: float
