"""Traces that a router records: token counts, outcomes, shared beginnings, and never any text."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx

from support.replicas import Exchange, FakeReplica, Loop, live_router
from support.servers import live_server
from support.waiting import wait_for
from twostroke.lab.simulator import read_trace
from twostroke.lab.simulator.recorded_traces import read_recorded_trace, report_prompts
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from pathlib import Path

_CHAT = "/v1/chat/completions"
_SECRET = "A secret that no trace may have. " * 4


def _body(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": _SECRET}, {"role": "user", "content": question}]
    return {"model": "tiny", "messages": messages, "max_tokens": 3, **fields}


def _lines(path: Path, count: int) -> list[dict[str, Any]]:
    wait_for(lambda: path.read_text().count("\n") >= count)
    return [json.loads(line) for line in path.read_text().splitlines()]


def _post(url: str, body: object) -> httpx.Response:
    return httpx.post(url + _CHAT, json=body, timeout=20, trust_env=False)


def test_a_router_records_what_its_servers_report(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with (
        live_server(tmp_path, ServeOptions(drain_s=1)) as server,
        live_router(server.url, record_trace=trace) as router,
    ):
        first = _post(router.url, _body("Who?", service_tier="priority", ignore_eos=True))
        assert first.status_code == 200, first.text
        _post(router.url, _body("What?", stream=True, ignore_eos=True))
        assert _post(router.url, {"model": "tiny", "messages": 3}).status_code == 400
        header, answer, stream = _lines(trace, 3)
    assert header["recorded_trace"] == 1
    assert answer["prompt_tokens"] == first.json()["usage"]["prompt_tokens"]
    assert (answer["output_tokens"], answer["class"]) == (3, "priority")
    assert answer["e2e_s"] > 0
    assert "ttft_s" not in answer
    assert 0 < stream["ttft_s"] <= stream["e2e_s"]
    assert stream["shared"][0] == 1
    assert 16 <= stream["shared"][1] <= stream["prompt_tokens"]
    assert "secret" not in trace.read_text()
    arrivals = read_trace(str(trace)).arrivals
    shared = stream["shared"][1]
    assert arrivals[0].tokens(0, 10**9)[:shared] == arrivals[1].tokens(1, 10**9)[:shared]


def test_a_router_records_servers_of_others_and_refusals(tmp_path: Path, fakes: Loop) -> None:
    replica, trace = fakes.start(FakeReplica()), tmp_path / "trace"
    usage = {"prompt_tokens": 50, "completion_tokens": 7, "total_tokens": 57}

    async def behave(exchange: Exchange) -> None:
        if len(replica.seen) == 1:
            await exchange.answer({"choices": [], "usage": usage})
        else:
            await exchange.answer({"error": {"message": "no room"}}, 429)

    replica.behaviour = behave
    with live_router(replica.url, record_trace=trace) as router:
        for _ in range(2):
            _post(router.url, _body("Who?"))
        _, answer, refusal = _lines(trace, 3)
    assert (answer["prompt_tokens"], answer["output_tokens"]) == (50, 7)
    assert refusal["outcome"] == "refused"
    assert refusal["output_tokens"] == 0
    assert len(read_trace(str(trace)).arrivals) == 2


def test_a_router_records_clients_that_leave(tmp_path: Path, fakes: Loop) -> None:
    replica, trace = fakes.start(FakeReplica()), tmp_path / "trace"

    async def behave(exchange: Exchange) -> None:
        await exchange.begin_events()
        for number in range(3):
            await exchange.chunk(f'data: {{"n":{number}}}\n\n'.encode())
        await asyncio.sleep(20)

    replica.behaviour = behave
    with live_router(replica.url, record_trace=trace) as router:
        url, body = router.url + _CHAT, _body("Who?", stream=True)
        with httpx.stream("POST", url, json=body, timeout=20, trust_env=False) as response:
            next(response.iter_bytes())
        _, line = _lines(trace, 2)
    assert line["outcome"] == "cancelled"
    assert 1 <= line["output_tokens"] <= 3


def test_a_router_estimates_where_prompts_part(tmp_path: Path, fakes: Loop) -> None:
    replica, trace = fakes.start(FakeReplica()), tmp_path / "trace"
    rules = " ".join(f"Rule {number}: answer question {number**3}." for number in range(60))

    async def behave(exchange: Exchange) -> None:
        usage = {"prompt_tokens": 600 + len(replica.seen), "completion_tokens": 7}
        await exchange.answer({"choices": [], "usage": {**usage, "total_tokens": 700}})

    replica.behaviour = behave
    with live_router(replica.url, record_trace=trace) as router:
        for minute in range(4):
            system = f"You are a helpful assistant. It is 2026-11-30, 11:2{minute}. {rules}"
            messages = [{"role": "system", "content": system}]
            _post(router.url, {"model": "tiny", "messages": messages})
        _, first, *later = _lines(trace, 5)
    assert "parts_at" not in first
    (position,) = {line["parts_at"] for line in later}
    assert 0 < position < 60
    assert all(line["repeated_tokens"] > 400 for line in later)
    (report,) = report_prompts(read_recorded_trace(trace))
    assert [point.num_prompts for point in report.partings] == [3]
