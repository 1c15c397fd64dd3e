"""The operations of which every model is made.

An operation names the values it reads and the one it writes; values are matrices of one row a
token, and widths count the values in a row. Everything that can be said of an operation without
running it is said here: its weights, its work, its label in profiles, what it stores for each
token, and how ranks can share it. Readers (backends) alone know how it is computed.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from twostroke.core.frozen import Frozen
from twostroke.program.pages import CacheLayer
from twostroke.program.sharding import Layout, Sharding, Unit, Weight
from twostroke.program.work import (
    Cost,
    EachAttended,
    EachCached,
    ShareOfExperts,
    each_row,
    each_sampled_row,
    once,
    once_if_sampled,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twostroke.program.pages import CacheFormat
    from twostroke.program.work import Count

    Work = Iterator[tuple[Count, Cost]]


class Activation(Enum):
    """The function of a gate, element by element."""

    SILU = "silu"  # x * sigmoid(x)
    GELU_TANH = "gelu_tanh"  # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))


class Operation(Frozen):
    """Answers that most operations share; each operation replaces those that differ."""

    output: str

    reads: ClassVar[tuple[str, ...]] = ()  # the fields that name its inputs
    sharding: ClassVar[Sharding] = Sharding(Unit.COLUMN, ("width",))

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

    @property
    def label(self) -> str:
        """Its name in profiles."""
        return type(self).__name__.lower()

    def _stored_bytes(self, weight_bytes: Mapping[str, int]) -> int:
        return sum(weight_bytes[weight.name] for weight in self.weights)


class Embed(Operation):
    """`output[r] = table[token[r]]`; table is (num_ids, width)."""

    table: str
    num_ids: int
    width: int

    sharding = Sharding(Unit.VOCABULARY, ("num_ids",), output=Layout.ROWS)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The table."""
        return (Weight(self.table, (self.num_ids, self.width), axis=0),)

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """One row of the table for each token."""
        del cache
        yield each_row, Cost(0, weight_bytes[self.table] // self.num_ids)


class ExternalInput(Operation):
    """`output[r]` comes from outside of the step (`StepPlan.external`), a row for each token."""

    width: int

    sharding = Sharding(Unit.OPERATION, output=Layout.REPLICATED)
    label = "external input"


class RMSNorm(Operation):
    """`output = x / sqrt(mean(x^2) + epsilon) * (weight + offset)` (arXiv:1910.07467).

    The mean is that of a row. With `num_groups` above 1 a row is that many equal pieces, each
    normalized by itself with the same weight (query-key norm).
    """

    x: str
    weight: str
    width: int
    epsilon: float
    num_groups: int = 1
    offset: float = 0.0

    reads = ("x",)
    sharding = Sharding(Unit.HEAD, ("width", "num_groups"))
    label = "norm"

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The factors of a group's values."""
        return (Weight(self.weight, (self.width // self.num_groups,)),)

    @property
    def row_flops(self) -> int:
        """Square, add, scale, weigh."""
        return 4 * self.width


class Linear(Operation):
    """`output = x @ weight.T + bias`; weight is (width, in_width)."""

    x: str
    weight: str
    in_width: int
    width: int
    bias: str | None = None

    reads = ("x",)
    sharding = Sharding(Unit.COLUMN, ("width",), gathers=True)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The matrix, and the bias if there is one."""
        matrix = Weight(self.weight, (self.width, self.in_width), axis=0)
        return (matrix,) if self.bias is None else (matrix, Weight(self.bias, (self.width,), 0))

    @property
    def row_flops(self) -> int:
        """Multiply and add."""
        return 2 * self.in_width * self.width

    @property
    def label(self) -> str:
        """The matrix's own name: attn_q of blk.0.attn_q.weight."""
        return self.weight.removesuffix(".weight").rpartition(".")[2]


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
    sharding = Sharding(Unit.HEAD, ("num_heads",))

    @property
    def width(self) -> int:
        """Values in a row of the output."""
        return self.num_heads * self.head_dim

    @property
    def row_flops(self) -> int:
        """Four products and two sums for each pair."""
        return 6 * self.num_heads * len(self.inverse_frequencies)


class Attention(Operation):
    """Causal attention over the pages of cache layer `layer`, k and v of this step stored first.

    Query head h reads key-value head `h // (num_heads // num_kv_heads)` (grouped queries,
    arXiv:2305.13245). `output = softmax(q k^T * scale) v` over the positions up to the row's own:
    all of them, or the last `window` (sliding window, arXiv:2310.06825). With a `soft_cap` c the
    scaled scores s become `c * tanh(s / c)` (arXiv:2408.00118).
    """

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

    reads = ("q", "k", "v")
    sharding = Sharding(Unit.HEAD, ("num_heads", "num_kv_heads"))

    @property
    def width(self) -> int:
        """Values in a row of the output."""
        return self.num_heads * self.head_dim

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Two products over each row's context, and the traffic of the pages."""
        del weight_bytes
        yield EachAttended(self.window), Cost(4 * self.num_heads * self.head_dim)
        stored = self.stores[self.layer].bytes_per_token(cache)
        yield EachCached(self.window), Cost(0, 0, stored)

    @property
    def stores(self) -> Mapping[int, CacheLayer]:
        """Keys and values of its layer."""
        return {self.layer: CacheLayer(self.num_kv_heads, self.head_dim, self.window)}

    @property
    def label(self) -> str:
        """With its window, if it has one."""
        return "attention" if self.window is None else f"attention({self.window})"


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


class Expert(Frozen):
    """Names of one expert's matrices: gate and up (ffn_width, width), down (width, ffn_width)."""

    gate: str
    up: str
    down: str


class MixtureOfExperts(Operation):
    """`output = sum over chosen experts e of share[e] * down_e(activation(gate_e x) * up_e x)`.

    `scores` is the value with the router's products, one for each expert. The shares are their
    softmax; each row chooses the `num_used` experts with the largest (of equal ones the first),
    and with `normalize` the chosen shares are divided by their sum (arXiv:2401.04088).
    """

    x: str
    scores: str
    experts: tuple[Expert, ...]
    width: int
    ffn_width: int
    num_used: int
    normalize: bool
    activation: Activation = Activation.SILU

    reads = ("x", "scores")
    sharding = Sharding(Unit.EXPERT, ("experts",), gathers=True, output=Layout.REPLICATED)
    label = "experts"

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Three matrices of each expert."""
        wide, narrow = (self.ffn_width, self.width), (self.width, self.ffn_width)
        shapes = {"gate": wide, "up": wide, "down": narrow}
        return tuple(
            Weight(getattr(e, p), shape) for e in self.experts for p, shape in shapes.items()
        )

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """The products of the chosen experts; the matrices of the others stay unread."""
        del cache
        yield each_row, Cost(self.num_used * self.ffn_width * (6 * self.width + 5))
        stored = self._stored_bytes(weight_bytes)
        yield ShareOfExperts(self.num_used, len(self.experts)), Cost(0, stored)


class Scale(Operation):
    """`output = x * factor`, element by element."""

    x: str
    width: int
    factor: float

    reads = ("x",)

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
    sharding = Sharding(Unit.VOCABULARY, ("width",), gathers=True)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The matrix."""
        return (Weight(self.weight, (self.width, self.in_width), axis=0),)

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """One product for each sampled row; without such rows the matrix stays unread."""
        del cache
        yield each_sampled_row, Cost(2 * self.in_width * self.width)
        yield once_if_sampled, Cost(0, self._stored_bytes(weight_bytes))


Op = (
    Embed
    | ExternalInput
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
