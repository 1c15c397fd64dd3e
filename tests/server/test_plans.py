"""/api/plan: plans of the served model, refused requests, and who may send them."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from support.plan_checks import check_refused, is_kept
from support.servers import live_server
from twostroke.backends.machine_limits import MachineLimits
from twostroke.core.errors import OverloadedError
from twostroke.core.hardware import Hardware
from twostroke.lab import planner
from twostroke.lab.planner import endpoint as plans
from twostroke.lab.planner.calibration import Calibration, MeasuredStep
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer

MACHINE = Hardware("a machine", 2, 8 << 30, 20e9, 1e12, "int8", "measured")
POINTS = (MeasuredStep(1, 16, 0, 2e-5, 1e-4, 1e-5), MeasuredStep(0, 0, 16, 2e-5, 4e-4, 1e-5))


@pytest.fixture
def measured(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    limits = MachineLimits("portable", 2, 1 << 20)
    monkeypatch.setattr(limits, "_hardware", MACHINE)
    (plans_extension,) = server.api._extensions
    monkeypatch.setattr(plans_extension, "_limits", limits)
    return server


def test_the_answer_is_that_of_the_planner(server: LiveServer) -> None:
    card = server.client.card
    model = planner.PlannedModel(
        "tiny", card.cost.program, card.cost.weight_bytes, card.format, "bf16"
    )
    device = planner.find_device("L4")
    for body, planned, question in (
        ({}, model, planner.Question(kv_format="f16", token_budget=2048)),
        (
            {"weights": "w4a16", "kv_format": "int8", "prompt": 64, "streams": 3, "tpot_s": 0.5},
            model.with_weights("w4a16"),
            planner.Question(kv_format="int8", prompt=64, streams=3, tpot_s=0.5, token_budget=2048),
        ),
    ):
        payload = server.http.post(plans.PATH, json={"device": "L4", **body}).json()
        plan = planner.make_plan(planned, device, question)
        assert payload == msgspec.json.decode(msgspec.json.encode(plan))


def test_this_machine_has_its_measured_limits(
    measured: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = measured.http.get(plans.PATH).json()
    assert choices["here"] == "a machine"
    assert {"L4", "H100-SXM"} < {device["name"] for device in choices["devices"]}
    assert "w4a16" in choices["weights"]
    plan = measured.http.post(plans.PATH, json={"prompt": 64}).json()
    assert plan["device"] == "a machine"
    assert plan["roof"]["bandwidth"] == MACHINE.bandwidth
    assert plan["calibrated"] is None
    assert plan["question"]["token_budget"] == measured.api.engine.facts.config.token_budget
    calibration = Calibration(POINTS, "2026-01-02", 1)
    known_on = {measured.api.engine.facts.backend.num_threads: calibration}.get
    monkeypatch.setattr(planner, "load_calibration", lambda _, count: known_on(count))
    corrected = measured.http.post(plans.PATH, json={"prompt": 64}).json()
    assert corrected["calibrated"]["date"] == "2026-01-02"
    assert corrected["ttft_s"] > plan["ttft_s"]
    table = measured.http.post(plans.PATH, json={"device": "L4"}).json()
    assert table["calibrated"] is None


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "device", "limits are not known"),
        ({"device": "H100-SXN"}, "device", "Did you mean 'H100-SXM'"),
        ({"device": "mine.toml"}, "device", "must be one of"),
        ({"device": "L4", "weights": "int9"}, "weights", "must be one of bf16"),
        ({"device": "L4", "kv_format": "q4"}, "kv_format", "must be one of f32"),
        ({"device": "L4", "prompt": 0}, "prompt", "1048576"),
        ({"device": "L4", "output": 1 << 40}, "output", "1048576"),
        ({"device": "L4", "streams": 1 << 15}, "streams", "16384"),
        ({"device": "L4", "count": 0}, "count", "from 1 to 1,024"),
        ({"device": "L4", "count": 10**400}, "count", "from 1 to 1,024"),
        ({"device": "L4", "cached": 1}, "cached", "below 1"),
        ({"device": "L4", "tpot_s": -1}, "tpot_s", "greater than 0"),
        ({"device": "L4", "prompt": "many"}, "prompt", "integer"),
    ],
)
def test_wrong_fields_are_named(
    server: LiveServer, body: dict[str, Any], field: str, words: str
) -> None:
    answer = server.http.post(plans.PATH, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert words in answer.json()["error"]["message"]


def test_a_wrong_method_gets_the_allowed_methods(server: LiveServer) -> None:
    answer = server.http.request("DELETE", plans.PATH)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}


def test_near_zero_objectives_are_answered(server: LiveServer) -> None:
    body = {"device": "L4", "prompt": 16, "output": 8}
    for name in ("ttft_s", "tpot_s"):
        answer = server.http.post(plans.PATH, json={**body, name: 5e-324})
        assert answer.status_code == 200
        assert "devices are not enough" in answer.json()["verdict"]


def test_plans_are_there_if_the_dashboard_is(tmp_path: Path) -> None:
    with live_server(tmp_path, ServeOptions(dashboard=False)) as server:
        for answer in (server.http.get(plans.PATH), server.http.post(plans.PATH, json={})):
            assert answer.status_code == 404
            assert "--dashboard" in answer.json()["error"]["message"]


def test_more_plans_than_can_wait_are_refused(server: LiveServer) -> None:
    gate = threading.Event()

    async def crowd() -> list[Any]:
        tenant_plans = plans.Plans(server.api.engine, "tiny", None)
        waiting = [tenant_plans._in_turn("anna", gate.wait) for _ in range(plans._MAX_WAITING)]
        tasks = [asyncio.ensure_future(waiting_plan) for waiting_plan in waiting]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="plans are waiting"):
            await tenant_plans.choices("anna")
        other = asyncio.ensure_future(tenant_plans.choices("ben"))
        await asyncio.sleep(0)
        gate.set()
        await other  # one tenant's plans leave room for others
        await asyncio.gather(*tasks)
        try:
            return (await tenant_plans.choices()).weights
        finally:
            tenant_plans.close()

    assert "fp8" in asyncio.run(crowd())


IMPOSSIBLE = [
    ({"prompt": 400, "output": 113}, "Shorten them by 1 token,"),
    ({"prompt": 1 << 20, "output": 1 << 20}, "cannot answer these requests"),
    ({"prompt": 9, "output": 9, "tpot_s": 1e-12}, "times the objective"),
    ({"prompt": 9, "output": 9, "ttft_s": 1e-12, "tpot_s": 1}, "times the objective"),
    ({"prompt": 9, "output": 9, "ttft_s": 1e-12, "users": 5}, "times the objective"),
    ({"prompt": 500, "output": 1, "streams": 16_000}, "can decode at once"),
]


@pytest.mark.parametrize(("body", "reason"), IMPOSSIBLE)
def test_an_impossible_plan_has_a_reason_and_no_cost(
    server: LiveServer, body: dict[str, Any], reason: str
) -> None:
    plan = server.http.post(plans.PATH, json={"device": "T4", **body}).json()
    check_refused(plan)
    assert reason in plan["verdict"]


@pytest.mark.parametrize("number", ["0", "-1", "1e400", "1e18", "NaN", "Infinity", '"x"', "[1]"])
def test_numbers_that_nothing_can_have_are_refused(server: LiveServer, number: str) -> None:
    names = ("prompt", "output", "streams", "users", "count", "ttft_s", "tpot_s", "cached")
    for name in (*names, "think_s"):
        if number == "0" and name in {"cached", "think_s"}:
            continue
        body = f'{{"device": "T4", "{name}": {number}}}'
        headers = {"content-type": "application/json"}
        answer = server.http.post(plans.PATH, content=body, headers=headers)
        assert answer.status_code == 400, (name, answer.text[:200])


@pytest.mark.parametrize("seed", range(2))
def test_every_plan_keeps_to_its_question_or_is_refused(server: LiveServer, seed: int) -> None:
    draw, num_chosen = random.Random(seed), 0
    question_values: dict[str, tuple[Any, ...]] = {
        "prompt": (1, 100, 400, 512, 1 << 20), "output": (1, 100, 112, 512),
        "cached": (0, 0.5, 0.999), "streams": (1, 100, 10_000), "users": (1, 50, 100_000),
        "think_s": (0, 5, 1e6), "ttft_s": (1e-9, 1e-3, 1e9), "tpot_s": (1e-9, 1e-3, 1),
        "count": (1, 64), "weights": ("fp8", "w4a16"), "kv_format": ("int8",),
    }  # fmt: skip
    for _ in range(40):
        body = {
            name: draw.choice(values)
            for name, values in question_values.items()
            if draw.random() < 0.4
        }
        answer = server.http.post(plans.PATH, json={"device": "L4"} | body)
        assert answer.status_code == 200, (body, answer.text)
        plan = answer.json()
        if plan["chosen"] is None:
            check_refused(plan)
            continue
        num_chosen += 1
        load = plan["user_load"]
        assert is_kept(plan) or not load["meets_objectives"], body
    assert num_chosen
