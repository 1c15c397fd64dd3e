"""An array of strings in a mapped file, each decoded when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from twostroke.weights.mapping import MappedFile


class Strings(Sequence[str]):
    """The strings of a vocabulary: 250,000 Python strings would take 15 MB.

    Bytes that are not UTF-8 become lone surrogates (`surrogateescape`), so that different strings
    stay different.
    """

    __slots__ = ("_mapping", "_starts")

    def __init__(self, mapping: MappedFile, starts: array[int]) -> None:
        """Take the offsets of all strings in the file, and of the one that would come next.

        Before each string are the eight bytes of its length.
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
        raw, starts, ends = self.spans()
        places = zip(starts.tolist(), ends.tolist(), strict=True)
        return (raw[begin:end].decode("utf-8", "surrogateescape") for begin, end in places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Strings, list)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def spans(self) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
        """Return a range of the file, and the begin and end of each string in it."""
        starts = np.frombuffer(self._starts, np.uint64).astype(np.int64)
        first = int(starts[0])
        starts -= first
        return self._mapping.buffer[first : first + int(starts[-1])], starts[:-1], starts[1:] - 8
