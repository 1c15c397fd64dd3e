"""Answers that later requests may build on: in memory, bounded, apart by tenant."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_OVERHEAD_BYTES: Final = 1000  # of an answer, beside its JSON
_ITEM_BYTES: Final = 200  # of an item's entry in the index


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
    """

    id: str
    asked: bytes
    answer: bytes
    item_ids: tuple[str, ...]
    previous: Kept | None = None
    num_holders: int = 0

    @property
    def num_bytes(self) -> int:
        """What it takes of the store's memory."""
        sizes = len(self.asked) + len(self.answer) + len(self.item_ids) * _ITEM_BYTES
        return sizes + _OVERHEAD_BYTES

    def conversation(self) -> Iterator[Kept]:
        """Yield the answers up to this one, the first of the conversation first."""
        found: list[Kept] = []
        step: Kept | None = self
        while step is not None:
            found.append(step)
            step = step.previous
        return reversed(found)


class Store:
    """Keeps the newest answers of all tenants; the oldest leave when they are too many or too much.

    Safe to use from several threads.
    """

    def __init__(self, max_answers: int, max_bytes: int) -> None:
        """Keep so many answers at most, of so many bytes together; 0 answers keeps none."""
        self.max_answers = max_answers
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: dict[tuple[str, str], Kept] = {}  # by tenant and id, the oldest first
        self._items: dict[tuple[str, str], Kept] = {}  # likewise, by the ids of items
        self._lock = Lock()

    def __len__(self) -> int:
        """How many answers can be found."""
        return len(self._answers)

    @property
    def num_bytes(self) -> int:
        """What all of them take, and what they follow."""
        return self._num_bytes

    def put(self, tenant: str, kept: Kept) -> None:
        """Keep an answer, as the newest."""
        with self._lock:
            self._answers[tenant, kept.id] = kept
            self._items |= dict.fromkeys([(tenant, id_) for id_ in kept.item_ids], kept)
            self._hold(kept)
            while len(self._answers) > self.max_answers or self._num_bytes > self.max_bytes:
                self._remove(next(iter(self._answers)))

    def find(self, tenant: str, id_: str) -> Kept | None:
        """Return a tenant's answer, or None if there is none by that id."""
        with self._lock:
            return self._answers.get((tenant, id_))

    def find_item(self, tenant: str, id_: str) -> Kept | None:
        """Return the answer that an item belongs to, or None if there is none."""
        with self._lock:
            return self._items.get((tenant, id_))

    def remove(self, tenant: str, id_: str) -> bool:
        """Forget an answer, and return whether it was there."""
        with self._lock:
            is_there = (tenant, id_) in self._answers
            if is_there:
                self._remove((tenant, id_))
            return is_there

    def _remove(self, key: tuple[str, str]) -> None:
        kept = self._answers.pop(key)
        for id_ in kept.item_ids:
            if self._items.get((key[0], id_)) is kept:
                del self._items[key[0], id_]
        self._release(kept)

    def _hold(self, kept: Kept | None) -> None:
        """Count a holder, and from the first one on the memory of the answer and those before."""
        while kept is not None:
            kept.num_holders += 1
            if kept.num_holders > 1:
                return
            self._num_bytes += kept.num_bytes
            kept = kept.previous

    def _release(self, kept: Kept | None) -> None:
        while kept is not None:
            kept.num_holders -= 1
            if kept.num_holders:
                return
            self._num_bytes -= kept.num_bytes
            kept = kept.previous


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends a request, and where what they are to find again is kept."""

    name: str
    store: Store

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self.store.max_answers > 0

    def put(self, kept: Kept) -> None:
        """Keep an answer."""
        self.store.put(self.name, kept)

    def find(self, id_: str) -> Kept | None:
        """Return an answer of this tenant's, or None."""
        return self.store.find(self.name, id_)

    def find_item(self, id_: str) -> Kept | None:
        """Return the answer of this tenant's that an item belongs to, or None."""
        return self.store.find_item(self.name, id_)

    def remove(self, id_: str) -> bool:
        """Forget an answer of this tenant's, and return whether it was there."""
        return self.store.remove(self.name, id_)
