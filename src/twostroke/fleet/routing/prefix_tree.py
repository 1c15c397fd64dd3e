"""Which replicas were sent the blocks of which prompts, and when: what they may still hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    Path = list[tuple["TreeEdge", int]]

_MOST_HOLDERS: Final = 8  # of the longest prefix that are looked at: the last ones
_FREED: Final = 4  # runs, with each prompt: all at once would take too long


class CachedPrefix:
    """Blocks that a replica was sent with one request; `epoch` counts its restarts.

    `used_s` is when the request ended, after which they may be evicted; until then it is inf.
    """

    __slots__ = ("epoch", "place", "used_s")

    def __init__(self, place: int, epoch: int) -> None:
        """Begin, in use."""
        self.place, self.epoch, self.used_s = place, epoch, math.inf


class TreeEdge:
    """Blocks that so far have only come one after another: an edge of a radix tree.

    `holders` has the last stay of all of them, by place, the newest last. A run that `has_branches`
    is continued by others.
    """

    __slots__ = ("generation", "has_branches", "holders", "keys")

    def __init__(
        self, keys: tuple[int, ...], holders: dict[int, CachedPrefix], generation: int
    ) -> None:
        """Begin."""
        self.keys, self.holders, self.generation = keys, holders, generation
        self.has_branches = False


class PrefixTree:
    """The last `most` blocks, by the keys of their prompts up to their ends.

    A conversation that stays at its replica is one run, found by its first key, so that a prompt
    takes as many look-ups as it has branches before it. A request's stay replaces those of all its
    blocks: who holds a run holds those before it. Runs are forgotten in two generations, which
    costs the same at each request, and keeps those that were asked for since half of them were new.
    """

    def __init__(self, most: int) -> None:
        """Begin with none."""
        self._half = max(1, most // 2)
        self._young: dict[int, TreeEdge] = {}  # by first key; all of the present generation
        self._old: dict[int, TreeEdge] = {}
        self._dead: dict[int, TreeEdge] = {}
        self._num_young = self._num_old = 0  # blocks
        self._generation = 0
        self._epochs: list[int] = []  # by place
        self._cutoffs_s: list[float] = []  # what was last used before is evicted

    def __len__(self) -> int:
        return self._num_young + self._num_old

    def begin_epoch(self, place: int) -> None:
        """Forget what a replica holds, which is new or has started again."""
        while place >= len(self._epochs):
            self._epochs.append(0)
            self._cutoffs_s.append(0.0)
        self._epochs[place] += 1
        self._cutoffs_s[place] = 0.0

    def cut(self, place: int, before_s: float) -> None:
        """Forget the blocks of a replica that were last used before a time."""
        self._cutoffs_s[place] = before_s

    def find(self, keys: Sequence[int]) -> Path:
        """Return the runs that a prompt begins with, and how many blocks of each."""
        at, path = 0, []
        young, old = self._young, self._old
        while at < len(keys):
            run = young.get(keys[at])
            if run is None:
                run = old.get(keys[at])
                if run is None:
                    break
            count = _num_equal(run.keys, keys, at)
            path.append((run, count))
            at += count
        return path

    def longest(self, path: Path) -> tuple[int, list[int]]:
        """Return how many of the first blocks some replica holds, and the last ones to get them."""
        num_blocks = sum([count for _, count in path])
        for run, count in reversed(path):
            places = []
            for stay in reversed(run.holders.values()):
                if self._is_valid(stay):
                    places.append(stay.place)
                    if len(places) == _MOST_HOLDERS:
                        break
            if places:
                return num_blocks, places
            num_blocks -= count
        return 0, []

    def num_held(self, path: Path, place: int) -> int:
        """Return how many of the first blocks a replica holds."""
        num_blocks = 0
        for run, count in path:
            stay = run.holders.get(place)
            if stay is None or not self._is_valid(stay):
                break
            num_blocks += count
        return num_blocks

    def add(self, keys: tuple[int, ...], path: Path, place: int) -> CachedPrefix:
        """Note that a replica was sent the blocks of a prompt; the caller ends their stay.

        `path` is what `find` has just returned for it.
        """
        stay, num_known, run = CachedPrefix(place, self._epochs[place]), 0, None
        for run, count in path:
            if count < len(run.keys):
                self._split(run, count)
            run.holders.pop(place, None)  # the last to come is last
            run.holders[place] = stay
            num_known += count
            self._keep(run)
        if rest := keys[num_known:]:
            if run is not None and len(run.holders) == 1 and not run.has_branches:
                run.keys += rest
            else:
                self._young[rest[0]] = TreeEdge(rest, {place: stay}, self._generation)
                if run is not None:
                    run.has_branches = True
            self._num_young += len(rest)
        self._forget()
        return stay

    def _split(self, run: TreeEdge, count: int) -> None:
        """Leave a run its first blocks; the others become one for themselves."""
        tail = TreeEdge(run.keys[count:], run.holders.copy(), run.generation)
        tail.has_branches, run.has_branches = run.has_branches, True
        run.keys = run.keys[:count]
        is_young = run.generation == self._generation
        (self._young if is_young else self._old)[tail.keys[0]] = tail

    def _keep(self, run: TreeEdge) -> None:
        """Count a run to those that were asked for lately."""
        if run.generation != self._generation:
            run.generation = self._generation
            self._young[run.keys[0]] = run
            self._num_young += len(run.keys)
            self._num_old -= len(run.keys)

    def _forget(self) -> None:
        """Drop the runs that were not asked for in a generation."""
        if self._num_young >= self._half:
            self._dead, self._old, self._young = self._old, self._young, {}
            self._num_old, self._num_young = self._num_young, 0
            self._generation += 1
        for _ in range(min(len(self._dead), _FREED)):
            self._dead.popitem()

    def _is_valid(self, stay: CachedPrefix) -> bool:
        place = stay.place
        return stay.epoch == self._epochs[place] and stay.used_s >= self._cutoffs_s[place]


def _num_equal(run: tuple[int, ...], keys: Sequence[int], at: int) -> int:
    """Return how many keys of a run follow in `keys`, of which that at `at` is its first.

    A key stands for all before it, so that a bisection finds the last equal one.
    """
    low, high = 1, min(len(run), len(keys) - at)
    if run[high - 1] == keys[at + high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == keys[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
