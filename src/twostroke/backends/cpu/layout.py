"""What the ranks of a host share: places of gathered values, barriers, ways between two ranks."""

from __future__ import annotations

from twostroke.backends.cpu.records import CHANNEL_SLOTS, LINK_HEAD_BYTES
from twostroke.core.frozen import Frozen

_PAGE = 4096  # bytes; memories and channels begin on one

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


class SharedLayout(Frozen):
    """What the ranks of a Program share: slots for gathered values, barriers, channels."""

    slots: tuple[Slot, ...]
    slot_of: dict[Key, int]
    barriers: dict[Team, int]
    channels: dict[ChannelKey, int]
    channel_widths: tuple[int, ...]

    def offsets(self, max_rows: int) -> tuple[list[int], list[int], int]:
        """Return where slots and channels lie, and where they end, for steps of so many rows."""
        sizes = [4 * slot.width * (slot.num_rows or max_rows) for slot in self.slots]
        sizes += [4 * width * max_rows * CHANNEL_SLOTS for width in self.channel_widths]
        places, end = [], LINK_HEAD_BYTES
        for size in sizes:
            places.append(end)
            end += -(-size // _PAGE) * _PAGE
        return places[: len(self.slots)], places[len(self.slots) :], end
