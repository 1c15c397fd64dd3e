"""The operations of which every model is made.

An operation names the values it reads and the one it writes; values are matrices of one row a
token. Widths are counts of values in a row. What an operation costs is `work`, told apart from
bytes so that the readers of a Program (cost, planner, backends) can combine them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.program.batch import BatchShape


@dataclass(frozen=True, slots=True)
class Embed:
    """`output[r] = table[token[r]]`; table is (vocab_size, width)."""

    output: str
    table: str
    width: int

    inputs: tuple[str, ...] = ()

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights that it reads."""
        return (self.table,)

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch."""
        del batch
        return 0


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`output = x / sqrt(mean(x^2) + epsilon) * weight` along each row (arXiv:1910.07467).

    With `num_groups` above 1 a row is that many equal pieces, each normalized by itself with the
    same weight (query-key norm).
    """

    output: str
    x: str
    weight: str
    width: int
    epsilon: float
    num_groups: int = 1

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return (self.x,)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights that it reads."""
        return (self.weight,)

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch."""
        return 4 * batch.num_rows * self.width


@dataclass(frozen=True, slots=True)
class Linear:
    """`output = x @ weight.T + bias`; weight is (width, in_width)."""

    output: str
    x: str
    weight: str
    in_width: int
    width: int
    bias: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return (self.x,)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights that it reads."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch."""
        return 2 * batch.num_rows * self.in_width * self.width


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate pairs of each head's first values by position times `inverse_frequencies[i]`.

    Pair i is (2i, 2i + 1) when `interleaved`, else (i, i + len(inverse_frequencies)); values
    beyond the pairs pass through (arXiv:2104.09864). Every rope scaling is a choice of
    frequencies, and of `magnitude`, which multiplies sine and cosine (YaRN, arXiv:2309.00071).
    """

    output: str
    x: str
    num_heads: int
    head_dim: int
    inverse_frequencies: tuple[float, ...]
    interleaved: bool
    magnitude: float = 1.0

    weights: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return (self.x,)

    @property
    def width(self) -> int:
        """Values in a row of the output."""
        return self.num_heads * self.head_dim

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch."""
        return 6 * batch.num_rows * self.num_heads * len(self.inverse_frequencies)


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention over the pages of cache layer `layer`, k and v of this step stored first.

    Query head h reads key-value head `h // (num_heads // num_kv_heads)` (grouped queries,
    arXiv:2305.13245). `output = softmax(q k^T * scale) v` over positions up to the row's own.
    """

    output: str
    q: str
    k: str
    v: str
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    weights: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return (self.q, self.k, self.v)

    @property
    def width(self) -> int:
        """Values in a row of the output."""
        return self.num_heads * self.head_dim

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch: two products over each row's context."""
        return 4 * batch.num_attended * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """`output = silu(gate) * up`, element by element (SwiGLU, arXiv:2002.05202)."""

    output: str
    gate: str
    up: str
    width: int

    weights: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return (self.gate, self.up)

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch."""
        return 5 * batch.num_rows * self.width


@dataclass(frozen=True, slots=True)
class Add:
    """`output = a + b`, element by element."""

    output: str
    a: str
    b: str
    width: int

    weights: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return (self.a, self.b)

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch."""
        return batch.num_rows * self.width


@dataclass(frozen=True, slots=True)
class Logits:
    """`output = x @ weight.T` for the rows that are sampled or scored, and for no others.

    `weight` is (vocab_size, in_width), often the embedding table itself.
    """

    output: str
    x: str
    weight: str
    in_width: int
    width: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return (self.x,)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights that it reads."""
        return (self.weight,)

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch."""
        return 2 * batch.num_sampled * self.in_width * self.width


Op = Embed | RMSNorm | Linear | Rope | Attention | GatedActivation | Add | Logits
