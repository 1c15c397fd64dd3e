"""Which layers share pages: groups of equal size, each of layers that see equally far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_GROUPS = 16  # each costs the scheduler a page id for every `page_size` tokens of a request


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose keys and values lie together in pages: one page holds tokens of all of them.

    `layers[i]` is the cache layer at place i of the group's pages. Rows of these layers read the
    last `window` positions, their own included, or all of them if it is None.
    """

    layers: tuple[int, ...]
    window: int | None = None


def group_layers(windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    """Cut layers, given by their windows, into groups of one size, so that any page fits any group.

    Of the sizes that make at most 16 groups it takes the one that leaves the fewest places empty,
    and of these the largest: the greatest common divisor of how many layers there are of each
    window, unless that makes too many groups. Then some groups have fewer layers than their pages
    have places.
    """
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    kinds = sorted(layers, key=lambda window: (window is not None, window or 0))
    counts = [len(layers[kind]) for kind in kinds]
    most_groups = max(_MOST_GROUPS, len(kinds))
    sizes = [size for size in range(1, max(counts) + 1) if _num_groups(counts, size) <= most_groups]
    size = min(sizes, key=lambda size: (size * _num_groups(counts, size), -size))
    return tuple(
        CacheGroup(tuple(layers[kind][first : first + size]), kind)
        for kind in kinds
        for first in range(0, len(layers[kind]), size)
    )


def _num_groups(counts: list[int], size: int) -> int:
    return sum(-(-count // size) for count in counts)
