"""Recurrent operations of the reference backend, and its memory for recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.interface import MappedPages
from twostroke.core.request import NO_STATE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.spans import RowSpan
    from twostroke.model.program import Program, ops

    Array = NDArray[np.float32]


class StateMemory:
    """The recurrent states of all state layers, in `num_slots` slots."""

    def __init__(self, program: Program, num_slots: int) -> None:
        """Reserve the slots; each has room for the states of one request."""
        self._columns: dict[int, slice] = {}
        width = 0
        for number, layer in program.state_layers.items():
            self._columns[number] = slice(width, width + layer.num_values)
            width += layer.num_values
        self._memory = np.zeros((num_slots, width), np.float32)

    @property
    def bytes(self) -> MappedPages:
        """Return access to the bytes of all slots."""
        return MappedPages(memoryview(self._memory.data).cast("B"), len(self._memory))

    def read(self, span: RowSpan, layer: int) -> Array:
        """Return a copy of the state from which a row span starts: zeros for a new request."""
        columns = self._columns[layer]
        if span.read_state == NO_STATE:
            return np.zeros(columns.stop - columns.start, np.float32)
        return self._memory[span.read_state, columns].copy()

    def write(self, span: RowSpan, layer: int, row: int, state: Array) -> None:
        """Store the state after a row of a span, if the row has a slot for it.

        `row` is a row of the step. Operations must call this for each row of the span.
        """
        index = row - span.rows.stop
        if index >= -len(span.write_states):
            self._memory[span.write_states[index], self._columns[layer]] = state.reshape(-1)


def short_convolution(
    op: ops.ShortConvolution,
    x: Array,
    weights: Mapping[str, Array],
    spans: Sequence[RowSpan],
    memory: StateMemory,
) -> Array:
    """Compute a short convolution (see `ops.ShortConvolution`); x is (rows, width)."""
    kernels = weights[op.weight]
    output = np.zeros_like(x)
    for span in spans:
        before = memory.read(span, op.layer).reshape(op.kernel - 1, op.width)
        rows = np.concatenate([before, x[span.rows]])
        num_rows = len(rows) - len(before)
        total = np.zeros((num_rows, op.width), np.float32)
        for tap in range(op.kernel):
            total += rows[tap : tap + num_rows] * kernels[:, tap]
        output[span.rows] = total
        for index, row in enumerate(range(span.rows.start, span.rows.stop), 1):
            memory.write(span, op.layer, row, rows[index : index + len(before)])
    return output if op.bias is None else output + weights[op.bias]


def gated_delta_rule(
    op: ops.GatedDeltaRule,
    values: tuple[Array, Array, Array],
    weights: Mapping[str, Array],
    spans: Sequence[RowSpan],
    memory: StateMemory,
) -> Array:
    """Compute the gated delta rule row by row (see `ops.GatedDeltaRule`).

    `values`: queries, keys and values (rows, in_width), decays (rows, value heads or channels of
    all heads) and strengths (rows, value heads).
    """
    x, decay, strength = values
    own_heads = slice(op.first_head, op.first_head + op.num_value_heads)
    key_width = op.num_key_heads * op.key_dim
    queries, keys = (
        _unit_heads(x[:, first : first + key_width], op) for first in (0, key_width)
    )  # (rows, value heads, key_dim)
    queries = queries * np.float32(op.key_dim**-0.5)
    heads = x[:, op.first_value : op.first_value + op.width]
    heads = heads.reshape(len(x), op.num_value_heads, op.value_dim)
    biases = weights[op.decay_bias].reshape(op.num_all_heads, op.decay_width)[own_heads]
    shifted = decay.reshape(len(x), op.num_value_heads, op.decay_width) + biases
    softened = np.logaddexp(np.float32(0), shifted, dtype=np.float32)
    decays = np.exp(weights[op.decay_rate][own_heads, None] * softened)  # (rows, heads, 1 or keys)
    strengths = 1 / (1 + np.exp(-strength))
    output = np.empty((len(x), op.num_value_heads, op.value_dim), np.float32)
    shape = (op.num_value_heads, op.key_dim, op.value_dim)
    for span in spans:
        state = memory.read(span, op.layer).reshape(shape)
        for row in range(span.rows.start, span.rows.stop):
            state *= decays[row, ..., None]
            predicted = np.einsum("hk,hkv->hv", keys[row], state)
            correction = strengths[row, :, None] * (heads[row] - predicted)
            state += keys[row, :, :, None] * correction[:, None, :]
            output[row] = np.einsum("hk,hkv->hv", queries[row], state)
            memory.write(span, op.layer, row, state)
    return output.reshape(len(x), -1)


def mamba2(
    op: ops.Mamba2,
    values: tuple[Array, Array],
    weights: Mapping[str, Array],
    spans: Sequence[RowSpan],
    memory: StateMemory,
) -> Array:
    """Compute Mamba-2 row by row (see `ops.Mamba2`).

    `values`: values, keys and queries (rows, in_width), and time steps (rows, heads).
    """
    x, time_step = values
    own_heads = slice(op.first_head, op.first_head + op.num_heads)
    first_key = op.num_all_heads * op.head_dim
    heads = x[:, :first_key].reshape(len(x), -1, op.head_dim)[:, own_heads]
    group_of_head = [op.group_of(head) for head in op.heads]
    keys, queries = (
        part.reshape(len(x), op.num_groups, op.state_size)[:, group_of_head]
        for part in np.split(x[:, first_key:], 2, axis=1)
    )  # (rows, heads, state_size)
    shifted = time_step + weights[op.step_bias][own_heads]
    steps = np.logaddexp(np.float32(0), shifted, dtype=np.float32)
    steps = np.clip(steps, np.float32(op.min_step), np.float32(op.max_step))
    decays = np.exp(weights[op.decay_rate][own_heads] * steps)
    output = np.empty(heads.shape, np.float32)
    shape = (op.num_heads, op.state_size, op.head_dim)
    for span in spans:
        state = memory.read(span, op.layer).reshape(shape)
        for row in range(span.rows.start, span.rows.stop):
            state *= decays[row, :, None, None]
            scaled = steps[row, :, None] * heads[row]
            state += keys[row, :, :, None] * scaled[:, None, :]
            output[row] = np.einsum("hk,hkv->hv", queries[row], state)
            memory.write(span, op.layer, row, state)
    output += weights[op.skip][own_heads][:, None] * heads
    return output.reshape(len(x), -1)


def _unit_heads(x: Array, op: ops.GatedDeltaRule) -> Array:
    """Return, for each value head, its normalized key head of x: (rows, heads, key_dim)."""
    heads = x.reshape(len(x), op.num_key_heads, op.key_dim)
    squares = np.sum(heads * heads, axis=-1, keepdims=True, dtype=np.float32)
    lengths = np.sqrt(squares + np.float32(op.epsilon))
    unit = np.asarray(heads / lengths, np.float32)
    unit_keys: Array = unit[:, [op.key_head(head) for head in op.value_heads]]
    return unit_keys
