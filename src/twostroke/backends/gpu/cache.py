"""`DevicePages`: the KV pages on the device, and the layout of each layer in a page."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from twostroke.backends.gpu.kernels.attention import HeadLayout
from twostroke.backends.gpu.transfers import on
from twostroke.core.errors import BackendError
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu
    from twostroke.model.program import Program

KV_TYPES: Final = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.uint8,
}
_SCALED: Final = ("int8", "fp8")
_SCALE_BYTES: Final = 2
_GRAIN: Final = 64  # pages and layers start at multiples of 64 values


class DevicePages:
    """The KV pages in GPU memory, all of the same size; a `PageMemory`.

    For each layer of its cache group, a page has keys (kv_heads, page_size, head_dim) and then
    values of the same shape. In 8-bit formats, float16 scales of keys (kv_heads, page_size) and
    then of values follow. For latent attention a page has only keys.

    Pages are copied to and from the host on a separate stream, without waiting for steps, because
    no step in flight uses a page that is read or filled.
    """

    def __init__(
        self, gpu: Gpu, program: Program, num_pages: int, page_size: int, kv_format: str
    ) -> None:
        self.page_size, self.kv_format = page_size, kv_format
        self._layer_offsets: dict[int, tuple[int, int]] = {}  # group and first value of each layer
        layers = program.cache_layers
        stride = 0
        for number, group in enumerate(program.cache_groups):
            first = 0
            for layer in group.layers:
                self._layer_offsets[layer] = number, first
                stored = layers[layer]
                heads = stored.num_rows * stored.num_kv_heads if kv_format in _SCALED else 0
                size = stored.values_per_token + _SCALE_BYTES * heads
                first += -(-page_size * size // _GRAIN) * _GRAIN
            stride = max(stride, first)
        self.page_stride = max(stride, _GRAIN)
        size = num_pages * self.page_stride
        self.memory = torch.zeros(size, dtype=KV_TYPES[kv_format], device=gpu.device)
        is_gpu = gpu.device.type == "cuda"
        self._stream = torch.cuda.Stream(gpu.device) if is_gpu else None

    @property
    def page_bytes(self) -> int:
        """Return the number of bytes of a KV page."""
        size: int = self.memory.itemsize
        return self.page_stride * size

    @property
    def mapped(self) -> None:
        """Return None, because the KV pages are in the GPU's memory."""

    def read(self, page: int) -> memoryview[Any]:
        """Copy a KV page to host memory, and return its bytes."""
        with self._copying():
            return memoryview(self._bytes(page).to("cpu", copy=True).numpy())

    @contextmanager
    def filling(self, page: int) -> Iterator[memoryview[Any]]:
        """Yield a buffer in host memory; when the context ends, copy it to the KV page."""
        content = torch.empty(self.page_bytes, dtype=torch.uint8)
        yield memoryview(content.numpy())
        with self._copying():
            self._bytes(page).copy_(content)

    def close(self) -> None:
        """Free the GPU memory of the KV pages, even if other objects refer to them."""
        self.memory = self.memory.new_empty(0)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Run the `with` block on the CUDA stream for page copies.

        Raises:
            BackendError: the device has failed.
        """
        try:
            with on(self.memory.device), torch.cuda.stream(self._stream):
                yield
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            raise BackendError(f"The GPU did not copy a page: {reason}.") from error

    def _bytes(self, page: int) -> Tensor:
        return self.memory.view(torch.uint8).view(-1, self.page_bytes)[page]

    def heads(self, op: ops.Attention, table_width: int, num_groups: int) -> HeadLayout:
        """Return the shape of an attention layer, and the layout of its keys and values in pages.

        `table_width`: the number of pages of each cache group in a page table.
        """
        group, first = self._layer_offsets[op.layer]
        size = self.page_size * op.num_kv_heads * op.head_dim
        end = first + size * op.cache_layer.num_rows
        return HeadLayout(
            kv_format=self.kv_format if self.kv_format in _SCALED else "",
            num_heads=op.num_heads,
            num_kv_heads=op.num_kv_heads,
            head_dim=op.head_dim,
            scale=op.scale,
            window=op.window or 0,
            soft_cap=op.soft_cap or 0.0,
            page_size=self.page_size,
            page_stride=self.page_stride,
            keys_at=first,
            values_at=first + size,
            scales_at=end // _SCALE_BYTES,
            rotated=op.rotated if isinstance(op, ops.LatentAttention) else 0,
            table_stride=table_width * num_groups,
            group_at=table_width * group,
        )
