"""Recurrent operations of the torch backend, and its memory for recurrent states.

Rows of a request are computed one after another, so results do not depend on how a prompt is cut.
A step computes the first rows of all its requests together, then their second rows, and so on.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from twostroke.backends.spans import RowSpan
from twostroke.core.request import NO_STATE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.model.program import Program, ops

    Numbers = NDArray[np.int64]


class TorchStateSlots:
    """The recurrent states of all state layers of a Program, in `num_slots` slots on a device."""

    def __init__(self, program: Program, num_slots: int, device: torch.device) -> None:
        """Reserve the slots; each has room for the states of one request."""
        self.memory = {
            number: torch.zeros((num_slots, layer.num_values), device=device)
            for number, layer in program.state_layers.items()
        }

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots."""
        return sum(memory.nbytes for memory in self.memory.values())


class RecurrentStep:
    """Reads and stores the recurrent states of one step, for the step's row spans.

    A sequence is a row span. Sequences are ordered by their number of rows, the longest first. If
    sequences have a row i, they are therefore the first sequences in this order.
    """

    def __init__(self, slots: TorchStateSlots, spans: Sequence[RowSpan]) -> None:
        """Set the step's row spans; `slots` has the states between steps."""
        self._memory = slots.memory
        self._spans = sorted(spans, key=lambda span: span.start - span.end)
        self._windows: dict[int, _Windows] = {}  # by the number of rows of a state

    @cached_property
    def rows(self) -> tuple[slice | Tensor, ...]:
        """For each i, the row i of each sequence that has such a row, as rows of the step."""
        firsts = np.array([span.rows.start for span in self._spans], np.int64)
        counts = self._counts
        return tuple([self._index(firsts[counts > row] + row) for row in range(int(counts[0]))])

    def read(self, layer: int) -> Tensor:
        """Return copies of the states from which sequences start: (sequences, values).

        A new sequence starts from zeros.
        """
        slots, is_new = self._read_slots
        states = self._memory[layer][slots]
        states[is_new] = 0
        return states

    def store(self, layer: int, row: int, states: Tensor) -> None:
        """Store the states after row `row`, for the sequences that have a slot for that state.

        `states`: (sequences, values), of the sequences that have this row.
        """
        if row in self._stores:
            sequences, slots = self._stores[row]
            self._memory[layer][slots] = states[sequences]

    def store_windows(self, layer: int, rows: Tensor, num_before: int) -> None:
        """Store the states of a short convolution that has read `rows`.

        A state is the last `num_before` rows.
        """
        windows = self.windows(num_before)
        self._memory[layer][windows.slots] = rows[windows.stored].flatten(1)

    def windows(self, num_before: int) -> _Windows:
        """Return which rows a short convolution reads and stores.

        Its state has `num_before` rows.
        """
        if num_before not in self._windows:
            self._windows[num_before] = self._find_windows(num_before)
        return self._windows[num_before]

    def _find_windows(self, num_before: int) -> _Windows:
        first_row = num_before * len(self._spans)
        read = np.zeros((int(self._counts.sum()), num_before + 1), np.int64)
        stored: list[Numbers] = []
        slots: list[int] = []
        for number, span in enumerate(self._spans):
            before = np.arange(num_before * number, num_before * (number + 1))
            rows = np.arange(first_row + span.rows.start, first_row + span.rows.stop)
            both = np.concatenate([before, rows])
            read[span.rows] = np.lib.stride_tricks.sliding_window_view(both, num_before + 1)
            for row, slot in _stored_rows(span):
                stored.append(both[row + 1 : row + 1 + num_before])
                slots.append(slot)
        return _Windows(
            self._tensor(read), self._tensor(np.array(stored)), self._tensor(np.array(slots))
        )

    @cached_property
    def _counts(self) -> Numbers:
        """The number of rows of each sequence, the largest first."""
        return np.array([span.end - span.start for span in self._spans], np.int64)

    @cached_property
    def _stores(self) -> dict[int, tuple[Tensor, Tensor]]:
        """For each row: the sequences that store the state after this row, and the slots for it."""
        by_row: dict[int, list[tuple[int, int]]] = {}
        for number, span in enumerate(self._spans):
            for row, slot in _stored_rows(span):
                by_row.setdefault(row, []).append((number, slot))
        return {
            row: (self._tensor(pairs[:, 0]), self._tensor(pairs[:, 1]))
            for row, pairs in ((row, np.array(pairs)) for row, pairs in by_row.items())
        }

    @cached_property
    def _device(self) -> torch.device:
        return next(iter(self._memory.values())).device

    @cached_property
    def _read_slots(self) -> tuple[Tensor, Tensor]:
        slots = np.array([span.read_state for span in self._spans], np.int64)
        is_new = slots == NO_STATE
        return self._tensor(np.where(is_new, 0, slots)), self._tensor(is_new)

    def _index(self, rows: Numbers) -> slice | Tensor:
        """Return an index of rows of the step: a slice for one row, to read it without a copy."""
        return slice(int(rows[0]), int(rows[0]) + 1) if len(rows) == 1 else self._tensor(rows)

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class _Windows(NamedTuple):
    """Which rows a short convolution reads and stores.

    Indices count the rows of all read states, one sequence after another, and then the rows of the
    step. `read` (rows of the step, rows of a state + 1) has, for each row, its own index and the
    indices of the rows before it. `stored` (states, rows of a state) has the rows of each state to
    store, and `slots` (states) its slot.
    """

    read: Tensor
    stored: Tensor
    slots: Tensor


def _stored_rows(span: RowSpan) -> list[tuple[int, int]]:
    """Return the rows of a span after which the state is stored, each with the slot for it."""
    first = span.end - span.start - len(span.write_states)
    return list(enumerate(span.write_states, first))


def new_sequence(program: Program, num_rows: int, device: torch.device) -> RecurrentStep:
    """Return the recurrent states of a step that computes one new sequence, and stores no state."""
    span = RowSpan(slice(0, num_rows), 0, np.zeros((0, 0), np.int64), write_states=(0,))
    return RecurrentStep(TorchStateSlots(program, 1, device), [span])


def short_convolution(
    op: ops.ShortConvolution, x: Tensor, weights: Mapping[str, Tensor], step: RecurrentStep
) -> Tensor:
    """Compute a short convolution (see `ops.ShortConvolution`) without its activation.

    x is (rows, width).
    """
    num_before = op.kernel - 1
    rows = torch.cat((step.read(op.layer).reshape(-1, op.width), x))
    read, kernels = step.windows(num_before).read, weights[op.weight]
    total = rows[read[:, 0]] * kernels[:, 0]
    for tap in range(1, op.kernel):
        total += rows[read[:, tap]] * kernels[:, tap]
    step.store_windows(op.layer, rows, num_before)
    return total if op.bias is None else total + weights[op.bias]


def gated_delta_rule(
    op: ops.GatedDeltaRule,
    values: tuple[Tensor, Tensor, Tensor],
    weights: Mapping[str, Tensor],
    step: RecurrentStep,
) -> Tensor:
    """Compute the gated delta rule row by row (see `ops.GatedDeltaRule`).

    `values`: queries, keys and values (rows, in_width), decays (rows, value heads or channels of
    all heads) and strengths (rows, value heads).

    Only functions and products are used whose rounding does not depend on the number of rows and
    sequences. PyTorch's sigmoid and softplus do not qualify: they round the last numbers of a large
    array differently.
    """
    x, decay, strength = values
    own_heads = slice(op.first_head, op.first_head + op.num_value_heads)
    key_width = op.num_key_heads * op.key_dim
    queries, keys = (
        _unit_heads(x[:, first : first + key_width], op) for first in (0, key_width)
    )  # (rows, value heads, key_dim)
    queries = queries * op.key_dim**-0.5
    heads = x[:, op.first_value : op.first_value + op.width]
    heads = heads.reshape(len(x), op.num_value_heads, op.value_dim)
    biases = weights[op.decay_bias].reshape(op.num_all_heads, op.decay_width)[own_heads]
    shifted = decay.reshape(len(x), op.num_value_heads, op.decay_width) + biases
    decays = (weights[op.decay_rate][own_heads, None] * _softplus(shifted)).exp()
    strengths = 1 / (1 + strength.neg().exp())
    output = x.new_empty((len(x), op.num_value_heads, op.value_dim))
    states = step.read(op.layer).reshape(-1, op.num_value_heads, op.key_dim, op.value_dim)
    for row, rows in enumerate(step.rows):
        query, key = queries[rows][..., None, :], keys[rows][..., None, :]
        active = states[: len(key)]  # a view: later rows change the same states
        active *= decays[rows][..., None]
        predicted = (key @ active)[..., 0, :]
        correction = strengths[rows][..., None] * (heads[rows] - predicted)
        active += key.mT * correction[..., None, :]
        output[rows] = (query @ active)[..., 0, :]
        step.store(op.layer, row, active.flatten(1))
    return output.flatten(1)


def mamba2(
    op: ops.Mamba2,
    values: tuple[Tensor, Tensor],
    weights: Mapping[str, Tensor],
    step: RecurrentStep,
) -> Tensor:
    """Compute Mamba-2 row by row (see `ops.Mamba2`).

    `values`: values, keys and queries (rows, in_width), and time steps (rows, heads).
    """
    x, time_step = values
    own_heads = slice(op.first_head, op.first_head + op.num_heads)
    columns = [op.num_all_heads * op.head_dim, *[op.num_groups * op.state_size] * 2]
    all_heads, all_keys, all_queries = x.split(columns, dim=1)
    heads = all_heads.unflatten(1, (-1, op.head_dim))[:, own_heads]
    group_of_head = [op.group_of(head) for head in op.heads]
    keys, queries = (
        part.unflatten(1, (op.num_groups, -1))[:, group_of_head] for part in (all_keys, all_queries)
    )  # (rows, heads, state_size)
    steps = _softplus(time_step + weights[op.step_bias][own_heads])
    steps = steps.clamp(op.min_step, op.max_step)
    decays = (weights[op.decay_rate][own_heads] * steps).exp()
    scaled = steps[..., None] * heads
    output = x.new_empty(heads.shape)
    states = step.read(op.layer).reshape(-1, op.num_heads, op.state_size, op.head_dim)
    for row, rows in enumerate(step.rows):
        query, key = queries[rows][..., None, :], keys[rows][..., None, :]
        active = states[: len(key)]  # a view: later rows change the same states
        active *= decays[rows][..., None, None]
        active += key.mT * scaled[rows][..., None, :]
        output[rows] = (query @ active)[..., 0, :]
        step.store(op.layer, row, active.flatten(1))
    output += weights[op.skip][own_heads][:, None] * heads
    return output.flatten(1)


def _softplus(x: Tensor) -> Tensor:
    """Return ln(1 + e^x), rounded equally however many numbers there are."""
    return x.clamp(min=0) + x.abs().neg().exp().log1p()


def _unit_heads(x: Tensor, op: ops.GatedDeltaRule) -> Tensor:
    """Return, for each value head, its normalized key head of x: (rows, heads, key_dim)."""
    heads = x.reshape(len(x), op.num_key_heads, op.key_dim)
    lengths = (heads.square().sum(dim=-1, keepdim=True) + op.epsilon).sqrt()
    key_heads = [op.key_head(head) for head in op.value_heads]
    return (heads / lengths)[:, key_heads]
