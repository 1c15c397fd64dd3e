"""The audit, on made-up answers: each fault is found, and no fault is found where there is none."""

from __future__ import annotations

import random

import pytest

from support.bench_answers import make_answer
from twostroke.lab.bench.audit import RunFacts, audit_run
from twostroke.lab.bench.report import make_bench_report
from twostroke.lab.measure.requests import Objectives

CLOSED = RunFacts(is_open=False, wants_lengths=True, ignores_end=True, prompt_overhead=10)
OPEN = RunFacts(is_open=True, wants_lengths=True, ignores_end=True, prompt_overhead=10)


def good_run(count=600, **fields):
    """Return answers of a steady run, with a request each 0.1 s and some noise."""
    rng = random.Random(0)
    return [
        make_answer(
            number,
            number / 10,
            ttft_s=rng.uniform(0.08, 0.12),
            gap_s=rng.uniform(0.009, 0.011),
            **{name: value(number) for name, value in fields.items()},
        )
        for number in range(count)
    ]


def findings(answers, facts=OPEN):
    audit = audit_run(answers, make_bench_report(answers, Objectives()), facts)
    assert all(finding.name in audit.verdict for finding in audit.findings)
    assert audit.verdict.startswith("This run is NOT VALID: ") is not audit.is_valid
    return {finding.name: finding.is_fatal for finding in audit.findings}


def test_a_good_run_can_be_trusted():
    for facts in (OPEN, CLOSED):
        assert findings(good_run(), facts) == {}
    report = make_bench_report(good_run(), Objectives())
    verdict = audit_run(good_run(), report, OPEN).verdict
    assert verdict == "This run can be trusted: the audit has no findings."


def test_a_late_client_is_fatal_if_it_is_material():
    assert findings(good_run(late_s=lambda _: 0.005)) == {}
    assert findings(good_run(late_s=lambda n: 0.03 if n % 50 == 0 else 0.0)) == {
        "late client": True
    }


def test_a_client_without_time_left_is_fatal():
    facts = RunFacts(is_open=True, client_share=0.97)
    assert findings(good_run(), facts) == {"busy client": True}


@pytest.mark.parametrize(("num_failed", "is_fatal"), [(1, False), (60, True)])
def test_failed_requests_are_named(num_failed, is_fatal):
    answers = good_run(failure=lambda n: "timeout" if n < num_failed else "")
    assert findings(answers) == {"failed requests": is_fatal}
    report = make_bench_report(answers, Objectives())
    assert report.failures == {"timeout": num_failed}
    text = audit_run(answers, report, OPEN).findings[0].text
    assert f"{num_failed} of 600 requests failed (timeout {num_failed})" in text


def test_few_samples_and_short_runs_are_named():
    assert findings(good_run(50)) == {"few samples": False}
    assert set(findings(good_run(5))) == {"few samples", "short run"}


def test_an_interrupted_run_is_named():
    facts = RunFacts(is_open=True, is_interrupted=True)
    assert findings(good_run(), facts) == {"interrupted": False}


def test_a_growing_queue_is_fatal():
    answers = [make_answer(n, n / 10, ttft_s=1 + n * 0.9) for n in range(300)]
    assert findings(answers)["growing queue"] is True


def test_drift_of_each_latency_is_fatal():
    answers = good_run()
    slower = [make_answer(n, n / 10, gap_s=0.01 * (1 + n / 600)) for n in range(600)]
    assert findings(slower) == {"drift of TPOT": True}
    warming = [make_answer(n, n / 10, ttft_s=0.2 if n < 300 else 0.1) for n in range(600)]
    assert findings(warming) == {"drift of TTFT": True}
    for changed in (slower, warming):
        facts = RunFacts(is_open=True, load_changes=True)
        assert list(findings(changed, facts).values()) == [False], "as its load does"
    little = [make_answer(n, n / 10, gap_s=0.01 * (1 + n / 6000)) for n in range(600)]
    assert findings(little) == {}
    assert findings(answers[:300] + good_run()[300:]) == {}


def test_stalls_are_named():
    answers = good_run()
    for number in (100, 200):
        stalled = make_answer(number, number / 10, gap_s=1.5, num_output=2)
        answers[number] = stalled
    assert findings(answers) == {"stalls": False}


def test_cached_prompts_are_fatal_unless_prefixes_are_shared():
    answers = good_run(num_cached=lambda _: 80)
    assert findings(answers) == {"cached prompts": True}
    sharing = RunFacts(is_open=True, shares_prefixes=True)
    assert findings(answers, sharing) == {}
    assert findings(good_run(num_cached=lambda _: 16)) == {}, "the template may be cached"


def test_prompts_of_other_lengths_are_named():
    assert findings(good_run(wanted_prompt=lambda _: 200)) == {"prompt lengths": False}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_output": 8},
        {"max_output": 12, "num_chunks": 10},
        {"num_output": 5, "num_chunks": 11, "finish_reason": "stop", "max_output": 20},
    ],
)
def test_counts_that_contradict_the_answer_are_fatal(fields):
    answers = good_run(**{name: lambda _, value=value: value for name, value in fields.items()})
    assert findings(answers, RunFacts(is_open=True)) == {"token counts": True}


def test_an_answer_that_fills_the_context_is_no_wrong_count():
    answers = good_run(max_output=lambda _: 20)  # 100 tokens of prompt, and 11 of the answer
    for facts in (RunFacts(is_open=True), RunFacts(is_open=True, context_length=111)):
        assert findings(answers, facts) == {"full context": False}
    facts = RunFacts(is_open=True, context_length=4096)
    assert findings(answers, facts) == {"token counts": True}, "there was room for more"


def test_counts_are_compared_with_the_tokenizer():
    for count, ignores_end, is_wrong in (
        (11, False, False),
        (20, True, True),
        (5, False, True),
        (5, True, False),  # an ignored end token has no text
    ):
        tokenized = dict.fromkeys(range(20), count)
        facts = RunFacts(is_open=True, ignores_end=ignores_end, tokenized=tokenized)
        assert ("token counts" in findings(good_run(), facts)) is is_wrong


def test_short_answers_are_named():
    answers = good_run(max_output=lambda _: 22, finish_reason=lambda _: "stop")
    assert findings(answers) == {"short answers": False}
    assert findings(answers, RunFacts(is_open=True)) == {}, "no length was wanted"


def test_batched_chunks_are_named():
    answers = good_run(num_output=lambda _: 40, num_chunks=lambda _: 10)
    assert findings(answers) == {"batched chunks": False}
    assert make_bench_report(answers, Objectives()).tokens_per_chunk == pytest.approx(4)


def test_missing_usage_is_named():
    answers = good_run(has_usage=lambda _: False)
    assert findings(answers, RunFacts(is_open=True, has_usage=False)) == {"no token counts": False}


def test_a_run_of_failures_alone_is_reported():
    answers = [make_answer(n, n / 10, failure="no connection") for n in range(20)]
    assert findings(answers)["failed requests"] is True
