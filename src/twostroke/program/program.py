"""A model as a list of operations over named values: the one description that all readers share."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from twostroke.program.groups import CacheGroup, group_layers
from twostroke.program.ops import Embed, Linear, Logits, MixtureOfExperts, RMSNorm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.program.ops import Op


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """How keys and values are stored: bytes a number, and bytes beside each head of either.

    What stands beside the head_dim keys of a head and token, and beside its values, is a scale.
    """

    value_bytes: float
    head_bytes: int = 0

    def head(self, head_dim: int) -> float:
        """Bytes of one head's keys, or of its values, of one token."""
        return head_dim * self.value_bytes + self.head_bytes


FLOAT16 = CacheFormat(2)


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """What one attention layer stores for each token: keys and values of its heads.

    With a `window`, only the last `window` tokens up to a row's own are ever read again.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def values_per_token(self) -> int:
        """Numbers stored for one token, keys and values together."""
        return 2 * self.num_kv_heads * self.head_dim

    def bytes_per_token(self, stored: CacheFormat) -> int:
        """Bytes stored for one token."""
        return ceil(2 * self.num_kv_heads * stored.head(self.head_dim))


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in the order in which they run, from tokens to logits.

    Each value is written once and before it is read. `cache_layers[i]` is what
    `Attention(layer=i)` keeps in the page pool. `context_length` is in tokens. `layer_outputs`
    names the hidden state behind each layer, for whoever looks inside.
    """

    name: str
    ops: tuple[Op, ...]
    cache_layers: tuple[CacheLayer, ...]
    vocab_size: int
    context_length: int
    layer_outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that each value is written once, before it is read."""
        written: set[str] = set()
        for op in self.ops:
            missing = [name for name in op.inputs if name not in written]
            assert not missing, f"{op} reads {missing} before they are written"
            assert op.output not in written, f"{op.output} is written twice"
            written.add(op.output)

    @property
    def value_widths(self) -> dict[str, int]:
        """The values that the operations write, by name, with how wide a row of each is."""
        return {op.output: op.width for op in self.ops}

    @property
    def last_states(self) -> str:
        """The value from which the logits are computed: the last hidden states, normed."""
        return self.ops[-1].inputs[0]

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights that the operations read, by name, with the shapes they must have."""
        return dict(self._weights())

    def _weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for op in self.ops:
            match op:
                case Embed(table=table, width=width):
                    yield table, (self.vocab_size, width)
                case RMSNorm(weight=weight, width=width, num_groups=groups):
                    yield weight, (width // groups,)
                case Linear(weight=weight, width=width, in_width=in_width, bias=bias):
                    yield weight, (width, in_width)
                    if bias is not None:
                        yield bias, (width,)
                case Logits(weight=weight, width=width, in_width=in_width):
                    yield weight, (width, in_width)
                case MixtureOfExperts(experts=experts, width=width, ffn_width=ffn_width):
                    for expert in experts:
                        yield expert.gate, (ffn_width, width)
                        yield expert.up, (ffn_width, width)
                        yield expert.down, (width, ffn_width)
                case _:
                    pass

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers that share pages; one group of all where every row sees its whole past."""
        windows = [
            None if layer.window is None or layer.window >= self.context_length else layer.window
            for layer in self.cache_layers
        ]
        return group_layers(windows)

    def page_bytes(self, page_size: int, stored: CacheFormat = FLOAT16) -> int:
        """Bytes of one page: `page_size` tokens of one cache group, the largest if they differ."""
        return page_size * max(
            sum(self.cache_layers[layer].bytes_per_token(stored) for layer in group.layers)
            for group in self.cache_groups
        )
