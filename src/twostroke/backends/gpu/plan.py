"""`GpuPlan`: a lowered Program with memory, which launches the kernels of a step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from twostroke.backends.gpu import mixtures, products
from twostroke.backends.gpu.graphs import bucket_of
from twostroke.backends.gpu.kernels import norm, pages, pointwise, product_heads, take_packed
from twostroke.backends.gpu.kernels.common import Parts
from twostroke.backends.gpu.kernels.routing import ExpertSelection
from twostroke.backends.gpu.lower import lower
from twostroke.backends.gpu.lowered import (
    Activate,
    AddNorm,
    Attend,
    Combine,
    EmbedRows,
    External,
    HeadProducts,
    MixExperts,
    Products,
    StoreKv,
    StoreLatents,
)
from twostroke.backends.gpu.memory import StepMemory, lay_out
from twostroke.backends.gpu.sampling import RESULT_INTS
from twostroke.backends.gpu.step_attention import (
    StepAttention,
    attentions_of,
    num_slots,
    rotation_floats,
    sum_floats,
    tiling_of,
)
from twostroke.backends.gpu.step_input import CHANGES, COPIES, LOGIT_ROWS, input_ints
from twostroke.backends.gpu.weight_layout import matrix_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.backends.gpu.cache import DevicePages
    from twostroke.backends.gpu.device import GpuDevice
    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.lowered import BufferColumns, GpuLowered, Record
    from twostroke.backends.gpu.step_input import StepArrayOffsets
    from twostroke.backends.gpu.weights import DeviceWeights
    from twostroke.model.program import Program, ops
    from twostroke.model.quant import QuantTensor

_MIN_PAGE_SIZE = 16  # tokens


def step_bytes(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    device: GpuDevice,
    max_rows: int,
    *,
    same_tokens: bool = False,
) -> int:
    """Return the bytes of GPU memory that steps need in addition to weights and KV pages."""
    gpu = device.gpu(torch.bfloat16, same_tokens=same_tokens)
    lowered, rows = lower(program), bucket_of(max_rows)
    packed = {
        name: (layout, shape[0], shape[1])
        for name, shape in program.weight_shapes.items()
        if len(shape) == 2 and (layout := matrix_layout(tensors[name]))
    }
    scratch = products.scratch_bytes(gpu, lowered, packed, rows)
    attentions = attentions_of(lowered)
    num_tilings = len({tiling_of(gpu, op) for op in attentions})
    slots = num_slots(attentions, rows)
    logits = LOGIT_ROWS * (lowered.logits.in_width + 2 * lowered.logits.width)  # the sampler's, too
    floats = rotation_floats(lowered, program.context_length) + sum_floats(attentions, rows)
    floats += logits + rows * RESULT_INTS
    tables = rows * len(program.cache_groups) * (program.context_length // _MIN_PAGE_SIZE + 8)
    numbers = floats + tables + input_ints(num_tilings, rows, slots)
    in_parts = products.in_parts(gpu, lowered, packed)
    return lay_out(gpu, lowered, in_parts, rows).num_bytes + scratch + 4 * numbers


class GpuPlan:
    """Launches the kernels of a lowered Program, for steps of up to `max_rows` rows.

    Each row of the sampler's `results` begins with the token that the last step drew; the next step
    reads it there.
    """

    def __init__(
        self,
        gpu: Gpu,
        lowered: GpuLowered,
        weights: DeviceWeights,
        cache: DevicePages,
        tables: Tensor,
        max_rows: int,
        *,
        piece: int | None = None,
    ) -> None:
        """Reserve the GPU memory of a step's intermediate values.

        `tables`: the page tables on the device, (tables, groups, pages). `piece`: into how short
        pieces a context may be divided, in tokens; only set by tests.
        """
        self._gpu, self._lowered, self._weights = gpu, lowered, weights
        self._cache, self._tables, self.max_rows = cache, tables, max_rows
        in_parts = products.in_parts(gpu, lowered, weights.shapes)
        self.memory = StepMemory(gpu, lowered, in_parts, max_rows)
        size = products.scratch_bytes(gpu, lowered, weights.shapes, max_rows)
        self._scratch = torch.zeros(size, dtype=torch.uint8, device=gpu.device)
        self._attention = StepAttention(
            gpu,
            lowered,
            weights=weights,
            cache=cache,
            tables=tables,
            memory=self.memory,
            max_rows=max_rows,
            piece=piece,
        )
        self.input = self._attention.input
        floats = {"dtype": torch.float32, "device": gpu.device}
        self._logit_states = torch.zeros(
            (LOGIT_ROWS, lowered.logits.in_width), dtype=gpu.element, device=gpu.device
        )
        self.logits = torch.zeros((LOGIT_ROWS, lowered.logits.width), **floats)
        self.results = torch.zeros((max_rows, RESULT_INTS), dtype=torch.int32, device=gpu.device)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of GPU memory that steps need in addition to weights and KV pages."""
        tensors = self.memory.memory, self._logit_states, self.logits, self.results, self._scratch
        num_bytes: int = sum(t.nbytes for t in tensors)
        return self._attention.num_bytes + num_bytes

    def tap(self, value: str, num_rows: int) -> Tensor:
        """Return an intermediate value that the step also returns, as float32 (rows, width)."""
        return self.memory.tensor(self._lowered.taps[value], num_rows)

    def last_states(self, num_rows: int) -> Tensor:
        """Return the last hidden states of the step's rows, (rows, width)."""
        return self.memory.tensor(self._lowered.last, num_rows)

    def take_external(self, values: NDArray[np.float32]) -> None:
        """Copy the external input of the next step to the GPU."""
        record = next(r for r in self._lowered.records if isinstance(r, External))
        self.memory.tensor(record.output, len(values)).copy_(torch.from_numpy(values))

    def change_tables(self, changes: NDArray[np.int32]) -> None:
        """Apply (index, page id) changes to the page tables on the GPU, before the step."""
        indices, page_ids = torch.from_numpy(changes).to(self._gpu.device).long().unbind(1)
        self._tables.view(-1)[indices] = page_ids.int()

    def launch(self, num_rows: int, mark: Callable[[], None] | None = None) -> None:
        """Launch the kernels of the step in `input`, up to the last hidden states.

        `num_rows`: the bucket, which is the step's padded number of rows. `mark` is called before
        each part of `GpuLowered.parts` that is not empty.
        """
        gpu, frame = self._gpu, self.input.device
        offsets = self.input.array_offsets(num_rows)
        pages.change(gpu, frame, CHANGES, frame=frame, tables=self._tables)
        pages.copy(
            gpu,
            frame,
            COPIES,
            frame=frame,
            cache=self._cache.memory.view(torch.int32),
            page_bytes=self._cache.page_bytes,
        )
        for record, parts in zip(self._lowered.records, self._lowered.parts, strict=True):
            if mark is not None and parts:
                mark()
            self._launch(record, offsets)

    def launch_logits(self, chunk: int, bucket: int) -> None:
        """Launch the logits of a chunk of at most `bucket` rows; they are written to `logits`."""
        gpu, op = self._gpu, self._lowered.logits
        header, row_ids = self.input.logit_rows(chunk)
        states = self.memory.tensor(self._lowered.last, self.max_rows)
        states_of_rows = self._logit_states[:bucket]
        pointwise.take_rows(gpu, header, bucket, x=states, row_ids=row_ids, output=states_of_rows)
        output = Parts(self.logits, op.width, op.width)
        self._multiply(header, bucket, states_of_rows, (op.weight,), output)
        if op.soft_cap is not None:
            pointwise.combine(
                gpu, header, bucket, output, self.logits[:bucket], soft_cap=op.soft_cap
            )

    def _launch(self, record: Record, offsets: StepArrayOffsets) -> None:
        gpu, frame, rows, memory = self._gpu, self.input.device, offsets.num_rows, self.memory
        match record:
            case EmbedRows():
                tokens = self.input.view(offsets.tokens, rows)
                output = memory.tensor(record.output, rows)
                if (table := self._weights.packed.get(record.table)) is not None:
                    take = partial(take_packed.launch, gpu, frame, rows, table=table)
                else:
                    dense = self._weights.matrices[record.table]
                    take = partial(pointwise.take_rows, gpu, frame, rows, x=dense)
                take(row_ids=tokens, output=output, factor=record.factor, results=self.results)
            case External():
                pass  # written before the step
            case AddNorm():
                self._add_norm(record, rows)
            case Products():
                x = memory.tensor(record.x, rows)
                output = memory.all_columns(record.output, rows)
                self._multiply(frame, rows, x, record.weights, output)
            case HeadProducts():
                op, x = record.op, memory.parts(record.x, rows)
                x = x.columns(op.first, x.width - op.first)
                product_heads.launch(
                    gpu,
                    frame,
                    rows,
                    x=x,
                    x_head=op.x_head,
                    matrices=self._weights.heads[op.output],
                    output=memory.tensor(record.output, rows),
                )
            case StoreKv() | StoreLatents() | Attend():
                self._attention.launch(record, offsets)
            case Activate():
                pointwise.activate(
                    gpu,
                    frame,
                    rows,
                    gate=self._biased(record.gate, rows),
                    up=self._biased(record.up, rows),
                    activation=record.activation,
                    output=memory.tensor(record.output, rows),
                )
            case MixExperts():
                self._mix(record, rows)
            case Combine():
                self._combine(record, rows)

    def _multiply(
        self, header: Tensor, rows: int, x: Tensor, names: tuple[str, ...], output: Parts
    ) -> None:
        factors = self._weights.factors(names)
        products.multiply(
            self._gpu,
            header,
            rows,
            x=x,
            factors=factors,
            output=output,
            scratch=self._scratch,
        )

    def _mix(self, record: MixExperts, rows: int) -> None:
        op, memory = record.op, self.memory
        values = mixtures.MixtureValues(
            x=memory.tensor(record.x, rows),
            scores=self._biased(record.scores, rows),
            selection=self._expert_selection(record),
            routes=memory.tensor(record.routes, rows).view(-1).view(torch.int32),
            hidden=memory.lines(record.hidden, rows),
            gated=memory.tensor(record.gated, rows).view(-1, op.ffn_width),
            terms=memory.lines(record.output, rows),
        )
        mixtures.launch(
            self._gpu,
            self.input.device,
            rows,
            op=op,
            weights=self._weights.experts[op.output],
            values=values,
        )

    def _biased(self, columns: BufferColumns, rows: int) -> tuple[Parts, Tensor | None]:
        bias = None if columns.bias is None else self._weights.vector(columns.bias)
        return self.memory.parts(columns, rows), bias

    def _expert_selection(self, record: MixExperts) -> ExpertSelection:
        route = record.route
        if route is None:
            return ExpertSelection(record.op.normalize)
        selection_bias, factors = (
            None if name is None else self._weights.vector(name)
            for name in (route.bias, route.factors)
        )
        return ExpertSelection(
            normalize=route.normalize,
            is_sigmoid=route.is_sigmoid,
            scale=route.scale,
            num_groups=route.num_groups,
            num_used_groups=route.num_used_groups,
            group_best=route.group_best,
            selection_bias=selection_bias,
            factors=factors,
        )

    def _combine(self, record: Combine, rows: int) -> None:
        a, bias = self._biased(record.a, rows)
        pointwise.combine(
            self._gpu,
            self.input.device,
            rows,
            a,
            self.memory.tensor(record.output, rows),
            bias=bias,
            factor=record.factor,
            weight=None if record.weight is None else self._weights.vector(record.weight),
            b=None if record.b is None else self.memory.parts(record.b, rows),
        )

    def _norm_of(self, op: ops.RMSNorm | None) -> norm.Norm | None:
        if op is None:
            return None
        return norm.Norm(self._weights.norm_weight(op), op.epsilon, op.num_groups)

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
            factor=None if record.factor is None else self._weights.vector(record.factor),
            norm=self._norm_of(record.norm),
            output=output,
        )
