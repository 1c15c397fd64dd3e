"""The operations of which every model is made.

An operation names the values it reads and the one it writes; values are matrices of one row a
token. Widths are counts of values in a row. What an operation costs is `work`, told apart from
bytes so that the readers of a Program (cost, planner, backends) can combine them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.program.batch import BatchShape


class Activation(Enum):
    """The function of a gate, element by element."""

    SILU = "silu"  # x * sigmoid(x)
    GELU_TANH = "gelu_tanh"  # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))


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
class Given:
    """`output[r]` is handed to the step from outside (`StepPlan.given`), a row for each token."""

    output: str
    width: int

    inputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch."""
        del batch
        return 0


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`output = x / sqrt(mean(x^2) + epsilon) * (weight + offset)` (arXiv:1910.07467).

    The mean is that of a row. With `num_groups` above 1 a row is that many equal pieces, each
    normalized by itself with the same weight (query-key norm).
    """

    output: str
    x: str
    weight: str
    width: int
    epsilon: float
    num_groups: int = 1
    offset: float = 0.0

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
    arXiv:2305.13245). `output = softmax(q k^T * scale) v` over the positions up to the row's own:
    all of them, or the last `window` (sliding window, arXiv:2310.06825). With a `soft_cap` c the
    scaled scores s become `c * tanh(s / c)` (arXiv:2408.00118).
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
    window: int | None = None
    soft_cap: float | None = None

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
        return 4 * batch.num_attended(self.window) * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """`output = activation(gate) * up`, element by element (SwiGLU, GeGLU: arXiv:2002.05202)."""

    output: str
    gate: str
    up: str
    width: int
    activation: Activation = Activation.SILU

    weights: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return (self.gate, self.up)

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch."""
        return 5 * batch.num_rows * self.width


@dataclass(frozen=True, slots=True)
class Expert:
    """Names of one expert's matrices: gate and up (ffn_width, width), down (width, ffn_width)."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """`output = sum over chosen experts e of share[e] * down_e(activation(gate_e x) * up_e x)`.

    `scores` is the value with the router's products, one an expert. The shares are their softmax;
    each row chooses the `num_used` experts with the largest (of equal ones the first), and with
    `normalize` the chosen shares are divided by their sum (arXiv:2401.04088).
    """

    output: str
    x: str
    scores: str
    experts: tuple[Expert, ...]
    width: int
    ffn_width: int
    num_used: int
    normalize: bool
    activation: Activation = Activation.SILU

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return (self.x, self.scores)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights that it reads."""
        return tuple(name for e in self.experts for name in (e.gate, e.up, e.down))

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch."""
        return batch.num_rows * self.num_used * self.ffn_width * (6 * self.width + 5)

    def share_read(self, num_rows: int) -> float:
        """Return the share of the experts that rows meet which choose independently."""
        return 1.0 - (1.0 - self.num_used / len(self.experts)) ** num_rows


@dataclass(frozen=True, slots=True)
class Scale:
    """`output = x * factor`, element by element."""

    output: str
    x: str
    width: int
    factor: float

    weights: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that it reads."""
        return (self.x,)

    def flops(self, batch: BatchShape) -> int:
        """Floating-point operations for the batch."""
        return batch.num_rows * self.width


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

    `weight` is (vocab_size, in_width), often the embedding table itself. With a `soft_cap` c
    a logit z becomes `c * tanh(z / c)`.
    """

    output: str
    x: str
    weight: str
    in_width: int
    width: int
    soft_cap: float | None = None

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


Op = (
    Embed
    | Given
    | RMSNorm
    | Linear
    | Rope
    | Attention
    | GatedActivation
    | MixtureOfExperts
    | Scale
    | Add
    | Logits
)
