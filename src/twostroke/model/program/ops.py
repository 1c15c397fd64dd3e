"""The operations from which every model is built.

An operation names the values that it reads and the value that it writes; values are matrices with
one row for each token, and widths count the values in a row. An operation describes everything that
can be known without running it: its weights, its work, its label in profiles, the keys and values
it stores, and how ranks can divide it. Only backends know how it is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.model.program.attention import (
    Attention,
    Projection,
    QkProjections,
    Rope,
    SharedKvAttention,
)
from twostroke.model.program.collectives import AllGather, AllReduce, Receive, Send, TakeColumns
from twostroke.model.program.experts import Expert, ExpertTerms, MixtureOfExperts, Route, SumTerms
from twostroke.model.program.latent import HeadLinear, Join, LatentAttention
from twostroke.model.program.operation import Activation, Operation
from twostroke.model.program.sharding import COLUMN_GRAIN, Sharding, TokenParts, Weight
from twostroke.model.program.split_kv import SplitKvAttention
from twostroke.model.program.work import Cost, each_row, each_sampled_row, once_if_sampled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from twostroke.model.program.kv_layout import CacheFormat
    from twostroke.model.program.operation import Work

__all__ = [
    "Activation",
    "Add",
    "AllGather",
    "AllReduce",
    "Attention",
    "Embed",
    "Expert",
    "ExpertTerms",
    "ExternalInput",
    "GatedActivation",
    "HeadLinear",
    "Join",
    "LatentAttention",
    "Linear",
    "LocalOp",
    "Logits",
    "MixtureOfExperts",
    "Op",
    "Projection",
    "QkProjections",
    "RMSNorm",
    "Receive",
    "Rope",
    "Route",
    "Scale",
    "Send",
    "SharedKvAttention",
    "SplitKvAttention",
    "SumTerms",
    "TakeColumns",
]


class Embed(Operation):
    """`output[r] = table[token[r] - first_id]`; table is (num_ids, width).

    Rows of tokens outside of the table are undefined.
    """

    table: str
    num_ids: int
    width: int
    first_id: int = 0

    sharding = Sharding.BY_STAGE
    grain = COLUMN_GRAIN  # like `Logits`, which often has the same matrix

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The table."""
        return (Weight(self.table, (self.num_ids, self.width), is_divided=True),)

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the traffic: one row of the table for each token."""
        del cache
        yield each_row, Cost(0, weight_bytes[self.table] // self.num_ids)

    @property
    def length(self) -> int:
        """The number of token ids."""
        return self.num_ids

    def part(self, first: int, end: int) -> Self:
        """Return the lookup of the ids from `first` to `end`."""
        return self._changed(num_ids=end - first, first_id=self.first_id + first)

    def parts_by(self, cuts: tuple[int, ...]) -> TokenParts:
        """Return how ranks with ids cut at `cuts` hold the rows."""
        return TokenParts(cuts)


class ExternalInput(Operation):
    """`output[r]` is a row of `StepPlan.external`, which the caller of the step computes."""

    width: int

    sharding = Sharding.REPLICATED
    label = "external input"


class RMSNorm(Operation):
    """`output = x / sqrt(mean(x^2) + epsilon) * (weight + offset)` (arXiv:1910.07467).

    The mean is taken over a row. With `num_groups` above 1 a row is divided into that many equal
    groups, each normalized separately with the same weight (query-key norm). Without a weight, the
    factor is 1.
    """

    x: str
    weight: str | None
    width: int
    epsilon: float
    num_groups: int = 1
    offset: float = 0.0

    reads = ("x",)
    label = "norm"

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The factors of a group's values."""
        if self.weight is None:
            return ()
        return (Weight(self.weight, (self.width // self.num_groups,)),)

    @property
    def row_flops(self) -> int:
        """Square, add, scale and multiply by the weight."""
        return 4 * self.width

    @property
    def grain(self) -> int:
        """The values of a group."""
        return self.width // self.num_groups

    def part(self, first: int, end: int) -> Self:
        """Return the norms of some groups."""
        return self._changed(width=end - first, num_groups=(end - first) // self.grain)


class Linear(Operation):
    """`output = x @ weight.T + bias`; weight is (width, in_width)."""

    x: str
    weight: str
    in_width: int
    width: int
    bias: str | None = None

    reads = ("x",)
    sharding = Sharding.BY_COLUMN_PARTS
    grain = COLUMN_GRAIN

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The matrix, and the bias if there is one."""
        matrix = Weight(self.weight, (self.width, self.in_width), is_divided=True)
        if self.bias is None:
            return (matrix,)
        return matrix, Weight(self.bias, (self.width,), is_divided=True)

    @property
    def row_flops(self) -> int:
        """A multiplication and an addition for each weight."""
        return 2 * self.in_width * self.width

    def part_reads(self, field: str, first: int, end: int) -> None:
        """Return None: each part reads whole rows."""

    def term(self, first: int, end: int) -> Self:
        """Return the product of the inputs from `first` to `end`: a term of the full product."""
        return self._changed(in_width=end - first, bias=self.bias if first == 0 else None)

    @property
    def label(self) -> str:
        """The matrix's short name: attn_q for blk.0.attn_q.weight."""
        return self.weight.removesuffix(".weight").rpartition(".")[2]


class GatedActivation(Operation):
    """`output = activation(gate) * up`, element by element (SwiGLU, GeGLU: arXiv:2002.05202)."""

    gate: str
    up: str
    width: int
    activation: Activation = Activation.SILU

    reads = ("gate", "up")

    @property
    def row_flops(self) -> int:
        """About five for each value."""
        return 5 * self.width

    @property
    def label(self) -> str:
        """The function's name."""
        return self.activation.value


class Scale(Operation):
    """`output = x * factor`, element by element; also times the one value of `weight`, if given."""

    x: str
    width: int
    factor: float = 1.0
    weight: str | None = None

    reads = ("x",)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The learned factor, if there is one."""
        return () if self.weight is None else (Weight(self.weight, (1,)),)

    @property
    def row_flops(self) -> int:
        """One for each value."""
        return self.width


class Add(Operation):
    """`output = a + b`, element by element."""

    a: str
    b: str
    width: int

    reads = ("a", "b")

    @property
    def row_flops(self) -> int:
        """One for each value."""
        return self.width


class Logits(Operation):
    """`output = x @ weight.T` for sampled or scored rows only.

    `weight` is (vocab_size, in_width), often the embedding table itself. With a `soft_cap` c a
    logit z becomes `c * tanh(z / c)`.
    """

    x: str
    weight: str
    in_width: int
    width: int
    soft_cap: float | None = None

    reads = ("x",)
    sharding = Sharding.BY_STAGE
    grain = COLUMN_GRAIN
    needs_all_rows = ("x",)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The matrix."""
        return (Weight(self.weight, (self.width, self.in_width), is_divided=True),)

    def part_reads(self, field: str, first: int, end: int) -> None:
        """Return None: each part reads whole rows."""

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield one product for each sampled row; without such rows the matrix is not read."""
        del cache
        yield each_sampled_row, Cost(2 * self.in_width * self.width)
        yield once_if_sampled, Cost(0, self._stored_bytes(weight_bytes))


# Operations that a rank computes without other ranks.
LocalOp = (
    Embed
    | ExternalInput
    | RMSNorm
    | Linear
    | HeadLinear
    | Join
    | Rope
    | Attention
    | SharedKvAttention
    | LatentAttention
    | GatedActivation
    | Route
    | MixtureOfExperts
    | ExpertTerms
    | SumTerms
    | Scale
    | Add
    | Logits
    | TakeColumns
)
Op = LocalOp | AllGather | AllReduce | Send | Receive | SplitKvAttention
