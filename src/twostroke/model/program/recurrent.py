"""Operations with a recurrent state: short convolutions, the gated delta rule and Mamba-2.

Attention stores keys and values for each token. A recurrent operation instead stores a state of
fixed size for each request, and computes each row from the state after the previous row. A
request's rows therefore run in order, and the first row of a request starts from a state of zeros.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

from twostroke.model.program.kv_layout import STATE_VALUE_BYTES, StateLayer
from twostroke.model.program.operation import Activation, Operation
from twostroke.model.program.sharding import Sharding, Weight
from twostroke.model.program.work import Cost, each_draft, each_request, each_row, once

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.program.kv_layout import CacheFormat
    from twostroke.model.program.operation import Work
    from twostroke.model.program.sharding import Range


class _RecurrentOperation(Operation):
    """An operation whose rows depend on a recurrent state of their request.

    Its field `layer` is the number of the state among the recurrent states of the model. A rank
    stores only the part of the state that belongs to its columns. Context parallel ranks all
    compute all rows, since a row needs the state after the previous row.
    """

    if TYPE_CHECKING:

        @property
        def num_state_values(self) -> int:
            """Return the float32 numbers of the recurrent state of one request."""

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the cost: weights once per step, FLOPs per row, and the state twice per request.

        The state is read before the request's first row, and written after its last row. It is also
        written after each draft.
        """
        del cache
        yield once, Cost(0, self._stored_bytes(weight_bytes))
        yield each_row, Cost(self.row_flops)
        yield each_request, Cost(0, 0, 2 * STATE_VALUE_BYTES * self.num_state_values)
        yield each_draft, Cost(0, 0, STATE_VALUE_BYTES * self.num_state_values)


class ShortConvolution(_RecurrentOperation):
    """Causal convolution of each column over the last `kernel` rows of a request.

    `output[r, c] = activation(bias[c] + sum over i of x[r - kernel + 1 + i, c] * weight[c, i])`,
    where rows before the request's first row are zeros. `weight` is (width, kernel). The state is
    the last `kernel - 1` rows of x, the oldest first.
    """

    x: str
    weight: str
    width: int
    kernel: int
    layer: int
    bias: str | None = None
    activation: Activation | None = None

    reads = ("x",)
    needs_all_rows = ("x",)
    label = "convolution"

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the names and shapes of the kernels, and of the bias if there is one."""
        kernels = Weight(self.weight, (self.width, self.kernel), is_divided=True)
        if self.bias is None:
            return (kernels,)
        return kernels, Weight(self.bias, (self.width,), is_divided=True)

    @property
    def states(self) -> Mapping[int, StateLayer]:
        """Return the shape of the recurrent state that the operation updates, by its number."""
        return {self.layer: StateLayer(self.num_state_values)}

    @property
    def num_state_values(self) -> int:
        """Return how many numbers the state has: the last `kernel - 1` rows of x."""
        return (self.kernel - 1) * self.width

    @property
    def row_flops(self) -> int:
        """Return the FLOPs for a row: two for each tap, and about five for an activation."""
        return self.width * (2 * self.kernel + (5 if self.activation else 0))


class GatedDeltaRule(_RecurrentOperation):
    """Gated delta rule: linear attention with a decaying, corrected state (arXiv:2412.06464).

    A row of x has the queries and keys of `num_key_heads` heads, each `key_dim` wide, and then the
    values of `num_value_heads` heads, each `value_dim` wide. Value head h uses key head
    `h % num_key_heads` if the heads are `is_tiled` (GGUF files of Qwen 3.5), else
    `h // (num_value_heads / num_key_heads)`. Each head of queries and keys is divided by
    `sqrt(sum of squares + epsilon)`; queries are also divided by `sqrt(key_dim)`.

    A head's state S is a matrix (key_dim, value_dim). With query q, key k, value v, decay
    `d = exp(decay_rate[h] * softplus(decay[h] + decay_bias[h]))` and strength
    `b = sigmoid(strength[h])`, a row computes

        S = d * S;  S = S + outer(k, b * (v - k @ S));  output = q @ S

    `decay_rate` has negative numbers. `decay` and `strength` are values (rows, num_value_heads).

    If it `gates_channels` (Kimi Delta Attention, arXiv:2510.26692), each channel of a head's keys,
    a row of S, has a decay of its own: `decay` is a value (rows, num_value_heads * key_dim), and
    `decay_bias` (num_value_heads * key_dim). `decay_rate` stays one number for each head.

    Ranks divide value heads: a rank's part computes `num_value_heads` heads from `first_head` on.
    It reads the whole x, which has `num_x_heads` value heads, because neighbouring value heads may
    use any key heads. It also has the whole `decay_rate` and `decay_bias`, but of `decay` and
    `strength` only the columns of its heads.
    """

    x: str
    decay: str
    strength: str
    decay_rate: str
    decay_bias: str
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    layer: int
    is_tiled: bool = False
    gates_channels: bool = False
    epsilon: float = 1e-6
    first_head: int = 0
    num_x_heads: int | None = None  # None: num_value_heads

    reads = ("x", "decay", "strength")
    sharding = Sharding.BY_COLUMN_PARTS
    needs_all_rows = ("x", "decay", "strength")
    label = "delta rule"

    def __post_init__(self) -> None:
        """Assert that each key head serves the same number of value heads."""
        assert self.num_all_heads % self.num_key_heads == 0, "value heads must share key heads"

    @property
    def num_all_heads(self) -> int:
        """Return the number of value heads in x; a rank may compute only some of them."""
        return self.num_value_heads if self.num_x_heads is None else self.num_x_heads

    @property
    def width(self) -> int:
        """Return the number of values in a row of the output, for its value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def first_value(self) -> int:
        """Return the first column of x that has values of the computed heads."""
        return 2 * self.num_key_heads * self.key_dim + self.first_head * self.value_dim

    @property
    def in_width(self) -> int:
        """Return the number of values in a row of x: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_all_heads * self.value_dim

    @property
    def grain(self) -> int:
        """Return how many neighbouring columns always stay on one rank: a value head's columns."""
        return self.value_dim

    def part(self, first: int, end: int) -> Self:
        """Return the rule for only the value heads in output columns `first` to `end`."""
        return self._changed(
            num_value_heads=(end - first) // self.value_dim,
            first_head=self.first_head + first // self.value_dim,
            num_x_heads=self.num_all_heads,
        )

    def part_reads(self, field: str, first: int, end: int) -> Range | None:
        """Return the columns of `field`, an input, that a rank reads for columns `first` to `end`.

        `first` and `end` are columns of the output. The result has the columns of
        the same heads; it is None for x, which every rank reads completely.
        """
        if field == "x":
            return None
        width = self.decay_width if field == "decay" else 1
        return first // self.value_dim * width, end // self.value_dim * width

    @property
    def decay_width(self) -> int:
        """Return how many decays a value head has in a row: one, or one for each key channel."""
        return self.key_dim if self.gates_channels else 1

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the names and shapes of the decay's rates and biases.

        A value head has one rate, and a bias for each of its decays.
        """
        rates = Weight(self.decay_rate, (self.num_all_heads,))
        return rates, Weight(self.decay_bias, (self.num_all_heads * self.decay_width,))

    @property
    def states(self) -> Mapping[int, StateLayer]:
        """Return the shape of the recurrent state that the operation updates, by its number."""
        return {self.layer: StateLayer(self.num_state_values)}

    @property
    def num_state_values(self) -> int:
        """Return how many numbers the state has: a matrix for each value head."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def row_flops(self) -> int:
        """Return the FLOPs for a row: decay, two products and an outer product for each head."""
        return 7 * self.num_state_values

    @property
    def value_heads(self) -> range:
        """Return the indices of the value heads of x for which the operation computes output."""
        return range(self.first_head, self.first_head + self.num_value_heads)

    def key_head(self, value_head: int) -> int:
        """Return the index of the key head that value head `value_head` of x uses."""
        if self.is_tiled:
            return value_head % self.num_key_heads
        return value_head // (self.num_all_heads // self.num_key_heads)


class Mamba2(_RecurrentOperation):
    """The state-space model of Mamba-2 (arXiv:2405.21060): a state with a decay for each head.

    A row of x has the values of `num_heads` heads, each `head_dim` wide, and then the keys and the
    queries (in papers: B and C) of `num_groups` groups, each `state_size` wide. Head h uses group
    `h // (num_heads / num_groups)`. `time_step` is a value (rows, num_heads).

    A head's state S is a matrix (state_size, head_dim). With value v, key k, query q and time step
    `t = softplus(time_step[h] + step_bias[h])`, limited to `min_step` and `max_step`, a row
    computes

        S = exp(decay_rate[h] * t) * S + outer(k, t * v);  output = q @ S + skip[h] * v

    `decay_rate` has negative numbers.

    Ranks divide heads as in the gated delta rule: a rank's part computes `num_heads` heads
    from `first_head` on, of the `num_x_heads` heads of x.
    """

    x: str
    time_step: str
    decay_rate: str
    step_bias: str
    skip: str
    num_heads: int
    num_groups: int
    state_size: int
    head_dim: int
    layer: int
    min_step: float = 0.0
    max_step: float = math.inf
    first_head: int = 0
    num_x_heads: int | None = None  # None: num_heads

    reads = ("x", "time_step")
    sharding = Sharding.BY_COLUMN_PARTS
    needs_all_rows = ("x", "time_step")
    label = "mamba2"

    def __post_init__(self) -> None:
        """Assert that each group serves the same number of heads."""
        assert self.num_all_heads % self.num_groups == 0, "heads must share groups"

    @property
    def num_all_heads(self) -> int:
        """Return the number of heads in x; a rank may compute only some of them."""
        return self.num_heads if self.num_x_heads is None else self.num_x_heads

    @property
    def width(self) -> int:
        """Return the number of values in a row of the output, for its heads."""
        return self.num_heads * self.head_dim

    @property
    def in_width(self) -> int:
        """Return the number of values in a row of x: values, keys and queries."""
        values = self.num_all_heads * self.head_dim
        return values + 2 * self.num_groups * self.state_size

    @property
    def grain(self) -> int:
        """Return how many neighbouring columns always stay on one rank: the columns of a head."""
        return self.head_dim

    def part(self, first: int, end: int) -> Self:
        """Return the operation for only the heads in output columns `first` to `end`."""
        return self._changed(
            num_heads=(end - first) // self.head_dim,
            first_head=self.first_head + first // self.head_dim,
            num_x_heads=self.num_all_heads,
        )

    def part_reads(self, field: str, first: int, end: int) -> Range | None:
        """Return the columns of `field`, an input, that a rank reads for columns `first` to `end`.

        `first` and `end` are columns of the output. The result has the columns of
        the same heads; it is None for x, which every rank reads completely.
        """
        return None if field == "x" else (first // self.head_dim, end // self.head_dim)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the names and shapes of rates, biases and skips, one for each head."""
        names = self.decay_rate, self.step_bias, self.skip
        return tuple([Weight(name, (self.num_all_heads,)) for name in names])

    @property
    def states(self) -> Mapping[int, StateLayer]:
        """Return the shape of the recurrent state that the operation updates, by its number."""
        return {self.layer: StateLayer(self.num_state_values)}

    @property
    def num_state_values(self) -> int:
        """Return how many numbers the state has: a matrix for each head."""
        return self.width * self.state_size

    @property
    def heads(self) -> range:
        """Return the indices of the heads of x for which the operation computes output."""
        return range(self.first_head, self.first_head + self.num_heads)

    def group_of(self, head: int) -> int:
        """Return the index of the group that head `head` of x uses."""
        return head // (self.num_all_heads // self.num_groups)

    @property
    def row_flops(self) -> int:
        """Return the FLOPs for a row: a decay, an outer product and a product for each head."""
        return 5 * self.num_state_values
