"""Divides a step's attention into work items: a tile of rows and a piece of context each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]

MAX_PIECES: Final = 65  # of a row: a window may cut the first and the last piece
_MAX_FULL_PIECES: Final = 64
BLOCK: Final = 64  # tokens that attention kernels read at once; some read half of them
FEW_ROWS: Final = 16  # slices of up to this many rows have their contexts divided into pieces


class Tiling(Frozen):
    """How attention is divided into tiles of rows and pieces of contexts, for similar layers.

    `window`: the sliding window of the layers. `small_rows`, `large_rows`: the rows of a tile, for
    slices of few rows and of many. `piece`: the smallest size of pieces in tokens; for longer
    contexts it is multiplied by a power of two, so that there are at most 64 pieces. `same_tokens`:
    all tiles have few rows, and a row's context is divided by the row's own length of context.
    """

    window: int | None
    small_rows: int
    large_rows: int
    piece: int = 256
    same_tokens: bool = False


class Items(Frozen, eq=False):
    """The work items of a step's attention: (n, 8) each, for tiles of few and of many rows.

    `merges` (n, 4): the rows whose context has several pieces.
    """

    small: Ints
    large: Ints
    merges: Ints


def divide(slices: Ints, tiling: Tiling, max_slots: int) -> list[Items]:
    """Divide the attention of a step's slices into work items, and return them by pass.

    A slice is (row, number of rows, position, table). If the pieces take more than `max_slots`
    slots, there are several passes. Tiles of many rows take no slots, and are in the first pass.
    """
    is_few = (slices[:, 1] <= FEW_ROWS) | tiling.same_tokens
    small = _tiles(_cut_at_piece_sizes(slices[is_few], tiling), tiling.small_rows)
    large = _tiles(slices[~is_few], tiling.large_rows)
    start, end = _visible_range(large, tiling)
    longest = np.argsort(start - end, kind="stable")  # long items first, which balances the work
    large, start, end = large[longest], start[longest], end[longest]
    no_slots = np.full(len(large), -1, np.int32)
    large_items = np.stack(
        [*(large[:, i] for i in (0, 1, 3, 2)), start, end, no_slots, np.zeros_like(no_slots)],
        axis=1,
    )
    slots = np.cumsum(_num_slots(small, tiling))
    items: list[Items] = []
    num_done, num_used_slots = 0, 0
    while not items or num_done < len(small):
        until = int(np.searchsorted(slots, num_used_slots + max_slots, side="right"))
        assert until > num_done or not len(small), "no tile has more pieces than there are slots"
        items.append(_pieces(small[num_done:until], large_items, tiling))
        num_done, num_used_slots = until, int(slots[until - 1]) if until else 0
        large_items = large_items[:0]
    return items


def _cut_at_piece_sizes(slices: Ints, tiling: Tiling) -> Ints:
    """Cut slices so that all rows of a slice have their contexts divided into pieces of one size.

    With `same_tokens` the size depends on the row's position alone, so that a row's result does not
    depend on the other rows of a step. Otherwise the slices are returned unchanged. Slices and
    result are (n, 4), as in `divide`; cut slices have their last rows at the end.
    """
    max_tokens = _MAX_FULL_PIECES * tiling.piece
    while tiling.same_tokens and len(slices):
        first, last = slices[:, 2] + 1, slices[:, 2] + slices[:, 1]
        limit = max_tokens << np.ceil(np.log2(np.maximum(1, -(-first // max_tokens)))).astype(
            np.int32
        )
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


def _tiles(slices: Ints, max_rows: int) -> Ints:
    """Cut slices into tiles of at most `max_rows` rows, in the same form: (n, 4) as in `divide`."""
    counts = -(-slices[:, 1] // max_rows)
    if len(slices) == 0 or counts.max() == 1:
        return slices
    first = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    first = first.astype(np.int32) * np.int32(max_rows)
    tiles = np.repeat(slices, counts, axis=0)
    tiles[:, 0] += first
    tiles[:, 1] = np.minimum(tiles[:, 1] - first, max_rows)
    tiles[:, 2] += first
    return tiles


def _visible_range(tiles: Ints, tiling: Tiling) -> tuple[Ints, Ints]:
    """Return the first and the end position of the tokens that each tile's rows attend to."""
    end = tiles[:, 2] + tiles[:, 1]
    if tiling.window is None:
        return np.zeros_like(end), end
    start = np.maximum(0, tiles[:, 2] + 1 - tiling.window)
    return start - start % (BLOCK if tiling.same_tokens else 1), end


def _cuts(tiles: Ints, tiling: Tiling) -> tuple[Ints, Ints, Ints]:
    """Return how each tile's context is divided into pieces.

    Returns, for each tile, (the size of its pieces in tokens, the number of the first piece, the
    number of pieces).
    """
    start, end = _visible_range(tiles, tiling)
    ratio = np.maximum(1, -(-end // (_MAX_FULL_PIECES * tiling.piece)))
    size = tiling.piece * (1 << np.ceil(np.log2(ratio)).astype(np.int32))
    first = start // size
    return size, first, -(-end // size) - first


def _num_slots(tiles: Ints, tiling: Tiling) -> Ints:
    """Return how many slots for partial sums each tile needs; 0 if its context is one piece."""
    _, _, counts = _cuts(tiles, tiling)
    return np.where(counts > 1, counts * tiles[:, 1], 0)


def _pieces(tiles: Ints, large: Ints, tiling: Tiling) -> Items:
    """Return the work items of one pass.

    They are each piece of `tiles`, which have few rows, and the items `large`.
    """
    start, end = _visible_range(tiles, tiling)
    size, first, counts = _cuts(tiles, tiling)
    num = int(counts.sum())
    of_tile = np.repeat(np.arange(len(tiles)), counts)
    piece_index = (np.arange(num) - np.repeat(counts.cumsum() - counts, counts)).astype(np.int32)
    size_of, piece_number = size[of_tile], first[of_tile] + piece_index
    is_cut = counts > 1
    slots = _num_slots(tiles, tiling)
    slot_of_tile = slots.cumsum() - slots
    small = np.empty((num, 8), np.int32)
    small[:, :4] = tiles[of_tile][:, (0, 1, 3, 2)]
    small[:, 4] = np.maximum(piece_number * size_of, start[of_tile])
    small[:, 5] = np.minimum((piece_number + 1) * size_of, end[of_tile])
    small[:, 6] = np.where(is_cut[of_tile], slot_of_tile[of_tile] + piece_index, -1)
    small[:, 7] = counts[of_tile]
    return Items(small, large, _merges(tiles, counts, slot_of_tile))


def _merges(tiles: Ints, counts: Ints, slots: Ints) -> Ints:
    """Return (row, first slot, slots, 0) for each row whose context has several pieces."""
    is_cut = counts > 1
    tiles, counts, slots = tiles[is_cut], counts[is_cut], slots[is_cut]
    rows = tiles[:, 1]
    within = np.arange(rows.sum()) - np.repeat(rows.cumsum() - rows, rows)
    merges = np.zeros((len(within), 4), np.int32)
    merges[:, 0] = np.repeat(tiles[:, 0], rows) + within
    merges[:, 1] = np.repeat(slots, rows) + within * np.repeat(counts, rows)
    merges[:, 2] = np.repeat(counts, rows)
    return merges
