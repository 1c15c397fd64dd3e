"""The operations from which every model is built.

An operation names the values that it reads and the value that it writes. Values are matrices with
one row for each token, and widths count the values in a row. An operation describes everything that
can be known without running it: its weights, its cost, its label in profiles, the keys and values
that it stores, and how ranks can divide it. Only backends know how it is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.model.program.attention import (
    Attention,
    Projection,
    QkProjections,
    QueryRope,
    Rope,
    SharedKvAttention,
)
from twostroke.model.program.collectives import AllGather, AllReduce, Receive, Send, TakeColumns
from twostroke.model.program.experts import Expert, ExpertTerms, MixtureOfExperts, Route, SumTerms
from twostroke.model.program.latent import HeadLinear, Join, LatentAttention
from twostroke.model.program.operation import Activation, Operation
from twostroke.model.program.recurrent import GatedDeltaRule, Mamba2, ShortConvolution
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
    "GateRows",
    "GatedActivation",
    "GatedDeltaRule",
    "HeadLinear",
    "Join",
    "LatentAttention",
    "Linear",
    "LocalOp",
    "Logits",
    "Mamba2",
    "MixtureOfExperts",
    "Op",
    "Projection",
    "QkProjections",
    "QueryRope",
    "RMSNorm",
    "Receive",
    "Rope",
    "Route",
    "Scale",
    "Send",
    "SharedKvAttention",
    "ShortConvolution",
    "SplitKvAttention",
    "SumTerms",
    "TakeColumns",
]


class Embed(Operation):
    """Embedding: `output[r] = table[token[r] - first_id]`; table is (num_ids, width).

    A rank may have only some token ids; its rows with other tokens are then undefined.
    """

    table: str
    num_ids: int
    width: int
    first_id: int = 0

    sharding = Sharding.BY_STAGE
    grain = COLUMN_GRAIN  # like `Logits`, which often has the same matrix

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the name and shape of the embedding table."""
        return (Weight(self.table, (self.num_ids, self.width), is_divided=True),)

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the cost of the embedding: one row of the table is read for each token."""
        del cache
        yield each_row, Cost(0, weight_bytes[self.table] // self.num_ids)

    @property
    def length(self) -> int:
        """Return the number of token ids; they are the units that ranks divide."""
        return self.num_ids

    def part(self, first: int, end: int) -> Self:
        """Return the embedding of only the token ids `first` to `end`, for one rank."""
        return self._changed(num_ids=end - first, first_id=self.first_id + first)

    def parts_by(self, cuts: tuple[int, ...]) -> TokenParts:
        """Return how ranks hold the output if they divide the token ids at `cuts`."""
        return TokenParts(cuts)


class ExternalInput(Operation):
    """Input rows that the caller passes with the step (`StepPlan.external`), not embeddings.

    Draft heads read the hidden states of the main model in this way.
    """

    width: int

    sharding = Sharding.REPLICATED
    label = "external input"


class RMSNorm(Operation):
    """RMS norm: `output = x / sqrt(mean(x^2) + epsilon) * (weight + offset)` (arXiv:1910.07467).

    The mean is taken over a row. With `num_groups` above 1 a row is divided into that many equal
    groups, which are normalized separately. The groups share one weight (query-key norm), unless it
    `is_wide`: then each group has its part of the weight (Mamba-2). Without a weight, the factor is
    1.
    """

    x: str
    weight: str | None
    width: int
    epsilon: float
    num_groups: int = 1
    offset: float = 0.0
    is_wide: bool = False

    reads = ("x",)
    label = "norm"

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the name and shape of the norm's weight; empty if it has none."""
        if self.weight is None:
            return ()
        if self.is_wide:
            return (Weight(self.weight, (self.width,), is_divided=True),)
        return (Weight(self.weight, (self.width // self.num_groups,)),)

    @property
    def row_flops(self) -> int:
        """Return the FLOPs for a row: square, add, scale and multiply by the weight."""
        return 4 * self.width

    @property
    def grain(self) -> int:
        """Return how many neighbouring columns always stay on one rank: a normalized group."""
        return self.width // self.num_groups

    def part(self, first: int, end: int) -> Self:
        """Return the norm of only the groups in columns `first` to `end`, for one rank."""
        return self._changed(width=end - first, num_groups=(end - first) // self.grain)


class Linear(Operation):
    """Matrix product: `output = x @ weight.T + bias`; weight is (width, in_width)."""

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
        """Return the names and shapes of the matrix, and of the bias if there is one."""
        matrix = Weight(self.weight, (self.width, self.in_width), is_divided=True)
        if self.bias is None:
            return (matrix,)
        return matrix, Weight(self.bias, (self.width,), is_divided=True)

    @property
    def row_flops(self) -> int:
        """Return the FLOPs for a row: a multiplication and an addition for each weight."""
        return 2 * self.in_width * self.width

    def part_reads(self, field: str, first: int, end: int) -> None:
        """Return None, because the part of each rank reads all columns of its input."""

    def term(self, first: int, end: int) -> Self:
        """Return the product of only the input columns `first` to `end`, and the weights for them.

        If ranks split the sum of a product, this is the term that one rank computes.
        """
        return self._changed(in_width=end - first, bias=self.bias if first == 0 else None)

    @property
    def label(self) -> str:
        """Return the name in profiles, such as attn_q for the matrix blk.0.attn_q.weight."""
        return self.weight.removesuffix(".weight").rpartition(".")[2]


class GatedActivation(Operation):
    """Gated activation (SwiGLU, GeGLU): `output = activation(gate) * up` (arXiv:2002.05202)."""

    gate: str
    up: str
    width: int
    activation: Activation = Activation.SILU

    reads = ("gate", "up")

    @property
    def row_flops(self) -> int:
        """Return the FLOPs for a row: about five for each value."""
        return 5 * self.width

    @property
    def label(self) -> str:
        """Return the name in profiles: the activation's name, or "multiply" without one."""
        is_plain = self.activation is Activation.IDENTITY
        return "multiply" if is_plain else self.activation.value


class GateRows(Operation):
    """Multiply each row by the sigmoid of its gate: `output[r] = x[r] * sigmoid(gate[r, 0])`.

    `x` is (rows, width), and `gate` (rows, 1). Qwen multiplies the output of its shared expert by
    such a gate.
    """

    x: str
    gate: str
    width: int

    reads = ("x", "gate")

    def part_reads(self, field: str, first: int, end: int) -> tuple[int, int] | None:
        """Return the columns of `field`, an input, that a rank reads for columns `first` to `end`.

        `first` and `end` are columns of the output. The result has the same columns
        of x; it is None for the gate, which every rank reads completely.
        """
        return (first, end) if field == "x" else None

    @property
    def row_flops(self) -> int:
        """Return the FLOPs for a row: one for each value."""
        return self.width


class Scale(Operation):
    """Elementwise `output = x * factor`, also multiplied by the one value of `weight` if given."""

    x: str
    width: int
    factor: float = 1.0
    weight: str | None = None

    reads = ("x",)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the name and shape of the learned factor, if there is one."""
        return () if self.weight is None else (Weight(self.weight, (1,)),)

    @property
    def row_flops(self) -> int:
        """Return the FLOPs for a row: one for each value."""
        return self.width


class Add(Operation):
    """Elementwise sum: `output = a + b`."""

    a: str
    b: str
    width: int

    reads = ("a", "b")

    @property
    def row_flops(self) -> int:
        """Return the FLOPs for a row: one for each value."""
        return self.width


class Logits(Operation):
    """Logits: `output = x @ weight.T`, only for rows that sample a token or score one.

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
        """Return the name and shape of the output matrix."""
        return (Weight(self.weight, (self.width, self.in_width), is_divided=True),)

    def part_reads(self, field: str, first: int, end: int) -> None:
        """Return None, because the part of each rank reads all columns of its input."""

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the cost of the logits; if a step samples no row, the matrix is not read."""
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
    | QueryRope
    | Attention
    | SharedKvAttention
    | LatentAttention
    | GatedActivation
    | GateRows
    | ShortConvolution
    | GatedDeltaRule
    | Mamba2
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
