"""`make gpu-campaign`: measure the gpu backend on this machine's GPU, correctness first.

Weights of real shapes are made up, so no model file is needed. Each row can be repeated alone
(`--row`), and the results are saved after each. Beside each time stands what the cost model
predicts from the copy bandwidth and the matrix rate of the same run. `--dry-run` needs no GPU: it
predicts from the figures that are given, and marks them as predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from report import machine_facts, note, table, write
from twostroke.backends.gpu.lower import lower
from twostroke.backends.gpu.lowered import Attend, Mix
from twostroke.cache import FORMATS as KV_FORMATS
from twostroke.cache import PageGroups
from twostroke.core.errors import BackendError, MemoryLimitError
from twostroke.core.frozen import Frozen
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import Slice, StepPlan
from twostroke.measure.single_step import Shape, SingleStep
from twostroke.models import ExpertSpec, ModelSpec, RopeSpec, build_program
from twostroke.program.cost import CostModel
from twostroke.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.program import Program

# Hidden size, heads, key-value heads, layers, FFN, vocabulary: those of Llama 3.1 8B
# (https://huggingface.co/meta-llama/Llama-3.1-8B), Qwen 2.5 1.5B
# (https://huggingface.co/Qwen/Qwen2.5-1.5B), and Qwen3-30B-A3B
# (https://huggingface.co/Qwen/Qwen3-30B-A3B), read on 2026-11-26.
_SHAPES: Final = {
    "8b": (4096, 32, 8, 32, 14336, 128256),
    "1.5b": (1536, 12, 2, 28, 8960, 151936),
    "30b-a3b": (2048, 32, 4, 48, 768, 151936),
    "small": (256, 8, 2, 2, 512, 1000),
    "small-experts": (256, 8, 2, 2, 256, 1000),
}
_EXPERTS: Final = {
    "30b-a3b": ExpertSpec(128, 8, 768, normalize=True),
    "small-experts": ExpertSpec(16, 4, 256, normalize=True),
}
_HEAD_DIMS: Final = {"30b-a3b": 128}
_MIX_LAUNCHES: Final = 5
_TABLE_ROWS: Final = 257  # that differ
_LAUNCH_S: Final = 1.5e-6  # assumed between two kernels of a graph
_MEASURED_S: Final = 3.0
_BANDWIDTH, _PEAK = 4.3e12, 790e12  # of one H200 that was seen; for --dry-run
_PAGE: Final = 16


class Row(Frozen):
    """One measurement: a model's shape and formats, the step, and whether rows have one tile."""

    model: str
    fmt: str
    step: Shape
    kv: str = "f16"
    same_tokens: bool = False


ROWS: Final = {
    "decode-8b-bf16": Row("8b", "BF16", Shape.decode(1, 256)),
    "decode-8b-q4_k": Row("8b", "Q4_K", Shape.decode(1, 256)),
    "decode-1.5b-bf16": Row("1.5b", "BF16", Shape.decode(1, 256)),
    "decode-8b-bf16-32k": Row("8b", "BF16", Shape.decode(1, 32_768)),
    "decode-8b-bf16-32k-int8": Row("8b", "BF16", Shape.decode(1, 32_768), "int8"),
    "decode-8b-bf16-32k-fp8": Row("8b", "BF16", Shape.decode(1, 32_768), "fp8"),
    "streams-256-8b-bf16-int8": Row("8b", "BF16", Shape.decode(256, 1024), "int8"),
    "decode-30b-a3b-bf16": Row("30b-a3b", "BF16", Shape.decode(1, 256)),
    "decode-30b-a3b-q4_k": Row("30b-a3b", "Q4_K", Shape.decode(1, 256)),
    "streams-32-30b-a3b-bf16": Row("30b-a3b", "BF16", Shape.decode(32, 1024)),
    "prefill-30b-a3b-bf16": Row("30b-a3b", "BF16", Shape.prefill(4096)),
    "streams-16-8b-bf16": Row("8b", "BF16", Shape.decode(16, 1024)),
    "streams-32-8b-bf16": Row("8b", "BF16", Shape.decode(32, 1024)),
    "streams-256-8b-bf16": Row("8b", "BF16", Shape.decode(256, 1024)),
    "prefill-8b-bf16": Row("8b", "BF16", Shape.prefill(4096)),
    "prefill-8b-q4_k": Row("8b", "Q4_K", Shape.prefill(4096)),
    "same-1-8b-bf16": Row("8b", "BF16", Shape.decode(1, 256), same_tokens=True),
    "same-1-8b-q4_k": Row("8b", "Q4_K", Shape.decode(1, 256), same_tokens=True),
    "same-32-8b-bf16": Row("8b", "BF16", Shape.decode(32, 1024), same_tokens=True),
    "same-256-8b-bf16": Row("8b", "BF16", Shape.decode(256, 1024), same_tokens=True),
    "same-prefill-8b-bf16": Row("8b", "BF16", Shape.prefill(4096), same_tokens=True),
}
_CHECKS: Final = ("correct", "same-tokens")
_SEQUENCES: Final = 500


def main() -> None:
    """Run the campaign, or the rows that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", choices=[*ROWS, *_CHECKS], action="append")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--bandwidth", type=float, default=_BANDWIDTH, help="bytes/s, for a dry run"
    )
    parser.add_argument("--peak", type=float, default=_PEAK, help="FLOPs/s, if dry")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-campaign.json"))
    given = parser.parse_args()
    names = given.row or [*_CHECKS, *ROWS]
    result: dict[str, Any] = {"facts": machine_facts(), "predicted_only": given.dry_run, "rows": {}}
    limits = given.bandwidth, given.peak
    if not given.dry_run:
        try:
            result["device"], limits = measure_device()
        except BackendError as error:
            raise SystemExit(f"{error} `--dry-run` predicts without a GPU.") from None
    for name in names:
        if name in _CHECKS:
            if given.dry_run:
                continue
            found = correct() if name == "correct" else same_tokens()
        else:
            found = predict(ROWS[name], *limits)
            if not given.dry_run:
                found |= measured(ROWS[name])
        result["rows"][name] = found
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write(given.out, json.dumps(result, indent=1) + "\n")
        note(f"{name}: {found}")
    print(report(result, limits))


def program_of(model: str) -> Program:
    """Return a Llama of a shape, perhaps with experts."""
    hidden, heads, kv_heads, layers, ffn, vocabulary = _SHAPES[model]
    head_dim = _HEAD_DIMS.get(model, hidden // heads)
    return build_program(
        ModelSpec(
            architecture="llama",
            name=model,
            num_layers=layers,
            hidden_size=hidden,
            ffn_size=ffn,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocabulary,
            context_length=40_960,
            norm_epsilon=1e-5,
            rope=RopeSpec(500_000.0, head_dim, interleaved=False),
            tied_embeddings=False,
            experts=_EXPERTS.get(model),
        )
    )


def made_up(program: Program, fmt: str) -> dict[str, QuantTensor]:
    """Return weights of which each has one row, repeated without memory.

    Tables have many, and routers are random: else all tokens would choose the same experts.
    """
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in program.weight_shapes.items():
        rows = 1 if len(shape) == 1 else shape[0]
        is_router, is_table = "ffn_gate_inp" in name, name == "token_embd.weight"
        chosen = FORMATS["F32" if len(shape) == 1 or is_router else fmt]
        drawn = rows if is_router else min(rows, _TABLE_ROWS) if is_table else 1
        values = (
            np.ones((1, shape[-1]))
            if len(shape) == 1
            else rng.standard_normal((drawn, shape[-1])) * shape[-1] ** -0.5
        )
        some = QuantTensor.from_floats(values.astype(np.float32), chosen).data
        repeated = np.lib.stride_tricks.as_strided(some, (rows, some.shape[1]), (0, 1))
        data = repeated if drawn == 1 else np.resize(some, (rows, some.shape[1]))
        tensors[name] = QuantTensor(chosen, shape, data)
    return tensors


def predict(row: Row, bandwidth: float, peak: float) -> dict[str, Any]:
    """Return what the cost model says about a row."""
    program = program_of(row.model)
    stored = _stored(program, row.fmt)
    cost = CostModel(program, stored, KV_FORMATS[row.kv]).per_step().of(row.step.batch)
    lowered = lower(program)
    attends = sum(isinstance(record, Attend) for record in lowered.records)
    mixes = sum(isinstance(record, Mix) for record in lowered.records)
    launches = len(lowered.records) + attends + (_MIX_LAUNCHES - 1) * mixes + 4
    floor_s = max(cost.bytes / bandwidth, cost.flops / peak)
    return {
        "step": row.step.name,
        "launches": launches,
        "bytes": cost.bytes,
        "flops": cost.flops,
        "floor_ms": round(1e3 * floor_s, 4),
        "predicted_ms": round(1e3 * (floor_s + launches * _LAUNCH_S), 4),
    }


def _stored(program: Program, fmt: str) -> Mapping[str, int]:
    return {
        name: shape[0] * FORMATS[fmt].num_bytes(shape[1]) if len(shape) > 1 else 4 * shape[0]
        for name, shape in program.weight_shapes.items()
    }


def measured(row: Row) -> dict[str, Any]:
    """Return the median time of the row's steps on this machine's GPU."""
    from twostroke.backends.gpu.backend import GpuBackend
    from twostroke.backends.gpu.device import find

    program, began = program_of(row.model), time.perf_counter()
    windows = tuple(group.window for group in program.cache_groups)
    num_pages = row.step.num_pages(PageGroups(_PAGE, windows))
    rows = max(256, row.step.batch.num_rows)
    try:
        backend: Any = GpuBackend(
            *(program, made_up(program, row.fmt), num_pages, _PAGE, find()),
            max_rows=rows,
            kv_format=row.kv,
            same_tokens=row.same_tokens,
        )
    except MemoryLimitError as error:
        return {"refused": str(error)}
    ready_s, single = time.perf_counter() - began, SingleStep(backend, program, row.step)
    single.run()
    times: list[float] = []
    while sum(times) < _MEASURED_S and len(times) < 500:
        times.append(single.run().elapsed_s)
    single.close()
    backend.close()
    return {
        "ms": round(1e3 * statistics.median(times), 4),
        "steps": len(times),
        "ready_s": round(ready_s, 1),
        "detail": backend.facts.detail,
    }


def correct() -> dict[str, Any]:
    """Return how far logits are from the reference's, for a format of each kind."""
    from twostroke.backends.gpu.backend import GpuBackend
    from twostroke.backends.gpu.device import find
    from twostroke.backends.reference import ReferenceBackend
    from twostroke.measure.divergence import compare

    rng, found = np.random.default_rng(1), {}
    models = ("small", "small-experts")
    formats = ("BF16", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K")
    for model, fmt in [(model, fmt) for model in models for fmt in formats]:
        program = program_of(model)
        tokens = rng.integers(0, program.vocab_size, 200).tolist()
        tensors = random_tensors(program, fmt, rng)
        right = ReferenceBackend(program, tensors, 1, _PAGE).score(tokens)
        for kv in ("f16", "int8", "fp8") if fmt == "BF16" else ("f16",):
            ours: Any = GpuBackend(program, tensors, 64, _PAGE, find(), kv_format=kv)
            result = compare([(right, ours.score(tokens), tokens)])
            ours.close()
            own = {"mean_kl": result.mean_kl, "top1": result.top1_agreement}
            found[f"{model} {fmt}, {kv} pages"] = own
    return found


def random_tensors(program: Program, fmt: str, rng: np.random.Generator) -> dict[str, QuantTensor]:
    """Return random weights."""
    return {
        name: QuantTensor.from_floats(
            (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
            if len(shape) > 1
            else np.ones(shape, np.float32),
            FORMATS[fmt if len(shape) > 1 else "F32"],
        )
        for name, shape in program.weight_shapes.items()
    }


def same_tokens(count: int = _SEQUENCES) -> dict[str, Any]:
    """Return how many sequences' log-probabilities differ from those of each computed alone."""
    from twostroke.backends.gpu.backend import GpuBackend
    from twostroke.backends.gpu.device import find

    program, rng, found = program_of("small"), np.random.default_rng(2), {}
    params = SamplingParams(temperature=0, logprobs=5)
    for fmt in ("BF16", "Q4_K"):
        given = program, random_tensors(program, fmt, rng), 16 * 20, _PAGE, find()
        backend: Any = GpuBackend(*given, max_rows=1024, same_tokens=True)
        known, differ = [], {"batched": 0, "chunked": 0, "drafted": 0}
        requests = []
        for number in range(count):
            tokens = rng.integers(0, program.vocab_size, rng.integers(20, 300)).tolist()
            request = Request(f"{number}", tokens, len(tokens), params, seed=1)
            request.pages = [[*range(20 * (number % 16), 20 * (number % 16) + 20)]]
            requests.append(request)
            known.append(backend.run(StepPlan((_part(request, 0),))).logprobs)
        for first in range(0, count, 3):
            together = [_part(request, 0) for request in requests[first : first + 3]]
            result = backend.run(StepPlan(tuple(together))).logprobs
            differ["batched"] += sum(
                [one] != right for one, right in zip(result, known[first : first + 3], strict=True)
            )
        for request, right in zip(requests, known, strict=True):
            middle = 2 * len(request.tokens) // 3
            backend.run(StepPlan((Slice(request, 0, middle, samples=False),)))
            differ["chunked"] += backend.run(StepPlan((_part(request, middle),))).logprobs != right
            last = len(request.tokens) - 3
            part = Slice(request, 0, last, samples=True)
            part.drafts = tuple(request.tokens[last:])
            differ["drafted"] += backend.run(StepPlan((part,))).logprobs[-1:] != right
            backend.forget(request)
        backend.close()
        found[fmt] = {"sequences": count, "differ": differ}
    return found


def _part(request: Request, start: int) -> Slice:
    return Slice(request, start, len(request.tokens) - start, samples=True)


def measure_device() -> tuple[dict[str, Any], tuple[float, float]]:
    """Return facts about the GPU, its copy bandwidth (read and write) and BF16 matrix rate."""
    from twostroke.backends.gpu.device import find
    from twostroke.backends.gpu.limits import measure

    device = find()
    if device.is_interpreted:
        return {"name": device.name}, (_BANDWIDTH, _PEAK)
    found = measure(device)
    facts = {"name": device.name, "sm": device.architecture}
    facts |= {"copy_bytes_s": found.bandwidth, "flops": found.peak}
    return facts, (found.bandwidth, found.peak)


def report(result: dict[str, Any], limits: tuple[float, float]) -> str:
    """Return the rows as a table."""
    lines = []
    for name, row in result["rows"].items():
        if name in _CHECKS:
            continue
        ms = row.get("ms")
        share = "" if ms is None else f"{row['floor_ms'] / ms:.0%}"
        cells = [f"{row[key]}" for key in ("launches", "floor_ms", "predicted_ms")]
        lines.append([name, row["step"], *cells, row.get("refused", ms or "not measured"), share])
    header = ("row", "step", "launches", "floor, ms", "predicted, ms", "measured, ms", "of floor")
    kind = "assumed" if result["predicted_only"] else "measured"
    text = table(header, [[str(cell) for cell in line] for line in lines])
    bandwidth, peak = limits
    return f"{text}\n\n{bandwidth / 1e12:.2f} TB/s and {peak / 1e12:.0f} TFLOPS {kind}."


if __name__ == "__main__":
    main()
