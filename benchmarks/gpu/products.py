"""Compare ways to multiply by packed matrices on a GPU: by tiles, dequantized first, and in BF16.

Run it with `python -m benchmarks.gpu.products` on a machine with a GPU.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.backends.gpu.launch import Gpu

_SHAPES: Final = ((4096, 4096), (28_672, 4096), (4096, 14_336))  # of an 8B: outputs, inputs
_ROWS: Final = (32, 64, 128, 256, 512)
_COPIES_BYTES: Final = 256 << 20  # of a matrix, more than the L2 cache has
_REPEATS: Final = 5
_LARGEST_ERROR: Final = 0.02  # of the largest product


def products(
    formats: tuple[str, ...] = ("Q4_K",),
    shapes: tuple[tuple[int, int], ...] = _SHAPES,
    many: tuple[int, ...] = _ROWS,
) -> dict[str, Any]:
    """Return microseconds of each way for each format, shape and number of rows."""
    from twostroke.backends.gpu.device import find_device

    device, times_by_case = find_device(), {}
    gpu = device.gpu(_element(is_interpreted=device.is_interpreted))
    for fmt in formats:
        for shape in shapes:
            ways = _Ways(gpu, fmt, shape, max(many))
            for rows in many:
                times_by_case[f"{fmt} {shape[0]} x {shape[1]}, {rows} rows"] = ways.times(rows)
    return times_by_case


def _element(*, is_interpreted: bool) -> Any:
    import torch

    return torch.float16 if is_interpreted else torch.bfloat16  # as interpreted products need


class _Ways:
    """The ways to multiply by one matrix, of which there are copies."""

    def __init__(self, gpu: Gpu, fmt: str, shape: tuple[int, int], most_rows: int) -> None:
        import torch

        from twostroke.backends.gpu.kernels import products_packed
        from twostroke.backends.gpu.kernels.packed import pack

        self._gpu, (self._width, self._depth) = gpu, shape
        rng = np.random.default_rng(1)
        tensor = QuantTensor.from_floats(
            rng.standard_normal((64, self._depth), np.float32), FORMATS[fmt]
        )
        data = np.broadcast_to(tensor.data, (self._width // 64, *tensor.data.shape))
        repeated_tensor = QuantTensor(tensor.format, shape, data.reshape(self._width, -1))
        packed = pack(repeated_tensor, gpu.device)
        count = 1 if gpu.is_interpreted else -(-_COPIES_BYTES // packed.num_bytes)
        self._packed = [packed, *(pack(repeated_tensor, gpu.device) for _ in range(count - 1))]
        tensor_kind = {"dtype": gpu.element, "device": gpu.device}
        self._dense = torch.empty(shape, **tensor_kind)
        products_packed.unpack_matrix(gpu, packed, self._dense)
        self._scratch = torch.empty(shape, **tensor_kind)
        x = rng.standard_normal((most_rows, self._depth), np.float32)
        self._x = torch.from_numpy(x).to(**tensor_kind)

    def times(self, rows: int) -> dict[str, Any]:
        """Return microseconds of each way."""
        import torch

        from twostroke.backends.gpu.kernels import products_packed, products_tiles
        from twostroke.backends.gpu.kernels.common import Parts

        gpu, x = self._gpu, self._x[:rows]
        header = torch.tensor([rows, 0, 0, 0], dtype=torch.int32, device=gpu.device)
        right = (x @ self._dense.T).float()
        out = torch.empty((rows, self._width), dtype=gpu.element, device=gpu.device)
        floats = {"dtype": torch.float32, "device": gpu.device}
        sums = torch.empty((products_tiles.MAX_PARTS, rows, self._width), **floats)
        results: dict[str, Any] = {}
        layout = self._packed[0].layout
        sizes = (rows, *(size for size in (64, 128) if size < rows))
        for tile in dict.fromkeys(products_tiles.tile_of(gpu, size, layout) for size in sizes):
            best = products_tiles.num_parts(gpu, rows, self._width, self._depth)
            for parts in dict.fromkeys((1, best)):
                output_parts = Parts(sums, self._width, self._width, parts, sums[0].numel())
                if parts == 1:
                    output_parts = Parts(out, self._width, self._width)

                def multiply(
                    packed: Any, tile: Any = tile, output_parts: Any = output_parts
                ) -> None:
                    products_tiles.launch(gpu, header, rows, x, packed, output_parts, tile)

                name = f"{tile.rows} by {tile.outputs}, {parts} parts"
                results[name] = self._us(multiply)
                total = (sums[:parts].sum(0) if parts > 1 else out).float()
                error = ((total - right).abs().max() / right.abs().max()).item()
                if not error <= _LARGEST_ERROR:
                    results[f"{name}: wrong"] = error

        def write_out(packed: Any) -> None:
            products_packed.unpack_matrix(gpu, packed, self._scratch)
            torch.mm(x, self._scratch.T, out=out)

        results["written out"] = self._us(write_out)
        results["not packed"] = self._us(lambda _: torch.mm(x, self._dense.T, out=out))
        return results

    def _us(self, multiply: Callable[[Any], None]) -> float | None:
        """Return the median time of a graph's products with all copies, each; None if emulated."""
        import torch

        multiply(self._packed[0])
        if self._gpu.is_interpreted:
            return None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for packed in self._packed:
                multiply(packed)
        times: list[float] = []
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / len(self._packed))
        return round(statistics.median(times), 2)
