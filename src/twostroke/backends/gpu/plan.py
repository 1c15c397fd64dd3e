"""A lowered Program with memory: launches a step's kernels, those of a bucket of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace

from twostroke.backends.gpu import mixtures, products
from twostroke.backends.gpu.cache import tiling_of
from twostroke.backends.gpu.graphs import bucket_of
from twostroke.backends.gpu.kernels import (
    attention,
    norm,
    pages,
    pointwise,
    rope,
    take_packed,
)
from twostroke.backends.gpu.kernels.attention import Work
from twostroke.backends.gpu.kernels.parts import Parts
from twostroke.backends.gpu.lower import lower
from twostroke.backends.gpu.lowered import (
    Activate,
    AddNorm,
    Attend,
    Combine,
    Embed,
    External,
    Mix,
    Products,
    Store,
)
from twostroke.backends.gpu.memory import StepMemory, lay_out
from twostroke.backends.gpu.sampling import RESULT_INTS
from twostroke.backends.gpu.step_input import (
    CHANGES,
    COPIES,
    LOGIT_ROWS,
    StepInput,
    input_ints,
)
from twostroke.backends.gpu.stored import matrix_layout
from twostroke.backends.gpu.tiles import FEW_ROWS, MOST_PIECES, Tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.backends.gpu.cache import PageMemory
    from twostroke.backends.gpu.device import Device
    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.lowered import Lowered, Place, Record, Source
    from twostroke.backends.gpu.step_input import Places
    from twostroke.backends.gpu.weights import DeviceWeights
    from twostroke.program import Program, ops
    from twostroke.quant import QuantTensor

_LEAST_PAGE = 16  # tokens
_DECODED_ROWS = 256  # rows for whose pieces of context there is room at once


def step_bytes(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    device: Device,
    max_rows: int,
    *,
    same_tokens: bool = False,
) -> int:
    """Return how many bytes of a device steps need besides weights and pages."""
    gpu = device.gpu(torch.bfloat16, same_tokens=same_tokens)
    lowered, rows = lower(program), bucket_of(max_rows)
    packed = {
        name: (layout, shape[0], shape[1])
        for name, shape in program.weight_shapes.items()
        if len(shape) == 2 and (layout := matrix_layout(tensors[name]))
    }
    scratch = products.scratch_bytes(gpu, lowered, packed, rows)
    attentions = [record.op for record in lowered.records if isinstance(record, Attend)]
    num_tilings = len({tiling_of(op, same_tokens=same_tokens) for op in attentions})
    num_slots = min(rows, _DECODED_ROWS) * MOST_PIECES
    slot = max((op.width + 2 * op.num_heads for op in attentions), default=0)
    pairs = {
        source.rope.inverse_frequencies
        for record in lowered.records
        for source in (record.sources if isinstance(record, Store) else ())
        if source.rope is not None
    }
    turns = 2 * program.context_length * sum(map(len, pairs))
    logits = LOGIT_ROWS * (lowered.logits.in_width + 2 * lowered.logits.width)  # the sampler's, too
    floats = turns + logits + num_slots * slot + rows * RESULT_INTS
    tables = rows * len(program.cache_groups) * (program.context_length // _LEAST_PAGE + 8)
    numbers = floats + tables + input_ints(num_tilings, rows, num_slots)
    return lay_out(gpu, lowered, rows).num_bytes + scratch + 4 * numbers


class Plan:
    """The launches of steps of up to `max_rows` rows.

    Rows of the sampler's `results` begin with the tokens that the last step drew: rows of the next
    one may read them there.
    """

    def __init__(
        self,
        gpu: Gpu,
        lowered: Lowered,
        weights: DeviceWeights,
        cache: PageMemory,
        tables: Tensor,
        max_rows: int,
        *,
        piece: int | None = None,
    ) -> None:
        """Reserve a step's memory; `tables` (tables, groups, pages) are the device's.

        `piece` is the shortest piece of a context, for tests.
        """
        self._gpu, self._lowered, self._weights = gpu, lowered, weights
        self._cache, self._tables, self.max_rows = cache, tables, max_rows
        self.memory = StepMemory(gpu, lowered, max_rows)
        size = products.scratch_bytes(gpu, lowered, weights.shapes, max_rows)
        self._scratch = torch.zeros(size, dtype=torch.uint8, device=gpu.device)
        self._attentions = [r.op for r in lowered.records if isinstance(r, Attend)]
        given = {} if piece is None else {"piece": piece}
        self._tilings: list[Tiling] = []
        self._tiling_of: dict[str, int] = {}
        for op in self._attentions:
            tiling = replace(tiling_of(op, same_tokens=gpu.same_tokens), **given)
            if tiling not in self._tilings:
                self._tilings.append(tiling)
            self._tiling_of[op.output] = self._tilings.index(tiling)
        num_slots = min(max_rows, _DECODED_ROWS) * MOST_PIECES
        self.input = StepInput(gpu, self._tilings, max_rows, num_slots)
        widest = max((op.width for op in self._attentions), default=0)
        heads = max((op.num_heads for op in self._attentions), default=0)
        floats = {"dtype": torch.float32, "device": gpu.device}
        self._sums = torch.zeros(num_slots * widest, **floats)
        self._tops = torch.zeros(num_slots * heads * 2, **floats)
        self._turns: dict[tuple[object, ...], rope.Turn] = {}
        most = tables.shape[2] * cache.page_size
        for record in lowered.records:
            for source in record.sources if isinstance(record, Store) else ():
                if source.rope is not None:
                    self._turn_of(source.rope, most)
        self._picked = torch.zeros(
            (LOGIT_ROWS, lowered.logits.in_width), dtype=gpu.element, device=gpu.device
        )
        self.logits = torch.zeros((LOGIT_ROWS, lowered.logits.width), **floats)
        self.results = torch.zeros((max_rows, RESULT_INTS), dtype=torch.int32, device=gpu.device)

    @property
    def num_bytes(self) -> int:
        """Bytes that steps need besides weights and pages."""
        own = self.memory.memory, self._sums, self._tops, self._picked, self.logits, self.results
        own_too = self._scratch, self.input.device, self._tables
        turns = [turn.table for turn in self._turns.values()]
        return sum(t.nbytes for t in (*own, *own_too, *turns))

    def tap(self, value: str, num_rows: int) -> Tensor:
        """Return a tapped value of the step's rows, float32."""
        return self.memory.tensor(self._lowered.taps[value], num_rows)

    def last_states(self, num_rows: int) -> Tensor:
        """Return the states from which logits are computed."""
        return self.memory.tensor(self._lowered.last, num_rows)

    def take_external(self, values: NDArray[np.float32]) -> None:
        """Send the value that comes with the next step."""
        record = next(r for r in self._lowered.records if isinstance(r, External))
        self.memory.tensor(record.output, len(values)).copy_(torch.from_numpy(values))

    def change_tables(self, changes: NDArray[np.int32]) -> None:
        """Change page tables before the step, by (index, page id)."""
        indices, found = torch.from_numpy(changes).to(self._gpu.device).long().unbind(1)
        self._tables.view(-1)[indices] = found.int()

    def launch(self, num_rows: int, mark: Callable[[], None] | None = None) -> None:
        """Launch the step in `input`, in a bucket of `num_rows` rows, up to the last states.

        `mark` is called before each of `Lowered.parts` that is not empty.
        """
        gpu, frame = self._gpu, self.input.device
        places = self.input.places(num_rows)
        pages.change(gpu, frame, CHANGES, frame, self._tables)
        cache = self._cache.memory.view(torch.int32)
        pages.copy(gpu, frame, COPIES, frame, cache, self._cache.page_bytes)
        for record, parts in zip(self._lowered.records, self._lowered.parts, strict=True):
            if mark is not None and parts:
                mark()
            self._launch(record, places)

    def launch_logits(self, chunk: int, bucket: int) -> None:
        """Write a chunk's rows of logits, at most `bucket`, to `logits`."""
        gpu, op = self._gpu, self._lowered.logits
        header, chosen = self.input.logit_rows(chunk)
        states = self.memory.tensor(self._lowered.last, self.max_rows)
        picked = self._picked[:bucket]
        pointwise.take_rows(gpu, header, bucket, states, chosen, picked)
        output = Parts(self.logits, op.width, op.width)
        self._multiply(header, bucket, picked, (op.weight,), output)
        if op.soft_cap is not None:
            pointwise.combine(
                gpu, header, bucket, output, self.logits[:bucket], soft_cap=op.soft_cap
            )

    def _launch(self, record: Record, places: Places) -> None:
        gpu, frame, rows, memory = self._gpu, self.input.device, places.num_rows, self.memory
        match record:
            case Embed():
                tokens = self.input.view(places.tokens, rows)
                output = memory.tensor(record.output, rows)
                given = {"factor": record.factor, "results": self.results}
                if (table := self._weights.packed.get(record.table)) is not None:
                    take_packed.launch(gpu, frame, rows, table, tokens, output, **given)
                else:
                    dense = self._weights.matrices[record.table]
                    pointwise.take_rows(gpu, frame, rows, dense, tokens, output, **given)
            case External():
                pass  # written before the step
            case AddNorm():
                self._add_norm(record, rows)
            case Products():
                x = memory.tensor(record.x, rows)
                output = memory.whole(record.output, rows)
                self._multiply(frame, rows, x, record.weights, output)
            case Store():
                self._store(record, places)
            case Attend():
                self._attend(record, rows)
            case Activate():
                output = memory.tensor(record.output, rows)
                gate, up = self._biased(record.gate, rows), self._biased(record.up, rows)
                pointwise.activate(gpu, frame, rows, gate, up, record.activation, output)
            case Mix():
                self._mix(record, rows)
            case Combine():
                a, bias = self._biased(record.a, rows)
                b = None if record.b is None else memory.parts(record.b, rows)
                output = memory.tensor(record.output, rows)
                pointwise.combine(gpu, frame, rows, a, output, bias=bias, factor=record.factor, b=b)

    def _multiply(
        self, header: Tensor, rows: int, x: Tensor, names: tuple[str, ...], output: Parts
    ) -> None:
        factors = self._weights.factors(names)
        products.multiply(self._gpu, header, rows, x, factors, output, scratch=self._scratch)

    def _mix(self, record: Mix, rows: int) -> None:
        op, memory = record.op, self.memory
        values = mixtures.Values(
            memory.tensor(record.x, rows),
            self._biased(record.scores, rows),
            memory.tensor(record.routes, rows).view(-1).view(torch.int32),
            memory.lines(record.hidden, rows),
            memory.tensor(record.gated, rows).view(-1, op.ffn_width),
            memory.lines(record.output, rows),
        )
        weights = self._weights.experts[op.output]
        mixtures.launch(self._gpu, self.input.device, rows, op, weights, values)

    def _biased(self, place: Place, rows: int) -> tuple[Parts, Tensor | None]:
        bias = None if place.bias is None else self._weights.vector(place.bias)
        return self.memory.parts(place, rows), bias

    def _norm_of(self, op: ops.RMSNorm | None) -> norm.Norm | None:
        if op is None:
            return None
        assert op.weight is not None, "lowering refuses norms without weights"
        return norm.Norm(self._weights.vector(op.weight, op.offset), op.epsilon)

    def _add_norm(self, record: AddNorm, rows: int) -> None:
        memory = self.memory
        delta, bias = (None, None) if record.delta is None else self._biased(record.delta, rows)
        residual, output = (
            None if buffer is None else memory.tensor(buffer, rows)
            for buffer in (record.residual, record.output)
        )
        norm.launch(
            self._gpu,
            self.input.device,
            rows,
            residual=residual,
            delta=delta,
            bias=bias,
            post=self._norm_of(record.post),
            norm=self._norm_of(record.norm),
            output=output,
        )

    def _store(self, record: Store, places: Places) -> None:
        rows, frame, view = places.num_rows, self.input.device, self.input.view
        where = rope.Places(
            view(places.positions, rows),
            view(places.tables, rows),
            view(places.first_extra, rows + 1),
            frame,
            self._tables,
        )
        q, k, v = (self._source(source, rows) for source in record.sources)
        turns = [None if s.rope is None else self._turn_of(s.rope) for s in record.sources]
        output = self.memory.tensor(record.output, rows)
        heads = self._heads(record.op)
        given = (q, k, v), (turns[0], turns[1]), heads, self._cache.memory, output
        balance = self._weights.balances.get(record.op.layer)
        rope.launch(self._gpu, frame, rows, where, *given, balance)

    def _source(self, source: Source, rows: int) -> rope.Source:
        parts, bias = self._biased(source.place, rows)
        return rope.Source(parts, bias, self._norm_of(source.norm))

    def _attend(self, record: Attend, rows: int) -> None:
        op, frame = record.op, self.input.device
        q, output = (self.memory.tensor(buffer, rows) for buffer in (record.q, record.output))
        number = self._tiling_of[op.output]
        few, many, merges = self.input.items_at(number)
        heads, cache = self._heads(op), self._cache.memory
        small, same = attention.small_block(op.group_size), self._gpu.same_tokens
        small = attention.same_block(op.group_size) if same else small
        large = attention.large_block(op.group_size, op.head_dim)
        given = q, cache, output, heads
        for header in self.input.headers[number]:
            work = Work(header, frame, self._tables, self._sums, self._tops)
            attention.launch(self._gpu, work, few, small, *given)
            if rows > FEW_ROWS and not same and header is self.input.headers[number][0]:
                attention.launch(self._gpu, work, many, large, *given)
            attention.merge(self._gpu, work, merges, output, heads)

    def _heads(self, op: ops.Attention) -> attention.Heads:
        _, num_groups, width = self._tables.shape
        return self._cache.heads(op, width, num_groups)

    def _turn_of(self, op: ops.Rope, num_positions: int = 0) -> rope.Turn:
        key = op.inverse_frequencies, op.magnitude
        if key not in self._turns:
            angles = np.arange(num_positions)[:, None] * np.array(op.inverse_frequencies)
            table = np.stack([np.cos(angles), np.sin(angles)], axis=1) * op.magnitude
            values = torch.from_numpy(table.astype(np.float32)).to(self._gpu.device)
            self._turns[key] = rope.Turn(values, len(op.inverse_frequencies), op.interleaved)
        found = self._turns[key]
        return rope.Turn(found.table, found.num_pairs, op.interleaved)
