"""An array of strings in a mapped file: decoded one by one, when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from twostroke.weights.mapping import MappedFile


class Strings(Sequence[str]):
    """A vocabulary's quarter of a million strings, which would take 15 MB as Python's own.

    Bytes that are no UTF-8 become lone surrogates (`surrogateescape`): two strings must not become
    one.
    """

    __slots__ = ("_mapping", "_starts")

    def __init__(self, mapping: MappedFile, starts: array[int]) -> None:
        """`starts` holds where each begins in the file, and, last, where one more would.

        Eight bytes, a string's length, lie before each.
        """
        self._mapping = mapping
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        one = range(len(self))[place]
        raw = self._mapping.buffer[self._starts[one] : self._starts[one + 1] - 8]
        return raw.decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (raw.decode("utf-8", "surrogateescape") for raw in self.encoded())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Strings, list)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def encoded(self) -> Iterator[bytes]:
        """Yield the strings as the file has them."""
        buffer, starts = self._mapping.buffer, self._starts
        begin = starts[0]
        for end in starts[1:]:
            yield buffer[begin : end - 8]
            begin = end
