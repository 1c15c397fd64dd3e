"""`twostroke simulate`: its report, its sweep, its JSON and its refusals."""

from __future__ import annotations

import json

import pytest

from twostroke.cli.simulate import command
from twostroke.lab.planner import find_device, load_planned_model
from twostroke.lab.simulator import SimulationSetup

SMALL = ("--on", "h100-sxm", "--rate", "4", "--requests", "40", "--output", "20")


def test_the_report_is_printed(cli, config):
    ran = cli("simulate", config, *SMALL, "--replicas", "2", "--ttft", "200", "--shared", "512")
    lines = ran.out.splitlines()
    assert lines[0] == "llama-8b (bf16) on 2 replicas (least-work), each H100-SXM"
    assert lines[1].startswith("poisson arrivals: 40 requests, ")
    assert [line.split()[0] for line in lines[5:9]] == ["QUEUE", "TTFT", "TPOT", "E2E"]
    assert "100.0% of requests meet the objectives" in ran.out
    assert "Prefix cache: 4" in ran.out
    assert "$" in lines[-1]
    assert (
        cli("simulate", config, *SMALL, "--replicas", "2", "--ttft", "200", "--shared", "512")
        == ran
    )


def test_a_load_of_which_nothing_ends_in_time_is_reported(cli, config):
    ran = cli("simulate", config, "--on", "h100-sxm", "--rate", "2", "--requests", "3")
    assert ran.code == 0
    assert ran.out.splitlines()[-1].endswith(" per 1M output tokens.")
    arguments = ("--on", "h100-sxm", "--rate", "400", "--requests", "100")
    report = json.loads(cli("simulate", config, *arguments, "--json").out)["report"]
    out = cli("simulate", config, *arguments).out
    carried = report["num_completed"] / report["duration_s"]
    assert f"all of them take {report['duration_s']:.3g} s, {carried:.3g} requests/s." in out
    assert "0 requests/s of" not in out


def test_python_and_the_command_have_the_same_defaults(config):
    options = {param.name: param.default for param in command.params}
    setup = SimulationSetup(load_planned_model(config), find_device("L4"))
    for name in ("replicas", "routing", "prefill_replicas", "disaggregate", "draft_cost"):
        assert options[name] == getattr(setup, name)


def test_requests_that_come_at_once_have_no_rate(cli, config, tmp_path):
    path = tmp_path / "once.csv"
    for count, words in (
        (1, "once.csv: 1 request, with 10 "),
        (2, "once.csv: 2 requests, with 10 "),
    ):
        path.write_text("at_s,input_tokens,output_tokens\n" + "0,10,5\n" * count)
        out = cli("simulate", config, "--on", "h100-sxm", "--trace", str(path)).out
        assert words in out
        assert " per minute), " in out
        assert "that arrive" not in out


def test_json_and_a_record_hold_the_run(cli, config, tmp_path):
    path = str(tmp_path / "run.json")
    body = json.loads(cli("simulate", config, *SMALL, "--json", "--record", path).out)
    assert body["report"]["num_completed"] == 40
    repeated_run = cli("simulate", config, "--on", "h100-sxm", "--trace", path, "--json")
    for name, latency in json.loads(repeated_run.out)["report"]["latencies"].items():
        expected_mean = body["report"]["latencies"][name]["mean"]
        assert latency["mean"] == pytest.approx(expected_mean, rel=1e-6)


def test_a_sweep_shows_what_it_tried(cli, config):
    arguments = ("simulate", config, *SMALL, "--prompt", "2000", "--sweep", "--ttft", "150")
    ran = cli(*arguments)
    assert "requests/s 90% of requests meet the objectives. The run is too short" in ran.out
    assert "REQUESTS/S" in ran.out
    body = json.loads(cli(*arguments, "--json").out)
    assert body["warning"].startswith("The run is too short for a reliable result: 40 requests ")
    ran = cli(*arguments, "--ttft", "0.01")
    assert (ran.code, ran.out) == (9, "")
    assert "Even at" in ran.err
    assert body["capacity"] == max(probe["rate"] for probe in body["probes"] if probe["meets"])


def test_prompts_are_prefilled_on_other_replicas_on_request(cli, config):
    options = ("--replicas", "2", "--prefill-replicas", "1", "--rate", "1", "--requests", "20")
    for rule, is_told in (("always", True), ("never", False)):
        ran = cli("simulate", config, "--on", "h100-sxm", *options, "--disaggregate", rule)
        assert ran.code == 0
        assert ("there 20." in ran.out) is is_told


def test_this_machine_has_the_pages_of_its_engine(cli, tiny):
    arguments = ("--rate", "5", "--requests", "10", "--prompt", "20", "--output", "5")
    ran = cli("simulate", tiny, *arguments, "--mbu", "1")
    assert ran.code == 0
    assert "10 requests" in ran.out
    assert "Times are limits, which no engine passes" in ran.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Give either --trace or --rate"),
        (("--rate", "1", "--trace", "azure-conv"), "Give either --trace or --rate"),
        (("--trace", "azure-conv", "--prompt", "5"), "--prompt needs --rate: a trace has its own"),
        (("--rate", "1", "--sweep"), "--sweep needs an objective: --ttft, --tpot or both"),
        (
            ("--rate", "1", "--ttft", "-5"),
            "--ttft must be greater than 0 and at most 1,000,000,000, got -5",
        ),
        (("--rate", "-1"), "--rate must be greater than 0"),
        (("--rate", "1", "--on", "H1000"), "--on must be one of here"),
        (("--rate", "1", "--prompt", "9000", "--on", "h100-sxm"), "Every request is refused"),
        (("--rate", "1", "--on", "h100-sxm", "--kv-memory", "90GB"), "It does not fit: weights"),
        (("--trace", "x.csv"), "x.csv cannot be read"),
        (("--rate", "1", "--routing", "prefx"), "Did you mean 'prefix'"),
        (("--rate", "1", "--speed", "1e-300"), "--speed must be from 1e-9"),
        (("--rate", "1", "--scale", "1e6"), "--scale makes a text of"),
        (("--rate", "1", "--record", "nowhere/x.json"), "--record is in a folder that does not"),
        (("--rate", "1", "--good", "0.9"), "--good has no effect without --sweep: add that, or"),
        (("--rate", "1", "--link", "5"), "--link has no effect without --prefill-replicas"),
        (("--rate", "1", "--disaggregate", "never"), "--disaggregate has no effect without"),
        (("--rate", "1", "--draft-cost", "0.1"), "--draft-cost has no effect without --acceptance"),
        (("--rate", "1", "--burstiness", "2"), "has no effect without --arrivals gamma"),
        (("--trace", "azure-conv", "--burstiness", "2"), "--burstiness needs --rate"),
        (("--trace", "azure-conv", "--seed", "2"), "--seed has no effect without --rate"),
        (("--rate", "1", "--batch-size", "2"), "--batch-size has no effect without --policy dyn"),
        (("--rate", "1", "--max-wait", "2"), "--max-wait has no effect without --policy dynamic"),
        (("--rate", "1", "--routing", "prefix", "--no-prefix-cache"), "--routing prefix needs"),
        (("--rate", "1", "--overhead", "-1"), "--overhead must be from 0 to 60,000, got -1"),
        (("--rate", "1", "--replicas", "0"), "--replicas must be from 1 to 1,024"),
    ],
)
def test_wrong_options_are_answered_with_a_sentence(cli, config, options, message):
    ran = cli("simulate", config, *options)
    assert ran.code != 0
    assert ran.out == ""
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1
