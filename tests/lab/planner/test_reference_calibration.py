"""Plans of models that were not measured, corrected by measured steps of another model."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from support.configs import write_config
from twostroke.lab.measure.single_step import StepShape
from twostroke.lab.planner import (
    Question,
    find_device,
    load_planned_model,
    make_plan,
    reference_steps,
)
from twostroke.lab.planner.roofline import Roofline
from twostroke.lab.planner.words import plan_facts

DEVICE = replace(find_device("L4"), peaks={"int8 VNNI": 9e11}, bandwidth=4e10)


def test_kernels_of_a_known_kind_take_what_they_took_of_another_model(tmp_path):
    model = load_planned_model(write_config(tmp_path / "8b.json", "8B")).with_weights("w4a16")
    reference = reference_steps(DEVICE)
    limits, corrected = (
        Roofline(model, DEVICE, Question(), calibration) for calibration in (None, reference)
    )
    for shape in (StepShape.decode(1, 1024), StepShape.decode(16, 128), StepShape.prefill(256)):
        floor, step = limits.step(shape.batch), corrected.step(shape.batch)
        assert step.nearest == shape.name
        for part in ("attention_s", "products_s"):
            assert 1 < getattr(step, part) / getattr(floor, part) < 100
        assert 1e-6 < step.rest_s / len(model.program.layer_outputs) < 1e-3
    question = Question(prompt=64, output=8, streams=4, token_budget=256)
    plan = make_plan(model, DEVICE, question, reference)
    assert plan.calibrated is None
    assert any(
        f"limits as much as the times of {plan.usual} do." in line for line in plan_facts(plan)
    )
    plain = make_plan(model, DEVICE, question)
    assert plan.ttft_s > 2 * plain.ttft_s
    # Formulas say how limits become these times.
    assert not any("by measured steps" in line for line in plain.steps)
    for name, limit_s, seconds in (
        ("prefill of 64 tokens: ", plain.ttft_s, plan.ttft_s),
        ("decode, 1 stream: ", plain.rows[0].step_s, plan.rows[0].step_s),
        ("decode, 4 streams: ", plain.chosen_row.step_s, plan.chosen_row.step_s),
    ):
        (line,) = (line for line in plan.steps if line.startswith(name))
        together, sums = line.split("together ")[1].split("; corrected by measured steps: ")
        assert float(together.split(" ")[0]) == pytest.approx(limit_s * 1e3, rel=1e-3)
        numbers = [float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", sums)]
        attention, longer, products, by, around, total = numbers
        assert attention * longer + products * by + around == pytest.approx(total, rel=0.01)
        assert total == pytest.approx(seconds * 1e3, rel=1e-3)


def test_other_kernels_have_no_reference_steps():
    assert reference_steps(find_device("H100-SXM")) is None
    assert reference_steps(replace(DEVICE, peaks={"float32 multiply and add": 9e10})) is None
