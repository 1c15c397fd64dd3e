"""The dashboard's data: what it shows of requests, pages and recent seconds, and what it hides."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.servers import live_server
from support.tiny import tiny_of
from support.waiting import wait_for
from twostroke.backends.machine_limits import MachineLimits
from twostroke.core.sampling import SamplingParams
from twostroke.engine.client import Caller
from twostroke.engine.scheduler import SchedulerStats
from twostroke.engine.status import RequestView, RunningRequests
from twostroke.server.observability.objectives import Goodput
from twostroke.server.observability.pages import MAX_CELLS, PageUsage, page_map
from twostroke.server.observability.state import DashboardState
from twostroke.server.options import Objective, ServeOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer
    from twostroke.engine.generation import Generation

_PARAMS = SamplingParams(max_tokens=400, ignore_eos=True)


def test_model_and_engine_are_described(server: LiveServer) -> None:
    state = server.http.get("/api/state").json()
    card = server.client.card
    shapes = card.cost.program.weight_shapes.values()
    assert state["model"]["name"] == "tiny"
    assert state["model"]["parameters"] == sum(int(np.prod(shape)) for shape in shapes)
    assert state["model"]["layers"] == len(card.cost.program.cache_layers)
    assert state["model"]["context_length"] == 512
    assert state["engine"]["max_running"] == 256
    assert state["pages"]["total"] == 256
    assert state["health"] == "ready"
    assert state["hardware"] is None
    assert state["memory"]["used_bytes"] > 10**7
    assert state["memory"]["kv_bytes"] == state["pages"]["total"] * state["pages"]["bytes_per_page"]
    assert state["uptime_s"] > 0


def test_running_and_waiting_requests_are_shown_without_their_prompts(tmp_path: Path) -> None:
    with live_server(tmp_path, max_running=1) as server:
        server.backend.gate.clear()
        tokens = server.client.card.tokenizer.encode("hello hello the world")
        caller = Caller(tenant="somebody", service_tier="flex")
        answers = [server.client.generate(tokens, _PARAMS, caller) for _ in range(2)]
        wait_for(lambda: server.client.loop.snapshot().scheduler.num_running == 1)
        text = server.http.get("/api/state").text
        _stop(server, answers)
    requests = json.loads(text)["requests"]
    assert (requests["num_running"], requests["num_waiting"]) == (1, 1)
    assert requests["waiting_tokens"] == len(tokens)
    assert requests["oldest_waiting_s"] > 0
    (running,) = requests["running"]
    assert running["class"] == "flex"
    assert running["prompt_tokens"] == len(tokens)
    assert running["ttft_s"] is running["tokens_per_s"] is None
    assert running["pages"] == 1
    for word in ("hello", "world", "somebody"):
        assert word not in text


def test_map_shows_which_pages_are_shared(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        tokens = [5] * 40  # of two full pages, and another
        server.client.generate(tokens, SamplingParams(max_tokens=1)).wait()
        server.backend.pause_s = 0.1  # so that they run until the gate is closed
        answers = [server.client.generate(tokens, _PARAMS) for _ in range(2)]
        wait_for(lambda: server.client.loop.snapshot().scheduler.num_running == 2)
        server.backend.gate.clear()
        state = server.http.get("/api/state").json()
        _stop(server, answers)
    pages, running = state["pages"], state["requests"]["running"]
    cells, owners, groups = _arrays(pages)
    assert groups is None
    assert len(cells) == len(owners) == pages["total"]
    assert pages["shared"] == (cells == 3).sum() == 2
    assert (cells >= 2).sum() == pages["held"]
    assert (cells == 1).sum() == pages["cached"]
    assert (cells == 0).sum() == pages["free"]
    assert set(owners[cells == 3]) == {1}
    assert set(owners) == {0, 1, 2}
    assert [request["shared_pages"] for request in running] == [2, 2]
    assert [request["cached_tokens"] for request in running] == [32, 32]


def test_page_map_distinguishes_cache_groups(tmp_path: Path) -> None:
    with live_server(tmp_path, tiny=tiny_of("gemma3")) as server:
        server.backend.pause_s = 0.1  # so that it runs until the gate is closed
        answers = [server.client.generate([5] * 40, _PARAMS)]
        wait_for(lambda: server.client.loop.snapshot().scheduler.num_running == 1)
        server.backend.gate.clear()
        pages = server.http.get("/api/state").json()["pages"]
        _stop(server, answers)
    cells, _, groups = _arrays(pages)
    assert len(pages["groups"]) > 1
    assert set(groups[cells == 2]) == set(range(1, len(pages["groups"]) + 1))
    assert set(groups[cells != 2]) == {0}


def test_large_pools_are_shown_in_cells_of_several_pages() -> None:
    counts = np.zeros(3 * MAX_CELLS - 1, int)
    counts[[0, 1, 6]] = 2, 1, 1
    view = _view(counts, pages_by_request=[(0, 1, 6), (0,)], cached=(2, 3, 4, 8))
    map_body = page_map(PageUsage.of(view), view.cached, 2)
    cells, owners, groups = _arrays(map_body)
    assert map_body["pages_per_cell"] == 3
    assert len(cells) == MAX_CELLS
    assert cells[:4].tolist() == [3, 1, 2, 0]  # held by two, cached, held by one, free
    assert owners[:4].tolist() == [1, 0, 1, 0]
    assert groups is not None
    assert groups[:4].tolist() == [1, 0, 1, 0]


def test_windows_count_the_last_seconds(server: LiveServer) -> None:
    for _ in range(3):
        server.chat(max_tokens=5, ignore_eos=True)
    time.sleep(1.1)  # until the second is over
    window = server.http.get("/api/state").json()["window"]["60"]
    assert 0 < window["seconds"] <= 60
    assert window["completion_tokens_per_s"] * window["seconds"] >= 15
    assert window["answers_per_s"] * window["seconds"] >= 3
    assert 0 <= window["cache_hit_rate"] <= 1
    latency = window["latency"]["default"]
    assert set(latency) == {"queue", "ttft", "tpot", "itl", "e2e"}
    assert latency["itl"]["count"] >= 12
    assert 0 < latency["ttft"]["p50"] <= latency["e2e"]["mean"] * 20
    assert latency["e2e"]["p99"] is None or latency["e2e"]["count"] >= 100
    assert window["strokes"]["decode"]["rows"] > 0
    assert window["strokes"]["decode"]["intensity"] > 0
    assert window["strokes"]["decode"]["mfu"] is None


def test_state_has_utilization_and_limits(server: LiveServer) -> None:
    server.chat(max_tokens=5, ignore_eos=True)
    time.sleep(1.1)
    limits = MachineLimits("portable", 1, 10**6)
    described = DashboardState(
        server.api.models,
        server.api.engine,
        limits,
        Goodput([]),
        ["tiny"],
        has_prompt_doctor=False,
    )
    state = json.loads(asyncio.run(described.body("ready")))
    hardware, decode = state["hardware"], state["window"]["60"]["strokes"]["decode"]
    assert hardware["cores"] == 1
    assert decode["mbu"] == pytest.approx(decode["bytes_per_s"] / hardware["bandwidth"])
    assert decode["mfu"] == pytest.approx(decode["flops_per_s"] / hardware["peak"])


def test_state_has_objectives(tmp_path: Path) -> None:
    objectives = (Objective("ttft", 60), Objective("tpot", 1e-9, "flex"))
    with live_server(tmp_path, ServeOptions(objectives=objectives, drain_s=1)) as server:
        server.chat(max_tokens=3, ignore_eos=True)
        server.chat(max_tokens=3, ignore_eos=True, service_tier="flex")
        time.sleep(1.1)
        state = server.http.get("/api/state").json()
    window = state["window"]["60"]
    assert {"class": "flex", "objective": "tpot", "limit_s": 1e-9} in state["objectives"]
    assert len(state["objectives"]) == 4
    met, missed = {"met": 1, "missed": 0}, {"met": 0, "missed": 1}
    assert window["objectives"] == {
        "default": {"ttft": met, "all": met},
        "flex": {"ttft": met, "tpot": missed, "all": missed},
    }
    goodput = window["goodput"]
    assert goodput["share"] == 0.5
    assert goodput["tokens_per_s"] == pytest.approx(3 * goodput["requests_per_s"])
    assert set(window["latency"]) == {"default", "flex"}


def test_state_is_made_once_for_simultaneous_requests(server: LiveServer) -> None:
    first, second = (server.http.get("/api/state") for _ in range(2))
    assert first.json()["uptime_s"] == second.json()["uptime_s"]
    assert first.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("host", "dashboard", "is_shown"),
    [
        ("127.0.0.1", None, True),
        ("::1", None, True),
        ("localhost", None, True),
        ("0.0.0.0", None, False),
        ("10.0.0.5", None, False),
        ("box.example", None, False),
        ("0.0.0.0", True, True),
        ("127.0.0.1", False, False),
    ],
)
def test_dashboard_is_shown_where_only_this_machine_sees_it(
    host: str, dashboard: bool | None, is_shown: bool
) -> None:
    assert ServeOptions(host=host, dashboard=dashboard).shows_dashboard is is_shown


def test_dashboard_that_is_off_says_how_to_have_it(tmp_path: Path) -> None:
    with live_server(tmp_path, ServeOptions(dashboard=False, drain_s=1)) as server:
        response = server.http.get("/api/state")
    assert response.status_code == 404
    assert "--dashboard" in response.json()["error"]["message"]


def _stop(server: LiveServer, answers: list[Generation]) -> None:
    for answer in answers:
        answer.cancel()
    server.backend.gate.set()
    server.wait_idle()


def _arrays(map_body: dict[str, Any]) -> tuple[Any, Any, Any]:
    groups = map_body["cell_groups"]
    return (
        np.frombuffer(b64decode(map_body["cells"]), np.uint8),
        np.frombuffer(b64decode(map_body["owners"]), "<u2"),
        None if groups is None else np.frombuffer(b64decode(groups), np.uint8),
    )


def _view(
    counts: Any, pages_by_request: list[tuple[int, ...]], cached: tuple[int, ...]
) -> RunningRequests:
    stats = SchedulerStats(*[0] * 10)
    requests = [
        RequestView(f"r{n}", "default", *[0] * 7, 0.0, 0.0, 0.0, pages=(pages,))
        for n, pages in enumerate(pages_by_request)
    ]
    return RunningRequests(stats, tuple(requests), tuple(counts.tolist()), cached, None)


def test_past_has_the_form_of_the_present(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        server.complete(prompt="hello", max_tokens=30)
        time.sleep(3)  # the past begins two seconds ago
        assert "past" not in server.http.get("/api/state").json()
        state = server.http.get("/api/state?past").json()
        assert state["past"]
        assert [sample["ago_s"] for sample in state["past"]] == sorted(
            (sample["ago_s"] for sample in state["past"]), reverse=True
        )
        for sample in state["past"]:
            assert sample["requests"].keys() <= state["requests"].keys()
            assert sample["window"].keys() <= state["window"]["10"].keys()


def test_nothing_ran_in_the_past_of_an_idle_server(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        time.sleep(3)
        began_s = time.monotonic()
        server.complete(prompt="hello", max_tokens=30)
        past = server.http.get("/api/state?past").json()["past"]
        took_s = time.monotonic() - began_s  # on a busy machine also the request is in the past
        idle = [sample["requests"] for sample in past if sample["ago_s"] > took_s]
        assert idle
        assert not any(requests["num_running"] for requests in idle)
