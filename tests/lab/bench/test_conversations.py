"""Conversations and agents: what each request sends, when it is sent, and what the audit says."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from support.fake_endpoint import TEMPLATE_TOKENS, EndpointBehavior, FakeEndpoint
from twostroke.core.errors import UsageError
from twostroke.lab.bench.benchmark import BenchLoad, Benchmark
from twostroke.lab.bench.conversations import ConversationShape, turn_figures
from twostroke.lab.bench.request_form import RequestForm
from twostroke.lab.bench.runner import RunLimits
from twostroke.lab.measure.requests import Objectives
from twostroke.lab.simulator.load import RequestArrival, Workload


@contextlib.contextmanager
def endpoint(**behavior):
    server = FakeEndpoint(EndpointBehavior(**behavior))
    try:
        yield server
    finally:
        server.close()


def bench(server, shape, num_conversations=4, rate=None, form=None):
    count = num_conversations * shape.num_requests
    arrivals = tuple(RequestArrival(n / (rate or 1.0), 40, 6) for n in range(count))
    load = BenchLoad(
        workload=Workload("conversations", arrivals),
        limits=RunLimits(num_clients=None if rate else 2),
        changes=True,
        conversation=shape,
    )
    benchmark = Benchmark(server.url, form or RequestForm(), key=None)
    return asyncio.run(benchmark.run(load, Objectives()))


@pytest.mark.parametrize("rate", [None, 200.0])
def test_each_turn_has_the_real_history(rate):
    with endpoint(caches_history=True) as server:
        result = bench(server, ConversationShape(num_turns=3), rate=rate)
        bodies = server.behavior.bodies
    assert len(bodies) == 12
    assert result.report.run.num_completed == 12
    by_length = {count: [b for b in bodies if len(b["messages"]) == count] for count in (1, 3, 5)}
    assert [len(group) for group in by_length.values()] == [4, 4, 4]
    for body in by_length[5]:
        roles = [message["role"] for message in body["messages"]]
        assert roles == ["user", "assistant"] * 2 + ["user"]
        assert body["messages"][1]["content"] == " word" * 6, "the answer of the server"
        earlier = [other for other in by_length[3] if other["messages"] == body["messages"][:3]]
        assert len(earlier) == 1, "the history is that of one conversation"
    firsts = [body["messages"][0]["content"] for body in by_length[1]]
    assert len(set(firsts)) == 4
    assert "missed prefixes" not in result.audit.verdict
    figures = turn_figures(result.record.answers)
    assert [figure.turn for figure in figures] == [1, 2, 3]
    assert figures[0].reusable_share == figures[0].cached_share == 0
    words = 40 - TEMPLATE_TOKENS  # of each message of the user
    assert figures[2].mean_prompt == 3 * words + 2 * 6 + TEMPLATE_TOKENS
    assert figures[2].cached_share == pytest.approx(figures[2].reusable_share, abs=0.1)
    assert all(answer.reply is None for answer in result.record.answers), "a record has no texts"


def test_turns_come_after_the_time_to_think():
    with endpoint() as server:
        for rate in (None, 100.0):
            shape = ConversationShape(num_turns=2, think_s=0.2)
            answers = bench(server, shape, 2, rate).record.answers
            for number in (0, 2):
                first, second = (a for a in answers if a.number in {number, number + 1})
                pause_s = second.log.timings.arrival_s - first.ended_s
                assert pause_s == pytest.approx(0.2)
                assert second.log.sent_s >= second.log.timings.arrival_s


def test_an_agent_sends_the_results_of_its_calls():
    shape = ConversationShape(num_turns=2, num_calls=2, tool_result=10)
    with endpoint() as server:
        result = bench(server, shape, 2)
        bodies = server.behavior.bodies
    assert len(bodies) == 12
    longest = max(bodies, key=lambda body: len(body["messages"]))
    roles = [message["role"] for message in longest["messages"]]
    turn = ["user", "assistant", "tool", "assistant", "tool"]
    assert roles == [*turn, "assistant", *turn]
    call = longest["messages"][1]["tool_calls"][0]
    assert call["function"] == {"name": "look_up", "arguments": '{"topic": "news"}'}
    assert longest["messages"][2]["tool_call_id"] == call["id"] == "call_x"
    assert len(longest["messages"][2]["content"].split()) == pytest.approx(10, abs=8)
    choices = [body["tool_choice"] for body in bodies if len(body["messages"]) in {1, 3, 5}]
    assert sorted(choices) == ["auto"] * 2 + ["required"] * 4
    assert all(body["tools"] and "ignore_eos" not in body for body in bodies)
    assert not {"no tools", "missing tool calls"} & {f.name for f in result.audit.findings}


def test_an_endpoint_without_tools_gets_plain_messages():
    with endpoint(has_tools=False) as server:
        result = bench(server, ConversationShape(num_calls=1, tool_result=10), 2)
        bodies = server.behavior.bodies
    assert result.report.run.num_completed == 4
    assert "no tools" in result.audit.verdict
    assert all("tools" not in body for body in bodies)
    assert [m["role"] for m in bodies[-1]["messages"]] == ["user", "assistant", "user"]


def test_a_cache_that_forgets_the_history_is_named():
    with endpoint(cached=0.1) as server:
        result = bench(server, ConversationShape(num_turns=4), 3)
    assert "missed prefixes" in result.audit.verdict


def test_a_failed_turn_ends_its_conversation():
    with endpoint(refuses=True) as server:
        result = bench(server, ConversationShape(num_turns=3), 4)
    failed = [answer for answer in result.record.answers if not answer.is_completed]
    numbers = {answer.number for answer in result.record.answers}
    assert failed
    for answer in failed:
        assert not numbers & set(range(answer.number + 1, (answer.number // 3 + 1) * 3))


def test_conversations_need_chat():
    with (
        endpoint() as server,
        pytest.raises(UsageError, match="api has no conversations: use chat"),
    ):
        bench(server, ConversationShape(num_turns=2), form=RequestForm(api="completions"))
