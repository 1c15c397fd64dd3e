"""Divides a step's attention into items: tiles of rows, and pieces of their contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]

MOST_PIECES: Final = 65  # of one row: a context's first and last piece may be cut by a window
_MOST_FULL_PIECES: Final = 64
BLOCK: Final = 64  # tokens that attention reads at once, or half of them
FEW_ROWS: Final = 16  # a slice of no more divides its context; one of more has tiles of many rows


class Tiling(Frozen):
    """How layers of one shape are divided: the window, and how many rows tiles have.

    A context is cut at multiples of a size that depends on its length alone: `piece` tokens, or
    the power of two times as many that makes at most 64 pieces. For the `same_tokens`, all tiles
    have few rows, and contexts are cut as each row's own would be.
    """

    window: int | None
    small_rows: int
    large_rows: int
    piece: int = 256
    same_tokens: bool = False


class Items(Frozen, eq=False):
    """Items (n, 8) of few rows and of many, and merges (n, 4)."""

    small: Ints
    large: Ints
    merges: Ints


def divide(slices: Ints, tiling: Tiling, most_slots: int) -> list[Items]:
    """Return the items of a step's slices, (row, number of rows, position, table) each.

    They are several lists, to be done one after another, if their pieces take more slots than
    there are; tiles of many rows take none and are in the first.
    """
    is_few = (slices[:, 1] <= FEW_ROWS) | tiling.same_tokens
    small = _tiles(_apart(slices[is_few], tiling), tiling.small_rows)
    large = _tiles(slices[~is_few], tiling.large_rows)
    start, end = _seen(large, tiling)
    longest = np.argsort(start - end, kind="stable")  # first: short ones make up for differences
    large, start, end = large[longest], start[longest], end[longest]
    whole = np.full(len(large), -1, np.int32)
    large_items = np.stack(
        [*(large[:, i] for i in (0, 1, 3, 2)), start, end, whole, np.zeros_like(whole)], axis=1
    )
    slots = np.cumsum(_num_slots(small, tiling))
    found: list[Items] = []
    done, used = 0, 0
    while not found or done < len(small):
        until = int(np.searchsorted(slots, used + most_slots, side="right"))
        assert until > done or not len(small), "no tile has more pieces than there are slots"
        found.append(_pieces(small[done:until], large_items, tiling))
        done, used = until, int(slots[until - 1]) if until else 0
        large_items = large_items[:0]
    return found


def _apart(slices: Ints, tiling: Tiling) -> Ints:
    """Return slices cut where a row's context has larger pieces than that of the row before."""
    most = _MOST_FULL_PIECES * tiling.piece
    while tiling.same_tokens and len(slices):
        first, last = slices[:, 2] + 1, slices[:, 2] + slices[:, 1]
        limit = most << np.ceil(np.log2(np.maximum(1, -(-first // most)))).astype(np.int32)
        is_cut = last > limit
        if not is_cut.any():
            break
        head, tail = slices.copy(), slices[is_cut]
        head[is_cut, 1] = num = (limit - slices[:, 2])[is_cut]
        tail[:, 0] += num
        tail[:, 1] -= num
        tail[:, 2] += num
        slices = np.concatenate([head, tail])
    return slices


def _tiles(slices: Ints, most_rows: int) -> Ints:
    """Return the slices cut into at most so many rows each."""
    counts = -(-slices[:, 1] // most_rows)
    if len(slices) == 0 or counts.max() == 1:
        return slices
    first = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    first = first.astype(np.int32) * np.int32(most_rows)
    tiles = np.repeat(slices, counts, axis=0)
    tiles[:, 0] += first
    tiles[:, 1] = np.minimum(tiles[:, 1] - first, most_rows)
    tiles[:, 2] += first
    return tiles


def _seen(tiles: Ints, tiling: Tiling) -> tuple[Ints, Ints]:
    """Return the first position that a tile's rows see, and the one after the last."""
    end = tiles[:, 2] + tiles[:, 1]
    if tiling.window is None:
        return np.zeros_like(end), end
    start = np.maximum(0, tiles[:, 2] + 1 - tiling.window)
    return start - start % (BLOCK if tiling.same_tokens else 1), end


def _cuts(tiles: Ints, tiling: Tiling) -> tuple[Ints, Ints, Ints]:
    """Return the size of each tile's pieces, the first one's number, and how many there are."""
    start, end = _seen(tiles, tiling)
    ratio = np.maximum(1, -(-end // (_MOST_FULL_PIECES * tiling.piece)))
    size = tiling.piece * (1 << np.ceil(np.log2(ratio)).astype(np.int32))
    first = start // size
    return size, first, -(-end // size) - first


def _num_slots(tiles: Ints, tiling: Tiling) -> Ints:
    """Return how many slots each tile needs: none if its context is not cut."""
    _, _, counts = _cuts(tiles, tiling)
    return np.where(counts > 1, counts * tiles[:, 1], 0)


def _pieces(tiles: Ints, large: Ints, tiling: Tiling) -> Items:
    """Cut the contexts of tiles of few rows."""
    start, end = _seen(tiles, tiling)
    size, first, counts = _cuts(tiles, tiling)
    num = int(counts.sum())
    of_tile = np.repeat(np.arange(len(tiles)), counts)
    place = (np.arange(num) - np.repeat(counts.cumsum() - counts, counts)).astype(np.int32)
    size_of, at = size[of_tile], first[of_tile] + place
    is_cut = counts > 1
    slots = _num_slots(tiles, tiling)
    slot_of_tile = slots.cumsum() - slots
    small = np.empty((num, 8), np.int32)
    small[:, :4] = tiles[of_tile][:, (0, 1, 3, 2)]
    small[:, 4] = np.maximum(at * size_of, start[of_tile])
    small[:, 5] = np.minimum((at + 1) * size_of, end[of_tile])
    small[:, 6] = np.where(is_cut[of_tile], slot_of_tile[of_tile] + place, -1)
    small[:, 7] = counts[of_tile]
    return Items(small, large, _merges(tiles, counts, slot_of_tile))


def _merges(tiles: Ints, counts: Ints, slots: Ints) -> Ints:
    """Return (row, first slot, slots, 0) for each row whose context is cut."""
    is_cut = counts > 1
    tiles, counts, slots = tiles[is_cut], counts[is_cut], slots[is_cut]
    rows = tiles[:, 1]
    within = np.arange(rows.sum()) - np.repeat(rows.cumsum() - rows, rows)
    merges = np.zeros((len(within), 4), np.int32)
    merges[:, 0] = np.repeat(tiles[:, 0], rows) + within
    merges[:, 1] = np.repeat(slots, rows) + within * np.repeat(counts, rows)
    merges[:, 2] = np.repeat(counts, rows)
    return merges
