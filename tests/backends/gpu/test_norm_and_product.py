"""Norms and dense matrix products agree with NumPy twins."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from twostroke.backends.gpu.kernels import norm, pointwise, product  # noqa: E402
from twostroke.backends.gpu.kernels.common import Parts  # noqa: E402
from twostroke.backends.gpu.launch import interpreted  # noqa: E402


def header(num_rows: int) -> torch.Tensor:
    return torch.tensor([num_rows, 0, 0, 0], dtype=torch.int32)


@pytest.mark.seeds(4)
def test_a_norm_adds_parts_bias_and_post_norm_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width, parts = int(rng.integers(1, 5)), int(rng.choice([16, 40, 96])), 1 + seed % 3
    residual = rng.standard_normal((rows + 1, width), np.float32)
    delta = rng.standard_normal((parts, rows + 1, width + 8), np.float32)
    bias, first, second = (rng.standard_normal(width, np.float32) for _ in range(3))
    stream = torch.from_numpy(residual.copy())
    output = torch.zeros((rows + 1, width), dtype=torch.float16)
    delta_parts = Parts(torch.from_numpy(delta), width + 8, width + 8, parts, delta[0].size)
    norm.launch(
        interpreted(),
        header(rows),
        rows + 1,
        residual=stream,
        delta=delta_parts.columns(8, width),
        bias=torch.from_numpy(bias) if seed % 2 else None,
        post=norm.Norm(torch.from_numpy(first), 1e-5) if seed > 1 else None,
        norm=norm.Norm(torch.from_numpy(second), 1e-6),
        output=output,
    )
    added = delta[:, :, 8:].sum(0) + (bias if seed % 2 else 0)
    if seed > 1:
        added = added / np.sqrt((added**2).mean(1, keepdims=True) + 1e-5) * first
    expected = residual + added
    np.testing.assert_allclose(stream.numpy()[:rows], expected[:rows], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(stream.numpy()[rows], residual[rows])  # no row of the step
    normed = expected / np.sqrt((expected**2).mean(1, keepdims=True) + 1e-6) * second
    np.testing.assert_allclose(output.numpy()[:rows], normed[:rows], rtol=2e-3, atol=2e-3)
    assert not output[rows].any()


@pytest.mark.seeds(4)
def test_a_product_sums_its_parts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width, depth = (int(rng.integers(1, max_size)) for max_size in (40, 150, 300))
    rows, depth, parts = (70 if seed == 3 else rows), 8 * (1 + depth // 8), 1 + seed
    x = rng.standard_normal((rows, depth)).astype(np.float16)
    weight = rng.standard_normal((width, depth)).astype(np.float16)
    output = torch.zeros((parts, rows, width + 8))
    output_parts = Parts(output, width + 8, width + 8, parts, output[0].numel()).columns(8, width)
    tensors = torch.from_numpy(x), torch.from_numpy(weight)
    product.launch(interpreted(), header(rows), rows, *tensors, output_parts)
    expected = x.astype(np.float32) @ weight.T.astype(np.float32)
    np.testing.assert_allclose(output.sum(0).numpy()[:, 8:], expected, rtol=1e-3, atol=1e-2)
    assert not output[:, :, :8].any()


def test_a_sum_is_scaled_by_a_number_that_was_learnt() -> None:
    rng = np.random.default_rng(1)
    a, b = (torch.from_numpy(rng.standard_normal((3, 40), np.float32)) for _ in range(2))
    output, weight = torch.zeros(3, 40), torch.tensor([0.25])
    parts = [Parts(x, 40, 40) for x in (a, b)]
    kwargs = {"factor": 3.0, "weight": weight, "b": parts[1]}
    pointwise.combine(interpreted(), header(3), 3, parts[0], output, **kwargs)
    np.testing.assert_allclose(output, a * 0.75 + b, rtol=1e-6)
    stream = a.clone()
    norm.launch(interpreted(), header(3), 3, residual=stream, delta=parts[1], factor=weight)
    np.testing.assert_allclose(stream, (a + b) * 0.25, rtol=1e-6)


def test_a_norm_of_groups_takes_each_by_itself() -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((2, 3, 4, 10), np.float32), rng.standard_normal(10, np.float32)
    delta_parts = Parts(torch.from_numpy(x), 40, 40, 2, 120)  # in two parts
    group_norm, output = norm.Norm(torch.from_numpy(weight), 1e-5, groups=4), torch.zeros(3, 40)
    norm.launch(
        interpreted(),
        header(3),
        3,
        residual=None,
        delta=delta_parts,
        norm=group_norm,
        output=output,
    )
    sums = x.sum(0)
    expected = sums / np.sqrt((sums**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(output, expected.reshape(3, 40), rtol=1e-4, atol=1e-5)
