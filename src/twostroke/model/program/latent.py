"""Attention to latent vectors, and the operations around it (arXiv:2405.04434).

All heads share one latent vector and one rotated key of each token. One product projects a head's
queries into the space of the latent vectors, and another projects the head's output back. Between
them is attention with a single key-value head, whose keys are also its values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twostroke.core.frozen import Frozen
from twostroke.model.program.attention import Attention
from twostroke.model.program.operation import Operation
from twostroke.model.program.sharding import Sharding, Weight
from twostroke.model.program.work import Cost, EachCached

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from twostroke.model.program.batch import BatchShape
    from twostroke.model.program.kv_layout import CacheFormat
    from twostroke.model.program.operation import Work
    from twostroke.model.program.sharding import Range


class HeadLinear(Operation):
    """A matrix product in which each head has its own matrix, as in latent attention (MLA).

    `output[h] = x[h, first : first + in_width] @ matrices[h].T`.

    A head has `x_head` values of x and `head_width` of the output; matrices are (head_width,
    in_width).
    """

    x: str
    matrices: tuple[str, ...]
    in_width: int
    head_width: int
    x_head: int
    first: int = 0

    reads = ("x",)
    sharding = Sharding.BY_COLUMN_PARTS
    label = "head products"

    @property
    def num_heads(self) -> int:
        """Return the number of heads."""
        return len(self.matrices)

    @property
    def width(self) -> int:
        """Return the number of values in a row of the output."""
        return self.num_heads * self.head_width

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the names and shapes of the heads' matrices."""
        shape = self.head_width, self.in_width
        return tuple([Weight(name, shape) for name in self.matrices])

    @property
    def row_flops(self) -> int:
        """Return the FLOPs for a row: a multiplication and an addition for each weight."""
        return 2 * self.width * self.in_width

    @property
    def grain(self) -> int:
        """Return how many neighbouring columns always stay on one rank: a head's output."""
        return self.head_width

    def part(self, first: int, end: int) -> Self:
        """Return the products of only the heads in columns `first` to `end`, for one rank."""
        return self._changed(matrices=self.matrices[first // self.grain : end // self.grain])

    def part_reads(self, field: str, first: int, end: int) -> Range:
        """Return the columns of x that a rank reads to compute output columns `first` to `end`.

        All are columns of whole heads.
        """
        del field
        return first // self.grain * self.x_head, end // self.grain * self.x_head


class Join(Operation):
    """Concatenates two values head by head: some columns of `a` and all columns of `b`.

    `output[h]` is `a[h, first : first + a_width]` followed by the `b_width` values of `b[h]`. A
    head has `a_head` values of `a`. In this way latent attention joins the rotary and the latent
    part of its queries.
    """

    a: str
    b: str
    num_heads: int
    a_width: int
    b_width: int
    a_head: int
    first: int = 0

    reads = ("a", "b")
    sharding = Sharding.BY_COLUMN_PARTS

    @property
    def grain(self) -> int:
        """Return how many neighbouring columns always stay on one rank: a head's output."""
        return self.a_width + self.b_width

    @property
    def width(self) -> int:
        """Return the number of values in a row of the output."""
        return self.num_heads * self.grain

    def part(self, first: int, end: int) -> Self:
        """Return the concatenation of only the heads in columns `first` to `end`, for one rank."""
        return self._changed(num_heads=(end - first) // self.grain)

    def part_reads(self, field: str, first: int, end: int) -> Range:
        """Return the columns of "a" or "b" that a rank reads for output columns `first` to `end`.

        All are columns of whole heads.
        """
        head = self.a_head if field == "a" else self.b_width
        return first // self.grain * head, end // self.grain * head


class LatentProducts(Frozen):
    """Counts the multiplications of one head of latent attention (MLA), for the cost model.

    There are two ways to compute scores and values: from the stored latent vectors directly, or
    from keys and values that are first expanded from the context's latent vectors. The direct way
    is cheaper for few rows, as in decoding. For each request the cheaper way is counted. Expanding
    the step's new rows is not counted here: a matrix product elsewhere does it.
    """

    latent: int
    rotated: int
    key: int
    value: int

    def __call__(self, batch: BatchShape) -> Any:
        """Return the number of multiplications of a batch; for a `DecodeRun`, of each step."""
        stored = 2 * self.latent + self.rotated
        if batch.num_rows == len(batch.starts):
            return batch.num_attended() * stored
        expanded = self.key + self.rotated + self.value
        expansion = self.latent * (self.key + self.value)  # of one token
        total = 0
        for start, count in batch.spans:
            pairs = count * start + count * (count + 1) // 2
            total += min(pairs * stored, pairs * expanded + start * expansion)
        return total


class LatentAttention(Attention, kw_only=True):
    """Latent attention (MLA): a key is a rotary part and a latent vector, which is also the value.

    `k` and `v` name the same value, which is stored once. Therefore the output of a head begins
    with `rotated` numbers that have no meaning, and later operations skip them. `key` and `value`
    are the widths of a head's keys (without the rotary part) and values that can be expanded from
    the latent vector.
    """

    rotated: int
    key: int
    value: int

    values_are_keys = True

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the cost of latent attention: the products of all heads, and KV cache traffic."""
        del weight_bytes
        products = LatentProducts(
            latent=self.head_dim - self.rotated,
            rotated=self.rotated,
            key=self.key,
            value=self.value,
        )
        yield products, Cost(2 * self.num_heads)
        yield EachCached(self.window), Cost(0, 0, self.cache_layer.bytes_per_token(cache))
