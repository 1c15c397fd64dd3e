"""The homes of prompts that no replica holds: consistent hashing (Karger et al., 1997)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_POINTS: Final = 64  # of a replica: shares of prompts differ by an eighth
_SPREAD: Final = np.uint64(0xBF58476D1CE4E5B9)  # of SplitMix64's finalizer
_SHIFT: Final = 48  # of a hash, to one of 65,536 parts of the circle: a bisection takes longer
_MOST_PASSED: Final = 1000  # points of replicas that are shut


class HashRing:
    """Points of replicas on a circle: the homes of a hash are the replicas that follow it.

    When a replica leaves, only what it was a home of moves.
    """

    def __init__(self) -> None:
        """Begin without replicas."""
        self._salts: dict[int, int] = {}  # by place
        self._places: list[int] = []  # by point
        self._begins: list[int] = []  # of each part of the circle, in `_places`

    def join(self, place: int, salt: int) -> None:
        """Give a place to a replica, in place of the one that had it."""
        self._salts[place] = salt
        self._places.clear()

    def homes(self, affinity: int, wait_s: npt.NDArray[np.float64]) -> list[int]:
        """Return the places of up to two replicas whose wait is finite."""
        if not self._places:
            self._draw()
        found: list[int] = []
        places, begin = self._places, self._begins[affinity >> _SHIFT]
        for at in range(begin, begin + min(len(places), _MOST_PASSED)):
            place = places[at % len(places)]
            if place not in found and wait_s.item(place) != math.inf:
                found.append(place)
                if len(found) == 2:
                    break
        return found

    def _draw(self) -> None:
        salts = np.array(list(self._salts.values()), np.uint64)
        points = salts[:, None] ^ (np.arange(1, _POINTS + 1, dtype=np.uint64) * _SPREAD)
        points = (points ^ points >> np.uint64(29)) * _SPREAD
        points = (points ^ points >> np.uint64(32)).ravel()
        order = points.argsort()
        begins = np.arange(1 << (64 - _SHIFT), dtype=np.uint64) << np.uint64(_SHIFT)
        self._begins = np.searchsorted(points[order], begins).tolist()
        self._places = np.repeat(list(self._salts), _POINTS)[order].tolist()
