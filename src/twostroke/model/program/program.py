"""A model as a list of operations over named values: the one description that all backends read."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.model.program.kv_layout import (
    FLOAT16,
    STATE_VALUE_BYTES,
    CacheFormat,
    CacheGroup,
    CacheLayer,
    StateLayer,
    group_layers,
)
from twostroke.model.program.ops import (
    Attention,
    Embed,
    ExternalInput,
    Linear,
    Logits,
    RMSNorm,
    Rope,
    Scale,
)

if TYPE_CHECKING:
    from twostroke.model.program.ops import Op

# Names in the text of a stored Program (see `stored_form`), by the present name of a class, or of a
# class and its field.
STORED_CLASSES: Final = {
    "Projection": "Made",
    "QkProjections": "Origin",
    "SharedKvAttention": "BorrowingAttention",
    "SplitKvAttention": "AttentionPieces",
    "MeshCoordinate": "Place",
}
STORED_FIELDS: Final[dict[tuple[str, str], str]] = {
    ("AllGather", "team_index"): "place",
    ("AllReduce", "team_index"): "place",
    ("SplitKvAttention", "team_index"): "place",
    ("SplitKvAttention", "reads_shared_kv"): "borrows",
}
# Fields that classes got after their first pages were stored. Left out while they have no value.
ADDED_FIELDS: Final = frozenset(
    {
        *("sinks", "gate_bias", "up_bias", "down_bias", "is_wide"),
        *("is_chunked", "scales_inputs", "temperature_offset", "gates_channels"),
    }
)


class Program(Frozen, dict=True):
    """A model as a list of operations in the order in which they run, from tokens to logits.

    Each value is written once, before it is read. `context_length` is in tokens. `layer_outputs`
    names the hidden state after each layer. `groups` are the cache groups if they are given: a
    rank's part of a Program has all groups of the undivided Program, even groups without a layer on
    this rank, because page ids are the same on all ranks.
    """

    name: str
    ops: tuple[Op, ...]
    vocab_size: int
    context_length: int
    layer_outputs: tuple[str, ...] = ()
    groups: tuple[CacheGroup, ...] | None = None

    def __post_init__(self) -> None:
        """Check that operations write each value once, before another operation reads it."""
        written: set[str] = set()
        for op in self.ops:
            missing = [name for name in op.inputs if name not in written]
            assert not missing, f"{op} reads {missing} before they are written"
            assert op.output not in written, f"{op.output} is written twice"
            written.add(op.output)

    def __repr__(self) -> str:
        """Return a short text, without the operations."""
        operations = f"{counted_noun(len(self.ops), 'operation')}, vocabulary of {self.vocab_size}"
        return f"<Program {self.name}: {operations}, context of {self.context_length} tokens>"

    @property
    def value_widths(self) -> dict[str, int]:
        """Return the width (values in a row) of each value that the operations write, by name."""
        return {op.output: op.width for op in self.ops}

    @property
    def last_states(self) -> str:
        """Return the name of the value that the logits are computed from, after the final norm.

        A `Scale` between the norm and the logits does not count.
        """
        name = next(op.x for op in reversed(self.ops) if isinstance(op, Logits))
        source = next(op for op in self.ops if op.output == name)
        return source.x if isinstance(source, Scale) else name

    @cached_property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights that the operations read, by name."""
        return {weight.name: weight.shape for op in self.ops for weight in op.weights}

    @cached_property
    def logits_only_outputs(self) -> frozenset[str]:
        """Return the names of values that are needed only for rows with logits.

        They are written after the last attention has stored its keys and values, and the last
        recurrent operation its state, so the computation of other rows can stop there. The output
        of the last attention is included if matrix products compute its keys and values, since a
        backend can let these products store them. The set is empty if a later operation reads the
        step's tokens or external inputs.
        """
        stores = [index for index, op in enumerate(self.ops) if op.stores or op.states]
        late_ops = self.ops[stores[-1] :] if stores else ()
        if not late_ops or any(isinstance(op, Embed | ExternalInput) for op in late_ops):
            return frozenset()
        last_store = late_ops[0]
        are_products = all(self._is_product(name, last_store) for name in last_store.inputs[1:])
        is_apart = isinstance(last_store, Attention) and are_products
        return frozenset(op.output for op in late_ops[0 if is_apart else 1 :])

    def _is_product(self, name: str, attention: Op) -> bool:
        """Return whether an attention's input is a matrix product, perhaps normed and rotated."""
        op = next(op for op in self.ops if op.output == name)
        while isinstance(op, Rope) or (isinstance(op, RMSNorm) and op.grain == attention.grain):
            op = next(other for other in self.ops if other.output == op.x)
        return isinstance(op, Linear)

    @cached_property
    def cache_layers(self) -> tuple[CacheLayer, ...]:
        """Return the shapes of the KV cache layers; the index is the layer's number."""
        layers = {number: layer for op in self.ops for number, layer in op.stores.items()}
        return tuple(layers[number] for number in range(len(layers)))

    @cached_property
    def state_layers(self) -> dict[int, StateLayer]:
        """Return the shapes of the recurrent states that a request has.

        The keys are the numbers of states, which recurrent operations have as `layer`.
        """
        layers = {number: layer for op in self.ops for number, layer in op.states.items()}
        return dict(sorted(layers.items()))

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all recurrent states of one request; 0 without such states."""
        return STATE_VALUE_BYTES * sum(layer.num_values for layer in self.state_layers.values())

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Return the groups of attention layers that share KV pages.

        There is one group if every row reads all earlier positions.
        """
        if self.groups is not None:
            return self.groups
        windows = [
            None if layer.window is None or layer.window >= self.context_length else layer.window
            for layer in self.cache_layers
        ]
        return group_layers(windows)

    def page_bytes(self, page_size: int, stored: CacheFormat = FLOAT16) -> int:
        """Return the bytes of a KV page: `page_size` tokens of the largest cache group."""
        layers = self.cache_layers
        return max(
            sum(layers[layer].bytes_in_page(page_size, stored) for layer in group.layers)
            for group in self.cache_groups
        )


def stored_form(value: object) -> str:
    """Return a Program as text; stored KV pages have names that are hashed from it.

    Pages outlive the process that stored them. The text must not change if a class or a field is
    renamed, or all stored pages would be lost: `STORED_CLASSES` and `STORED_FIELDS` keep the old
    names, and `ADDED_FIELDS` are in the text only of Programs that use them. `value` is the Program
    or, in recursive calls, a field of it.
    """
    if isinstance(value, tuple):
        items = [stored_form(item) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if not isinstance(value, msgspec.Struct):
        return repr(value)
    class_name = type(value).__name__
    fields = [
        f"{STORED_FIELDS.get((class_name, name), name)}={stored_form(getattr(value, name))}"
        for name in value.__struct_fields__
        if name not in ADDED_FIELDS or getattr(value, name) not in {None, False}
    ]
    return f"{STORED_CLASSES.get(class_name, class_name)}({', '.join(fields)})"
