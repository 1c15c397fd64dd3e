"""What the ranks of a host share: places of gathered values, barriers, ways between two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.backends.cpu.records import CHANNEL_SLOTS, LINK_HEAD_BYTES
from twostroke.core.frozen import Frozen
from twostroke.model.program.kv_layout import KV_SPLIT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.model.program.ops import SplitKvAttention

_PAGE = 4096  # bytes; memories and channels begin on one
_ALIGNMENT = 64
_FLOAT_BYTES = 4
_MOST_VALUE_BYTES = 4  # of a key and a value, in any format of the cache
_PREPARED_BYTES = 16  # of a value: enough for all that is made of it for several weights
_TILE_BYTES = 4 << 20  # of what ranks exchange of attention at once, unless one piece needs more
_PREPARED_ROWS = 64  # more than a step has: kinds of rows are padded to whole tiles

Team = tuple[int, ...]
Key = tuple[Team, str]  # a team, and a value that it gathers
ChannelKey = tuple[int, int, int]  # sender, receiver, and the place among the values sent


class RankChannel(Frozen):
    """The way to or from another rank of the values that come at place `number` of a step."""

    is_sent: bool
    peer: int
    number: int
    width: int

    def key(self, rank: int) -> ChannelKey:
        """Return how both ranks know it."""
        return (rank, self.peer, self.number) if self.is_sent else (self.peer, rank, self.number)


class SharedSlot(Frozen):
    """Rows of shared memory that values of one width take in turn; `num_rows` 0: the step's."""

    width: int
    num_rows: int


class Together(Frozen):
    """Products of which the ranks of a team prepare the rows together, by their weights.

    Rows have up to `width` values.
    """

    products: frozenset[tuple[str, ...]]
    width: int


class SharedOffsets(Frozen):
    """Where in shared memory slots, channels and what a team has two places for begin; its end.

    Those are prepared rows and tiles of attention: where they lie, and the size of one place.
    """

    slots: list[int]
    channels: list[int]
    prepared: dict[Team, tuple[int, int]]
    tiles: dict[Team, tuple[int, int]]
    end: int


class SharedLayout(Frozen):
    """What the ranks of a Program share: slots for gathered values, barriers, channels."""

    slots: tuple[SharedSlot, ...]
    slot_of: dict[Key, int]
    barriers: dict[Team, int]
    channels: dict[ChannelKey, int]
    channel_widths: tuple[int, ...]
    together: dict[Team, Together]
    tile_bytes: dict[Team, int]

    def offsets(self, max_rows: int) -> SharedOffsets:
        """Return where everything lies for steps of up to `max_rows` rows."""
        end = LINK_HEAD_BYTES

        def place(size: int) -> int:
            nonlocal end
            begin, end = end, end + -(-size // _PAGE) * _PAGE
            return begin

        slots = [place(4 * slot.width * (slot.num_rows or max_rows)) for slot in self.slots]
        channels = [place(4 * width * max_rows * CHANNEL_SLOTS) for width in self.channel_widths]
        prepared = {}
        for team, products in self.together.items():
            size = _PREPARED_BYTES * products.width * (max_rows + _PREPARED_ROWS)
            prepared[team] = (place(2 * size), size)
        tiles = {team: (place(2 * size), size) for team, size in self.tile_bytes.items()}
        return SharedOffsets(slots, channels, prepared, tiles, end)


def tile_bytes(pieces: Iterable[SplitKvAttention]) -> dict[Team, int]:
    """Return the size of a team's tiles: room for a piece of each member, and for a row's share."""
    found: dict[Team, int] = {}
    for op in pieces:
        keys = len(op.team) * KV_SPLIT_TOKENS * op.num_kv_heads * op.head_dim * _MOST_VALUE_BYTES
        shares = _FLOAT_BYTES * op.num_heads * (op.head_dim + 2) + _ALIGNMENT
        found[op.team] = max(found.get(op.team, _TILE_BYTES), keys, shares)
    return {team: -(-size // _ALIGNMENT) * _ALIGNMENT for team, size in found.items()}
