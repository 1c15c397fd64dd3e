"""What `compile.py` compiles: kernels as models of 8 billion parameters launch them.

Besides packed products and the sampler these are all launches of whole steps, of models that
together have every variant: biases, norms of heads and after layers, windows, caps, wide heads.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from models import MODELS, VOCAB
from msgspec.structs import replace

from twostroke.backends.gpu import mixtures, sampling
from twostroke.backends.gpu.cache import DevicePages
from twostroke.backends.gpu.kernels import (
    attention,
    product,
    products_fp8,
    products_packed,
    rope,
    sampler,
    take_packed,
)
from twostroke.backends.gpu.kernels.common import Parts
from twostroke.backends.gpu.kernels.packed import PackedMatrix
from twostroke.backends.gpu.kernels.routing import ExpertSelection
from twostroke.backends.gpu.launch import listing
from twostroke.backends.gpu.lower import lower
from twostroke.backends.gpu.lowered import route_ints
from twostroke.backends.gpu.mixtures import ExpertWeights, MixtureValues
from twostroke.backends.gpu.plan import GpuPlan
from twostroke.backends.gpu.weight_layout import layout_of
from twostroke.core.frozen import Frozen
from twostroke.model.families import build_program
from twostroke.model.program import Program
from twostroke.model.program.experts import Expert, MixtureOfExperts
from twostroke.model.program.ops import Attention, ExternalInput, HeadLinear, RMSNorm
from twostroke.model.quant import FORMATS, e4m3, grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twostroke.backends.gpu.launch import Gpu, Launch
    from twostroke.model.quant import Format

WIDTH: Final = 4096
DEPTH: Final = 4096


class Case(Frozen, eq=False):
    """Launches, and what they do: bytes, operations, weights that a turn of the loop reads.

    With `is_matrix` a kernel must use the tensor cores' own instruction for many rows.
    """

    launches: Sequence[Launch]
    num_bytes: int = 0
    num_operations: int = 0
    weights_per_turn: int = 0
    is_matrix: bool = False


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _packed(fmt: Format, width: int = WIDTH, depth: int = DEPTH, count: int = 1) -> PackedMatrix:
    layout = layout_of(fmt, depth)
    assert layout is not None
    tiles, blocks = width // 64, -(-depth // 256)
    codes = _empty(count, tiles, blocks, layout.steps, 64, layout.columns, dtype=torch.int16)
    high = {
        5: _empty(count, tiles, blocks, 64, 32, dtype=torch.uint8),
        6: _empty(count, tiles, blocks, 2, 64, 16, dtype=torch.int16),
    }
    words = {"k": 4, "q6_k": 4, "f32": 256 // layout.group}.get(layout.scales, 128 // layout.group)
    kind = torch.float32 if layout.scales == "f32" else torch.int32
    scales = _empty(count, blocks, words, width, dtype=kind)
    offsets = None
    if layout.scales == "q6_k":
        offsets = _empty(count, blocks, 1, width, dtype=torch.float32)
    elif layout.offset:
        offsets = _empty(count, blocks, 128 // layout.group, width)
    return PackedMatrix(layout, width, depth, codes, scales, high.get(layout.bits), offsets)


def packed_product(fmt: Format, rows: int, architecture: int, *, depth: int = DEPTH) -> Case:
    """Return a product of packed weights."""
    launches: list[Launch] = []
    gpu = listing(launches, architecture)
    weight = _packed(fmt, depth=depth)
    count = 4 if rows <= products_packed.FEW_ROWS else 1
    values = _empty(count, rows, WIDTH, dtype=torch.float32)
    output = Parts(values, WIDTH, WIDTH, count, rows * WIDTH)
    x = _empty(rows, depth, dtype=gpu.element)
    products_packed.launch(gpu, _empty(4), rows, x, weight, output)
    is_few = rows <= products_packed.FEW_ROWS
    return Case(
        launches,
        weight.num_bytes + 2 * x.numel() + 4 * values.numel(),
        2 * rows * WIDTH * depth,
        64 * 256 if is_few else launches[0].constants["BLOCK_N"] * 128,
        is_matrix=not is_few,
    )


def fp8_product(fmt: Format, rows: int, architecture: int) -> Case:
    """Return a product of E4M3 with E4M3, and the rounding of its rows."""
    launches: list[Launch] = []
    gpu = listing(launches, architecture)
    weight = _packed(fmt)
    output = Parts(_empty(rows, WIDTH, dtype=gpu.element), WIDTH, WIDTH)
    if not products_fp8.is_supported(gpu, rows, weight, output):
        return Case(launches)
    x = _empty(rows, DEPTH, dtype=gpu.element)
    size = products_fp8.scratch_bytes(gpu, rows, (weight.layout, WIDTH, DEPTH))
    scratch = _empty(size, dtype=torch.uint8)
    rounded = products_fp8.round_rows(gpu, _empty(4), rows, x, weight.layout, scratch)
    products_fp8.launch(gpu, _empty(4), rows, rounded, weight, output)
    num_bytes = weight.num_bytes + 2 * x.numel() + 2 * output.values.numel()
    return Case(launches, num_bytes, rows * WIDTH * DEPTH)  # twice as fast as in BF16


def written_in_rows(architecture: int) -> Case:
    """Return codes of E4M3 that are written out row after row."""
    launches: list[Launch] = []
    weight = _packed(e4m3(DEPTH))
    output = _empty(WIDTH, DEPTH, dtype=torch.float8_e4m3fn)
    products_fp8.write_rows(listing(launches, architecture), weight, output)
    return Case(launches, 2 * output.numel())


def written_out(fmt: Format, architecture: int) -> Case:
    """Return packed weights that are written out."""
    launches: list[Launch] = []
    gpu = listing(launches, architecture)
    weight = _packed(fmt)
    output = _empty(WIDTH, DEPTH, dtype=gpu.element)
    products_packed.unpack_matrix(gpu, weight, output)
    return Case(launches, weight.num_bytes + 2 * output.numel())


def table_rows(fmt: Format, architecture: int) -> Case:
    """Return rows of a packed table."""
    launches: list[Launch] = []
    gpu = listing(launches, architecture)
    output = _empty(16, DEPTH, dtype=torch.float32)
    kwargs = {"factor": 1.0, "results": _empty(16, sampling.RESULT_INTS)}
    take_packed.launch(gpu, _empty(4), 16, _packed(fmt), _empty(16), output, **kwargs)
    return Case(launches)


def experts(fmt: Format, rows: int, architecture: int, *, same_tokens: bool = False) -> Case:
    """Return a mixture of Qwen3-30B-A3B's shape; of many rows, only its products."""
    launches: list[Launch] = []
    gpu = replace(listing(launches, architecture), same_tokens=same_tokens)
    count, used, width, ffn = 128, 8, 2048, 768
    op = MixtureOfExperts("y", "x", "s", (Expert("g", "u", "d"),) * count, width, ffn, used, True)

    def stack(outputs: int, inputs: int) -> PackedMatrix | torch.Tensor:
        if fmt.name == "BF16":
            return _empty(count, outputs, inputs, dtype=torch.bfloat16)
        return _packed(fmt, outputs, inputs, count)

    dtype = torch.float32 if rows <= product.FEW_ROWS or same_tokens else gpu.element
    pairs = rows * used
    values = MixtureValues(
        _empty(rows, width, dtype=gpu.element),
        (Parts(_empty(rows, count, dtype=torch.float32), count, count), None),
        ExpertSelection(normalize=True),
        _empty(rows * route_ints(used)),
        Parts(_empty(pairs, 2 * ffn, dtype=dtype), 2 * ffn, 2 * ffn),
        _empty(pairs, ffn, dtype=gpu.element),
        Parts(_empty(pairs, width, dtype=dtype), width, width),
    )
    weights = ExpertWeights((stack(2 * ffn, width),), stack(width, ffn))
    mixtures.launch(gpu, _empty(4), rows, op, weights, values)
    is_many = rows > product.FEW_ROWS
    if is_many:
        launches = [launch for launch in launches if "LINES" in launch.constants]
    return Case(
        launches,
        weights.num_bytes * min(1, pairs / count),
        pairs * 6 * width * ffn,
        is_matrix=is_many and not same_tokens,
    )


def paged(kv_format: str, step: str, architecture: int) -> Case:
    """Return the write of keys and values, and attention, of one layer of Llama 3.1 8B."""
    launches: list[Launch] = []
    gpu = listing(launches, architecture)
    heads, kv_heads, dim, rows = 32, 8, 128, 1 if step == "decode" else 2048
    op = Attention("y", "x", "x", "x", 0, heads, kv_heads, dim, dim**-0.5)
    program = Program("layer", (ExternalInput("x", heads * dim), op), 1000, 4096)
    pages = DevicePages(gpu, program, 256, 16, kv_format)
    shape, frame = pages.heads(op, 256, 1), _empty(1 << 16)
    turn = rope.Rotation(_empty(4096, 2, dim // 2, dtype=torch.float32), dim // 2, False)
    parts = Parts(_empty(rows, heads * 2 * dim, dtype=torch.float32), heads * dim, heads * dim)
    source = rope.HeadSource(parts)
    q = _empty(rows, heads * dim, dtype=gpu.element)
    slots = rope.SlotMapping(*(_empty(rows + 3) for _ in range(5)))
    arguments = (source, source, source), (turn, turn), shape, pages.memory
    is_even = kv_format == "int8"
    balance = _empty(3, kv_heads * dim, dtype=torch.float32) if is_even else None
    rope.launch(gpu, _empty(4), rows, slots, *arguments, q, balance)
    floats = [_empty(1 << 20, dtype=torch.float32) for _ in range(2)]
    work = attention.AttentionItems(frame, frame, _empty(1 << 16), floats[0], floats[1])
    block = attention.small_block(4) if step == "decode" else attention.large_block(4, dim)
    attention.launch(gpu, work, 8, block, q, pages.memory, q, shape)
    return Case(launches)


def samples(architecture: int) -> Case:
    """Return draws with all options, and log-probabilities."""
    launches: list[Launch] = []
    gpu = listing(launches, architecture)
    logits = _empty(1, VOCAB, dtype=torch.float32)
    rows, lists = _empty(1, sampling.ROW_INTS), _empty(1000)
    results = _empty(1, sampling.RESULT_INTS)
    sampler.launch(gpu, logits, rows, lists, results, logits)
    sampler.report(gpu, logits, rows, results)
    return Case(launches, 4 * VOCAB)


class _Weights:
    """Matrices and vectors without memory, as `DeviceWeights` has them."""

    def __init__(self, gpu: Gpu, program: Program) -> None:
        self._gpu, self._shapes = gpu, program.weight_shapes
        self.matrices = {
            name: _empty(*shape, dtype=gpu.element) for name, shape in self._shapes.items()
        }
        self.packed: dict[str, PackedMatrix] = {}
        self.shapes: dict[str, Any] = {}
        self.balances: dict[int, torch.Tensor] = {}
        self.heads = {
            op.output: _empty(op.num_heads, op.head_width, op.in_width, dtype=gpu.element)
            for op in program.ops
            if isinstance(op, HeadLinear)
        }
        self.experts = {
            op.output: ExpertWeights(
                (_empty(len(op.experts), 2 * op.ffn_width, op.width, dtype=gpu.element),),
                _empty(len(op.experts), op.width, op.ffn_width, dtype=gpu.element),
            )
            for op in program.ops
            if isinstance(op, MixtureOfExperts)
        }

    def factors(self, names: tuple[str, ...]) -> Sequence[torch.Tensor]:
        width = sum(self._shapes[name][0] for name in names)
        return [_empty(width, self._shapes[names[0]][1], dtype=self._gpu.element)]

    def vector(self, name: str) -> torch.Tensor:
        return _empty(*self._shapes[name], dtype=torch.float32)

    def norm_weight(self, op: RMSNorm) -> torch.Tensor:
        return _empty(op.grain, dtype=torch.float32)


_STEPS: Final = {  # rows, and whether each row has the same tile
    "1 row": (1, False),
    "16 rows": (16, False),
    "64 rows": (64, False),
    "many rows": (512, False),
    "same tokens": (64, True),
}


def step(model: str, name: str, architecture: int) -> Case:
    """Return the launches of a model's step that those before it in `_STEPS` do not have."""
    keys: set[str] = set()
    for step_name, (rows, same_tokens) in _STEPS.items():
        launches: list[Launch] = []
        gpu = replace(listing(launches, architecture), same_tokens=same_tokens)
        program = build_program(MODELS[model])
        pages = DevicePages(gpu, program, 64, 16, "f16")
        tables = _empty(rows, len(program.cache_groups), 516)
        plan = GpuPlan(
            gpu, lower(program), cast("Any", _Weights(gpu, program)), pages, tables, rows
        )
        plan.launch(rows)
        plan.launch_logits(0, min(rows, 64))
        new = {}
        for launch in launches:
            options = launch.types, launch.constants, launch.options
            key = f"{launch.kernel.__name__} {options}"
            if key not in keys:
                new[key] = launch
        keys |= set(new)
        if step_name == name:
            return Case(list(new.values()))
    raise AssertionError(name)


_FORMATS: Final = (
    *(FORMATS[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")),
    grouped(4, 128, "f16", zero=True),
    grouped(8, 32, "f32"),  # which takes the most shared memory
    e4m3(128),
)
CASES: Final[Mapping[str, Callable[[int], Case]]] = {
    **{
        f"{fmt.name} {rows} rows": partial(packed_product, fmt, rows)
        for fmt in _FORMATS
        for rows in (4, 16, 32, 64, 128, 256)
    },
    **{
        f"{name} {rows} rows of 896": partial(packed_product, FORMATS[name], rows, depth=896)
        for name in ("Q8_0", "Q4_0")
        for rows in (4, 64, 128, 256)
    },
    **{f"{fmt.name} written out": partial(written_out, fmt) for fmt in _FORMATS},
    **{f"{fmt.name} table": partial(table_rows, fmt) for fmt in _FORMATS},
    **{
        f"{fmt.name} by E4M3 {rows} rows": partial(fp8_product, fmt, rows)
        for fmt in (e4m3(128), e4m3(DEPTH))
        for rows in (128, 512)
    },
    "E4M3 written in rows": written_in_rows,
    **{
        f"{fmt.name} experts {rows} rows": partial(experts, fmt, rows)
        for fmt in (FORMATS["BF16"], *_FORMATS)
        for rows in (1, 2048)
    },
    **{
        f"{fmt.name} experts same tokens": partial(experts, fmt, 2048, same_tokens=True)
        for fmt in (FORMATS["BF16"], *_FORMATS)
    },
    **{
        f"{step} with {kv_format} pages": partial(paged, kv_format, step)
        for kv_format in ("bf16", "int8", "fp8")
        for step in ("decode", "prefill")
    },
    "sampler": samples,
    **{f"{model} {name}": partial(step, model, name) for model in MODELS for name in _STEPS},
}
