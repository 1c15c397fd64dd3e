"""Runs against a small server with planted faults: the audit's first line names each of them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from support.fake_endpoint import TEMPLATE_TOKENS, EndpointBehavior, FakeEndpoint
from twostroke.core.errors import UsageError
from twostroke.lab.bench.benchmark import BenchLoad, Benchmark
from twostroke.lab.bench.preflight import EndpointRefusedError
from twostroke.lab.bench.request_form import RequestForm
from twostroke.lab.bench.requests_to_send import DatasetPrompt
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


def load(count=40, num_prompt=50, num_output=10, clients=2, rate=None, **fields):
    arrivals = tuple(
        RequestArrival(number / (rate or 1.0), num_prompt, num_output) for number in range(count)
    )
    limits = RunLimits(num_clients=None if rate else clients)
    return BenchLoad(workload=Workload("a load", arrivals), limits=limits, **fields)


def bench(server, bench_load=None, form=None, key=None, timeout_s=60.0):
    benchmark = Benchmark(server.url, form or RequestForm(), key=key, timeout_s=timeout_s)
    return asyncio.run(benchmark.run(bench_load or load(), Objectives(ttft_s=60.0)))


FAULTS = {
    "stalls": ({"stall_s": 1.2, "step_s": 0.001}, {"count": 10, "clients": 5}),
    "failed requests": ({"drops": True}, {}),
    "token counts": ({"tokens_factor": 0.5}, {}),
    "batched chunks": ({"chunk_tokens": 5}, {}),
    "drift of TPOT": ({"slow_down_s": 0.001}, {"count": 100, "clients": 10}),
    "cached prompts": ({"cached": 0.9}, {"num_prompt": 200}),
    "short answers": ({"ends_early": True}, {}),
    "no token counts": ({"has_usage": False}, {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_line_names_each_fault(name):
    behavior, shape = FAULTS[name]
    with endpoint(**behavior) as server:
        result = bench(server, load(**shape))
    assert name in result.audit.verdict
    assert not result.audit.verdict.startswith("This run can be trusted")


def test_no_fault_is_named_without_a_fault():
    with endpoint(step_s=0.002) as server:
        result = bench(server)
    timed = {"stalls", "drift of TPOT"}  # which a busy machine may have
    assert not {finding.name for finding in result.audit.findings} & (set(FAULTS) - timed)


def test_every_request_is_sent_once_with_its_lengths():
    with endpoint() as server:
        for bench_load in (load(count=30), load(count=30, rate=200.0)):
            server.behavior.bodies.clear()
            result = bench(server, bench_load)
            texts = [body["messages"][0]["content"] for body in server.behavior.bodies]
            assert len(set(texts)) == len(texts) == 30
            assert {body["max_tokens"] for body in server.behavior.bodies} == {10}
            logs = [answer.log for answer in result.record.answers]
            assert {log.num_prompt for log in logs} == {50}, "calibrated by the server's count"
            assert {log.num_output for log in logs} == {10}
            assert result.facts.prompt_overhead == TEMPLATE_TOKENS
            assert all(log.sent_s >= log.timings.arrival_s for log in logs)


def test_a_count_that_no_tokenizer_has_does_not_change_the_prompts():
    with endpoint(num_prompt=7) as server:
        result = bench(server, load(num_prompt=50))
        texts = [body["messages"][0]["content"] for body in server.behavior.bodies]
    assert {len(text.split()) for text in texts} == {50}
    assert "prompt lengths" in result.audit.verdict


def test_failures_are_counted_by_kind():
    kinds = {"refuses": "HTTP 429", "drops": "connection closed"}
    for fault, kind in kinds.items():
        with endpoint(**{fault: True}) as server:
            result = bench(server, load(count=30))
            assert result.report.failures == {kind: 10}
            assert result.report.run.num_completed == 20
    with endpoint(error_after=3) as server:
        result = bench(server, load(count=3))
        assert result.report.failures == {"error in the stream": 3}
        texts = {finding.name: finding.text for finding in result.audit.findings}
        assert "The engine died." in texts["failed requests"]


def test_a_request_that_takes_too_long_fails():
    with endpoint(stall_s=30.0) as server:
        result = bench(server, load(count=5, clients=5), timeout_s=1.0)
    assert result.report.failures == {"timeout": 1}


def test_refused_fields_are_left_out():
    with endpoint(strict=True) as server:
        result = bench(server)
        assert not result.facts.ignores_end
        assert all("ignore_eos" not in body for body in server.behavior.bodies)
    with endpoint(counts_chunks=True, chunk_tokens=4) as server:
        result = bench(server)
        assert result.record.answers[0].chunk_tokens == (4, 4, 2)


def test_completions_and_datasets_are_sent_as_they_are():
    with endpoint() as server:
        bench(server, form=RequestForm(api="completions"))
        assert all(isinstance(body["prompt"], str) for body in server.behavior.bodies)
        server.behavior.bodies.clear()
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
        prompts = (DatasetPrompt("What?", 3), DatasetPrompt(messages))
        form = RequestForm(ignores_end=False, extra_fields={"top_p": 0.5})
        bench(server, load(count=2, clients=1, prompts=prompts, max_output=5), form=form)
        first, second = server.behavior.bodies
        assert first["messages"] == [{"role": "user", "content": "What?"}]
        assert second["messages"] == messages
        assert (first["max_tokens"], second["max_tokens"]) == (3, 5)
        assert first["top_p"] == 0.5
        assert "ignore_eos" not in first


def test_first_tokens_of_reasoning_are_reported():
    with endpoint(reasoning=4, step_s=0.002) as server:
        latencies = bench(server).report.run.latencies
    assert latencies["content_ttft"].mean > latencies["ttft"].mean


def test_the_tokenizer_shows_wrong_counts():
    with endpoint(tokens_factor=0.4, chunk_tokens=5, has_tokenizer=True) as server:
        bench_load = load(count=20, num_output=20)
        result = bench(server, bench_load)
    assert set(result.facts.tokenized.values()) == {20}
    assert "token counts" in result.audit.verdict


def test_an_endpoint_that_cannot_be_measured_is_one_sentence():
    with endpoint(key="secret") as server:
        with pytest.raises(EndpointRefusedError, match=r"refuses the key \(HTTP 401\)"):
            bench(server, key="wrong")
        assert bench(server, key="secret").report.run.num_completed == 40
    with endpoint(models=("one", "two")) as server:
        with pytest.raises(UsageError, match="has several models: 'one', 'two'"):
            bench(server)
        with pytest.raises(EndpointRefusedError, match=r"has no model 'on'.* Did you mean 'one'"):
            bench(server, form=RequestForm(model="on"))
    with pytest.raises(EndpointRefusedError, match="cannot be reached: Connection refused"):
        bench(server)


def test_a_stop_reports_the_answers_so_far():
    with endpoint(step_s=0.002) as server:
        benchmark = Benchmark(server.url, RequestForm(), key=None)

        def watch(runner, now_s):
            if runner.answers:
                benchmark.stop()

        result = asyncio.run(benchmark.run(load(count=1_000_000), Objectives(), watch))
    assert result.facts.is_interrupted
    assert "interrupted" in result.audit.verdict
    assert 0 < result.report.run.num_requests < 1_000_000


def test_a_stop_before_the_first_answer_is_an_interruption():
    with endpoint(step_s=0.5) as server:
        benchmark = Benchmark(server.url, RequestForm(), key=None)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(benchmark.run(load(), Objectives(), lambda *_: benchmark.stop()))
