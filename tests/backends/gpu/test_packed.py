"""Packed matrices and their products agree with the values that their formats define."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from twostroke.backends.gpu.kernels import packed, products_packed, take_packed  # noqa: E402
from twostroke.backends.gpu.kernels.common import Parts  # noqa: E402
from twostroke.backends.gpu.kernels.packed import pack  # noqa: E402
from twostroke.backends.gpu.launch import interpreted  # noqa: E402
from twostroke.backends.gpu.weight_layout import matrix_layout, packed_bytes  # noqa: E402
from twostroke.model.quant import FORMATS, QuantTensor, e4m3, grouped  # noqa: E402

CPU = torch.device("cpu")
FORMS = (
    *(FORMATS[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")),
    grouped(4, 128, "f16", zero=True),
    grouped(4, 64, "bf16"),
    grouped(4, 32, "f32"),
    grouped(8, 128, "f16"),
    grouped(4, 512, "f16", zero=True),
    grouped(8, 320, "f32"),
    e4m3(32),
    e4m3(128),
    e4m3(320),
)


def header(num_rows: int) -> torch.Tensor:
    return torch.tensor([num_rows, 0, 0, 0], dtype=torch.int32)


def depth_of(fmt) -> int:
    return 512 if 320 % fmt.block_size else 320


def random_matrix(rng, fmt, shape) -> QuantTensor:
    return QuantTensor.from_floats(rng.standard_normal(shape, np.float32), fmt)


@pytest.mark.parametrize("fmt", FORMS, ids=lambda fmt: fmt.name)
def test_a_matrix_is_written_out_exactly(fmt) -> None:
    rng = np.random.default_rng(1)
    depth = depth_of(fmt)
    tensor = random_matrix(rng, fmt, (70, depth))
    output = torch.zeros((70, depth))
    gpu = interpreted(torch.float32)
    products_packed.unpack_matrix(gpu, pack(tensor, CPU), output)
    np.testing.assert_allclose(output.numpy(), tensor.dequantize(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fmt", FORMS, ids=lambda fmt: fmt.name)
def test_rows_of_a_table_are_taken_exactly(fmt) -> None:
    depth = depth_of(fmt)
    tensor = random_matrix(np.random.default_rng(3), fmt, (70, depth))
    row_indices, results = torch.tensor([69, -2, 0, 5], dtype=torch.int32), torch.zeros((3, 8))
    results = results.int()
    results[1, 0] = 64  # what the last step drew
    output = torch.zeros((4, depth))
    table, arguments = pack(tensor, CPU), {"factor": 2.0, "results": results}
    take_packed.launch(interpreted(), header(3), 4, table, row_indices, output, **arguments)
    expected = 2 * tensor.dequantize()[[69, 64, 0]]
    np.testing.assert_allclose(output.numpy()[:3], expected, rtol=1e-6, atol=1e-6)
    assert not output[3].any()  # no row of the step


@pytest.mark.parametrize("fmt", FORMS, ids=lambda fmt: fmt.name)
def test_products_of_few_and_of_more_rows(fmt) -> None:
    rng = np.random.default_rng(2)
    width, depth = 70, depth_of(fmt)
    tensor = random_matrix(rng, fmt, (width, depth))
    weight = pack(tensor, CPU)
    for rows, parts in ((3, 2), (9, 1), (20, 2), (70, 1), (130, 2)):
        x = rng.standard_normal((rows + 1, depth)).astype(np.float16)
        output = torch.zeros((parts, rows + 1, width + 8))
        output_parts = Parts(output, width + 8, width + 8, parts, output[0].numel()).columns(
            8, width
        )
        products_packed.launch(
            interpreted(), header(rows), rows + 1, torch.from_numpy(x), weight, output_parts
        )
        expected = x[:rows].astype(np.float32) @ tensor.dequantize().T
        got = output.sum(0).numpy()
        np.testing.assert_allclose(got[:rows, 8:], expected, rtol=3e-3, atol=0.06)
        assert not got[rows].any()
        assert not got[:, :8].any()


@pytest.mark.parametrize("fmt", FORMS, ids=lambda fmt: fmt.name)
def test_bytes_are_known_before_a_matrix_is_packed(fmt) -> None:
    for width in (70, 128):
        tensor = random_matrix(np.random.default_rng(6), fmt, (width, depth_of(fmt)))
        layout = matrix_layout(tensor)
        assert layout is not None
        assert pack(tensor, CPU).num_bytes == packed_bytes(layout, *tensor.shape)


def test_rows_that_repeat_without_memory_are_packed() -> None:
    """Benchmarks make weights of real shapes from such rows."""
    tensor = random_matrix(np.random.default_rng(5), FORMS[0], (1, 512))
    data = np.broadcast_to(tensor.data, (64, tensor.data.shape[1]))
    result = pack(QuantTensor(tensor.format, (64, 512), data), CPU)
    right = pack(QuantTensor(tensor.format, (64, 512), data.copy()), CPU)
    assert torch.equal(result.codes, right.codes)


@pytest.mark.parametrize("fmt", FORMS[3:7], ids=lambda fmt: fmt.name)
def test_a_large_matrix_is_packed_in_parts(fmt, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_matrix(np.random.default_rng(4), fmt, (200, 512))
    packed_whole = pack(tensor, CPU)
    monkeypatch.setattr(packed, "_CODES_AT_ONCE", 70 * 512)
    parts = pack(tensor, CPU).pointers
    for name, right in packed_whole.pointers.items():
        result = parts[name]
        assert result.is_contiguous()
        assert result.shape == right.shape
        assert torch.equal(result.view(torch.uint8), right.view(torch.uint8))
