"""`Operation`, the base class of operations: what backends, ranks and the cost model ask of one."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.model.program.sharding import ColumnParts, Sharding
from twostroke.model.program.work import Cost, each_row, once

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twostroke.model.program.kv_layout import CacheFormat, CacheLayer, StateLayer
    from twostroke.model.program.sharding import Parts, Range, Weight
    from twostroke.model.program.work import Count

    Work = Iterator[tuple[Count, Cost]]


class Activation(Enum):
    """An activation function, applied to each value of a gate projection.

    A gated activation multiplies the result by the value of the up projection. `SWIGLU_OAI` also
    changes that value: with g = min(gate, 7) and u = up, clamped to -7 to 7, the gated activation
    is `g * sigmoid(1.702 g) * (u + 1)` (gpt-oss).
    """

    SILU = "silu"  # x * sigmoid(x)
    SIGMOID = "sigmoid"  # 1 / (1 + exp(-x)): gates of an attention's output
    IDENTITY = "identity"  # x: gates of short convolutions
    RELU = "relu"  # max(x, 0): a value that is its own gate becomes its squared ReLU
    GELU_TANH = "gelu_tanh"  # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
    SWIGLU_OAI = "swiglu_oai"


SWIGLU_OAI_ALPHA = 1.702
SWIGLU_OAI_LIMIT = 7.0


class Operation(Frozen):
    """Base class of a Program's operations; subclasses override the defaults that do not fit them.

    The defaults about ranks (`sharding` to `part_reads`) are right for an operation that works on
    each value of a row independently.
    """

    output: str

    if TYPE_CHECKING:

        @property
        def width(self) -> int:
            """Return the number of values in a row of the output."""

    reads: ClassVar[tuple[str, ...]] = ()  # the fields that name its inputs
    sharding: ClassVar[Sharding] = Sharding.AS_INPUTS
    needs_all_rows: ClassVar[tuple[str, ...]] = ()  # inputs whose other rows a row reads, too

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the values that the operation reads."""
        return tuple([getattr(self, field) for field in self.reads])

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the names and shapes of the weights that the operation reads."""
        return ()

    @property
    def row_flops(self) -> int:
        """Return the FLOPs of the operation for each row."""
        return 0

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the terms of the operation's cost: (count, cost) pairs.

        `count` is a function of the batch, such as its number of rows; the cost is multiplied by
        it. `weight_bytes` has the stored size of each weight, and `cache` is the format of keys and
        values.
        """
        del cache
        yield once, Cost(0, self._stored_bytes(weight_bytes))
        yield each_row, Cost(self.row_flops)

    @property
    def stores(self) -> Mapping[int, CacheLayer]:
        """Return the shapes of KV cache layers that the operation writes, by number.

        Most operations write none.
        """
        return {}

    @property
    def states(self) -> Mapping[int, StateLayer]:
        """Return the shapes of recurrent states that the operation updates, by number."""
        return {}

    def with_layers(self, new_layers: Mapping[int, int]) -> Self:
        """Return the operation with its KV cache layers renumbered by `new_layers` (old to new)."""
        del new_layers
        return self

    @property
    def label(self) -> str:
        """Return the operation's name in profiles."""
        return type(self).__name__.lower()

    @property
    def steps(self) -> tuple[Operation, ...]:
        """Return the operations that replace this one when ranks divide it: usually only itself."""
        return (self,)

    @property
    def length(self) -> int:
        """Return how many units ranks can divide among them: by default, output columns."""
        return self.width

    @property
    def grain(self) -> int:
        """Return how many neighbouring units always stay on one rank, such as a head's columns."""
        return 1

    def part(self, first: int, end: int) -> Self:
        """Return the operation that computes only units `first` to `end` - 1, for one rank.

        Units are output columns, unless the operation overrides `length`.
        """
        return self._changed(width=end - first)

    def part_reads(self, field: str, first: int, end: int) -> Range | None:
        """Return the columns of input `field` that a rank reads to compute `part(first, end)`.

        `field` is the name of the operation's field, such as "x", that names the input. The result
        is (first column, end), without the end. None means all columns.
        """
        del field
        return first, end

    def parts_by(self, cuts: tuple[int, ...]) -> Parts:
        """Return how ranks hold the output if they divide the operation's units at `cuts`."""
        return ColumnParts(cuts)

    def _changed(self, **fields: Any) -> Self:
        return replace(self, **fields)

    def _stored_bytes(self, weight_bytes: Mapping[str, int]) -> int:
        return sum(weight_bytes[weight.name] for weight in self.weights)
