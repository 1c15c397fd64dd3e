"""The rotation of queries and keys by their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.model.program.operation import Operation

if TYPE_CHECKING:
    from typing import Self


class Rope(Operation):
    """Rotate pairs of each head's first values by position times `inverse_frequencies[i]`.

    Pair i is (2i, 2i + 1) when `interleaved`, else (i, i + len(inverse_frequencies)); values
    beyond the pairs pass through (arXiv:2104.09864). Every rope scaling is a choice of
    frequencies, and of `magnitude`, which multiplies sine and cosine (YaRN, arXiv:2309.00071).
    """

    x: str
    num_heads: int
    head_dim: int
    inverse_frequencies: tuple[float, ...]
    interleaved: bool
    magnitude: float = 1.0

    reads = ("x",)

    @property
    def width(self) -> int:
        """Values in a row of the output."""
        return self.num_heads * self.head_dim

    @property
    def grain(self) -> int:
        """A head."""
        return self.head_dim

    def part(self, first: int, end: int) -> Self:
        """Return the rotation of some heads."""
        return self._changed(num_heads=(end - first) // self.head_dim)

    @property
    def row_flops(self) -> int:
        """Four products and two sums for each pair."""
        return 6 * self.num_heads * len(self.inverse_frequencies)
