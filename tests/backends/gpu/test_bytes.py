"""Keys and values of 8 bits: stored numbers and whole models agree with NumPy twins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from msgspec.structs import replace  # noqa: E402

from support.programs import PROGRAMS, SPEC, VOCAB_SIZE, random_tensors  # noqa: E402
from twostroke.backends.cpu.keys import balances  # noqa: E402
from twostroke.backends.gpu.backend import GpuBackend  # noqa: E402
from twostroke.backends.gpu.cache import DevicePages  # noqa: E402
from twostroke.backends.gpu.device import find_device  # noqa: E402
from twostroke.backends.gpu.kernels import rope  # noqa: E402
from twostroke.backends.gpu.kernels.common import Parts  # noqa: E402
from twostroke.backends.gpu.launch import interpreted  # noqa: E402
from twostroke.backends.reference import ReferenceBackend, backend  # noqa: E402
from twostroke.backends.reference.operations import PagedCache  # noqa: E402
from twostroke.model.families import build_program  # noqa: E402
from twostroke.model.families.spec import WindowSpec  # noqa: E402
from twostroke.model.program.kv_layout import FORMATS  # noqa: E402
from twostroke.model.program.ops import Attention  # noqa: E402
from twostroke.model.quant.floats import E4M3  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKENS = [(7 * i * i + 3) % VOCAB_SIZE for i in range(75)]


def hadamard(dim: int) -> Any:
    """Return the Hadamard matrix for heads of `dim` values, scaled to be its own inverse."""
    width = dim & -dim
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(dim // width), matrix / np.sqrt(width))


def rounded(heads: Any, kv_format: str) -> Any:
    """Return heads (..., dim) rounded to a KV format: codes times scales."""
    heads = np.clip(heads, -65504, 65504)
    max_code = 127 if kv_format == "int8" else 448
    scale = (np.abs(heads).max(-1, keepdims=True) / max_code).astype(np.float16).astype(np.float32)
    exact = np.clip(heads / np.where(scale == 0, 1, scale), -max_code, max_code)
    if kv_format == "int8":
        return np.round(exact) * scale
    code_values = np.sort(E4M3[np.isfinite(E4M3)])
    after = np.clip(np.searchsorted(code_values, exact), 1, len(code_values) - 1)
    low, high = code_values[after - 1], code_values[after]
    return np.where(exact - low < high - exact, low, high) * scale


def stored(
    keys: Any, values: Any, kv_format: str, mean: Any = 0, factor: Any = 1
) -> tuple[Any, Any]:
    """Return keys and values (..., heads, dim) as attention reads them after the store."""
    if kv_format == "fp8":
        return rounded(keys, "fp8"), rounded(values, "fp8")
    matrix = hadamard(keys.shape[-1]).astype(np.float32)
    width = keys.shape[-1] & -keys.shape[-1]
    spread = (keys - mean) * factor @ matrix / np.float32(np.sqrt(width))
    result = rounded(spread, "int8") @ matrix * np.float32(np.sqrt(width))
    return result / factor + mean, rounded(values, "int8")


def read(page: Any, heads: Any, offset: int) -> list[Any]:
    """Return a token's keys and values (kv_heads, dim) in a page: codes times scales.

    `offset` is the token's offset in the page.
    """
    heads_read, size = [], heads.num_kv_heads * heads.page_size
    shape = heads.num_kv_heads, heads.page_size, -1
    for kind, start in enumerate((heads.keys_at, heads.values_at)):
        codes = page[start : start + size * heads.head_dim].numpy().reshape(shape)[:, offset]
        first = heads.scales_at + kind * size
        scales = page.view(torch.float16)[first : first + size].numpy().reshape(shape)[:, offset]
        numbers = E4M3[codes] if heads.kv_format == "fp8" else codes.astype(np.float32)
        heads_read.append(numbers * scales.astype(np.float32))
    return heads_read


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
@pytest.mark.parametrize("dim", [64, 24])
def test_heads_are_stored_with_a_scale_each(kv_format: str, dim: int) -> None:
    rng = np.random.default_rng(dim)
    rows, heads, kv_heads, page_size = 5, 4, 2, 16
    op = Attention("y", "q", "k", "v", 0, heads, kv_heads, dim, 1.0)
    spec = replace(SPEC, num_layers=1, head_dim=dim)
    program = build_program(spec)
    pages = DevicePages(interpreted(), program, 8, page_size, kv_format)
    assert pages.page_bytes >= program.page_bytes(page_size, FORMATS[kv_format])
    width = dim * (heads + 2 * kv_heads)
    product = (rng.standard_normal((rows, width)) * rng.choice([1e-3, 1, 50], (rows, 1))).astype(
        np.float32
    )
    product[1] = 0
    product[2, -1] = 1e6  # more than a page holds
    parts, at, sources = Parts(torch.from_numpy(product), width, width), 0, []
    for count in (heads, kv_heads, kv_heads):
        sources.append(rope.HeadSource(parts.columns(at, count * dim)))
        at += count * dim
    mean, factor = rng.standard_normal((kv_heads, dim)), 2.0 ** rng.integers(-3, 4, (kv_heads, dim))
    balance = np.stack([mean, factor, 1 / factor]).reshape(3, -1).astype(np.float32)
    is_balanced = kv_format == "int8"
    positions = np.array([3, 17, 18, 40, 5], np.int32)
    tables = np.array([[0, 1, 2, 3], [4, 5, 6, 7]], np.int32)
    extra = np.array([0, 0, 1, 1, 1, 1], np.int32)  # row 1 is also stored in the second table
    arrays = positions, np.zeros(rows, np.int32), extra, np.array([1], np.int32), tables
    output = torch.zeros(rows, heads * dim)
    rope.launch(
        interpreted(),
        torch.tensor([rows], dtype=torch.int32),
        rows,
        rope.SlotMapping(*map(torch.from_numpy, arrays)),
        (sources[0], sources[1], sources[2]),
        (None, None),
        pages.heads(op, 4, 1),
        pages.memory,
        output,
        torch.from_numpy(balance) if is_balanced else None,
    )
    shape = pages.heads(op, 4, 1)
    for row, table in ((0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0)):
        page = pages.memory.view(8, -1)[tables[table, positions[row] // page_size]]
        result = read(page, shape, positions[row] % page_size)
        row_heads = product[row].reshape(-1, dim)[heads:].reshape(2, kv_heads, dim)
        keys, values = stored(row_heads[0], row_heads[1], kv_format, mean, factor)
        if kv_format == "int8":
            width = dim & -dim
            result[0] = result[0] @ hadamard(dim).astype(np.float32) * np.sqrt(width)
            keys = (keys - mean) * factor
        for ours, right in zip(result, (keys, values), strict=True):
            step = np.abs(right).max(-1, keepdims=True) / (127 if is_balanced else 16)
            assert (np.abs(ours - right) <= 1.5 * step + 1e-6).all()
            assert np.abs(ours - right).mean() <= 0.02 * step.mean() + 1e-6  # ties apart
    queries = product[:, : heads * dim].reshape(rows, heads, dim)
    if is_balanced:
        queries = queries / np.repeat(factor, heads // kv_heads, axis=0)
        queries = queries @ hadamard(dim).astype(np.float32) * np.sqrt(dim & -dim)
    np.testing.assert_allclose(output.numpy(), queries.reshape(rows, -1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
@pytest.mark.parametrize("variant", ["biases", "window", "post norms", "borrowing", "latent"])
def test_logits_are_those_of_a_reference_that_rounds(
    variant: str, kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = build_program(replace(SPEC, head_dim=48, window=WindowSpec(20, (True, False))))
    program, is_int8 = window if variant == "window" else PROGRAMS[variant], kv_format == "int8"
    tensors = random_tensors(program)
    for name in [name for name in tensors if name.endswith("attn_k.bias")]:
        values = tensors[name].dequantize() + 20
        tensors[name] = type(tensors[name]).from_floats(values, tensors[name].format)
    balanced: Mapping[int, Any] = balances(program, tensors, kv_format)
    assert any(x[0].any() for x in balanced.values()) == (variant == "biases" and is_int8)
    layers = {op.layer: op for op in program.ops if isinstance(op, Attention)}

    class Rounding(PagedCache):
        def store(self, span: Any, layer: int, at: Any, k: Any, v: Any) -> None:
            dim = layers[layer].head_dim
            heads = [x.reshape(len(x), -1, dim) for x in (k, v)]
            mean, factor, _ = balanced[layer].reshape(3, -1, dim) if is_int8 else (0, 1, 1)
            stored_heads = stored(*heads, kv_format, mean, factor)
            if layers[layer].values_are_keys:
                stored_heads = stored_heads[0], stored_heads[0]
            super().store(span, layer, at, *(x.reshape(len(k), -1) for x in stored_heads))

    exact = ReferenceBackend(program, tensors, 1, 16).score(TOKENS)
    monkeypatch.setattr(backend, "PagedCache", Rounding)
    right = ReferenceBackend(program, tensors, 1, 16).score(TOKENS)
    ours = GpuBackend(
        program,
        tensors,
        2,
        16,
        find_device(),
        element=torch.float32,
        kv_format=kv_format,
        max_rows=64,
    )
    result = ours.score(TOKENS)
    assert f"{kv_format} keys and values" in ours.facts.detail
    lost, differs = np.abs(exact - right).mean(), np.abs(result - right).mean()
    assert differs < 0.1 * lost  # a number that falls on the other side
