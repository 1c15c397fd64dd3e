"""The pool of recurrent states: slots of running requests, and cached snapshots for prefixes.

A model with recurrent layers (linear attention, short convolutions) keeps a state of fixed size for
each request. A prefix of a prompt can be reused only where a snapshot of the state was kept: after
the last of the prefix's tokens. Snapshots are kept at few page boundaries, because one can take as
much memory as the keys and values of thousands of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from twostroke.core.request import NO_STATE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MIN_AGE: Final = 4  # added to every age, since the order of the newest snapshots says little
# Weights of a snapshot that a longer one continues, beside 1 for the longer one: the next turn of a
# chat starts from either of them, and seldom from one where a turn has started before.
_CONTINUED_WEIGHT: Final = 0.5
_PASSED_WEIGHT: Final = 0.125


@dataclass(slots=True)
class _Snapshot:
    """A snapshot of the recurrent state after a prefix, with the facts that determine its value.

    Attributes:
        key: key of the prefix's last page.
        num_tokens: the length of the prefix.
        previous: key of the longest shorter snapshot of the same sequence; None without one.
        used_at: time of the last use, on a clock that counts the uses of all snapshots.
        num_uses: how many requests have started from it.
        num_next: how many snapshots have this snapshot as `previous`.
        is_shared: whether several prompts are known to begin with this prefix and to differ after
            it.
    """

    key: bytes
    num_tokens: int
    previous: bytes | None
    used_at: int
    num_uses: int = 0
    num_next: int = 0
    is_shared: bool = False


class StatePool:
    """The slots for recurrent states of an engine, with their reference counts.

    A slot is referenced (requests start from it, or a step writes it), cached (no references, but
    it is the snapshot of a prefix), or free. If no slot is free, the cached slot of the least value
    is used again. The pool manages slots; the backend owns the memory.

    All slots have the same size, so the value of a snapshot is the number of tokens that would be
    computed again without it, multiplied by its uses and divided by the time since its last use:
    hyperbolic caching (Blankstein et al., USENIX ATC 2017). Time is counted in uses of snapshots. A
    chat starts from each of its snapshots at most once. So a snapshot is worth less if the same
    sequence has a longer snapshot, above all after its first use, unless several prompts share it.
    A snapshot whose page was evicted has no value.

    Attributes:
        has_page: whether the prefix index has the page with a key.
        num_extra: number of slots that running requests must never need: the slots of transfers and
            leases and, if steps are planned while other steps are in flight, of drafts.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.has_page: Callable[[bytes], bool] = lambda _: True
        self.num_extra = 0
        self._counts = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._snapshots: dict[int, _Snapshot] = {}  # by slot
        self._slots: dict[bytes, int] = {}  # of snapshots, by key
        self._cached: dict[int, None] = {}  # in the order of their releases
        self._num_uses = 0

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
        """Return a slot with one reference; the least valuable snapshot is evicted if needed.

        There must be an available slot.
        """
        if not self._free:
            evicted = min(self._cached, key=self._value)
            self.drop(self._snapshots[evicted].key)
        slot = self._free.pop()
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
            if slot in self._snapshots:
                self._cached[slot] = None
            else:
                self._free.append(slot)

    def keep(
        self,
        slot: int,
        key: bytes,
        num_tokens: int = 0,
        previous: bytes | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        """Make a referenced slot the snapshot of the prefix with this page key.

        Nothing happens if the prefix has a snapshot already, or the slot is another snapshot. The
        prefix has `num_tokens` tokens. `previous` is the key of the longest shorter snapshot of the
        sequence. `is_shared`: whether other prompts are known to have this prefix.
        """
        assert self._counts[slot] > 0, "only a referenced state is worth keeping"
        if key not in self._slots and slot not in self._snapshots:
            self._num_uses += 1
            self._slots[key] = slot
            snapshot = _Snapshot(key, num_tokens, None, self._num_uses, is_shared=is_shared)
            self._snapshots[slot] = snapshot
            self._link(snapshot, previous)

    def use(self, slot: int, previous: bytes | None) -> None:
        """Record that a request starts from the snapshot in `slot`.

        `previous` is the key of the longest shorter snapshot of the request's sequence, which may
        have been kept later than the snapshot itself.
        """
        snapshot = self._snapshots.get(slot)
        if snapshot is not None:
            self._num_uses += 1
            snapshot.num_uses += 1
            snapshot.used_at = self._num_uses
            self._link(snapshot, previous)

    def drop(self, key: bytes) -> None:
        """Forget the snapshot with this page key, if there is one."""
        slot = self._slots.pop(key, NO_STATE)
        if slot == NO_STATE:
            return
        dropped = self._snapshots.pop(slot)
        previous = dropped.previous
        self._link(dropped, None)  # before others are linked, so that no snapshot counts two
        if dropped.num_next:
            for snapshot in self._snapshots.values():
                if snapshot.previous == key:
                    self._link(snapshot, previous)
        if slot in self._cached:
            del self._cached[slot]
            self._free.append(slot)

    def is_shared(self, key: bytes) -> bool:
        """Whether other requests have used the snapshot with this page key, or share its prefix."""
        slot = self.find(key)
        if slot == NO_STATE:
            return False
        snapshot = self._snapshots[slot]
        return snapshot.is_shared or snapshot.num_uses > 0

    def find(self, key: bytes) -> int:
        """Return the slot of the snapshot with this page key, or `NO_STATE`."""
        return self._slots.get(key, NO_STATE)

    def longest(self, keys: Sequence[bytes], num_pages: int) -> tuple[int, int]:
        """Return the longest cached snapshot of a sequence, up to `num_pages` pages.

        `keys` are the page keys of the sequence. Returns the length of the snapshot's prefix in
        pages, and its slot; (0, `NO_STATE`) if there is no snapshot.
        """
        for count in range(num_pages, 0, -1):
            slot = self._slots.get(keys[count - 1], NO_STATE)
            if slot != NO_STATE:
                return count, slot
        return 0, NO_STATE

    def longest_before(self, keys: Sequence[bytes], num_pages: int) -> bytes | None:
        """Return the key of a sequence's longest snapshot of less than `num_pages` pages.

        None if there is none. `keys` are the page keys of the sequence.
        """
        count, _ = self.longest(keys, num_pages - 1)
        return keys[count - 1] if count else None

    def evict_all(self) -> None:
        """Evict all snapshots, because their content is lost."""
        for key in list(self._slots):
            self.drop(key)

    def _link(self, snapshot: _Snapshot, previous: bytes | None) -> None:
        """Set `previous` of a snapshot: the longest shorter snapshot of its sequence, or None."""
        for key, change in ((snapshot.previous, -1), (previous, 1)):
            slot = NO_STATE if key is None else self._slots.get(key, NO_STATE)
            if slot != NO_STATE:
                linked = self._snapshots[slot]
                linked.num_next += change
                linked.is_shared = linked.is_shared or linked.num_next > 1
        snapshot.previous = previous if previous in self._slots else None

    def _value(self, slot: int) -> float:
        """Return the value of a snapshot: the snapshot with the least value is evicted first."""
        snapshot = self._snapshots[slot]
        if not self.has_page(snapshot.key):
            return 0.0
        previous = self._slots.get(snapshot.previous or b"", NO_STATE)
        first = 0 if previous == NO_STATE else self._snapshots[previous].num_tokens
        weight = max(1.0, snapshot.num_uses)
        if snapshot.num_next and snapshot.num_uses < 2 and not snapshot.is_shared:
            weight = _PASSED_WEIGHT if snapshot.num_uses else _CONTINUED_WEIGHT
        age = self._num_uses - snapshot.used_at + _MIN_AGE
        return weight * (snapshot.num_tokens - first) / age
