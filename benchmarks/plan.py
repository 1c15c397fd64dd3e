"""`make bench-plan`: planned times of steps beside measured ones on this machine.

Each model's steps are measured for a grid of shapes. Half of the grid calibrates the plan, the
other half is compared with it: as limits (nothing measured but the machine), and corrected.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import msgspec

from report import caption, machine_facts, save, table
from twostroke.measure.profile import Wanted, profile
from twostroke.measure.single_step import Shape
from twostroke.planner import Calibration, Question, make_plan, planned_model, this_machine
from twostroke.planner.calibration import Point, usual_shapes
from twostroke.planner.roofline import Roofline

MODELS = ("smollm2", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
OTHERS = (
    *(Shape.decode(count, size) for size in (256, 2048) for count in (2, 8, 24)),
    *map(Shape.prefill, (128, 512)),
)
HEADER = ("step", "measured, ms", "limit, ms", "error", "corrected, ms", "error")


def main() -> None:
    """Measure, then print and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL")
    parser.add_argument("--steps", type=int, metavar="N", help="of each shape [default: 2 s]")
    given = parser.parse_args()
    parts, points = [], {}
    for model in given.models:
        text, points[model] = _measured(model, given.steps)
        parts.append(text)
        print(text, flush=True)
    facts = machine_facts()
    result = {"facts": facts, "points": msgspec.to_builtins(points)}
    save("plan", result, "\n".join([*parts, caption(facts)]))


def _measured(model: str, num_steps: int | None) -> tuple[str, list[Point]]:
    """Return the table of one model with its errors, and what was measured."""
    planned, question = planned_model(model), Question()
    calibrating = usual_shapes(planned.program.context_length)
    wanted = Wanted((*calibrating, *OTHERS), num_steps)
    points = [Point.of(one) for one in profile(model, wanted, lambda _: None)]
    known = Calibration(tuple(points[: len(calibrating)]), "")
    device = this_machine()
    roofline = Roofline(planned, device, question)
    rows, before, after = [], [], []
    for one in points[len(calibrating) :]:
        limit_s = roofline.least(one.batch).seconds
        corrected_s = known.seconds(roofline, one.batch)
        before.append(abs(limit_s / one.seconds - 1))
        after.append(abs(corrected_s / one.seconds - 1))
        cells = [f"{seconds * 1e3:,.2f}" for seconds in (one.seconds, limit_s, corrected_s)]
        rows.append((one.name, *cells[:2], f"{before[-1]:.0%}", cells[2], f"{after[-1]:.0%}"))
    began_s = time.perf_counter()
    make_plan(planned, device, question, known)
    planned_s = time.perf_counter() - began_s
    told = known.error(roofline)
    text = (
        f"## {model}\n\n{table(HEADER, rows)}\n\nMedian error: {median(before):.1%} as limits, "
        f"{median(after):.1%} corrected by {len(calibrating)} other steps, which say {told:.1%} of "
        f"each other. A plan takes {planned_s:.2f} s.\n"
    )
    return text, points


if __name__ == "__main__":
    main()
