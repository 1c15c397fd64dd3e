"""Where keys and values are kept: in pages between steps, or not at all within one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from twostroke.backends.spans import PageMap
from twostroke.model.program.ops import SharedKvAttention

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from twostroke.backends.spans import RowSpan
    from twostroke.model.program import Op, Program, ops

    Seen = tuple[slice, Tensor, Tensor, int]


class Keeper(Protocol):
    """Stores a step's keys and values and finds those that its rows attend to."""

    def spans(self, op: ops.Attention, own: tuple[Tensor, ...]) -> Iterator[Seen]:
        """Yield (rows, keys, values, position of the first key) for each span of rows.

        `own` are keys and values of the step, (rows, width), or nothing, where an earlier operation
        has stored them; the yielded ones are (context, kv_heads, head_dim).
        """


class WholeSequences:
    """Sequences of these lengths, one after another: nothing outlives the step.

    Gradients flow through.
    """

    def __init__(self, lengths: Sequence[int], operations: Sequence[Op]) -> None:
        """Keep what some of the `operations` borrow, until the keeper goes."""
        self._lengths = lengths
        self._lent = {op.layer for op in operations if isinstance(op, SharedKvAttention)}
        self._stored: dict[int, tuple[Tensor, ...]] = {}

    def spans(self, op: ops.Attention, own: tuple[Tensor, ...]) -> Iterator[Seen]:
        """Yield a span for each sequence."""
        start = 0
        if op.stores and op.layer in self._lent:
            self._stored[op.layer] = own
        k, v = own or self._stored[op.layer]
        for length in self._lengths:
            rows, shape = slice(start, start + length), (length, op.num_kv_heads, op.head_dim)
            yield rows, k[rows].reshape(shape), v[rows].reshape(shape), 0
            start += length


class TorchKvPages:
    """Keys and values of every layer, in pages; float32."""

    def __init__(
        self, program: Program, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        """Reserve `num_pages` pages of `page_size` tokens of one cache group."""
        self.map = PageMap(program, page_size)
        self.memory = torch.zeros((num_pages * page_size, self.map.width), device=device)


class PagedStep:
    """The spans of one step over pages; what the step computes is stored before it is read."""

    def __init__(self, pages: TorchKvPages, spans: Sequence[RowSpan]) -> None:
        """`spans` are consecutive rows of one sequence each, in the order of the rows."""
        self._pages = pages
        self._spans = spans
        if any(span.copies for span in spans):
            device = pages.memory.device
            found = pages.map.copies(spans)
            targets, sources = (torch.from_numpy(slots).to(device) for slots in found)
            pages.memory[targets] = pages.memory[sources]

    def spans(self, op: ops.Attention, own: tuple[Tensor, ...]) -> Iterator[Seen]:
        """Store the step's keys and values, then yield each span's own with what it can see."""
        memory, columns = self._pages.memory, self._pages.map.columns(op.layer)
        for span in self._spans:
            rows = torch.from_numpy(span.stored_rows).to(memory.device)
            stored = np.arange(span.end - len(rows), span.end)
            at = self._pages.map.slots(span, op.layer, stored)
            for part, column in zip(own, columns if own else (), strict=True):
                memory[torch.from_numpy(at).to(memory.device), column] = part[rows]
            first = 0 if op.window is None else max(0, span.start + 1 - op.window)
            found = self._pages.map.slots(span, op.layer, np.arange(first, span.end))
            slots = torch.from_numpy(found).to(memory.device)
            shape = (len(slots), op.num_kv_heads, op.head_dim)
            keys, values = (memory[slots, column].reshape(shape) for column in columns)
            yield span.rows, keys, values, first
