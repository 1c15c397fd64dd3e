"""MFU, MBU and costs of runs, checked by worked examples."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from support.bench_answers import make_answer
from twostroke.lab.bench.report import make_bench_report
from twostroke.lab.bench.resource_text import resource_sentences
from twostroke.lab.bench.resources import (
    COUNTED_METHOD,
    ESTIMATED_METHOD,
    BenchMachine,
    RunResources,
    machine_use,
    run_cost,
)
from twostroke.lab.bench.server_counters import ServerCounters, StepWork
from twostroke.lab.measure.requests import Objectives
from twostroke.lab.planner import Device, find_device, load_planned_model


@pytest.fixture
def answers():
    """One request a second with 101 tokens, of which each third has a long TTFT."""
    return [
        make_answer(n, float(n), ttft_s=3.0 if n % 3 else 0.1, num_output=101) for n in range(91)
    ]


def report_with(answers, objectives=Objectives(), **fields):  # noqa: B008 - it is frozen
    report = make_bench_report(answers, objectives)
    return replace(report, run=replace(report.run, **fields))


def test_costs_follow_from_the_price_of_an_hour(answers):
    machine = BenchMachine(usd_per_hour=1.0, num_devices=2)
    report = report_with(answers, output_per_s=100.0, input_per_s=300.0, requests_per_s=100 / 60)
    cost = run_cost(machine, report)
    assert cost is not None
    assert cost.usd_per_hour == 2.0
    assert cost.per_million_output == pytest.approx(5.556, abs=5e-4)
    assert cost.per_million_tokens == pytest.approx(5.556 / 4, abs=5e-4)
    assert cost.per_thousand_requests == pytest.approx(0.33, abs=5e-3)
    assert cost.per_thousand_good is None


def test_only_good_requests_share_the_costs_of_goodput(answers):
    report = report_with(answers, Objectives(ttft_s=0.2))
    cost = run_cost(BenchMachine(device=find_device("H100-SXM")), report)
    assert cost is not None
    assert cost.usd_per_hour == 2.69
    assert cost.price_source.startswith("H100-SXM, RunPod")
    assert cost.per_thousand_good == pytest.approx(3 * cost.per_thousand_requests, rel=0.1)
    assert run_cost(BenchMachine(), report) is None


def test_a_run_without_finished_requests_has_no_costs_of_them(answers):
    report = report_with(answers, output_per_s=0.0, input_per_s=0.0, requests_per_s=0.0)
    cost = run_cost(BenchMachine(usd_per_hour=2.0), report)
    assert cost is not None
    assert cost.per_million_output is None
    sentences = dict(resource_sentences(RunResources(cost=cost)))
    assert sentences["Costs"].startswith("No request completed, at $2 an hour")


def test_shares_of_counted_steps_come_first(answers):
    counters = ServerCounters(
        prefill=StepWork(10, 2e12, 1e9, 2.0),
        decode=StepWork(100, 1e12, 7e10, 4.0),
        peak_flops=4e12,
        bandwidth=25e9,
    )
    report = make_bench_report(answers, Objectives())
    use = machine_use(BenchMachine(), counters, answers, report)
    assert use is not None
    assert use.mfu == pytest.approx(0.25)
    assert use.mbu == pytest.approx(0.7)
    assert use.method == COUNTED_METHOD
    device = Device("other", None, 50e9, {"bf16": 8e12})
    use = machine_use(BenchMachine(device=device), counters, answers, report)
    assert use is not None
    assert (use.mfu, use.mbu) == (pytest.approx(0.125), pytest.approx(0.35))


def test_a_7b_model_at_100_tokens_per_second_has_an_mbu_of_70_percent(tmp_path):
    # The worked example: 14 GB of weights at 100 tokens/s on 2,000 GB/s.
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, '
        '"intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, '
        '"vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": false, '
        '"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu"}'
    )
    model = load_planned_model(str(config))
    answers = [
        make_answer(n, 2.0 * n, gap_s=0.01, ttft_s=0.1, num_prompt=20, num_output=101)
        for n in range(40)
    ]
    machine = BenchMachine(device=Device("d", None, 2000e9, {"bf16": 312e12}), model=model)
    use = machine_use(machine, None, answers, make_bench_report(answers, Objectives()))
    assert use is not None
    assert use.method == ESTIMATED_METHOD
    assert use.mbu == pytest.approx(0.66 + 0.01, abs=0.03)  # 13.2 GB: the embedding is not read
    # 120 tokens of 6.6 GFLOP x 2 every 2 s, of 312 TFLOP/s.
    assert use.mfu == pytest.approx(120 * 2 * 6.6e9 / 2 / 312e12, rel=0.05)


def test_shares_are_unknown_without_limits_or_work(answers):
    report = make_bench_report(answers, Objectives())
    assert machine_use(BenchMachine(), None, answers, report) is None
    device = find_device("H100-SXM")
    assert machine_use(BenchMachine(device=device), None, answers, report) is None
