"""What all operations have in common: the questions that readers may ask of them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.model.program.sharding import ColumnParts, Sharding
from twostroke.model.program.work import Cost, each_row, once

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twostroke.model.program.kv_layout import CacheFormat, CacheLayer
    from twostroke.model.program.sharding import Parts, Range, Weight
    from twostroke.model.program.work import Count

    Work = Iterator[tuple[Count, Cost]]


class Activation(Enum):
    """The function of a gate, element by element."""

    SILU = "silu"  # x * sigmoid(x)
    GELU_TANH = "gelu_tanh"  # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))


class Operation(Frozen):
    """Answers that most operations share; each operation replaces those that differ.

    Those about ranks (`sharding` to `part_reads`) fit an operation that works on each value of a
    row by itself.
    """

    output: str

    if TYPE_CHECKING:

        @property
        def width(self) -> int:
            """Values in a row of the output."""

    reads: ClassVar[tuple[str, ...]] = ()  # the fields that name its inputs
    sharding: ClassVar[Sharding] = Sharding.AS_INPUTS
    needs_all_rows: ClassVar[tuple[str, ...]] = ()  # fields of inputs of which a row reads others

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return tuple([getattr(self, field) for field in self.reads])

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that it reads."""
        return ()

    @property
    def row_flops(self) -> int:
        """Floating-point operations for each row."""
        return 0

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield its cost in terms that grow with a count, for weights and a cache stored so."""
        del cache
        yield once, Cost(0, self._stored_bytes(weight_bytes))
        yield each_row, Cost(self.row_flops)

    @property
    def stores(self) -> Mapping[int, CacheLayer]:
        """What it stores for each token, by cache layer."""
        return {}

    def with_layers(self, places: Mapping[int, int]) -> Self:
        """Return it with other numbers of the cache layers that it stores."""
        del places
        return self

    @property
    def label(self) -> str:
        """Its name in profiles."""
        return type(self).__name__.lower()

    @property
    def steps(self) -> tuple[Operation, ...]:
        """The operations that ranks divide instead of it."""
        return (self,)

    @property
    def length(self) -> int:
        """How many things `part` can choose from: the columns of its output."""
        return self.width

    @property
    def grain(self) -> int:
        """How many of these things stay together."""
        return 1

    def part(self, first: int, end: int) -> Self:
        """Return the operation that computes the columns from `first` to `end` alone."""
        return self._changed(width=end - first)

    def part_reads(self, field: str, first: int, end: int) -> Range | None:
        """Return the columns of an input that `part` reads; None for all of them."""
        del field
        return first, end

    def parts_by(self, cuts: tuple[int, ...]) -> Parts:
        """Return how the output lies on ranks that cut `length` so."""
        return ColumnParts(cuts)

    def _changed(self, **fields: Any) -> Self:
        return replace(self, **fields)

    def _stored_bytes(self, weight_bytes: Mapping[str, int]) -> int:
        return sum(weight_bytes[weight.name] for weight in self.weights)
