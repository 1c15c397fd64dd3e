"""The page cache of a simulated replica: KV pages that are loaded again instead of computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.core.request import NO_STATE
from twostroke.engine.kv_offload.disk_index import PREFIX_BYTES, DiskIndex, Entry
from twostroke.engine.kv_offload.rules import (
    MIN_PREFILL_S,
    ComputedPages,
    RecentUses,
    is_worth_loading,
    max_loss_s,
)
from twostroke.model.program.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.scheduler.request_state import RequestState
    from twostroke.engine.scheduler.transfers import Transfer
    from twostroke.lab.simulator.replica import Clock, SimulatedReplica

_STATE: Final = b"state"
_EVICTED_RATIO: Final = 16  # a full cache frees this part at once, because choosing takes long
_WINDOW_PAGES: Final = 4  # pages that arrive together


class PageCacheSettings(Frozen):
    """Settings of the page cache of each simulated replica.

    Attributes:
        max_bytes: its capacity.
        bytes_per_s: speed at which pages are loaded. Loads of several requests at the same time do
            not slow each other down.
        page_bytes: size of a KV page of one group of layers.
        num_groups: number of groups of layers; each group has its own pages.
        state_bytes: size of a snapshot of the recurrent states; 0 for models without such states.
        token_budget: most prompt tokens of a step.
        seconds: the time of a step, by which loading is compared with prefill.
    """

    max_bytes: int
    bytes_per_s: float
    page_bytes: int
    num_groups: int
    state_bytes: int
    token_budget: int
    seconds: Callable[[BatchShape], float]

    def prefill_s(self, start: int, end: int) -> float:
        """Return the seconds to prefill tokens[start:end] of a prompt alone."""
        budget = self.token_budget
        return sum(
            self.seconds(BatchShape.prefill(min(budget, end - chunk_start), chunk_start))
            for chunk_start in range(start, end, budget)
        )


class SimulatedPageCache:
    """Stores and loads KV pages by the rules of `OffloadManager`, in virtual time.

    Storing a page takes no time; loading takes the time of its bytes. The scheduler reports used
    pages by the methods of `PageWatcher`. Before each call, the replica must have applied all steps
    that have ended (`catch_up`).

    Attributes:
        num_loads: requests for which pages were loaded.
    """

    def __init__(
        self, settings: PageCacheSettings, replica: SimulatedReplica, clock: Clock
    ) -> None:
        """Watch the pages of a replica."""
        self.num_loads = 0
        self._settings = settings
        self._scheduler = replica.scheduler
        self._page_size = replica.page_size
        self._clock = clock
        self._index = DiskIndex(settings.max_bytes)
        self._computed = ComputedPages()
        self._uses = RecentUses()
        self._loads: dict[int, tuple[Transfer, list[PageKey]]] = {}  # by number of the request
        replica.may_fast_forward = False  # the order in which requests fill pages matters here
        replica.scheduler.prefix_cache.watcher = self

    def on_prefix_hit(self, state: RequestState, num_pages: int) -> None:
        """Store the cached pages that a request starts with, if not done within the last minute."""
        chain = state.chain
        if chain is not None and self._uses.add(chain.keys[num_pages - 1], self._clock.now_s):
            self._store(chain.keys[:num_pages], 0, num_pages - 1)

    def on_computed(self, state: RequestState, first: int, end: int) -> None:
        """Store KV pages that a request has computed for the second time."""
        chain = state.chain
        if chain is not None and (num_seen := self._computed.add(chain.keys[first:end])):
            self._store(chain.keys[: first + num_seen], first, first)

    def load(self, number: int, state: RequestState) -> float | None:
        """Start to load a queued request's stored KV pages; return when they will have arrived.

        `number` is the request's number in the workload. Returns None if the request computes its
        whole prompt.
        """
        settings, transfers = self._settings, self._scheduler.prefix_cache.transfers
        prefill_s = settings.prefill_s(0, len(state.request.tokens))
        if prefill_s < MIN_PREFILL_S:
            return None
        transfer = transfers.begin(state)
        if transfer is None:
            return None
        missing = transfers.select_missing(
            transfer,
            lambda page_key: page_name(page_key) in self._index.entries,
            lambda key: _STATE + key in self._index.entries,
        )
        num_pages = transfer.num_pages
        if transfer.is_complete or num_pages is None:
            transfers.end(transfer)
            return None
        page_s = settings.page_bytes / settings.bytes_per_s
        expected_s = len(missing) * page_s
        if transfer.missing_state is not None:
            expected_s += settings.state_bytes / settings.bytes_per_s
        missing_prefill_s = settings.prefill_s(
            transfer.first_page * self._page_size, num_pages * self._page_size
        )
        if not is_worth_loading(
            expected_s,
            first_page_s=page_s if missing else 0.0,
            max_expected_s=missing_prefill_s / 2,
            slack_s=max_loss_s(prefill_s),
        ):
            transfers.end(transfer)
            return None
        self.num_loads += 1
        self._loads[number] = transfer, missing
        return self._clock.now_s + expected_s

    def arrive(self, number: int) -> None:
        """Give a request its loaded KV pages."""
        transfers = self._scheduler.prefix_cache.transfers
        transfer, missing = self._loads.pop(number)
        for start in range(0, len(missing), _WINDOW_PAGES):
            window = missing[start : start + _WINDOW_PAGES]
            num_allocated = len(transfers.allocate(transfer, window))
            transfers.add_arrived(transfer, window[:num_allocated])
            if num_allocated < len(window):
                break
        is_next = transfer.missing_state is not None and not transfer.missing
        if is_next and transfers.allocate_state(transfer) != NO_STATE:
            transfers.add_state(transfer)
        transfers.end(transfer)

    def _store(self, keys: Sequence[bytes], first: int, first_state: int) -> None:
        """Store the pages from index `first` on, and the snapshots from `first_state` on.

        `keys` are the page keys of the sequence up to the last page to store.
        """
        settings, transfers = self._settings, self._scheduler.prefix_cache.transfers
        saved_s = settings.prefill_s(0, len(keys) * self._page_size) / len(keys)
        for start in range(first, len(keys), _WINDOW_PAGES):
            indices = range(start, min(len(keys), start + _WINDOW_PAGES))
            lease = transfers.lease(
                [(group, keys[index]) for index in indices for group in range(settings.num_groups)]
            )
            stored = set(lease.pages)
            transfers.release(lease)
            for index in indices:
                for group in range(settings.num_groups):
                    if (group, keys[index]) in stored:
                        previous = page_name((group, keys[index - 1])) if index else b""
                        name = page_name((group, keys[index]))
                        self._add(name, settings.page_bytes, saved_s, index, previous)
        for index in range(first_state if settings.state_bytes else len(keys), len(keys)):
            state_lease = transfers.lease_state(keys[index])
            if state_lease is not None:
                transfers.release(state_lease)
                name, previous = _STATE + keys[index], page_name((0, keys[index]))
                self._add(name, settings.state_bytes, saved_s, index + 1, previous)
        transfers.touch(list(keys))

    def _add(
        self, name: bytes, num_bytes: int, saved_s: float, index: int, previous: bytes
    ) -> None:
        """Add a page or a snapshot, or record its use; evict others if the cache is full.

        `saved_s` is the prefill time that the page saves, `index` its index in the sequence, and
        `previous` the name of the page before it.
        """
        entries, now_s = self._index.entries, self._clock.now_s
        if name in entries:
            self._index.use(name, saved_s, now_s)
            return
        if self._index.num_bytes + num_bytes > self._index.max_bytes:
            room = max(num_bytes, self._index.max_bytes // _EVICTED_RATIO)
            for evicted in self._index.surplus(now_s, room):
                self._index.remove(evicted)
        entry = Entry(num_bytes, saved_s, index, now_s, previous=previous[:PREFIX_BYTES])
        self._index.add(name, entry)


def page_name(page_key: PageKey) -> bytes:
    """Return the name of a page in the index, which refers to pages by the first bytes of names."""
    group, key = page_key
    return bytes([key[0] ^ group]) + key[1:]
