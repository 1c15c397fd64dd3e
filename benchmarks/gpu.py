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

import gpu_checks
from gpu_models import format_of, made_up, program_of
from report import machine_facts, note, table, write
from twostroke.backends.gpu.lower import lower
from twostroke.backends.gpu.lowered import Attend, Mix, Products
from twostroke.cache import FORMATS as KV_FORMATS
from twostroke.cache import PageGroups
from twostroke.core.errors import BackendError, MemoryLimitError
from twostroke.core.frozen import Frozen
from twostroke.measure.single_step import Shape, SingleStep
from twostroke.program import BatchShape
from twostroke.program.cost import CostModel
from twostroke.program.ops import Linear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.program import Program

_MIX_LAUNCHES: Final = 5
_LAUNCH_S: Final = 1.5e-6  # assumed between two kernels of a graph
_EAGER_LAUNCH_S: Final = 20e-6  # assumed for a launch from Python
_FP8_ROWS: Final = 64  # beyond which products with FP8 have twice the matrix rate
_MEASURED_S: Final = 3.0
_BANDWIDTH, _PEAK = 4.3e12, 790e12  # of one H200 that was seen; for --dry-run
_PAGE: Final = 16


class Row(Frozen):
    """One measurement: a model's shape and formats, the step, and whether rows have one tile.

    With `less` its figures are those of the step less `times` those of another row: what attention
    takes. `drafts` follow the newest token, and each is right with the chance `accepted`.
    """

    model: str
    fmt: str
    step: Shape
    kv: str = "f16"
    same_tokens: bool = False
    has_graphs: bool = True
    drafts: int = 0
    accepted: float = 0.0
    less: str = ""
    times: int = 1

    @property
    def batch(self) -> BatchShape:
        """The shape of the step, with its drafts."""
        if self.drafts:
            rows = 1 + self.drafts
            return BatchShape((self.step.context,), (rows,), rows)
        return self.step.batch

    @property
    def tokens(self) -> float:
        """How many tokens a step of one stream gives: those before the first wrong draft."""
        return sum(self.accepted**i for i in range(1 + self.drafts))


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
    "prefill-8b-fp8": Row("8b", "FP8", Shape.prefill(4096)),
    "prefill-8b-fp8-blocks": Row("8b", "FP8 blocks", Shape.prefill(4096)),
    "decode-8b-fp8": Row("8b", "FP8", Shape.decode(1, 256)),
    "decode-70b-q4_k": Row("70b", "Q4_K", Shape.decode(1, 256)),
    "attention-decode-32k": Row("8b", "BF16", Shape.decode(1, 32_768), less="decode-8b-bf16"),
    "attention-prefill-8k": Row("8b", "BF16", Shape.prefill(8192), less="prefill-8b-bf16", times=2),
    **{
        f"rows-{rows}-8b-{fmt.lower()}": Row("8b", fmt, Shape.decode(rows, 256))
        for rows in (8, 64, 128, 512)
        for fmt in ("BF16", "Q4_K", "Q8_0", "FP8")
    },
    "ladder-eager": Row("7b", "BF16", Shape.decode(1, 256), has_graphs=False),
    "ladder-graph": Row("7b", "BF16", Shape.decode(1, 256)),
    "ladder-int8": Row("7b", "Q8_0", Shape.decode(1, 256)),
    "ladder-int4": Row("7b", "Q4_0", Shape.decode(1, 256)),
    "ladder-drafts": Row("7b", "Q4_0", Shape.decode(1, 256), drafts=5, accepted=0.7),
    "same-1-8b-bf16": Row("8b", "BF16", Shape.decode(1, 256), same_tokens=True),
    "same-1-8b-q4_k": Row("8b", "Q4_K", Shape.decode(1, 256), same_tokens=True),
    "same-32-8b-bf16": Row("8b", "BF16", Shape.decode(32, 1024), same_tokens=True),
    "same-256-8b-bf16": Row("8b", "BF16", Shape.decode(256, 1024), same_tokens=True),
    "same-prefill-8b-bf16": Row("8b", "BF16", Shape.prefill(4096), same_tokens=True),
}
_CHECKS: Final = {
    "correct": gpu_checks.correct,
    "sampler": gpu_checks.sampler,
    "same-tokens": gpu_checks.same_tokens,
}


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
            found = _CHECKS[name]()
        else:
            row = ROWS[name]
            found = predict(row, *limits)
            if not given.dry_run:
                found |= measured(row) if not row.less else difference(row)
        result["rows"][name] = found
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write(given.out, json.dumps(result, indent=1) + "\n")
        note(f"{name}: {found}")
    print(report(result, limits))


def predict(row: Row, bandwidth: float, peak: float) -> dict[str, Any]:
    """Return what the cost model says about a row."""
    program = program_of(row.model)
    per_step = CostModel(program, _stored(program, row.fmt), KV_FORMATS[row.kv]).per_step()
    cost = per_step.of(row.batch)
    found: dict[str, Any] = {"step": row.step.name, "bytes": cost.bytes, "flops": cost.flops}
    flops_as_bf16: float = cost.flops
    is_fp8 = row.fmt.startswith("FP8") and row.batch.num_rows > _FP8_ROWS
    if is_fp8:
        linear = sum(op.row_flops for op in program.ops if isinstance(op, Linear))
        flops_as_bf16 -= linear * row.batch.num_rows / 2
    lowered = lower(program)
    attends = sum(isinstance(record, Attend) for record in lowered.records)
    mixes = sum(isinstance(record, Mix) for record in lowered.records)
    launches = len(lowered.records) + attends + (_MIX_LAUNCHES - 1) * mixes + 4
    products = [record for record in lowered.records if isinstance(record, Products)]
    if row.fmt != "BF16":  # each packed matrix is multiplied by itself
        launches += sum(len(record.weights) - 1 for record in products)
    if is_fp8:
        launches += len(products)  # round their rows
    floor_s = max(cost.bytes / bandwidth, flops_as_bf16 / peak)
    step_s = floor_s + launches * _LAUNCH_S
    if not row.has_graphs:
        step_s = max(step_s, launches * _EAGER_LAUNCH_S)
    if row.less:
        other = predict(ROWS[row.less], bandwidth, peak)
        launches = attends
        found["step"] = f"{row.step.name}: attention"
        found["bytes"] -= row.times * other["bytes"]
        found["flops"] -= row.times * other["flops"]
        floor_s = max(found["bytes"] / bandwidth, found["flops"] / peak)
        step_s = floor_s + launches * _LAUNCH_S
    found |= {"launches": launches, "floor_ms": round(1e3 * floor_s, 4)}
    found |= {"predicted_ms": round(1e3 * step_s, 4)}
    if not row.less and row.step.num_streams == 1 and not row.step.num_prompt:
        found["predicted_tokens_s"] = round(row.tokens / step_s, 1)
    return found


def _stored(program: Program, fmt: str) -> Mapping[str, int]:
    return {
        name: shape[0] * format_of(fmt, name, shape[1]).num_bytes(shape[1])
        if len(shape) > 1
        else 4 * shape[0]
        for name, shape in program.weight_shapes.items()
    }


def measured(row: Row) -> dict[str, Any]:
    """Return the median time of the row's steps on this machine's GPU."""
    from twostroke.backends.gpu.backend import GpuBackend
    from twostroke.backends.gpu.device import find

    program, began = program_of(row.model), time.perf_counter()
    windows = tuple(group.window for group in program.cache_groups)
    num_pages = row.step.num_pages(PageGroups(_PAGE, windows))
    rows = max(256, row.batch.num_rows)
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
    if not row.has_graphs:
        backend._graphs.drop()  # noqa: SLF001 - what nobody but this row wants
    if row.drafts:
        single.plan.slices[0].drafts = tuple(range(1, 1 + row.drafts))
    single.run()
    times: list[float] = []
    launched: list[float] = []
    while sum(times) < _MEASURED_S and len(times) < 500:
        started = time.perf_counter()
        backend.start(single.plan)
        launched.append(time.perf_counter() - started)
        times.append(backend.finish().elapsed_s)
    scheduler_s = 0.0 if row.drafts else statistics.median(single.scheduler_times())
    single.close()
    backend.close()
    step_s = statistics.median(times)
    return {
        "ms": round(1e3 * step_s, 4),
        "host_ms": round(1e3 * (statistics.median(launched) + scheduler_s), 4),
        "tokens_s": round(row.step.num_streams * row.tokens / step_s, 1),
        "steps": len(times),
        "ready_s": round(ready_s, 1),
        "detail": backend.facts.detail,
    }


def difference(row: Row) -> dict[str, Any]:
    """Return a row's time less that of the row beside it."""
    own, other = measured(row), measured(ROWS[row.less])
    for found in (own, other):
        if "refused" in found:
            return found
    return {"ms": round(own["ms"] - row.times * other["ms"], 4), "detail": own["detail"]}


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
    """Return the rows as a table, and how far predictions are from what was measured."""
    lines, errors = [], []
    for name, row in result["rows"].items():
        if name in _CHECKS:
            continue
        ms = row.get("ms")
        share = "" if ms is None else f"{row['floor_ms'] / ms:.0%}"
        if ms is not None:
            errors.append(abs(row["predicted_ms"] / ms - 1))
        cells = [f"{row[key]}" for key in ("launches", "floor_ms", "predicted_ms")]
        cells.append(row.get("refused", ms or "not measured"))
        speed = row.get("tokens_s", row.get("predicted_tokens_s", ""))
        lines.append([name, row["step"], *cells, share, row.get("host_ms", ""), speed])
    header = [
        *("row", "step", "launches", "floor, ms", "predicted, ms", "measured, ms", "of floor"),
        *("host, ms", "tokens/s"),
    ]
    kind = "assumed" if result["predicted_only"] else "measured"
    text = table(header, [[str(cell) for cell in line] for line in lines])
    bandwidth, peak = limits
    text = f"{text}\n\n{bandwidth / 1e12:.2f} TB/s and {peak / 1e12:.0f} TFLOPS {kind}."
    if errors:
        text += f" Predictions are {statistics.median(errors):.0%} off (median)."
    return text


if __name__ == "__main__":
    main()
