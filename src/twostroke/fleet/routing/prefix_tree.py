"""The prefix tree: which replicas were sent which prompts, and so may have them in their caches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    Path = list[tuple["TreeEdge", int]]  # edges from the root, with the number of equal blocks

_MAX_HOLDERS: Final = 8  # replicas that are considered for the longest prefix, the latest first
_MAX_FREED_EDGES: Final = 4  # with each prompt, since freeing all at once would take too long


class CachedPrefix:
    """The entry of a request's prompt in the prefix tree: a replica should have its blocks cached.

    Attributes:
        index: the index of the replica.
        epoch: how often the replica had been reset when the request was sent.
        used_s: the time of the request's end, after which the blocks may be evicted; inf while the
            request runs.
    """

    __slots__ = ("epoch", "index", "used_s")

    def __init__(self, index: int, epoch: int) -> None:
        """Create the entry of a running request, whose blocks are in use."""
        self.index = index
        self.epoch = epoch
        self.used_s = math.inf


class TreeEdge:
    """An edge of the radix tree of prompts: a run of blocks at which no prompts have diverged yet.

    Attributes:
        keys: the keys of the blocks.
        holders: by index of a replica, the entry of its latest request with all of these blocks;
            the replica with the latest request is the last.
        generation: the generation in which the edge was used last.
        has_branches: whether other edges follow this edge.
    """

    __slots__ = ("generation", "has_branches", "holders", "keys")

    def __init__(
        self, keys: tuple[int, ...], holders: dict[int, CachedPrefix], generation: int
    ) -> None:
        """Create an edge that no other edge follows."""
        self.keys = keys
        self.holders = holders
        self.generation = generation
        self.has_branches = False


class PrefixTree:
    """A radix tree of prompts, which are lists of block keys.

    The key of a block is a hash of the prompt up to the end of this block. A conversation that
    stays at its replica is a single edge, found by the key of its first block. So finding a prompt
    takes one look-up for each branch on its path. A request is stored only at the edges of its
    path, since a replica that has the blocks of an edge also has the blocks before them.

    Old edges are dropped by generation, at a constant cost for each prompt: an edge is dropped if
    it was not used while half of `max_blocks` blocks were added or used.
    """

    def __init__(self, max_blocks: int) -> None:
        """Create an empty tree for at most `max_blocks` blocks."""
        self._max_young_blocks = max(1, max_blocks // 2)
        self._young: dict[int, TreeEdge] = {}  # by first key: edges used in this generation
        self._old: dict[int, TreeEdge] = {}
        self._dropped: dict[int, TreeEdge] = {}
        self._num_young_blocks = 0
        self._num_old_blocks = 0
        self._generation = 0
        self._epochs: list[int] = []  # by index of the replica
        self._cutoffs_s: list[float] = []  # blocks last used before have been evicted

    def __len__(self) -> int:
        """Return the number of blocks in the tree."""
        return self._num_young_blocks + self._num_old_blocks

    def reset(self, index: int) -> None:
        """Forget all cached blocks of a replica, which is new or has been restarted."""
        while index >= len(self._epochs):
            self._epochs.append(0)
            self._cutoffs_s.append(0.0)
        self._epochs[index] += 1
        self._cutoffs_s[index] = 0.0

    def evict_before(self, index: int, cutoff_s: float) -> None:
        """Forget the cached blocks of a replica that were last used before the time `cutoff_s`."""
        self._cutoffs_s[index] = cutoff_s

    def find(self, keys: Sequence[int]) -> Path:
        """Return the edges with which a prompt begins, and the number of equal blocks of each edge.

        `keys` are the keys of the prompt's blocks.
        """
        path: Path = []
        position = 0
        young, old = self._young, self._old
        while position < len(keys):
            edge = young.get(keys[position])
            if edge is None:
                edge = old.get(keys[position])
                if edge is None:
                    break
            count = _num_equal(edge.keys, keys, position)
            path.append((edge, count))
            position += count
        return path

    def longest_prefix(self, path: Path) -> tuple[int, list[int]]:
        """Return the length in blocks of the longest cached prefix, and replicas that have it.

        `path` is the result of `find` for the prompt. At most `_MAX_HOLDERS` replicas are
        returned, the replica with the latest such request first.
        """
        num_blocks = sum([count for _, count in path])
        for edge, count in reversed(path):
            indices = []
            for cached in reversed(edge.holders.values()):
                if self._is_valid(cached):
                    indices.append(cached.index)
                    if len(indices) == _MAX_HOLDERS:
                        break
            if indices:
                return num_blocks, indices
            num_blocks -= count
        return 0, []

    def num_cached(self, path: Path, index: int) -> int:
        """Return how many of a prompt's first blocks a replica should have in its cache.

        `path` is the result of `find` for the prompt.
        """
        num_blocks = 0
        for edge, count in path:
            cached = edge.holders.get(index)
            if cached is None or not self._is_valid(cached):
                break
            num_blocks += count
        return num_blocks

    def add(self, keys: tuple[int, ...], path: Path, index: int) -> CachedPrefix:
        """Add a prompt that is sent to a replica, and return its entry.

        `keys` are the keys of the prompt's blocks, `path` is the result of `find` for them, and
        `index` is the index of the replica. The caller sets the entry's `used_s` at the request's
        end.
        """
        cached = CachedPrefix(index, self._epochs[index])
        num_found = 0
        edge = None
        for edge, count in path:
            if count < len(edge.keys):
                self._split(edge, count)
            edge.holders.pop(index, None)  # the latest holder must be the last
            edge.holders[index] = cached
            num_found += count
            self._use(edge)
        if new_keys := keys[num_found:]:
            if edge is not None and len(edge.holders) == 1 and not edge.has_branches:
                edge.keys += new_keys
            else:
                self._young[new_keys[0]] = TreeEdge(new_keys, {index: cached}, self._generation)
                if edge is not None:
                    edge.has_branches = True
            self._num_young_blocks += len(new_keys)
        self._drop_old()
        return cached

    def _split(self, edge: TreeEdge, count: int) -> None:
        """Cut an edge of the tree after `count` blocks; its other blocks become a new edge."""
        tail = TreeEdge(edge.keys[count:], edge.holders.copy(), edge.generation)
        tail.has_branches = edge.has_branches
        edge.has_branches = True
        edge.keys = edge.keys[:count]
        is_young = edge.generation == self._generation
        (self._young if is_young else self._old)[tail.keys[0]] = tail

    def _use(self, edge: TreeEdge) -> None:
        """Mark an edge of the tree as used by a prompt, so that it is not dropped as old."""
        if edge.generation != self._generation:
            edge.generation = self._generation
            self._young[edge.keys[0]] = edge
            self._num_young_blocks += len(edge.keys)
            self._num_old_blocks -= len(edge.keys)

    def _drop_old(self) -> None:
        """Drop the edges of the oldest generation if the present generation is full.

        Dropped edges are freed a few at a time, so that no prompt waits long.
        """
        if self._num_young_blocks >= self._max_young_blocks:
            self._dropped = self._old
            self._old = self._young
            self._young = {}
            self._num_old_blocks = self._num_young_blocks
            self._num_young_blocks = 0
            self._generation += 1
        for _ in range(min(len(self._dropped), _MAX_FREED_EDGES)):
            self._dropped.popitem()

    def _is_valid(self, cached: CachedPrefix) -> bool:
        """Return whether a replica probably still has a prompt's blocks in its cache."""
        index = cached.index
        return cached.epoch == self._epochs[index] and cached.used_s >= self._cutoffs_s[index]


def _num_equal(edge_keys: tuple[int, ...], keys: Sequence[int], position: int) -> int:
    """Return how many keys of a tree's edge are equal to a prompt's keys from `position` on.

    The first key of the edge is known to be equal. If two keys are equal, all keys before them are
    equal, too, so a bisection finds the last equal key.
    """
    low, high = 1, min(len(edge_keys), len(keys) - position)
    if edge_keys[high - 1] == keys[position + high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if edge_keys[middle - 1] == keys[position + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
