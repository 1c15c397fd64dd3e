"""What the ranks of a host share: places of gathered values, barriers, ways between two ranks."""

from __future__ import annotations

from twostroke.backends.cpu.records import CHANNEL_SLOTS, LINK_HEAD_BYTES
from twostroke.core.frozen import Frozen

_PAGE = 4096  # bytes; memories and channels begin on one
_PREPARED_BYTES = 16  # of a value: enough for all that is made of it for several weights
_PREPARED_ROWS = 64  # more than a step has: kinds of rows are padded to whole tiles

Team = tuple[int, ...]
Key = tuple[Team, str]  # a team, and a value that it gathers
ChannelKey = tuple[int, int, int]  # sender, receiver, and the place among the values sent


class Channel(Frozen):
    """The way to or from another rank of the values that come at place `number` of a step."""

    is_sent: bool
    peer: int
    number: int
    width: int

    def key(self, rank: int) -> ChannelKey:
        """Return how both ranks know it."""
        return (rank, self.peer, self.number) if self.is_sent else (self.peer, rank, self.number)


class Slot(Frozen):
    """Rows of shared memory that values of one width take in turn; `num_rows` 0: the step's."""

    width: int
    num_rows: int


class Together(Frozen):
    """Products of which the ranks of a team prepare the rows together, by their weights.

    Rows have up to `width` values.
    """

    products: frozenset[tuple[str, ...]]
    width: int


class Offsets(Frozen):
    """Where in shared memory slots, channels and two places of prepared rows begin, and its end.

    Prepared rows are those of a team: where they lie, and the size of one place.
    """

    slots: list[int]
    channels: list[int]
    prepared: dict[Team, tuple[int, int]]
    end: int


class SharedLayout(Frozen):
    """What the ranks of a Program share: slots for gathered values, barriers, channels."""

    slots: tuple[Slot, ...]
    slot_of: dict[Key, int]
    barriers: dict[Team, int]
    channels: dict[ChannelKey, int]
    channel_widths: tuple[int, ...]
    together: dict[Team, Together]

    def offsets(self, max_rows: int) -> Offsets:
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
        return Offsets(slots, channels, prepared, end)
