"""Answers that later requests may build on: in memory, bounded, apart by tenant."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_CONVERSATION_BYTES: Final = 8 * 1024 * 1024
MAX_CONVERSATION_ITEMS: Final = 10_000

_OVERHEAD_BYTES: Final = 1000  # of an answer, beside its JSON
_ITEM_BYTES: Final = 200  # of an item's entry in the index, beside its id


@dataclass(slots=True, eq=False)
class Kept:
    """One answer: the JSON of it and of what it answers, and the answer that these follow.

    What follows an answer holds it: it is found no more when it is deleted or among the oldest,
    but its memory is free when nothing follows it.

    Attributes:
        id: by which it is found.
        asked: JSON, a list of the items that came with its request.
        answer: JSON, as its client got it.
        item_ids: by which its items, asked and answered, are found.
        previous: the answer before it in the conversation.
        num_holders: how many need it: its entry, and those that follow it.
        num_bytes: what it takes of the store's memory.
        total_bytes: what the conversation takes, up to here.
        total_items: how many items that has.
    """

    id: str
    asked: bytes
    answer: bytes
    item_ids: tuple[str, ...]
    previous: Kept | None = None
    num_holders: int = 0
    num_bytes: int = field(init=False)
    total_bytes: int = field(init=False)
    total_items: int = field(init=False)

    def __post_init__(self) -> None:
        """Count."""
        index = len(self.item_ids) * _ITEM_BYTES + sum(map(len, self.item_ids))
        self.num_bytes = len(self.asked) + len(self.answer) + index + _OVERHEAD_BYTES
        before = self.previous
        self.total_bytes = self.num_bytes + (before.total_bytes if before else 0)
        self.total_items = len(self.item_ids) + (before.total_items if before else 0)

    def conversation(self) -> Iterator[Kept]:
        """Yield the answers up to this one, the first of the conversation first."""
        found: list[Kept] = []
        step: Kept | None = self
        while step is not None:
            found.append(step)
            step = step.previous
        return reversed(found)


@dataclass(slots=True)
class _Shelf:
    """What is kept of one tenant: answers, the oldest first, and answers by the ids of items."""

    answers: dict[str, Kept] = field(default_factory=dict)
    items: dict[str, Kept] = field(default_factory=dict)
    num_bytes: int = 0

    def hold(self, kept: Kept | None) -> None:
        """Count a holder, and from the first one on the memory of the answer and those before."""
        while kept is not None:
            kept.num_holders += 1
            if kept.num_holders > 1:
                return
            self.num_bytes += kept.num_bytes
            kept = kept.previous

    def release(self, kept: Kept | None) -> None:
        """Count a holder less, and after the last one no memory."""
        while kept is not None:
            kept.num_holders -= 1
            if kept.num_holders:
                return
            self.num_bytes -= kept.num_bytes
            kept = kept.previous


class Store:
    """Keeps the newest answers of all tenants, within bounds.

    When they are too many or too much, the oldest leave, of the tenant that has most. A
    conversation that is too large is not kept, and nothing leaves for it. Safe to use from several
    threads.
    """

    def __init__(self, max_answers: int, max_bytes: int) -> None:
        """Keep so many answers at most, of so many bytes together; 0 answers keeps none."""
        self.max_answers = max_answers
        self.max_bytes = max_bytes
        self._num_answers = 0
        self._num_bytes = 0
        self._shelves: dict[str, _Shelf] = {}  # by tenant; none is empty
        self._lock = Lock()

    def __len__(self) -> int:
        """How many answers can be found."""
        return self._num_answers

    @property
    def num_bytes(self) -> int:
        """What all of them take, and what they follow."""
        return self._num_bytes

    def fits(self, kept: Kept) -> bool:
        """Whether an answer may be kept, with the conversation that it follows."""
        return (
            self.max_answers > 0
            and kept.total_bytes <= min(self.max_bytes, MAX_CONVERSATION_BYTES)
            and kept.total_items <= MAX_CONVERSATION_ITEMS
        )

    def put(self, tenant: str, kept: Kept) -> bool:
        """Keep an answer, as the newest, and return whether it fits."""
        if not self.fits(kept):
            return False
        with self._lock:
            shelf = self._shelves.setdefault(tenant, _Shelf())
            shelf.answers[kept.id] = kept
            shelf.items |= dict.fromkeys(kept.item_ids, kept)
            before = shelf.num_bytes
            shelf.hold(kept)
            self._num_answers += 1
            self._num_bytes += shelf.num_bytes - before
            self._evict(
                kept,
                lambda: self._num_answers > self.max_answers,
                lambda shelf: len(shelf.answers),
            )
            self._evict(
                kept, lambda: self._num_bytes > self.max_bytes, lambda shelf: shelf.num_bytes
            )
        return True

    def find(self, tenant: str, id_: str) -> Kept | None:
        """Return a tenant's answer, or None if there is none by that id."""
        with self._lock:
            shelf = self._shelves.get(tenant)
            return shelf.answers.get(id_) if shelf else None

    def find_item(self, tenant: str, id_: str) -> Kept | None:
        """Return the answer that an item belongs to, or None if there is none."""
        with self._lock:
            shelf = self._shelves.get(tenant)
            return shelf.items.get(id_) if shelf else None

    def remove(self, tenant: str, id_: str) -> bool:
        """Forget an answer, and return whether it was there."""
        with self._lock:
            shelf = self._shelves.get(tenant)
            is_there = shelf is not None and id_ in shelf.answers
            if is_there:
                self._remove(tenant, id_)
            return is_there

    def _evict(
        self, newest: Kept, is_over: Callable[[], bool], size: Callable[[_Shelf], int]
    ) -> None:
        """Remove the oldest answer of the tenant that has most, and again; the newest stays."""
        if not is_over():
            return
        shelves = enumerate(self._shelves.items())
        heap = [(-size(shelf), place, tenant) for place, (tenant, shelf) in shelves]
        heapify(heap)
        while is_over():
            _, place, tenant = heappop(heap)
            shelf = self._shelves[tenant]
            oldest = next(iter(shelf.answers.values()))
            if oldest is newest:
                continue
            self._remove(tenant, oldest.id)
            if shelf.answers:
                heappush(heap, (-size(shelf), place, tenant))

    def _remove(self, tenant: str, id_: str) -> None:
        shelf = self._shelves[tenant]
        kept = shelf.answers.pop(id_)
        for item in kept.item_ids:
            if shelf.items.get(item) is kept:
                del shelf.items[item]
        before = shelf.num_bytes
        shelf.release(kept)
        self._num_answers -= 1
        self._num_bytes += shelf.num_bytes - before
        if not shelf.answers:
            del self._shelves[tenant]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends a request, and where what they are to find again is kept."""

    name: str
    store: Store

    def fits(self, kept: Kept) -> bool:
        """Whether an answer may be kept."""
        return self.store.fits(kept)

    def put(self, kept: Kept) -> bool:
        """Keep an answer, and return whether it fits."""
        return self.store.put(self.name, kept)

    def find(self, id_: str) -> Kept | None:
        """Return an answer of this tenant's, or None."""
        return self.store.find(self.name, id_)

    def find_item(self, id_: str) -> Kept | None:
        """Return the answer of this tenant's that an item belongs to, or None."""
        return self.store.find_item(self.name, id_)

    def remove(self, id_: str) -> bool:
        """Forget an answer of this tenant's, and return whether it was there."""
        return self.store.remove(self.name, id_)
