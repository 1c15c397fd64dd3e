"""Random KV transfers into a scheduler's pages, and leases of them, as by disks and engines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from twostroke.core.request import NO_STATE

if TYPE_CHECKING:
    import random
    from collections import Counter
    from collections.abc import Iterable, Sequence

    from support.fake_model import FakePipeline
    from twostroke.core.request import Request
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.scheduler import Scheduler
    from twostroke.engine.scheduler.transfers import Lease, Transfer


class RandomTransfers:
    """Copies leased pages, and transfers the copies back when requests miss the pages."""

    def __init__(self, scheduler: Scheduler, model: FakePipeline, counts: Counter[str]) -> None:
        self.scheduler, self._model, self._counts = scheduler, model, counts
        self._all = scheduler.prefix_cache.transfers
        recurrent = scheduler._recurrent
        self._states = None if recurrent is None else recurrent.pool
        self._stored: dict[PageKey, list[int]] = {}
        self._stored_states: dict[bytes, tuple[int, int]] = {}
        self._transfers: list[tuple[Transfer, list[PageKey]]] = []  # with what is still to come
        self._leases: list[tuple[Lease, dict[PageKey, list[int]]]] = []
        self._state_leases: list[tuple[Lease, tuple[int, int]]] = []

    def expect(self, rng: random.Random, request: Request) -> None:
        """Perhaps begin a transfer for a request that was just added."""
        state = self.scheduler._states[request.id]
        if rng.random() < 0.3:
            self._store_known()
            if self._states is None or rng.random() < 0.5:
                self.scheduler._pool.evict_all()
            else:
                self._states.evict_all()
        if rng.random() < 0.2:
            return
        transfer = self._all.begin(state, rng.choice((1.0, 5.0, math.inf)))
        if transfer is not None:
            lost = rng.random() * 0.2
            stored_keys = {key for key in self._stored if rng.random() >= lost}
            states = {key for key in self._stored_states if rng.random() >= lost}
            missing = self._all.select_missing(
                transfer, stored_keys.__contains__, states.__contains__
            )
            self._transfers.append((transfer, missing))
            self._counts["transfers"] += 1

    def move(self, rng: random.Random) -> None:
        """Let one transfer or lease make progress, fail, or end; or lease pages."""
        if self._transfers and rng.random() < 0.6:
            self._go_on(rng, rng.randrange(len(self._transfers)))
        elif self._leases and rng.random() < 0.5:
            self._release(self._leases.pop(rng.randrange(len(self._leases))))
        elif self._state_leases and rng.random() < 0.3:
            self._release_state(*self._state_leases.pop(rng.randrange(len(self._state_leases))))
        else:
            self._lease(rng)

    def end_all(self) -> None:
        """End all transfers and leases."""
        while self._transfers:
            self._all.end(self._transfers.pop()[0])
        while self._leases:
            self._release(self._leases.pop())
        while self._state_leases:
            self._release_state(*self._state_leases.pop())

    def held_slots(self) -> list[int]:
        """Return the slots of recurrent states that transfers and leases hold."""
        slots = [transfer.state_slot for transfer, _ in self._transfers]
        slots += [lease.state_slot for lease, _ in self._state_leases]
        return [slot for slot in slots if slot != NO_STATE]

    def held_pages(self) -> Iterable[Sequence[int]]:
        """Return the pages of each transfer and lease."""
        yield from (list(transfer.pages.values()) for transfer, _ in self._transfers)
        yield from (list(lease.pages.values()) for lease, _ in self._leases)

    def check(self) -> None:
        """Assert that claims have owners, and that there is room for the longest request."""
        open_ = [transfer for transfer, _ in self._transfers]
        assert all(claim in open_ for claim in self._all._claiming), "a claim outlived its owner"
        num_held = sum(map(len, self.held_pages()))
        assert num_held == self._all.num_held_pages <= self._all.max_held_pages, (
            "too many pages are held"
        )
        num_slots = len(self.held_slots())
        assert num_slots == self._all.num_held_states <= self._all.max_held_states, (
            "too many recurrent states are held"
        )

    def _go_on(self, rng: random.Random, number: int) -> None:
        transfer, missing = self._transfers[number]
        if rng.random() < 0.1:
            self._all.drop(transfer)
            self._counts["dropped transfers"] += 1
        if transfer.missing_state is not None and rng.random() < 0.5:
            self._bring_state(rng, transfer)
        elif (not missing and transfer.missing_state is None) or rng.random() < 0.1:
            self._transfers.pop(number)
            self._all.end(transfer)
        else:
            self._bring_pages(rng, transfer, missing)

    def _bring_state(self, rng: random.Random, transfer: Transfer) -> None:
        """Bring the snapshot of a transfer, if there is a slot."""
        key, slot = transfer.missing_state, transfer.state_slot
        assert key is not None
        slot = self._all.allocate_state(transfer) if slot == NO_STATE else slot
        if slot == NO_STATE:
            return
        for stage in self._model.stages:
            stage.fill_state(slot, self._stored_states[key])
        if rng.random() < 0.9:  # else it comes later
            self._all.add_state(transfer)
            self._counts["arrived states"] += 1

    def _bring_pages(self, rng: random.Random, transfer: Transfer, missing: list[PageKey]) -> None:
        part = missing[: rng.randint(1, 4)]
        pages = self._all.allocate(transfer, part)
        part = part[: len(pages)]
        rng.shuffle(part)
        for key in part:
            for stage in self._model.stages:
                stage.fill(transfer.pages[key], self._stored[key])
            if rng.random() < 0.95:  # else it is damaged
                self._all.add_arrived(transfer, [key])
                self._counts["arrived pages"] += 1
        del missing[: len(part)]

    def _lease(self, rng: random.Random) -> None:
        if stored_keys := self._store_known():
            lease = self._all.lease(
                rng.sample(stored_keys, min(len(stored_keys), rng.choice((1, 4, 20))))
            )
            self._leases.append((lease, self._read(lease)))
            self._counts["leased pages"] += len(lease.pages)
            state_lease = self._all.lease_state(rng.choice(stored_keys)[1])
            if state_lease is not None:
                state = self._model.stages[0].state(state_lease.state_slot)
                self._state_leases.append((state_lease, state))

    def _store_known(self) -> list[PageKey]:
        """Copy all pages in the prefix index; return their keys."""
        index = self.scheduler.prefix_cache._index
        stored_keys = {} if index is None else {key: page for page, key in index._keys.items()}
        self._stored.update({k: self._model.stages[0].content(p) for k, p in stored_keys.items()})
        if self._states is not None:
            self._stored_states.update(
                {key: self._model.stages[0].state(s) for key, s in self._states._slots.items()}
            )
        return sorted(stored_keys)

    def _release(self, leased: tuple[Lease, dict[PageKey, list[int]]]) -> None:
        lease, content = leased
        assert self._read(lease) == content, "a page changed while it was leased"
        self._all.release(lease)

    def _release_state(self, lease: Lease, state: tuple[int, int]) -> None:
        now = self._model.stages[0].state(lease.state_slot)
        assert now == state, "a recurrent state changed while it was leased"
        self._all.release(lease)

    def _read(self, lease: Lease) -> dict[PageKey, list[int]]:
        return {key: self._model.stages[0].content(page) for key, page in lease.pages.items()}
