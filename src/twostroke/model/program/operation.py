"""The base of all operations: the questions that backends, ranks and the cost model ask of them."""

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
    """An operation of a Program, with defaults that each operation overrides where it differs.

    The defaults about ranks (`sharding` to `part_reads`) are right for an operation that works on
    each value of a row independently.
    """

    output: str

    if TYPE_CHECKING:

        @property
        def width(self) -> int:
            """Values in a row of the output."""

    reads: ClassVar[tuple[str, ...]] = ()  # the fields that name its inputs
    sharding: ClassVar[Sharding] = Sharding.AS_INPUTS
    needs_all_rows: ClassVar[tuple[str, ...]] = ()  # inputs whose other rows a row reads, too

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the values that it reads."""
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
        """Yield its costs, each with the count to which it is proportional.

        `weight_bytes` and `cache` tell how weights, and keys and values, are stored.
        """
        del cache
        yield once, Cost(0, self._stored_bytes(weight_bytes))
        yield each_row, Cost(self.row_flops)

    @property
    def stores(self) -> Mapping[int, CacheLayer]:
        """The layers of the KV cache that it stores, by number."""
        return {}

    def with_layers(self, new_layers: Mapping[int, int]) -> Self:
        """Return the operation with new numbers of its cache layers, by old number."""
        del new_layers
        return self

    @property
    def label(self) -> str:
        """Its name in profiles."""
        return type(self).__name__.lower()

    @property
    def steps(self) -> tuple[Operation, ...]:
        """The operations into which ranks divide it: usually itself."""
        return (self,)

    @property
    def length(self) -> int:
        """The number of units that `part` can select: by default the columns of the output."""
        return self.width

    @property
    def grain(self) -> int:
        """The number of units that must stay together."""
        return 1

    def part(self, first: int, end: int) -> Self:
        """Return the operation that computes only the columns from `first` to `end`."""
        return self._changed(width=end - first)

    def part_reads(self, field: str, first: int, end: int) -> Range | None:
        """Return the columns of input `field` that `part` reads; None for all of them."""
        del field
        return first, end

    def parts_by(self, cuts: tuple[int, ...]) -> Parts:
        """Return how ranks hold the output if `length` is cut at `cuts`."""
        return ColumnParts(cuts)

    def _changed(self, **fields: Any) -> Self:
        return replace(self, **fields)

    def _stored_bytes(self, weight_bytes: Mapping[str, int]) -> int:
        return sum(weight_bytes[weight.name] for weight in self.weights)
