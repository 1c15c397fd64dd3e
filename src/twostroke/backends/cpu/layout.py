"""The memory that the ranks of a host share: gathered values, barriers and channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.backends.cpu.records import CHANNEL_SLOTS, LINK_HEAD_BYTES
from twostroke.core.frozen import Frozen
from twostroke.model.program.kv_layout import KV_SPLIT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.model.program.ops import SplitKvAttention

_PAGE_BYTES = 4096  # memories and channels begin at multiples of it
_ALIGNMENT = 64  # bytes
_FLOAT_BYTES = 4
_MAX_VALUE_BYTES = 4  # of a key and a value together, in any KV format
_PREPARED_BYTES = 16  # of a value, prepared in all forms that different weights need
_TILE_BYTES = 4 << 20  # exchanged at once in attention, unless one piece of tokens needs more
_PREPARED_ROWS = 64  # extra rows, for padding to whole tiles

Team = tuple[int, ...]
Key = tuple[Team, str]  # a team, and the name of a value that it gathers
ChannelKey = tuple[int, int, int]  # sender, receiver, and index among the values sent


class RankChannel(Frozen):
    """A pipeline channel in shared memory that sends a value to, or from, rank `peer`.

    `number`: index among the values that the two ranks send in this direction.
    """

    is_sent: bool
    peer: int
    number: int
    width: int

    def key(self, rank: int) -> ChannelKey:
        """Return (sender, receiver, number), which is equal on both ranks of the channel.

        `rank`: the rank that has this object.
        """
        return (rank, self.peer, self.number) if self.is_sent else (self.peer, rank, self.number)


class SharedSlot(Frozen):
    """Rows of the ranks' shared memory, reused by several gathered values of the same width.

    `num_rows` 0 means as many rows as the step has.
    """

    width: int
    num_rows: int


class SharedPreparation(Frozen):
    """Matrix products whose input rows the ranks of a team quantize together, in shared memory.

    Each item of `products` has the names of the weights that multiply the same input. `width`: the
    largest width of the rows.
    """

    products: frozenset[tuple[str, ...]]
    width: int


class SharedOffsets(Frozen):
    """The byte offsets at which the parts of the ranks' shared memory begin.

    `slots` and `channels` have an offset for each slot and channel. `prepared` (quantized input
    rows) and `tiles` (of attention) have, for each team, an offset and the size of each of two
    buffers. `end` is the size of the shared memory.
    """

    slots: list[int]
    channels: list[int]
    prepared: dict[Team, tuple[int, int]]
    tiles: dict[Team, tuple[int, int]]
    end: int


class SharedLayout(Frozen):
    """The layout of the ranks' shared memory: slots for gathered values, barriers, channels.

    `slot_of`, `barriers` and `channels` map each gathered value, team and channel to its index.
    """

    slots: tuple[SharedSlot, ...]
    slot_of: dict[Key, int]
    barriers: dict[Team, int]
    channels: dict[ChannelKey, int]
    channel_widths: tuple[int, ...]
    prepared_products: dict[Team, SharedPreparation]
    tile_bytes: dict[Team, int]

    def offsets(self, max_rows: int) -> SharedOffsets:
        """Return the byte offsets in shared memory, for steps of up to `max_rows` rows."""
        end = LINK_HEAD_BYTES

        def reserve(size: int) -> int:
            nonlocal end
            begin, end = end, end + -(-size // _PAGE_BYTES) * _PAGE_BYTES
            return begin

        slots = [reserve(4 * slot.width * (slot.num_rows or max_rows)) for slot in self.slots]
        channels = [reserve(4 * width * max_rows * CHANNEL_SLOTS) for width in self.channel_widths]
        prepared = {}
        for team, products in self.prepared_products.items():
            size = _PREPARED_BYTES * products.width * (max_rows + _PREPARED_ROWS)
            prepared[team] = (reserve(2 * size), size)
        tiles = {team: (reserve(2 * size), size) for team, size in self.tile_bytes.items()}
        return SharedOffsets(slots, channels, prepared, tiles, end)


def tile_bytes(split_kv_ops: Iterable[SplitKvAttention]) -> dict[Team, int]:
    """Return the bytes of the attention tiles that each team of ranks exchanges.

    A tile holds the keys and values of one KV split of each rank, or a row's partial attention.
    """
    sizes: dict[Team, int] = {}
    for op in split_kv_ops:
        keys = len(op.team) * KV_SPLIT_TOKENS * op.num_kv_heads * op.head_dim * _MAX_VALUE_BYTES
        shares = _FLOAT_BYTES * op.num_heads * (op.head_dim + 2) + _ALIGNMENT
        sizes[op.team] = max(sizes.get(op.team, _TILE_BYTES), keys, shares)
    return {team: -(-size // _ALIGNMENT) * _ALIGNMENT for team, size in sizes.items()}
