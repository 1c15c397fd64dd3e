"""The operations of which every model is made.

An operation names the values it reads and the one it writes; values are matrices of one row a
token, and widths count the values in a row. Everything that can be said of an operation without
running it is said here: its weights, its work, its label in profiles, what it stores for each
token, and how ranks can share it. Readers (backends) alone know how it is computed.
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

    Rows of tokens that the table does not have are undefined.
    """

    table: str
    num_ids: int
    width: int
    first_id: int = 0

    sharding = Sharding.BY_STAGE
    grain = COLUMN_GRAIN  # as the logits, whose matrix is often the same

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The table."""
        return (Weight(self.table, (self.num_ids, self.width), is_divided=True),)

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """One row of the table for each token."""
        del cache
        yield each_row, Cost(0, weight_bytes[self.table] // self.num_ids)

    @property
    def length(self) -> int:
        """The ids."""
        return self.num_ids

    def part(self, first: int, end: int) -> Self:
        """Return the rows of the ids from `first` to `end`."""
        return self._changed(num_ids=end - first, first_id=self.first_id + first)

    def parts_by(self, cuts: tuple[int, ...]) -> TokenParts:
        """Return how the rows lie on ranks with ids cut so."""
        return TokenParts(cuts)


class ExternalInput(Operation):
    """`output[r]` comes from outside of the step (`StepPlan.external`), a row for each token."""

    width: int

    sharding = Sharding.WHOLE
    label = "external input"


class RMSNorm(Operation):
    """`output = x / sqrt(mean(x^2) + epsilon) * (weight + offset)` (arXiv:1910.07467).

    The mean is that of a row. With `num_groups` above 1 a row is that many equal pieces, each
    normalized by itself with the same weight (query-key norm). Without a weight that is one.
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
        """Square, add, scale, weigh."""
        return 4 * self.width

    @property
    def grain(self) -> int:
        """A group."""
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
        """Multiply and add."""
        return 2 * self.in_width * self.width

    def part_reads(self, field: str, first: int, end: int) -> None:
        """Read the whole row."""

    def term(self, first: int, end: int) -> Self:
        """Return the product of the inputs from `first` to `end`: a term of the whole."""
        return self._changed(in_width=end - first, bias=self.bias if first == 0 else None)

    @property
    def label(self) -> str:
        """The matrix's own name: attn_q of blk.0.attn_q.weight."""
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
    """`output = x * factor`, element by element; times the value of `weight`, if it has one."""

    x: str
    width: int
    factor: float = 1.0
    weight: str | None = None

    reads = ("x",)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The factor that a model has learnt."""
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
    """`output = x @ weight.T` for the rows that are sampled or scored, and for no others.

    `weight` is (vocab_size, in_width), often the embedding table itself. With a `soft_cap` c
    a logit z becomes `c * tanh(z / c)`.
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
        """Read the whole row."""

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """One product for each sampled row; without such rows the matrix stays unread."""
        del cache
        yield each_sampled_row, Cost(2 * self.in_width * self.width)
        yield once_if_sampled, Cost(0, self._stored_bytes(weight_bytes))


# Each rank computes these by itself.
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
