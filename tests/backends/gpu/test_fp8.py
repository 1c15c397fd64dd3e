"""Products of E4M3 with E4M3, and folders in FP8 whose codes are not changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from support.programs import SPEC, random_tensors  # noqa: E402
from support.published import compressed_config, fp8, write_published  # noqa: E402
from twostroke.backends.gpu import products  # noqa: E402
from twostroke.backends.gpu.backend import GpuBackend  # noqa: E402
from twostroke.backends.gpu.device import find_device  # noqa: E402
from twostroke.backends.gpu.kernels import products_fp8  # noqa: E402
from twostroke.backends.gpu.kernels.common import Parts  # noqa: E402
from twostroke.backends.gpu.kernels.packed import pack  # noqa: E402
from twostroke.backends.gpu.launch import interpreted, listing  # noqa: E402
from twostroke.backends.gpu.weight_layout import layout_of  # noqa: E402
from twostroke.backends.reference import ReferenceBackend  # noqa: E402
from twostroke.lab.measure.divergence import compare  # noqa: E402
from twostroke.model.families import build_program  # noqa: E402
from twostroke.model.quant import QuantTensor, e4m3  # noqa: E402
from twostroke.model.quant.floats import E4M3, nearest_e4m3  # noqa: E402
from twostroke.model.weights.load import load_path  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.weight_layout import PackedLayout
    from twostroke.model.program import Program

TOKENS = [(7 * i * i + 3) % 60 for i in range(75)]
HAS_LIBRARY = torch.__version__ >= (2, 14)
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="needs PyTorch 2.14")


def rounded(x: np.ndarray, group: int) -> np.ndarray:
    """Return rows rounded to E4M3 with a scale for each group; the last group may be shorter."""
    out = np.empty_like(x)
    for first in range(0, x.shape[1], group):
        part = x[:, first : first + group]
        scale = np.abs(part).max(axis=1, keepdims=True) / np.float32(448)
        scale[scale == 0] = 1
        out[:, first : first + group] = E4M3[nearest_e4m3(part / scale)] * scale
    return out


def rounded_on_gpu(gpu: Gpu, header: Any, x: Any, layout: PackedLayout) -> products_fp8.RoundedRows:
    size = products_fp8.rounded_bytes(*x.shape, layout)
    scratch = torch.zeros(size, dtype=torch.uint8)
    return products_fp8.round_rows(gpu, header, len(x), x, layout, scratch)


@pytest.mark.parametrize(("group", "depth"), [(128, 384), (320, 320)])
def test_many_rows_are_rounded_and_multiplied(group: int, depth: int) -> None:
    rng = np.random.default_rng(group)
    width, rows = 70, 131
    tensor = QuantTensor.from_floats(rng.standard_normal((width, depth), np.float32), e4m3(group))
    weight, gpu = pack(tensor, torch.device("cpu")), interpreted()
    x = rng.standard_normal((rows + 1, depth)).astype(np.float16)
    x[:, 3] *= 30
    x[0] = 0
    x[2] *= np.float16(1e-3)
    output = torch.zeros((rows + 1, width + 8), dtype=torch.float16)
    output_parts = Parts(output, width + 8, width + 8).columns(8, width)
    header = torch.tensor([rows, 0, 0, 0], dtype=torch.int32)
    assert products_fp8.is_supported(gpu, rows, weight, output_parts)
    for layer in (gpu, replace(gpu, architecture=80), replace(gpu, same_tokens=True)):
        assert products_fp8.is_supported(layer, rows, weight, output_parts) == (layer is gpu)
    ours = rounded_on_gpu(gpu, header, torch.from_numpy(x), weight.layout)
    products_fp8.launch(gpu, header, rows + 1, ours, weight, output_parts)
    exact = rounded(x[:rows].astype(np.float32), group) @ tensor.dequantize().T
    np.testing.assert_allclose(output.numpy()[:rows, 8:], exact, rtol=2e-3, atol=2e-3)
    assert not output[rows].any()
    assert not output[:, :8].any()


@needs_library
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_very_many_rows_are_multiplied_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring matrices share the rounded rows, and are unpacked one after another."""
    monkeypatch.setattr(products_fp8, "LIBRARY_ROWS", 96)
    rng, calls, start = np.random.default_rng(7), list[Any](), products_fp8.write_rows
    monkeypatch.setattr(products_fp8, "write_rows", lambda *x, **y: calls.append(start(*x, **y)))
    depth, rows = 384, 101
    widths, groups = (80, 48, 64, 96, 70, 64), (depth, depth, 128, depth, depth, depth)
    tensors = [
        QuantTensor.from_floats(rng.standard_normal((width, depth), np.float32), e4m3(group))
        for width, group in zip(widths, groups, strict=True)
    ]
    weights, gpu = [pack(tensor, torch.device("cpu")) for tensor in tensors], interpreted()
    x = rng.standard_normal((rows, depth)).astype(np.float16)
    x[:, 3] *= 30
    x[0] = 0
    x[2, 7], x[5, 380] = np.nan, np.inf
    stride = sum(widths) + 10  # 432
    output = torch.zeros((rows, stride), dtype=torch.float16)
    header = torch.tensor([rows, 0, 0, 0], dtype=torch.int32)
    shapes = [(weight.layout, weight.width, depth) for weight in weights]
    size = max(products_fp8.scratch_bytes(gpu, rows, shape) for shape in shapes)
    scratch = torch.full((size,), 0x7F, dtype=torch.uint8)
    output_parts = Parts(output, stride, stride)
    products.multiply(
        gpu, header, rows, torch.from_numpy(x), weights, output_parts, scratch=scratch
    )
    assert len(calls) == 3
    first, results = 0, output.numpy()
    is_finite = np.isfinite(x).all(axis=1)
    for tensor, width, group in zip(tensors, widths, groups, strict=True):
        columns = results[:, first : first + width]
        exact = rounded(x[is_finite].astype(np.float32), group) @ tensor.dequantize().T
        np.testing.assert_allclose(columns[is_finite], exact, rtol=2e-3, atol=2e-3)
        if group == depth and not (width % 16 or first % 8):
            assert not np.isfinite(
                columns[~is_finite]
            ).any()  # Triton's interpreter has no E4M3 NaN
        first += width
    assert not results[:, first:].any()


def test_the_library_is_used_where_it_writes_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    layout = layout_of(e4m3(256), 256)
    assert layout is not None

    def has_matrix(gpu: Gpu, rows: int = 4096, width: int = 4096) -> bool:
        size = products_fp8.scratch_bytes(gpu, rows, (layout, width, 256))
        return size > products_fp8.rounded_bytes(rows, 256, layout)

    gpu = listing([], 90)
    assert has_matrix(gpu)
    assert not has_matrix(gpu, 1023)
    assert not has_matrix(gpu, width=4104)
    assert not has_matrix(replace(gpu, element=torch.float16))
    assert not any(has_matrix(listing([], architecture)) for architecture in (89, 100, 120))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert not has_matrix(gpu)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter casts the NaN in NumPy
def test_a_value_that_is_not_a_number_stays_in_its_row() -> None:
    rng = np.random.default_rng(0)
    tensor = QuantTensor.from_floats(rng.standard_normal((64, 256), np.float32), e4m3(128))
    layout, gpu = pack(tensor, torch.device("cpu")).layout, interpreted()
    x = rng.standard_normal((70, 256)).astype(np.float16)
    x[3, 5] = np.nan
    header = torch.tensor([70, 0, 0, 0], dtype=torch.int32)
    result = rounded_on_gpu(gpu, header, torch.from_numpy(x), layout)
    is_nan = E4M3[result.codes.view(torch.uint8).numpy()[:70]]
    assert np.argwhere(np.isnan(is_nan)).tolist() == [[3, 10]]  # where packed rows have input 5


FOLDERS = {
    "tensor": (fp8(None, None), {"strategy": "tensor"}),
    "channel": (fp8(1, None), {"strategy": "channel"}),
    "block": (fp8(128, 128, "weight_scale_inv"), None),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_stay_e4m3_and_agree_with_the_reference(tmp_path: Path, kind: str) -> None:
    make, options = FOLDERS[kind]
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if options is not None:
        config = compressed_config("float-quantized", num_bits=8, type="float", **options)
    write_published(tmp_path, make, config)
    loaded = load_path(tmp_path)
    program = build_program(loaded.spec)
    tokens = TOKENS[:16]
    right = ReferenceBackend(program, loaded.tensors, 1, 64).score(tokens)
    kwargs = {"element": torch.float16, "kv_format": "f16", "max_rows": 16, "piece": 32}
    ours = GpuBackend(program, loaded.tensors, 8, 16, find_device(), **kwargs)
    result = compare([(right, ours.score(tokens), tokens)])
    assert result.mean_kl < 1e-4
    assert "E4M3" not in ours.facts.detail, "no matrix was converted"


@pytest.mark.parametrize("name", ["launch", pytest.param("write_rows", marks=needs_library)])
def test_steps_of_many_rows_are_close(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    program = build_program(replace(SPEC, num_layers=1, hidden_size=256, ffn_size=256, head_dim=64))
    tensors = fp8_tensors(program)
    right = ReferenceBackend(program, tensors, 1, 128).score(TOKENS)
    kwargs = {"element": torch.float16, "kv_format": "f16", "max_rows": 128}
    launched, start = [], getattr(products_fp8, name)
    monkeypatch.setattr(products_fp8, name, lambda *x, **y: launched.append(start(*x, **y)))
    if name == "write_rows":
        monkeypatch.setattr(products_fp8, "LIBRARY_ROWS", 65)
    ours = GpuBackend(program, tensors, 2, 128, find_device(), **kwargs)
    launched.clear()
    result = compare([(right, ours.score(TOKENS), TOKENS)])
    assert launched
    assert result.mean_kl < 2e-2


def fp8_tensors(program: Program) -> dict[str, QuantTensor]:
    """Return random weights: attention has a scale for each block, others one for each row."""
    results = {}
    for name, tensor in random_tensors(program).items():
        is_product = len(tensor.shape) > 1 and name.startswith("blk.")
        fmt = e4m3(128) if "attn" in name else e4m3(tensor.shape[-1])
        values = tensor.dequantize()
        results[name] = QuantTensor.from_floats(values, fmt) if is_product else tensor
    return results
