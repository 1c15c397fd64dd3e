"""Steps of a running server are read, and correct the times of plans."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.servers import live_server
from support.tiny import write_tiny_gguf
from support.waiting import wait_for
from twostroke.core.errors import EngineStoppedError, UsageError
from twostroke.lab.measure.single_step import StepShape
from twostroke.lab.planner import (
    Calibration,
    Question,
    calibrated_threads,
    find_device,
    load_calibration,
    load_planned_model,
    make_plan,
)
from twostroke.lab.planner.calibration import MeasuredStep, calibrate_from_server
from twostroke.lab.planner.models import PlannedModel
from twostroke.lab.planner.roofline import Roofline
from twostroke.lab.planner.served import (
    ServedStep,
    group_steps,
    merge_steps,
    read_steps,
    server_threads,
    thread_count_text,
)
from twostroke.lab.planner.words import plan_facts


@pytest.mark.parametrize(
    ("starts", "counts"),
    [((50,) * 7, (1,) * 7), ((0,), (33,)), ((20,) * 5, (1, 1, 1, 16, 16)), ((0, 0), (8, 9))],
)
def test_a_shape_is_that_of_the_steps_it_stands_for(starts, counts):
    attended = sum(n * start + n * (n + 1) // 2 for start, n in zip(starts, counts, strict=True))
    prompt_rows = sum(n for n in counts if n > 1)
    batch = ServedStep(sum(counts), prompt_rows, len(counts), attended, 1.0).batch
    assert (batch.starts, batch.counts) == (starts, counts)
    assert batch.num_attended() == attended


def test_the_mean_of_steps_of_like_shapes_counts():
    steps = [(8, 0, 8, 0.25, 8 * n, turn_s) for n, turn_s in ((100, 0.5), (101, 0.5), (102, 1.25))]
    steps += [(8, 0, 8, 0.25, 808, 9.0)]  # disturbed
    steps += [(40, 33, 8, 0.1, 900, 0.5)] * 2  # too few
    steps += [(9, 0, 3, 0.1, 900, 0.5)] * 5  # drafts
    assert group_steps(steps) == (ServedStep(8, 0, 8, 808, 0.75, between_s=0.5),)
    assert group_steps([]) == ()
    newer = ServedStep(8, 0, 8, 820, 0.3)
    larger = ServedStep(32, 0, 32, 3200, 0.4)
    assert set(merge_steps([ServedStep(8, 0, 8, 808, 0.2), larger], [newer])) == {newer, larger}


def test_plans_take_what_the_server_takes(tmp_path):
    planned = load_planned_model(str(write_tiny_gguf(tmp_path / "tiny.gguf")))
    roofline = Roofline(planned, find_device("L4"), Question())
    shapes = (StepShape.decode(1, 30), StepShape.decode(4, 30))
    points = []
    for step in shapes:
        limits = roofline.min_step(step.batch)
        points.append(
            MeasuredStep(
                streams=step.num_streams,
                context=step.context,
                prompt=step.num_prompt,
                attention_s=2 * limits.attention_s,
                products_s=2 * limits.products_s,
                rest_s=1e-6,
            )
        )
    alone = Calibration(tuple(points), "2026-01-01", 1)
    served_steps = []
    for count, factor in ((2, 1.5), (16, 3.0)):
        step = ServedStep(count, 0, count, 41 * count, 1.0)
        seconds = factor * alone.seconds(roofline, step.batch)
        served_steps.append(ServedStep(count, 0, count, 41 * count, seconds))
    both = Calibration(tuple(points), "2026-01-01", 1, served_steps=tuple(served_steps))
    for step in served_steps:  # each decides alone where it was measured
        assert both.seconds(roofline, step.batch) == pytest.approx(step.seconds, rel=1e-3)
        assert both.factors(roofline, step.batch).nearest == step.name
    between = StepShape.decode(6, 40).batch
    longer = both.seconds(roofline, between) / alone.seconds(roofline, between)
    assert 1.5 < longer < 3.0
    assert both.errors(roofline) == pytest.approx([1.0, 0.5])  # each by the other
    assert both.num_steps == 4
    # Without measured steps of the engine alone, the server's steps count from the least times.
    only = Calibration((), "2026-01-01", 1, served_steps=tuple(served_steps))
    assert only.seconds(roofline, served_steps[0].batch) == pytest.approx(
        served_steps[0].seconds, rel=1e-3
    )
    assert math.isfinite(only.error(roofline))
    # A single step cannot be predicted from others: its error is unknown.
    single = Calibration((), "2026-01-01", 1, served_steps=tuple(served_steps[:1]))
    plan = make_plan(planned, find_device("L4"), Question(prompt=30, output=10), single)
    assert (plan.calibrated.num_steps, plan.calibrated.error) == (1, None)
    assert any(f"Nearest step: {single.served_steps[0].name}." in line for line in plan_facts(plan))


def test_a_step_after_a_pause_takes_the_usual_time_between_steps():
    after_pauses = [(16, 16, 1, step_s, 136, 0.0) for step_s in (0.5, 0.6, 0.7)]
    others = [(8, 0, 8, 0.2, 808 + n, 0.2 + between_s) for n, between_s in enumerate((1, 2, 9))]
    by_rows = {step.rows: step for step in group_steps(after_pauses + others)}
    assert by_rows[16].seconds == pytest.approx(0.6 + 2)
    assert by_rows[16].between_s == pytest.approx(2)
    (alone,) = group_steps(after_pauses)
    assert (alone.seconds, alone.between_s) == pytest.approx((0.6, 0))


def test_a_step_that_is_seen_often_counts_once():
    step = [8, 0, 8, 0.1, 808, 0.2]
    assert group_steps([step] * 9) == ()
    others = [[8, 0, 8, 0.1, 808, seconds] for seconds in (0.3, 0.4)]
    (served_step,) = group_steps([step] * 9 + others)
    assert (served_step.seconds, served_step.between_s) == pytest.approx((0.3, 0.2))


def test_a_server_that_does_not_say_its_threads_is_refused(tmp_path, monkeypatch):
    planned = load_planned_model(str(write_tiny_gguf(tmp_path / "tiny.gguf")))
    older = {"model": {"name": "tiny", "identity": planned.identity}, "steps": []}
    with_threads = older | {"ranks": [], "engine": {"threads": 2}}
    for state in (older, with_threads | {"engine": {}}, with_threads | {"ranks": [{}]}):
        monkeypatch.setattr(
            "twostroke.lab.planner.served.fetch_json", lambda *_, state=state: state
        )
        with pytest.raises(UsageError, match="how many threads it computes: it is an older ver"):
            server_threads("http://a", None, planned)
    monkeypatch.setattr("twostroke.lab.planner.served.fetch_json", lambda *_: with_threads)
    assert server_threads("http://a", None, planned) == 2


def test_steps_of_a_running_server_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("twostroke.lab.planner.calibration.WATCH_S", 0.0)
    with live_server(tmp_path) as server:
        model = load_planned_model(str(next(tmp_path.glob("*.gguf"))))
        notices = []
        with pytest.raises(UsageError, match="was not busy"):
            calibrate_from_server(server.url, None, model, notices.append)
        server.complete(max_tokens=60, ignore_eos=True)
        wait_for(lambda: bool(read_steps(server.url, None, model)))  # it is kept for a moment
        steps = read_steps(server.url, None, model)
        assert steps[0][-1] == 0, "it had nothing to do before"
        assert all(turn_s >= step_s > 0 for *_, step_s, _, turn_s in steps[1:])
        with pytest.raises(UsageError, match="was not busy"):  # steps before do not count
            calibrate_from_server(server.url, None, model, notices.append)
        monkeypatch.setattr("twostroke.lab.planner.calibration.WATCH_S", 3.0)
        with ThreadPoolExecutor(1) as pool:
            completion = pool.submit(server.complete, max_tokens=60, ignore_eos=True)
            calibrate_from_server(f"{server.url}/v1", None, model, notices.append)
            completion.result()
        count = server_threads(server.url, None, model)
        calibration = load_calibration(model.identity, count)
        assert calibration is not None
        assert calibration.served_steps
        assert f"shapes were seen, {thread_count_text(count)}." in notices[-1]
        assert load_calibration(model.identity, count + 1) is None
        assert calibrated_threads(model.identity) == [count]
        plan = make_plan(model, find_device("L4"), Question(prompt=30, output=10), calibration)
        assert any(f"measured {thread_count_text(count)} on" in line for line in plan_facts(plan))
        other = PlannedModel(
            name="other",
            program=model.program,
            weight_bytes={},
            stored="IQ9",
            arithmetic="bf16",
            identity="1",
        )
        with pytest.raises(UsageError, match="not those of other"):
            read_steps(server.url, None, other)
        for url in ("localhost:8000", "http://a:port", "http://[::1"):
            with pytest.raises(UsageError, match="must be like"):
                read_steps(url, None, model)
        with pytest.raises(UsageError, match="shows no steps"):
            read_steps(f"{server.url}/nowhere", None, model)
    with pytest.raises(EngineStoppedError, match="cannot be reached"):
        read_steps(server.url, None, model)
