"""Mixtures of experts: routes and grouped products agree with NumPy twins."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from msgspec.structs import replace  # noqa: E402

from support.programs import SPEC, random_tensors  # noqa: E402
from twostroke.backends.gpu import mixtures  # noqa: E402
from twostroke.backends.gpu.kernels import product, products_packed, routing  # noqa: E402
from twostroke.backends.gpu.kernels.common import Parts  # noqa: E402
from twostroke.backends.gpu.kernels.packed import PackedMatrix, pack_stack  # noqa: E402
from twostroke.backends.gpu.launch import interpreted  # noqa: E402
from twostroke.backends.gpu.lower import lower  # noqa: E402
from twostroke.backends.gpu.lowered import route_ints  # noqa: E402
from twostroke.backends.gpu.weight_layout import device_bytes  # noqa: E402
from twostroke.backends.gpu.weights import DeviceWeights  # noqa: E402
from twostroke.backends.reference.operations import choose_experts  # noqa: E402
from twostroke.model.families import build_program  # noqa: E402
from twostroke.model.families.spec import ExpertSpec  # noqa: E402
from twostroke.model.program.experts import Expert, MixtureOfExperts  # noqa: E402
from twostroke.model.quant import FORMATS, QuantTensor, grouped  # noqa: E402

CPU = torch.device("cpu")


def header(num_rows: int) -> torch.Tensor:
    return torch.tensor([num_rows, 0, 0, 0], dtype=torch.int32)


def routes_of(
    scores,
    num_used: int,
    *,
    num_unused_rows: int = 0,
    min_rows: int = 8,
    normalize=False,
    bias=None,
):
    """Return the routes of rows with these scores, in a bucket with some unused rows."""
    rows, experts = scores.shape
    bucket = rows + num_unused_rows
    memory = torch.full((bucket * route_ints(num_used),), -99, dtype=torch.int32)
    routes = routing.divide_memory(memory, bucket, experts, num_used, (min_rows, 64))
    score_parts = np.zeros((2, bucket, experts + 8), np.float32)  # in two parts
    score_parts[0, :rows, 8:] = np.where(np.isinf(scores), scores, 0)
    score_parts[1, :rows, 8:] = np.where(np.isinf(scores), 0, scores)
    parts = Parts(torch.from_numpy(score_parts), experts + 8, experts + 8, 2, score_parts[0].size)
    bias = None if bias is None else torch.from_numpy(bias)
    columns = parts.columns(8, experts)
    gpu = interpreted()
    routing.launch(
        gpu, header(rows), bucket, columns, bias, routes, routing.ExpertSelection(normalize)
    )
    return routes


@pytest.mark.seeds(6)
def test_rows_choose_as_in_the_reference_and_stand_in_the_order_of_experts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts, rows = int(rng.choice([1, 4, 40])), int(rng.integers(1, 50))
    used = min(experts, 1 + seed)
    scores = rng.integers(-2, 3, (rows, experts)).astype(np.float32)  # many are equal
    scores[0, 0] = -0.0
    scores[-1, -1] = -np.inf
    bias = rng.integers(-1, 2, experts).astype(np.float32) if seed % 2 else None
    result = routes_of(scores, used, num_unused_rows=seed, normalize=seed > 2, bias=bias)
    if bias is not None:
        scores += bias
    chosen_experts = choose_experts(scores, used)
    np.testing.assert_array_equal(
        result.expert_ids[: rows * used].reshape(rows, used), chosen_experts
    )
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares = np.take_along_axis(shares / shares.sum(1, keepdims=True), chosen_experts, axis=1)
    if seed > 2:
        shares /= shares.sum(1, keepdims=True)
    got = result.shares[: rows * used].reshape(rows, used)
    np.testing.assert_allclose(got, shares, rtol=1e-5, atol=1e-7)
    order = np.argsort(chosen_experts.reshape(-1), kind="stable")
    np.testing.assert_array_equal(result.order[: rows * used], order)
    items = [
        (expert, int(first), min(result.block, int(count - done)))
        for expert, count in enumerate(np.bincount(chosen_experts.reshape(-1), minlength=experts))
        for done in range(0, count, result.block)
        for first in [(chosen_experts < expert).sum() + done]
    ]
    assert result.header[:2].tolist() == [rows * used, len(items)]
    assert len(items) <= result.max_items
    assert [tuple(item[:3]) for item in result.items.view(-1, 4)[: len(items)].tolist()] == items
    assert (result.expert_ids[rows * used :] == -99).all()  # no rows of the step


def test_a_score_that_is_not_a_number_makes_such_shares() -> None:
    scores = np.ones((2, 8), np.float32)
    scores[1, 5] = np.nan
    shares = routes_of(scores, 2).shares[:4].numpy()
    np.testing.assert_array_equal(np.isnan(shares), [False, False, True, True])


@pytest.mark.parametrize(
    ("fmt", "rows"),
    [("F16", 3), ("F16", 90), ("Q4_0", 3), ("Q8_0", 40), ("Q4_K", 30), ("Q5_K", 2), ("Q6_K", 30),
     ("zero points", 3), ("zero points", 30)],
)  # fmt: skip
def test_products_of_pairs_are_those_of_their_experts(fmt: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    experts, used, width, depth = 5, 2, 70, 512
    scores = rng.standard_normal((rows, experts)).astype(np.float32)
    scores[:, 0] -= 9  # hardly used
    number_format = grouped(4, 128, "f16", zero=True) if fmt == "zero points" else FORMATS[fmt]
    values = rng.standard_normal((experts, width, depth), np.float32)
    tensors = [QuantTensor.from_floats(matrix, number_format) for matrix in values]
    exact = np.stack([tensor.dequantize() for tensor in tensors])
    gpu, routes = (
        interpreted(),
        routes_of(scores, used, num_unused_rows=1, min_rows=8 if fmt != "F16" else 16),
    )
    for lines, is_shared in ((used, False), (1, True)):
        x = rng.standard_normal((rows * used // lines, depth)).astype(np.float16)
        output = torch.zeros(((rows + 1) * used, width + 8))
        output_parts = Parts(output, width + 8, width + 8).columns(8, width)
        way = routing.Grouped(routes, lines, is_shared)
        if fmt == "F16":
            stack = torch.from_numpy(values.astype(np.float16))
            product.launch_grouped(gpu, torch.from_numpy(x), stack, output_parts, way)
        else:
            stack = pack_stack(tensors, experts, CPU)
            assert stack.num_bytes >= sum(tensor.num_bytes for tensor in tensors)
            products_packed.launch_grouped(gpu, torch.from_numpy(x), stack, output_parts, way)
        pairs = np.arange(rows * used)
        of_pair = exact[choose_experts(scores, used).reshape(-1)]
        expected = np.einsum("pwd,pd->pw", of_pair, x[pairs // lines].astype(np.float32))
        if is_shared:
            expected *= routes.shares.numpy()[: len(pairs), None]
        np.testing.assert_allclose(output.numpy()[: len(pairs), 8:], expected, rtol=4e-3, atol=0.1)
        assert not output[len(pairs) :].any()
        assert not output[:, :8].any()


def test_memory_is_planned_for_the_stacks_that_stay_packed() -> None:
    mixture = ExpertSpec(4, 2, 256, normalize=True)
    sizes = {"hidden_size": 256, "ffn_size": 256, "head_dim": 64, "experts": mixture}
    program = build_program(replace(SPEC, **sizes))
    tensors, other = (random_tensors(program, fmt, fmt) for fmt in ("Q4_K", "Q6_K"))
    planned = sum(device_bytes(program, tensors).values())
    for name in other:  # all ups, but of the downs one
        if "ffn_up." in name or "ffn_down.0." in name:
            tensors[name] = other[name]
    weights = DeviceWeights(interpreted(), lower(program), tensors)
    now = sum(device_bytes(program, tensors).values())
    assert now == pytest.approx(weights.num_bytes, rel=0.01)
    assert weights.num_bytes > 1.3 * planned


def test_stacks_whose_columns_are_in_another_order_are_converted() -> None:
    rng = np.random.default_rng(0)
    order = rng.permutation(256).astype(np.int32)
    tensors = {
        name: QuantTensor.from_floats(rng.standard_normal(shape, np.float32), FORMATS["Q8_0"])
        for name, shape in (("gate", (64, 256)), ("up", (64, 256)), ("down", (256, 64)))
    }
    tensors["up"] = replace(tensors["up"], order=order)
    op = MixtureOfExperts("y", "x", "scores", (Expert("gate", "up", "down"),), 256, 64, 1, True)

    def convert(tensor: QuantTensor, target: torch.Tensor) -> None:
        target.copy_(torch.from_numpy(tensor.dequantize()))

    gates, ups = mixtures.load(interpreted(), op, tensors, convert).wide
    assert isinstance(gates, PackedMatrix)
    expected = tensors["up"].dequantize().astype(np.float16)
    np.testing.assert_array_equal(ups[0].numpy(), expected)
