"""Weights on the device: packed if products read their format, else in the element type."""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from twostroke.backends.gpu import mixtures
from twostroke.backends.gpu.kernels.packed import concatenate, pack
from twostroke.backends.gpu.lowered import (
    AddNorm,
    Combine,
    EmbedRows,
    HeadProducts,
    MixExperts,
    Products,
    columns_read,
    sources,
)
from twostroke.backends.gpu.weight_layout import matrix_layout, runs_of_neighbours
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.backends.gpu.kernels.packed import PackedMatrix
    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.lowered import GpuLowered
    from twostroke.backends.gpu.mixtures import ExpertWeights
    from twostroke.backends.gpu.weight_layout import Matrix
    from twostroke.model.quant import QuantTensor

    Progress = Callable[[int, int], None]
    Release = Callable[[Sequence[QuantTensor]], None]

_STORED = {"F16": torch.float16, "BF16": torch.bfloat16}


def element_of(tensors: Mapping[str, QuantTensor]) -> torch.dtype:
    """Return the 16-bit type in which matrix products read their inputs.

    float16 if most bytes of the weight matrices are float16, else bfloat16.
    """
    num_bytes: Counter[str] = Counter()
    for tensor in tensors.values():
        if len(tensor.shape) > 1:
            num_bytes[tensor.format.name] += tensor.num_bytes
    common_format = max(num_bytes, key=num_bytes.__getitem__, default="")
    return _STORED.get(common_format, torch.bfloat16)


class DeviceWeights:
    """The weights of a lowered Program in GPU memory.

    `packed`: matrices in formats that kernels read. `joined`: neighbouring packed matrices with the
    same input, concatenated. `matrices`: other matrices, in the element type. `converted`: the
    number of matrices that were converted to the element type, by format.
    """

    def __init__(
        self,
        gpu: Gpu,
        lowered: GpuLowered,
        tensors: Mapping[str, QuantTensor],
        release: Release = lambda _: None,
        progress: Progress = lambda *_: None,
        balances: Mapping[int, NDArray[np.float32]] = MappingProxyType({}),
    ) -> None:
        """Load the weights of a lowered Program to the GPU; callbacks as in `PackedWeights.pack`.

        `balances`: by layer, how keys are balanced before they become int8 (`keys.balances`).
        """
        self._gpu, self._tensors = gpu, tensors
        self.converted: Counter[str] = Counter()
        self.matrices: dict[str, Tensor] = {}
        self.packed: dict[str, PackedMatrix] = {}
        self.shapes: dict[str, Matrix] = {}  # only of packed matrices
        self.joined: dict[tuple[str, ...], PackedMatrix] = {}
        self.products: dict[tuple[str, ...], Tensor] = {}
        self.experts: dict[str, ExpertWeights] = {}  # by the mixture's output
        self.heads: dict[str, Tensor] = {}  # (heads, outputs, inputs), by the products' output
        self.balances = {k: torch.from_numpy(x).to(gpu.device) for k, x in balances.items()}
        self._vectors: dict[tuple[str, float], Tensor] = {}
        self._ones_vectors: dict[int, Tensor] = {}
        groups = [record.weights for record in lowered.records if isinstance(record, Products)]
        tables = [record.table for record in lowered.records if isinstance(record, EmbedRows)]
        mixes = [record.op for record in lowered.records if isinstance(record, MixExperts)]
        heads = [record.op for record in lowered.records if isinstance(record, HeadProducts)]
        names = {name for group in groups for name in group} | {*tables, lowered.logits.weight}
        names |= {weight.name for op in (*mixes, *heads) for weight in op.weights}
        total, done = sum(tensors[name].num_bytes for name in names), 0

        def finish(loaded: Sequence[QuantTensor]) -> None:
            nonlocal done
            done += sum(tensor.num_bytes for tensor in loaded)
            release(loaded)
            progress(min(done, total), total)

        read = [*groups, (lowered.logits.weight,), *((name,) for name in tables)]
        for name in dict.fromkeys(name for group in read for name in group):
            if matrix_layout(tensors[name]):
                packed = self.packed[name] = pack(tensors[name], gpu.device)
                self.shapes[name] = packed.layout, packed.width, packed.depth
                finish([tensors[name]])
        self._join([group for group in dict.fromkeys(read) if len(group) > 1])
        dense = [tuple(n for n in group if n not in self.shapes) for group in read]
        for group in filter(None, dense):
            if group not in self.products and (len(group) > 1 or group[0] not in self.matrices):
                self._load_dense(group, finish)
        for op in mixes:
            self.experts[op.output] = mixtures.load(gpu, op, tensors, self._load)
            finish([tensors[weight.name] for weight in op.weights])
        for product in heads:
            self.heads[product.output] = self._load_heads(product)
            finish([tensors[name] for name in product.matrices])
        for norm in _norms_of(lowered):
            self.norm_weight(norm)
        for name in _vectors_of(lowered):
            self.vector(name)
        self._tensors = {}

    def _load_dense(self, group: tuple[str, ...], finish: Release) -> None:
        """Load unpacked matrices with the same input as one matrix (sum of widths, depth)."""
        shapes = [self._tensors[name].shape for name in group]
        size = sum(shape[0] for shape in shapes), shapes[0][1]
        stacked = torch.empty(size, dtype=self._gpu.element, device=self._gpu.device)
        first = 0
        for name, shape in zip(group, shapes, strict=True):
            self.matrices[name] = stacked[first : first + shape[0]]
            self._load(self._tensors[name], self.matrices[name])
            first += shape[0]
            finish([self._tensors[name]])
        self.products[group] = stacked

    def _load_heads(self, op: ops.HeadLinear) -> Tensor:
        shape = op.num_heads, op.head_width, op.in_width
        stack = torch.empty(shape, dtype=self._gpu.element, device=self._gpu.device)
        for matrix, name in zip(stack, op.matrices, strict=True):
            self._load(self._tensors[name], matrix)
        return stack

    @property
    def num_bytes(self) -> int:
        """Return the bytes of GPU memory of all weights."""
        products = {tensor.data_ptr(): tensor for tensor in self.products.values()}
        tensors = *products.values(), *self._vectors.values(), *self._ones_vectors.values()
        tensors += tuple(self.heads.values())
        num_bytes: int = sum(t.nbytes for t in tensors)
        packed = *self.packed.values(), *self.joined.values()
        num_bytes += sum(matrix.num_bytes for matrix in packed)
        return num_bytes + sum(experts.num_bytes for experts in self.experts.values())

    def factors(self, names: tuple[str, ...]) -> Sequence[Tensor | PackedMatrix]:
        """Return the matrices of products with the same input.

        Concatenated matrices count as one.
        """
        if names in self.products:
            return (self.products[names],)
        return [
            self.joined[run]
            if len(run) > 1
            else self.packed[run[0]]
            if run[0] in self.packed
            else self.matrices[run[0]]
            for run in self._runs(names)
        ]

    def _runs(self, names: tuple[str, ...]) -> list[tuple[str, ...]]:
        runs = runs_of_neighbours([self.shapes.get(name) for name in names])
        return [tuple([names[index] for index in run]) for run in runs]

    def _join(self, groups: Sequence[tuple[str, ...]]) -> None:
        """Concatenate neighbouring packed matrices with the same input, to save launches."""
        runs = [run for group in groups for run in self._runs(group) if len(run) > 1]
        readers = Counter(name for run in runs for name in run)
        for run in runs:
            parts = [self.packed[name] for name in run]
            self.joined[run] = concatenate(parts, sum(part.width for part in parts))
            for name in run:
                readers[name] -= 1
                if not readers[name]:
                    del self.packed[name]

    def vector(self, name: str, offset: float = 0.0) -> Tensor:
        """Return a vector (one-dimensional weight) in float32 on the GPU, with an offset added."""
        if (name, offset) not in self._vectors:
            values = self._tensors[name].dequantize().reshape(-1) + np.float32(offset)
            self._vectors[name, offset] = torch.from_numpy(values).to(self._gpu.device)
        return self._vectors[name, offset]

    def norm_weight(self, op: ops.RMSNorm) -> Tensor:
        """Return the weight of an RMSNorm on the GPU, with its offset; ones if it has no weight."""
        if op.weight is not None:
            return self.vector(op.weight, op.offset)
        if op.grain not in self._ones_vectors:
            vector = torch.ones(op.grain, dtype=torch.float32, device=self._gpu.device)
            self._ones_vectors[op.grain] = vector
        return self._ones_vectors[op.grain]

    def _load(self, tensor: QuantTensor, target: Tensor) -> None:
        dtype = _STORED.get(tensor.format.name)
        if dtype is not None:
            stored = torch.from_numpy(tensor.data.copy()).view(dtype)
            target.copy_(stored.view(target.shape))
        else:
            target.copy_(torch.from_numpy(tensor.dequantize()))
        if dtype != self._gpu.element:
            self.converted[tensor.format.name] += 1


def _norms_of(lowered: GpuLowered) -> Iterator[ops.RMSNorm]:
    for record in lowered.records:
        norms = [source.norm for source in sources(record)]
        norms += [record.post, record.norm] if isinstance(record, AddNorm) else []
        yield from (norm for norm in norms if norm is not None)


def _vectors_of(lowered: GpuLowered) -> Iterator[str]:
    """Yield the names of biases and scale factors that launch records read."""
    for record in lowered.records:
        names = [columns.bias for columns in columns_read(record)]
        match record:
            case AddNorm(factor=name) | Combine(weight=name):
                names.append(name)
            case MixExperts(route=ops.Route(bias=name, factors=other)):
                names += [name, other]
        yield from (name for name in names if name is not None)
