"""Consistent hashing: the preferred replicas of prompts that no replica has in its cache.

Karger et al., "Consistent Hashing and Random Trees", STOC 1997.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_POINTS_PER_REPLICA: Final = 64  # the replicas' shares of prompts then differ by an eighth
_MIX_FACTOR: Final = np.uint64(0xBF58476D1CE4E5B9)  # of SplitMix64's finalizer
_SECTOR_SHIFT: Final = 48  # of a 64-bit hash, to one of 65,536 sectors; a bisection is slower
_MAX_SKIPPED_POINTS: Final = 1000  # points of closed replicas
_NUM_PREFERRED: Final = 2


class HashRing:
    """Consistent hashing of prompts to replicas.

    Each replica has points on a ring of hashes; a prompt's hash prefers the replicas whose points
    follow the hash on the ring. When a replica leaves, only the prompts that preferred this replica
    get another one.
    """

    def __init__(self) -> None:
        """Create a ring without replicas."""
        self._salts: dict[int, int] = {}  # by index of the replica
        self._owners: list[int] = []  # index of the replica of each point, in the ring's order
        self._sector_starts: list[int] = []  # index in `_owners` of each sector's first point

    def add(self, index: int, salt: int) -> None:
        """Add a replica to the ring, or replace the replica with this index.

        `salt` is a hash of the replica's name, from which its points are computed.
        """
        self._salts[index] = salt
        self._owners.clear()

    def preferred(self, affinity: int, wait_s: npt.NDArray[np.float64]) -> list[int]:
        """Return the indices of up to two open replicas that a prompt's 64-bit hash prefers.

        `wait_s`, shape (replicas,), is inf for closed replicas.
        """
        if not self._owners:
            self._place_points()
        owners = self._owners
        start = self._sector_starts[affinity >> _SECTOR_SHIFT]
        preferred: list[int] = []
        for point in range(start, start + min(len(owners), _MAX_SKIPPED_POINTS)):
            index = owners[point % len(owners)]
            if index not in preferred and wait_s.item(index) != math.inf:
                preferred.append(index)
                if len(preferred) == _NUM_PREFERRED:
                    break
        return preferred

    def _place_points(self) -> None:
        """Compute the points of all replicas on the ring, and sort them."""
        salts = np.array(list(self._salts.values()), np.uint64)
        numbers = np.arange(1, _POINTS_PER_REPLICA + 1, dtype=np.uint64)
        points = salts[:, None] ^ (numbers * _MIX_FACTOR)  # (replicas, points)
        points = (points ^ points >> np.uint64(29)) * _MIX_FACTOR
        points = (points ^ points >> np.uint64(32)).ravel()
        order = points.argsort()
        sectors = np.arange(1 << (64 - _SECTOR_SHIFT), dtype=np.uint64) << np.uint64(_SECTOR_SHIFT)
        self._sector_starts = np.searchsorted(points[order], sectors).tolist()
        self._owners = np.repeat(list(self._salts), _POINTS_PER_REPLICA)[order].tolist()
