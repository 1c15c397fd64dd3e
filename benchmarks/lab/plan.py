"""Compare planned times of steps with measured times on this machine.

Run it with `make bench WHAT=plan`.

Each model's steps are measured for a grid of shapes. Half of the grid calibrates the plan; the
other half is compared with it: as limits (only the machine was measured), and corrected. The
peak memory of new processes is compared with weights, keys and values, and published speeds with
limits. Answers of `twostroke plan` and a large fleet are timed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from benchmarks.common.footprint import OFTEN_S, generate_command, live
from benchmarks.common.report import caption, machine_facts, save, table
from benchmarks.lab.published import answer_times, fleet_time, published_points
from twostroke.core.hardware import resolve_num_threads
from twostroke.lab.measure.single_step import StepShape
from twostroke.lab.planner import (
    Calibration,
    Question,
    load_planned_model,
    make_plan,
    reference_steps,
    this_machine,
)
from twostroke.lab.planner.calibration import calibration_shapes, measured_points
from twostroke.lab.planner.reference_calibration import REFERENCE
from twostroke.lab.planner.roofline import Roofline, kv_bytes
from twostroke.model.loader import build_tokenizer, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.lab.planner.calibration import MeasuredStep

MODELS = ("smollm2", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
OTHERS = (
    *(StepShape.decode(count, size) for size in (256, 2048) for count in (2, 8, 24)),
    *map(StepShape.prefill, (128, 512)),
)
PARTS = ("steps", "memory", "published", "answers", "fleet")
MEMORY_TOKENS = (512, 1024, 2048, 4096)  # that a process holds; the first tells its runtime
MEMORY_HEADER = ("tokens", "measured, MB", "weights and KV, MB", "with the runtime, MB", "error")
HEADER = (
    "step", "measured, ms", "limit, ms", "error", "before calibration, ms", "error", "after, ms",
    "error",
)  # fmt: skip


def main() -> None:
    """Measure, then print and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    text = "fetched if need be; a run of some is kept under their names"
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL", help=text)
    parser.add_argument("--steps", type=int, metavar="N", help="of each shape [default: 2 s]")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    args = parser.parse_args()
    texts: list[str] = []
    result: dict[str, object] = {}

    def add(name: str, section: tuple[str, object]) -> None:
        texts.append(section[0])
        result[name] = msgspec.to_builtins(section[1])
        print(section[0], flush=True)

    if {"steps", "memory"} & set(args.parts):
        pull = (sys.executable, "-m", "twostroke", "pull", *args.models)
        subprocess.run(pull, check=True)
    for model in args.models:
        if "steps" in args.parts:
            add(f"steps of {model}", _measured(model, args.steps))
        if "memory" in args.parts:
            add(f"memory of {model}", _memory(model))
    if "published" in args.parts:
        add("published", published_points())
    if "answers" in args.parts:
        add("answers", answer_times())
    if "fleet" in args.parts:
        add("fleet", fleet_time())
    facts = machine_facts()
    is_default = tuple(args.models) == MODELS
    name = "plan" if is_default else "-".join(["plan", *args.models])
    save(name, {"facts": facts, **result}, "\n".join([*texts, caption(facts)]))


def _memory(model: str) -> tuple[str, list[tuple[int, int, float]]]:
    """Return the table of one model's peak memory, and (tokens, measured, planned) in bytes.

    It is memory of the process's own: pages of the mapped file can be given back at any time. The
    smallest process tells what interpreter, libraries and buffers take, for the others.
    """
    planned = load_planned_model(model)
    encode = build_tokenizer(load(model)).encode
    results = []
    for count in MEMORY_TOKENS:
        if count > planned.program.context_length:
            break
        prompt = "the " * (count - 16)
        num_tokens = len(encode(prompt)) + 8
        sizes = ("--context-length", str(count), "--max-tokens", "8", "--ignore-eos")
        command = generate_command(model, "--raw", *sizes, "-p", prompt)
        min_bytes = planned.all_bytes + kv_bytes(planned, Question(), num_tokens)
        results.append((num_tokens, live(command, OFTEN_S).anonymous, min_bytes))
    runtime = results[0][1] - results[0][2]
    rows, errors = [], []
    for num_tokens, measured, min_bytes in results:
        errors.append(abs((min_bytes + runtime) / measured - 1))
        sizes_mb = [
            f"{num_bytes / 1e6:,.1f}" for num_bytes in (measured, min_bytes, min_bytes + runtime)
        ]
        rows.append((f"{num_tokens:,}", *sizes_mb, f"{errors[-1]:.1%}"))
    text = (
        f"## {model}: peak memory\n\n{table(MEMORY_HEADER, rows)}\n\nLargest error: "
        f"{max(errors[1:]):.1%}, with {runtime / 1e6:.1f} MB of runtime from the first row.\n"
    )
    return text, results


def _measured(model: str, num_steps: int | None) -> tuple[str, Sequence[MeasuredStep]]:
    """Return the table of one model with its errors, and what was measured."""
    planned, question = load_planned_model(model), Question()
    calibrating = calibration_shapes(planned.program.context_length)
    points = measured_points(model, (*calibrating, *OTHERS), lambda _: None, num_steps)
    device = this_machine()
    calibration = Calibration(points[: len(calibrating)], "", resolve_num_threads(None))
    roofline = Roofline(planned, device, question)
    roofs = (
        roofline,
        *(
            Roofline(planned, device, question, steps)
            for steps in (reference_steps(device), calibration)
        ),
    )
    rows, errors = [], []
    for point in points[len(calibrating) :]:
        results = [roof.step(point.batch).seconds for roof in roofs]
        errors.append([abs(seconds / point.seconds - 1) for seconds in results])
        pairs = zip(results, errors[-1], strict=True)
        cells = [cell for s, error in pairs for cell in (f"{s * 1e3:,.2f}", f"{error:.0%}")]
        rows.append((point.name, f"{point.seconds * 1e3:,.2f}", *cells))
    began_s = time.perf_counter()
    make_plan(planned, device, question, calibration)
    planned_s = time.perf_counter() - began_s
    calibration_error = calibration.error(roofline)
    limits, before, after = [median(column) for column in zip(*errors, strict=True)]
    text = (
        f"## {model}\n\n{table(HEADER, rows)}\n\nMedian error: {limits:.1%} as limits; "
        f"{before:.1%} before calibration, by steps of {REFERENCE}; {after:.1%} after it, by "
        f"{len(calibrating)} other steps, which say {calibration_error:.1%} of each other. "
        f"A plan takes {planned_s:.2f} s.\n"
    )
    return text, points


if __name__ == "__main__":
    main()
