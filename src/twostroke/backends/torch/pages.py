"""Storage of keys and values: in KV pages for the engine, or per step for whole sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from twostroke.backends.spans import PageMap
from twostroke.model.program.kv_layout import first_seen
from twostroke.model.program.ops import SharedKvAttention

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from twostroke.backends.spans import RowSpan
    from twostroke.model.program import Op, Program, ops

    Seen = tuple[slice, Tensor, Tensor, int]


class KvKeeper(Protocol):
    """Stores a step's keys and values, and returns the context of each sequence of the step.

    Implemented for training (whole sequences) and for the engine (KV pages).
    """

    def spans(self, op: ops.Attention, step_kv: tuple[Tensor, ...]) -> Iterator[Seen]:
        """Yield (rows, keys, values, position of the first key) for each sequence of the step.

        `step_kv`: keys and values of the step, (rows, width); empty if an earlier operation has
        stored them. The yielded keys and values are (context, kv_heads, head_dim).
        """


class WholeSequences:
    """Stores keys and values of whole sequences during one step, without KV pages, for training.

    Gradients flow through keys and values.
    """

    def __init__(self, lengths: Sequence[int], operations: Sequence[Op]) -> None:
        """Set the lengths of the step's sequences.

        `operations`: the Program's operations, which show the layers that share keys and values.
        """
        self._lengths = lengths
        self._shared_layers = {op.layer for op in operations if isinstance(op, SharedKvAttention)}
        self._stored: dict[int, tuple[Tensor, ...]] = {}

    def spans(self, op: ops.Attention, step_kv: tuple[Tensor, ...]) -> Iterator[Seen]:
        """Yield the rows, keys and values of each sequence; see `KvKeeper.spans`."""
        start = 0
        if op.stores and op.layer in self._shared_layers:
            self._stored[op.layer] = step_kv
        k, v = step_kv or self._stored[op.layer]
        for length in self._lengths:
            rows, shape = slice(start, start + length), (length, op.num_kv_heads, op.head_dim)
            yield rows, k[rows].reshape(shape), v[rows].reshape(shape), 0
            start += length


class TorchKvPages:
    """The torch backend's KV cache: keys and values of all layers in float32 pages."""

    def __init__(
        self, program: Program, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        """Reserve `num_pages` KV pages, each for `page_size` tokens of one cache group."""
        self.map = PageMap(program, page_size)
        self.memory = torch.zeros((num_pages * page_size, self.map.width), device=device)


class PagedStep:
    """Stores a step's keys and values in KV pages, and reads contexts from them; a `KvKeeper`."""

    def __init__(self, pages: TorchKvPages, spans: Sequence[RowSpan]) -> None:
        """Set the row spans of the step, in order, and copy the first pages of draft branches."""
        self._pages = pages
        self._spans = spans
        if any(span.copies for span in spans):
            device = pages.memory.device
            slots_of_copies = pages.map.copies(spans)
            targets, sources = (torch.from_numpy(slots).to(device) for slots in slots_of_copies)
            pages.memory[targets] = pages.memory[sources]

    def spans(self, op: ops.Attention, step_kv: tuple[Tensor, ...]) -> Iterator[Seen]:
        """Store the step's keys and values in pages; yield the context of each row span."""
        memory, columns = self._pages.memory, self._pages.map.columns(op.layer)
        for span in self._spans:
            rows = torch.from_numpy(span.stored_rows).to(memory.device)
            stored = np.arange(span.end - len(rows), span.end)
            stored_slots = self._pages.map.slots(span, op.layer, stored)
            for part, column in zip(step_kv, columns if step_kv else (), strict=True):
                memory[torch.from_numpy(stored_slots).to(memory.device), column] = part[rows]
            first = 0
            if op.window is not None:
                first = max(0, first_seen(span.start, op.window, is_chunked=op.is_chunked))
            context_slots = self._pages.map.slots(span, op.layer, np.arange(first, span.end))
            slots = torch.from_numpy(context_slots).to(memory.device)
            shape = (len(slots), op.num_kv_heads, op.head_dim)
            keys, values = (memory[slots, column].reshape(shape) for column in columns)
            yield span.rows, keys, values, first
