"""Places for a lowered Program's values and weights: reused buffers, and tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable

T = TypeVar("T")


@dataclass(slots=True)
class Table(Generic[T]):
    """Things in the order of their first use."""

    places: dict[T, int] = field(default_factory=dict)

    def place(self, thing: T) -> int:
        """Return the place of a thing; a new thing gets the next place."""
        return self.places.setdefault(thing, len(self.places))


@dataclass(slots=True)
class Buffers:
    """The buffer of each value; a buffer is reused after the last read of its value.

    A buffer is only reused for values of the same width, so that rows stay dense.
    """

    reads_left: Counter[str]
    widths: list[int] = field(default_factory=list)
    free: dict[int, list[int]] = field(default_factory=dict)
    of_value: dict[str, int] = field(default_factory=dict)

    def write(self, name: str, width: int) -> int:
        """Give a new value a buffer."""
        pool = self.free.setdefault(width, [])
        if not pool:
            self.widths.append(width)
            pool.append(len(self.widths) - 1)
        self.of_value[name] = pool.pop()
        return self.of_value[name]

    def take_over(self, name: str, earlier: str) -> int:
        """Let a new value replace an earlier one in its buffer."""
        self.of_value[name] = self.of_value.pop(earlier)
        return self.of_value[name]

    def done(self, names: Iterable[str]) -> None:
        """Count reads; a value without further ones gives its buffer back."""
        for name in names:
            self.reads_left[name] -= 1
            if self.reads_left[name] <= 0 and name in self.of_value:
                buffer = self.of_value.pop(name)
                self.free[self.widths[buffer]].append(buffer)
