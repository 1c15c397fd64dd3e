"""Plans whose times are corrected by measured steps."""

from __future__ import annotations

import pytest

from support.native import native_dir
from support.tiny import write_tiny_gguf
from twostroke.backends import machine_limits as limits
from twostroke.core.errors import UsageError
from twostroke.lab.measure.single_step import StepShape
from twostroke.lab.planner import (
    Calibration,
    Question,
    calibrate,
    find_device,
    load_calibration,
    load_planned_model,
    make_plan,
    this_machine,
)
from twostroke.lab.planner.calibration import MeasuredStep, measure
from twostroke.lab.planner.roofline import Roofline

SHAPES = (
    StepShape.decode(1, 30),
    StepShape.decode(4, 30),
    StepShape.decode(4, 60),
    StepShape.prefill(40),
)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    return str(write_tiny_gguf(tmp_path / "tiny.gguf"))


def slower(roofline, shape, attention, products, rest_s):
    limits = roofline.min_step(shape.batch)
    return MeasuredStep(
        streams=shape.num_streams,
        context=shape.context,
        prompt=shape.num_prompt,
        attention_s=attention * limits.attention_s,
        products_s=products * limits.products_s,
        rest_s=rest_s,
    )


def test_steps_take_what_was_measured_of_steps_like_them(model):
    planned, device = load_planned_model(model), find_device("L4")
    roofline = Roofline(planned, device, Question())
    calibration = Calibration(
        tuple(slower(roofline, measured_shape, 3, 2, 0.1) for measured_shape in SHAPES),
        "2026-01-01",
        1,
    )
    batch = StepShape.decode(2, 50).batch  # not among them
    limits = roofline.min_step(batch)
    expected = 3 * limits.attention_s + 2 * limits.products_s + 0.1
    assert calibration.seconds(roofline, batch) == pytest.approx(expected)
    assert calibration.error(roofline) == pytest.approx(0, abs=1e-9)
    step = Roofline(planned, device, Question(), calibration).step(batch)
    assert step.seconds == pytest.approx(expected)
    # A point of the same shape decides nearly alone, and its neighbours tell that it differs.
    odd = (*calibration.points[1:], slower(roofline, SHAPES[0], 30, 20, 1.0))
    other = Calibration(odd, "2026-01-01", 1)
    assert other.seconds(roofline, SHAPES[0].batch) == pytest.approx(odd[-1].seconds, rel=1e-3)
    assert max(other.errors(roofline)) > 0.5
    assert other.factors(roofline, SHAPES[0].batch).nearest == SHAPES[0].name


def test_contexts_tell_nothing_about_products(model):
    """Matrix products take as long as in measured steps with as many rows, at any context."""
    planned, device = load_planned_model(model), find_device("L4")
    roofline = Roofline(planned, device, Question())
    shapes = (StepShape.decode(2, 20), StepShape.decode(2, 900), StepShape.decode(8, 900))
    times = zip(shapes, (2, 8, 50), strict=True)
    calibration = Calibration(
        tuple(slower(roofline, shape, 3, p, 0.1) for shape, p in times), "2026-01-01", 1
    )
    factors = calibration.factors(roofline, StepShape.decode(2, 900).batch)
    assert factors.products == pytest.approx(4, rel=1e-3)  # the geometric mean of both
    assert factors.nearest == shapes[1].name


def test_other_choices_change_corrected_times_as_limits(model):
    planned, device = load_planned_model(model), find_device("L4")
    roofline = Roofline(planned, device, Question())
    calibration = Calibration(
        tuple(slower(roofline, shape, 3, 2, 0.1) for shape in SHAPES), "2026-01-01", 1
    )
    batch = StepShape.decode(2, 50).batch
    for weights, question in (
        ("bf16", Question()),
        ("w4a16", Question(kv_format="int8")),
        (None, Question(kv_format="int8")),
    ):
        other = planned if weights is None else planned.with_weights("bf16").with_weights(weights)
        limits = Roofline(other, device, question).min_step(batch)
        expected = 3 * limits.attention_s + 2 * limits.products_s + 0.1
        assert Roofline(other, device, question, calibration).step(batch).seconds == pytest.approx(
            expected
        )
    plan = make_plan(planned, device, Question(prompt=30, output=10), calibration)
    times = {what_if.change: what_if.tpot_s for what_if in plan.what_ifs}
    assert times["keys and values int8"] < times["as asked"]


def test_measured_steps_are_kept_for_the_model_on_this_machine(model, tmp_path):
    native_dir()
    planned = load_planned_model(model)
    assert load_calibration(planned.identity) is None
    calibration = measure(model, planned.identity, SHAPES, lambda _: None, num_steps=3)
    assert load_calibration(planned.identity) == calibration
    assert all(point.seconds > 0 for point in calibration.points)
    assert load_calibration("another") is None
    plan = make_plan(planned, find_device("L4"), Question(prompt=30, output=10), calibration)
    assert plan.calibrated.num_steps == len(SHAPES)
    assert plan.calibrated.nearest in {shape.name for shape in SHAPES}
    (path,) = (tmp_path / "cache" / "calibrations").iterdir()
    path.write_text(path.read_text().replace('"version": 3', '"version": 2'))
    assert load_calibration(planned.identity) is None  # with activations of 15 bits


def test_a_plan_measures_this_machine_again_and_keeps_the_best(monkeypatch, tmp_path):
    native_dir()
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    for busy, best in ((2e9, 2e9), (9e9, 9e9), (1e9, 9e9)):
        monkeypatch.setattr(limits, "measure_bandwidth", lambda *_, measured=busy: measured)
        assert this_machine(1).bandwidth == best


def test_a_configuration_cannot_be_measured():
    with pytest.raises(UsageError, match="name a model with weights"):
        calibrate("config.json", "", 100, print)
