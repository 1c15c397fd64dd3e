"""The pool of recurrent states: slots of running requests, and cached snapshots for prefixes.

A model with recurrent layers (linear attention, short convolutions) keeps a state of fixed size for
each request. A prefix of a prompt can be reused only where a snapshot of the state was kept: after
the last of the prefix's tokens. Snapshots are kept at few page boundaries, because one can take as
much memory as the keys and values of thousands of tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from twostroke.core.request import NO_STATE

if TYPE_CHECKING:
    from collections.abc import Sequence


class StatePool:
    """The slots for recurrent states of an engine, with their reference counts.

    A slot is referenced (requests start from it, or a step writes it), cached (no references, but
    it is the snapshot of a prefix), or free. Cached slots are used again when no slot is free, the
    least recently used first. The pool manages slots; the backend owns the memory.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._counts = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._keys: dict[int, bytes] = {}  # of the slots that are snapshots
        self._slots: dict[bytes, int] = {}  # the reverse
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """The number of slots that `allocate` could return now: free slots and cached slots."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """The number of snapshots without references."""
        return len(self._cached)

    def num_references(self, slot: int) -> int:
        """Return the number of references to a slot."""
        return self._counts[slot]

    def allocate(self) -> int:
        """Return a slot with one reference; the least recently used snapshot is evicted if needed.

        There must be an available slot.
        """
        if self._free:
            slot = self._free.pop()
        else:
            slot, _ = self._cached.popitem(last=False)
            del self._slots[self._keys.pop(slot)]
        self._counts[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        """Add a reference to a slot, which is referenced or cached."""
        if self._counts[slot] == 0:
            del self._cached[slot]
        self._counts[slot] += 1

    def release(self, slot: int) -> None:
        """Drop a reference to a slot: without references it becomes free, or stays cached.

        It stays cached if it is the snapshot of a prefix.
        """
        self._counts[slot] -= 1
        assert self._counts[slot] >= 0, "a state without references was released"
        if self._counts[slot] == 0:
            if slot in self._keys:
                self._cached[slot] = None
            else:
                self._free.append(slot)

    def keep(self, slot: int, key: bytes) -> None:
        """Make a referenced slot the snapshot of the prefix with this page key, if it has none."""
        assert self._counts[slot] > 0, "only a referenced state is worth keeping"
        if key not in self._slots and slot not in self._keys:
            self._slots[key] = slot
            self._keys[slot] = key

    def drop(self, key: bytes) -> None:
        """Forget the snapshot with this page key, if there is one."""
        slot = self._slots.pop(key, NO_STATE)
        if slot != NO_STATE:
            del self._keys[slot]
            if slot in self._cached:
                del self._cached[slot]
                self._free.append(slot)

    def find(self, key: bytes) -> int:
        """Return the slot of the snapshot with this page key, or `NO_STATE`."""
        return self._slots.get(key, NO_STATE)

    def longest(self, keys: Sequence[bytes], num_pages: int) -> tuple[int, int]:
        """Return the longest prefix with a snapshot, in pages up to `num_pages`, and its slot.

        (0, `NO_STATE`) if there is none. `keys` are the page keys of the sequence.
        """
        for count in range(num_pages, 0, -1):
            slot = self._slots.get(keys[count - 1], NO_STATE)
            if slot != NO_STATE:
                return count, slot
        return 0, NO_STATE

    def evict_all(self) -> None:
        """Evict all snapshots, because their content is lost."""
        for key in list(self._slots):
            self.drop(key)
