"""Weights on the device, in the element type; what had another is converted as it is loaded."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from twostroke.backends.gpu.lowered import AddNorm, Embed, Products, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.lowered import Lowered
    from twostroke.program import ops
    from twostroke.quant import QuantTensor

    Progress = Callable[[int, int], None]
    Release = Callable[[Sequence[QuantTensor]], None]

_STORED = {"F16": torch.float16, "BF16": torch.bfloat16}


def element_of(tensors: Mapping[str, QuantTensor]) -> torch.dtype:
    """Return the type of products' inputs: that of most of the matrices' bytes, if it is F16."""
    num_bytes: Counter[str] = Counter()
    for tensor in tensors.values():
        if len(tensor.shape) > 1:
            num_bytes[tensor.format.name] += tensor.num_bytes
    most = max(num_bytes, key=num_bytes.__getitem__, default="")
    return _STORED.get(most, torch.bfloat16)


def device_bytes(tensors: Mapping[str, QuantTensor]) -> int:
    """Return how many bytes weights take on the device."""
    return sum(
        tensor.num_values * (2 if len(tensor.shape) > 1 else 4) for tensor in tensors.values()
    )


class DeviceWeights:
    """Matrices in the element type by name, those that read one input together, and vectors.

    `converted` counts the matrices of each format that was not the element type.
    """

    def __init__(
        self,
        gpu: Gpu,
        lowered: Lowered,
        tensors: Mapping[str, QuantTensor],
        release: Release = lambda _: None,
        progress: Progress = lambda *_: None,
    ) -> None:
        """Load what a lowered Program reads; see `PackedWeights.pack` for the two callbacks."""
        self._gpu, self._tensors = gpu, tensors
        self.converted: Counter[str] = Counter()
        self.matrices: dict[str, Tensor] = {}
        self.products: dict[tuple[str, ...], Tensor] = {}
        self._vectors: dict[tuple[str, float], Tensor] = {}
        groups = [record.weights for record in lowered.records if isinstance(record, Products)]
        tables = [record.table for record in lowered.records if isinstance(record, Embed)]
        names = {name for group in groups for name in group} | {*tables, lowered.logits.weight}
        total, done = sum(tensors[name].num_bytes for name in names), 0
        for group in [*groups, *((name,) for name in (*tables, lowered.logits.weight))]:
            if group in self.products or (len(group) == 1 and group[0] in self.matrices):
                continue
            shapes = [tensors[name].shape for name in group]
            whole = torch.empty(
                (sum(shape[0] for shape in shapes), shapes[0][1]),
                dtype=gpu.element,
                device=gpu.device,
            )
            first = 0
            for name, shape in zip(group, shapes, strict=True):
                self.matrices[name] = whole[first : first + shape[0]]
                self._load(tensors[name], self.matrices[name])
                first += shape[0]
                done += tensors[name].num_bytes
                release([tensors[name]])
                progress(min(done, total), total)
            self.products[group] = whole
        for name, offset in _vectors_of(lowered):
            self.vector(name, offset)
        self._tensors = {}

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        held = {tensor.data_ptr(): tensor for tensor in self.products.values()}
        return sum(t.nbytes for t in (*held.values(), *self._vectors.values()))

    def product(self, names: tuple[str, ...]) -> Tensor:
        """Return matrices that read one input as one, (all outputs, inputs)."""
        return self.products[names] if names in self.products else self.matrices[names[0]]

    def vector(self, name: str, offset: float = 0.0) -> Tensor:
        """Return a weight of one dimension in float32, with an offset added."""
        if (name, offset) not in self._vectors:
            values = self._tensors[name].dequantize().reshape(-1) + np.float32(offset)
            self._vectors[name, offset] = torch.from_numpy(values).to(self._gpu.device)
        return self._vectors[name, offset]

    def _load(self, tensor: QuantTensor, target: Tensor) -> None:
        dtype = _STORED.get(tensor.format.name)
        if dtype is not None:
            stored = torch.from_numpy(tensor.data.copy()).view(dtype)
            target.copy_(stored.view(target.shape))
        else:
            target.copy_(torch.from_numpy(tensor.dequantize()))
        if dtype != self._gpu.element:
            self.converted[tensor.format.name] += 1


def _vectors_of(lowered: Lowered) -> Iterator[tuple[str, float]]:
    """Yield the norms' weights and the biases that records read."""
    for record in lowered.records:
        norms: list[ops.RMSNorm | None] = []
        if isinstance(record, AddNorm):
            norms = [record.post, record.norm]
        elif isinstance(record, Store):
            norms = [source.norm for source in record.sources]
        yield from ((norm.weight, norm.offset) for norm in norms if norm is not None)
        for name in record.__struct_fields__:
            value = getattr(record, name)
            places = [source.place for source in value] if name == "sources" else [value]
            for place in places:
                if (bias := getattr(place, "bias", None)) is not None:
                    yield bias, 0.0
