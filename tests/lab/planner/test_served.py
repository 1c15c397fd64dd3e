"""Steps of a running server, and plans that are corrected by them."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.servers import live_server, wait_for
from support.tiny import write_tiny_gguf
from twostroke.core.errors import EngineStoppedError, UsageError
from twostroke.lab.measure.single_step import Shape
from twostroke.lab.planner import (
    Calibration,
    Question,
    calibrated_threads,
    find_device,
    known_calibration,
    make_plan,
    planned_model,
)
from twostroke.lab.planner.calibration import Point, calibrate_from
from twostroke.lab.planner.models import PlannedModel
from twostroke.lab.planner.roofline import Roofline
from twostroke.lab.planner.served import ServedStep, grouped, look, merged, on_threads, threads_of
from twostroke.lab.planner.words import facts


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


def test_the_median_of_steps_of_like_shapes_counts():
    steps = [(8, 0, 8, 0.1, 8 * n, 0.2) for n in (100, 101, 102)]
    steps += [(8, 0, 8, 0.1, 808, 9.0), (8, 0, 8, 0.1, 808, 0.0)]  # disturbed, after a pause
    steps += [(40, 33, 8, 0.1, 900, 0.5)] * 2  # too few
    steps += [(9, 0, 3, 0.1, 900, 0.5)] * 5  # guesses
    assert grouped(steps) == (ServedStep(8, 0, 8, 808, 0.2, between_s=0.1),)
    assert grouped([]) == ()
    newer = ServedStep(8, 0, 8, 820, 0.3)
    far = ServedStep(32, 0, 32, 3200, 0.4)
    assert set(merged([ServedStep(8, 0, 8, 808, 0.2), far], [newer])) == {newer, far}


def test_plans_take_what_the_server_takes(tmp_path):
    planned = planned_model(str(write_tiny_gguf(tmp_path / "tiny.gguf")))
    roofline = Roofline(planned, find_device("L4"), Question())
    shapes = (Shape.decode(1, 30), Shape.decode(4, 30))
    points = []
    for one in shapes:
        least = roofline.least(one.batch)
        sizes = one.num_streams, one.context, one.num_prompt
        points.append(Point(*sizes, 2 * least.attention_s, 2 * least.products_s, 1e-6))
    alone = Calibration(tuple(points), "2026-01-01", 1)
    served = []
    for count, factor in ((2, 1.5), (16, 3.0)):
        one = ServedStep(count, 0, count, 41 * count, 1.0)
        seconds = factor * alone.seconds(roofline, one.batch)
        served.append(ServedStep(count, 0, count, 41 * count, seconds))
    found = Calibration(tuple(points), "2026-01-01", 1, served=tuple(served))
    for one in served:  # each decides alone where it was measured
        assert found.seconds(roofline, one.batch) == pytest.approx(one.seconds, rel=1e-3)
        assert found.factors(roofline, one.batch).nearest == one.name
    between = Shape.decode(6, 40).batch
    longer = found.seconds(roofline, between) / alone.seconds(roofline, between)
    assert 1.5 < longer < 3.0
    assert found.errors(roofline) == pytest.approx([1.0, 0.5])  # each by the other
    assert found.num_steps == 4
    # Without measured steps of the engine alone, those of the server count from the least times.
    only = Calibration((), "2026-01-01", 1, served=tuple(served))
    assert only.seconds(roofline, served[0].batch) == pytest.approx(served[0].seconds, rel=1e-3)
    assert math.isfinite(only.error(roofline))
    one = Calibration((), "2026-01-01", 1, served=tuple(served[:1]))  # nothing tells how good it is
    plan = make_plan(planned, find_device("L4"), Question(prompt=30, output=10), one)
    assert (plan.calibrated.num_steps, plan.calibrated.error) == (1, None)
    assert any(f"Nearest: {one.served[0].name}." in line for line in facts(plan))


def test_a_step_that_is_seen_often_counts_once():
    one = [8, 0, 8, 0.1, 808, 0.2]
    assert grouped([one] * 9) == ()
    others = [[8, 0, 8, 0.1, 808, seconds] for seconds in (0.3, 0.4)]
    (found,) = grouped([one] * 9 + others)
    assert (found.seconds, found.between_s) == pytest.approx((0.3, 0.2))


def test_a_server_that_does_not_say_its_threads_is_refused(tmp_path, monkeypatch):
    planned = planned_model(str(write_tiny_gguf(tmp_path / "tiny.gguf")))
    older = {"model": {"name": "tiny", "identity": planned.identity}, "steps": []}
    known = older | {"ranks": [], "engine": {"threads": 2}}
    for state in (older, known | {"engine": {}}, known | {"ranks": [{}]}):
        monkeypatch.setattr("twostroke.lab.planner.served._state", lambda *_, state=state: state)
        with pytest.raises(UsageError, match="how many threads it computes: it is an older ver"):
            threads_of("http://a", None, planned)
    monkeypatch.setattr("twostroke.lab.planner.served._state", lambda *_: known)
    assert threads_of("http://a", None, planned) == 2


def test_steps_of_a_running_server_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("twostroke.lab.planner.calibration.WATCH_S", 0.0)
    with live_server(tmp_path) as server:
        model = planned_model(str(next(tmp_path.glob("*.gguf"))))
        said = []
        with pytest.raises(UsageError, match="was not busy"):
            calibrate_from(server.url, None, model, said.append)
        server.complete(max_tokens=60, ignore_eos=True)
        wait_for(lambda: bool(look(server.url, None, model)))  # it is kept for a moment
        steps = look(server.url, None, model)
        assert steps[0][-1] == 0, "it had nothing to do before"
        assert all(turn_s >= step_s > 0 for *_, step_s, _, turn_s in steps[1:])
        with pytest.raises(UsageError, match="was not busy"):  # steps before do not count
            calibrate_from(server.url, None, model, said.append)
        monkeypatch.setattr("twostroke.lab.planner.calibration.WATCH_S", 3.0)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.complete, max_tokens=60, ignore_eos=True)
            calibrate_from(f"{server.url}/v1", None, model, said.append)
            asked.result()
        count = threads_of(server.url, None, model)
        known = known_calibration(model.identity, count)
        assert known is not None
        assert known.served
        assert f"shapes were seen, {on_threads(count)}." in said[-1]
        assert known_calibration(model.identity, count + 1) is None
        assert calibrated_threads(model.identity) == [count]
        plan = make_plan(model, find_device("L4"), Question(prompt=30, output=10), known)
        assert any(f"measured {on_threads(count)} on" in line for line in facts(plan))
        other = PlannedModel("other", model.program, {}, "IQ9", "bf16", "1")
        with pytest.raises(UsageError, match="not those of other"):
            look(server.url, None, other)
        for url in ("localhost:8000", "http://a:port", "http://[::1"):
            with pytest.raises(UsageError, match="must be like"):
                look(url, None, model)
        with pytest.raises(UsageError, match="shows no steps"):
            look(f"{server.url}/nowhere", None, model)
    with pytest.raises(EngineStoppedError, match="cannot be reached"):
        look(server.url, None, model)
