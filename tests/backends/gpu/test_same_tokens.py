"""With `--same-tokens`, a row's numbers depend on its request alone, bit for bit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from support.cpu import tiny_model  # noqa: E402
from support.programs import PROGRAMS, SPEC, VOCAB_SIZE, random_tensors  # noqa: E402
from support.schedules import Setting, fresh, random_requests, run_schedule  # noqa: E402
from twostroke.backends.gpu.backend import GpuBackend  # noqa: E402
from twostroke.backends.gpu.device import find_device  # noqa: E402
from twostroke.backends.gpu.kernels import product, products_packed  # noqa: E402
from twostroke.backends.gpu.kernels.common import Parts  # noqa: E402
from twostroke.backends.gpu.kernels.packed import pack  # noqa: E402
from twostroke.backends.gpu.kernels.product import num_parts  # noqa: E402
from twostroke.backends.gpu.launch import listing  # noqa: E402
from twostroke.backends.gpu.tiles import Tiling, divide  # noqa: E402
from twostroke.core.errors import UsageError  # noqa: E402
from twostroke.core.options import ComputeOptions  # noqa: E402
from twostroke.core.request import Request  # noqa: E402
from twostroke.core.sampling import SamplingParams  # noqa: E402
from twostroke.core.step import Slice, StepPlan  # noqa: E402
from twostroke.engine.scheduler.policy import Continuous  # noqa: E402
from twostroke.model.families import build_program  # noqa: E402
from twostroke.model.families.spec import ExpertSpec, WindowSpec  # noqa: E402
from twostroke.model.quant import FORMATS, QuantTensor  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.model.program import Program

EXPERTS = ExpertSpec(4, 2, 256, normalize=True)
TOKENS = [(7 * i * i + 3) % VOCAB_SIZE for i in range(70)]
PAGES = [*range(20, 25)]
# How the rows of a request are divided into steps, and how many other requests share each.
SHARED: dict[str, Sequence[tuple[int, int]]] = {
    "chunks": [(3, 0), (67, 0)],
    "batch": [(19, 3), (50, 0), (1, 2)],
}


@pytest.fixture(autouse=True)
def _rows_of_a_tile_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter compute all rows of a tile in the same way, as tensor cores do."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: object, a: Any, b: Any, d: Any, *__: object) -> Any:
        exact = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return TensorHandle(exact.astype(np.float32) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def a_request(name: str, pages: list[int], num_groups: int) -> Request:
    request = Request(name, [*TOKENS], len(TOKENS), SamplingParams(temperature=0), seed=1)
    request.pages = [[page + 27 * group for page in pages] for group in range(num_groups)]
    return request


def computed(backend: GpuBackend, steps: Sequence[tuple[int, int]], drafts: int = 0) -> Any:
    """Return the last row's logits and the request's KV pages after these steps."""
    num_groups = len(backend.facts.windows)
    request, done = a_request("q", PAGES, num_groups), 0
    for number, (count, num_others) in enumerate(steps):
        others = [a_request(f"{i} {number}", [i], num_groups) for i in range(num_others)]
        slices = [
            Slice(other_request, 0, 1 + i % 5, samples=True)
            for i, other_request in enumerate(others)
        ]
        request_slice = Slice(
            request, done, count - drafts * (done + count == len(TOKENS)), samples=True
        )
        if done + count == len(TOKENS) and drafts:
            request_slice = replace_drafts(request_slice, TOKENS[-drafts:])
        plan = StepPlan((*slices, request_slice))
        backend.run(plan)
        done += count
    last = num_others + drafts
    pages = backend._pages.memory.view(-1, backend._pages.page_stride)
    ids = [page for group in request.pages for page in group]
    for request_id in (request, *others):
        backend.forget(request_id)
    return backend._plan.logits[last].clone(), pages[ids].clone()


def replace_drafts(slice_: Slice, drafts: list[int]) -> Slice:
    slice_.drafts = tuple(drafts)
    return slice_


def is_same(right: Any, tested_arrays: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(right, tested_arrays, strict=True))


@pytest.mark.parametrize(
    ("fmt", "window", "experts"),
    [("F16", None, None), ("Q4_K", 20, None), ("F16", None, EXPERTS), ("Q4_0", None, EXPERTS)],
)
def test_a_row_is_the_same_in_all_steps(
    fmt: str, window: int | None, experts: ExpertSpec | None
) -> None:
    spec = replace(SPEC, hidden_size=256, ffn_size=256, head_dim=64, num_layers=1, experts=experts)
    if window:
        spec = replace(spec, window=WindowSpec(window, (True,)))
    check_rows(build_program(spec), fmt)


@pytest.mark.parametrize("name", ["latent", "borrowing"])
def test_a_row_of_other_attention_is_the_same_in_all_steps(name: str) -> None:
    check_rows(PROGRAMS[name], "F16")


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_a_row_over_pages_in_eight_bits_is_the_same_in_all_steps(kv_format: str) -> None:
    check_rows(build_program(replace(SPEC, num_layers=2)), "F16", kv_format)


def test_a_row_of_latent_attention_over_eight_bits_is_the_same_in_all_steps() -> None:
    check_rows(PROGRAMS["latent"], "F16", "int8")


def check_rows(program: Program, fmt: str, kv_format: str = "f16") -> None:
    tensors = random_tensors(program, fmt, fmt)

    def make(*, same_tokens: bool) -> GpuBackend:
        kwargs = {"piece": 32, "max_rows": 128, "same_tokens": same_tokens, "kv_format": kv_format}
        num_pages = 27 * len(program.cache_groups)
        return GpuBackend(program, tensors, num_pages, 16, find_device(), **kwargs)

    ours, other = make(same_tokens=True), make(same_tokens=False)
    right = computed(ours, [(len(TOKENS), 0)])
    for steps in SHARED.values():
        assert is_same(computed(ours, steps), right)
    assert is_same(computed(ours, [(67, 0), (3, 1)], drafts=2), right)
    whole_rows = computed(other, [(len(TOKENS), 0)])
    assert not is_same(computed(other, SHARED["chunks"]), whole_rows), (
        "the comparison finds nothing"
    )


def test_requests_together_are_answered_as_each_alone() -> None:
    """Requests are preempted, chunked and cached, with drafts; log-probabilities are equal, too."""
    model = tiny_model(num_layers=1)
    requests = random_requests(random.Random(11), 4, vocab_size=280, longest=24, most_output=44)
    crowded = Setting(5, 60, 8, prefix_cache=True, policy=Continuous(), draft_seed=3)

    def backend(num_pages: int) -> GpuBackend:
        kwargs = {"piece": 32, "max_rows": 64, "same_tokens": True}
        return GpuBackend(*model, num_pages, 16, find_device(), **kwargs)

    alone = replace(crowded.alone(64), token_budget=64)
    right, _ = run_schedule(backend(64), alone, [fresh(r) for r in requests], 100)
    copies = [fresh(request) for request in requests]
    ours, num_preemptions = run_schedule(backend(5), crowded, copies, 100, right)
    assert num_preemptions
    assert sum(request.num_drafted for request in copies) > 5
    assert ours == right


@pytest.mark.parametrize("fmt", ["BF16", "Q4_K", "Q8_0"])
def test_all_rows_are_multiplied_in_tiles_of_one_shape(fmt: str) -> None:
    results = []
    for same_tokens in (True, False):
        launches: list[Any] = []
        gpu = replace(listing(launches, 90), same_tokens=same_tokens)
        header = torch.empty(4, dtype=torch.int32, device="meta")
        for rows in (1, 9, 40, 600):
            x = torch.empty((rows, 512), dtype=gpu.element, device="meta")
            count = num_parts(gpu, rows, 128, 512)
            values = torch.empty((count, rows, 128), device="meta")
            output = Parts(values, 128, 128, count, rows * 128)
            tensor = QuantTensor.from_floats(np.ones((128, 512), np.float32), FORMATS[fmt])
            if fmt == "BF16":
                weight = torch.empty((128, 512), dtype=gpu.element, device="meta")
                product.launch(gpu, header, rows, x, weight, output)
            else:
                packed = pack(tensor, torch.device("meta"))
                products_packed.launch(gpu, header, rows, x, packed, output)
        assert len(launches) == 4
        shapes = [
            (launch.constants, launch.num_warps, launch.num_stages, launch.grid[1])
            for launch in launches
        ]
        results.append(all(shape == shapes[0] for shape in shapes))
    assert results == [True, False]


def test_pieces_are_those_of_each_row_alone() -> None:
    """A tile has only rows whose contexts are divided in the same way."""
    for window in (None, 100):
        tiling = Tiling(window, 8, 8, same_tokens=True)
        slices = np.array([[0, 40, 8170, 2], [40, 300, 16_300, 1], [340, 1, 9000, 3]], np.int32)
        (items,) = divide(slices, tiling, 1_000_000)
        assert not len(items.large)
        for first, count, start, table in slices.tolist():
            for offset in range(0, count, 7):
                row, position = first + offset, start + offset
                (alone,) = divide(np.array([[0, 1, position, table]], np.int32), tiling, 1000)
                mine = (items.small[:, 0] <= row) & (row < items.small[:, 0] + items.small[:, 1])
                kv_splits = items.small[mine]
                seen = np.maximum(0, position + 1 - (window or position + 1))
                kv_splits = kv_splits[(kv_splits[:, 5] > seen) & (kv_splits[:, 4] <= position)]
                edges = np.minimum(kv_splits[:, 5], position + 1).tolist()
                assert edges == alone.small[:, 5].tolist()
                assert not (kv_splits[:, 4] % 64).any()


def test_same_tokens_are_refused_where_they_cannot_be_kept() -> None:
    with pytest.raises(UsageError, match="needs the backend cpu or gpu"):
        ComputeOptions("torch", same_tokens=True)
    assert ComputeOptions("cpu", same_tokens=True).same_tokens
