"""A lowered Program with memory: launches a step's kernels, those of a bucket of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from twostroke.backends.gpu import mixtures, products
from twostroke.backends.gpu.attending import (
    Attending,
    attentions_of,
    num_slots,
    sum_floats,
    tiling_of,
    turn_floats,
)
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
from twostroke.backends.gpu.step_input import CHANGES, COPIES, LOGIT_ROWS, input_ints
from twostroke.backends.gpu.stored import matrix_layout

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

_LEAST_PAGE = 16  # tokens


def step_bytes(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    device: GpuDevice,
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
    attentions = attentions_of(lowered)
    num_tilings = len({tiling_of(gpu, op) for op in attentions})
    slots = num_slots(attentions, rows)
    logits = LOGIT_ROWS * (lowered.logits.in_width + 2 * lowered.logits.width)  # the sampler's, too
    floats = turn_floats(lowered, program.context_length) + sum_floats(attentions, rows)
    floats += logits + rows * RESULT_INTS
    tables = rows * len(program.cache_groups) * (program.context_length // _LEAST_PAGE + 8)
    numbers = floats + tables + input_ints(num_tilings, rows, slots)
    in_parts = products.in_parts(gpu, lowered, packed)
    return lay_out(gpu, lowered, in_parts, rows).num_bytes + scratch + 4 * numbers


class GpuPlan:
    """The launches of steps of up to `max_rows` rows.

    Rows of the sampler's `results` begin with the tokens that the last step drew: rows of the next
    one may read them there.
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
        """Reserve a step's memory; `tables` (tables, groups, pages) are the device's.

        `piece` is the shortest piece of a context, for tests.
        """
        self._gpu, self._lowered, self._weights = gpu, lowered, weights
        self._cache, self._tables, self.max_rows = cache, tables, max_rows
        in_parts = products.in_parts(gpu, lowered, weights.shapes)
        self.memory = StepMemory(gpu, lowered, in_parts, max_rows)
        size = products.scratch_bytes(gpu, lowered, weights.shapes, max_rows)
        self._scratch = torch.zeros(size, dtype=torch.uint8, device=gpu.device)
        given = weights, cache, tables, self.memory, max_rows, piece
        self._attending = Attending(gpu, lowered, *given)
        self.input = self._attending.input
        floats = {"dtype": torch.float32, "device": gpu.device}
        self._picked = torch.zeros(
            (LOGIT_ROWS, lowered.logits.in_width), dtype=gpu.element, device=gpu.device
        )
        self.logits = torch.zeros((LOGIT_ROWS, lowered.logits.width), **floats)
        self.results = torch.zeros((max_rows, RESULT_INTS), dtype=torch.int32, device=gpu.device)

    @property
    def num_bytes(self) -> int:
        """Bytes that steps need besides weights and pages."""
        own = self.memory.memory, self._picked, self.logits, self.results, self._scratch
        num_bytes: int = sum(t.nbytes for t in own)
        return self._attending.num_bytes + num_bytes

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

        `mark` is called before each of `GpuLowered.parts` that is not empty.
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

    def _launch(self, record: Record, places: StepArrayOffsets) -> None:
        gpu, frame, rows, memory = self._gpu, self.input.device, places.num_rows, self.memory
        match record:
            case EmbedRows():
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
            case HeadProducts():
                op, x = record.op, memory.parts(record.x, rows)
                x = x.columns(op.first, x.width - op.first)
                output, matrices = (
                    memory.tensor(record.output, rows),
                    self._weights.heads[op.output],
                )
                product_heads.launch(gpu, frame, rows, x, op.x_head, matrices, output)
            case StoreKv() | StoreLatents() | Attend():
                self._attending.launch(record, places)
            case Activate():
                output = memory.tensor(record.output, rows)
                gate, up = self._biased(record.gate, rows), self._biased(record.up, rows)
                pointwise.activate(gpu, frame, rows, gate, up, record.activation, output)
            case MixExperts():
                self._mix(record, rows)
            case Combine():
                self._combine(record, rows)

    def _multiply(
        self, header: Tensor, rows: int, x: Tensor, names: tuple[str, ...], output: Parts
    ) -> None:
        factors = self._weights.factors(names)
        products.multiply(self._gpu, header, rows, x, factors, output, scratch=self._scratch)

    def _mix(self, record: MixExperts, rows: int) -> None:
        op, memory = record.op, self.memory
        values = mixtures.Values(
            memory.tensor(record.x, rows),
            self._biased(record.scores, rows),
            self._choice(record),
            memory.tensor(record.routes, rows).view(-1).view(torch.int32),
            memory.lines(record.hidden, rows),
            memory.tensor(record.gated, rows).view(-1, op.ffn_width),
            memory.lines(record.output, rows),
        )
        weights = self._weights.experts[op.output]
        mixtures.launch(self._gpu, self.input.device, rows, op, weights, values)

    def _biased(self, place: BufferColumns, rows: int) -> tuple[Parts, Tensor | None]:
        bias = None if place.bias is None else self._weights.vector(place.bias)
        return self.memory.parts(place, rows), bias

    def _choice(self, record: MixExperts) -> ExpertSelection:
        route = record.route
        if route is None:
            return ExpertSelection(record.op.normalize)
        wanted, factors = (
            None if name is None else self._weights.vector(name)
            for name in (route.bias, route.factors)
        )
        groups = route.num_groups, route.num_used_groups, route.group_best
        given = route.normalize, route.is_sigmoid, route.scale, *groups
        return ExpertSelection(*given, wanted=wanted, factors=factors)

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
