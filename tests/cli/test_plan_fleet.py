"""`twostroke plan fleet` and `plan buy`: their tables, their JSON and their refusals."""

from __future__ import annotations

import json

import pytest


def test_a_fleet_is_another_command_of_two_words(cli, config, tmp_path):
    pytest.importorskip("highspy", reason="the extra [plan] is not installed")
    path = tmp_path / "fleet.yaml"
    path.write_text(f"models:\n- model: {config}\n  requests_per_s: 2\ndevices: [L40S, L4]\n")
    out = cli("plan", "fleet", str(path)).out
    assert "Times are limits, which no engine passes" in out.splitlines()[0]
    assert "llama-8b" in out
    assert any(line.startswith("WITHOUT") for line in out.splitlines())
    path.write_text(path.read_text() + "mfu: 0.5\nmbu: 0.7\n")
    first = cli("plan", "fleet", str(path)).out.splitlines()[0]
    assert first.endswith("Engines reach 50% of arithmetic and 70% of bandwidth.")
    body = json.loads(cli("plan", "fleet", str(path), "--json").out)
    assert body["models"][0]["carried"] == body["models"][0]["load"]
    path.write_text(path.read_text() + "budget: 0.01\n")
    ran = cli("plan", "fleet", str(path))
    assert (ran.code, ran.out) == (9, "")
    assert "times the budget" in ran.err
    ran = cli("plan", "fleet", str(path), "--json")
    assert ran.code == 9
    assert "times the budget" in json.loads(ran.out)["verdict"]
    path.write_text("models:\n- requests_per_s: 1\n  model: ./nothing.gguf\n")
    ran = cli("plan", "fleet", str(path))
    assert ran.code == 3
    assert "fleet.yaml, line 3: " in ran.err
    assert "cannot be read" in cli("plan", "fleet", str(tmp_path / "none.yaml")).err


def test_sizes_that_a_configuration_leaves_out_are_named_by_every_command(cli, tmp_path):
    pytest.importorskip("highspy", reason="the extra [plan] is not installed")
    path, fleet = tmp_path / "bare.json", tmp_path / "fleet.yaml"
    path.write_text('{"model_type": "llama", "num_hidden_layers": 9, "intermediate_size": 64}')
    fleet.write_text(f"models:\n- model: {path}\n  requests_per_s: 2\ndevices: [L4]\n")
    keys = ["hidden_size", "num_attention_heads"]
    for arguments, expected in (
        (("plan", str(path), "--on", "L4"), keys),
        (("plan", "fleet", str(fleet)), {"bare": keys}),
        (("plan", "buy", str(path), "--on", "L4", "--requests-per-day", "9"), keys),
        (("simulate", str(path), "--on", "L4", "--rate", "1", "--requests", "3"), keys),
    ):
        assert (
            f"of bare leaves out {', '.join(keys)}: the defaults of transformers"
            in cli(*arguments).out
        )
        assert json.loads(cli(*arguments, "--json").out)["assumed"] == expected


def test_every_plan_refuses_requests_beyond_the_context(cli, tmp_path):
    pytest.importorskip("highspy", reason="the extra [plan] is not installed")
    path, fleet = tmp_path / "bare.json", tmp_path / "fleet.yaml"
    path.write_text('{"model_type": "llama", "max_position_embeddings": 1000}')
    request = f"models:\n- model: {path}\n  requests_per_s: 2\n  weights: [fp8, bf16]\n"
    fleet.write_text(f"{request}  prompt: 900\ndevices: [L4]\n")
    for arguments in (
        ("plan", str(path), "--on", "L4", "--prompt", "900"),
        ("plan", "fleet", str(fleet)),
        ("plan", "buy", str(path), "--on", "L4", "--requests-per-day", "9", "--prompt", "900"),
    ):
        refused = cli(*arguments)
        assert refused.code == 9
        assert "bare cannot answer these requests" in refused.err
        assert "Shorten them by 156 tokens" in refused.err
        assert "$" not in refused.out
    fleet.write_text(f"{request}  prompt: 744\ndevices: [L4]\n")
    assert cli("plan", "fleet", str(fleet)).code == 0


def test_hosting_is_compared_with_apis(cli, config):
    arguments = ("plan", "buy", config, "--on", "H100-SXM", "--requests-per-day", "100000")
    lines = cli(*arguments, "--hours", "office", "--cached", "0.5").out.splitlines()
    assert lines[0].startswith("llama-8b on 2 replicas of H100-SXM")
    assert any(line.startswith("GPT-4.1 ") for line in lines)
    assert any(line.startswith("The prices of DeepSeek R1 are from 2025-02") for line in lines)
    signals = [line.split(":")[0] for line in lines[-3:]]
    assert signals == ["Cost", "Latency", "Reliability"]
    api_options = ("--api", "gpt-4.1", "--api-ttft", "500", "--api-tpot", "1", "--json")
    body = json.loads(cli(*arguments, *api_options).out)
    assert [comparison["api"] for comparison in body["comparisons"]] == ["GPT-4.1"]
    assert len(body["swings"]) > 6
    for wrong, reason in (
        (("--api", "GPT-4.2"), "--api must be one of"),
        (("--on", "here"), "--on cannot be 'here'"),
        (("--hours", "1,2"), "24 numbers"),
        (("--requests-per-day", "-1"), "--requests-per-day must be greater than 0"),
        (("--utilization", "2"), "--utilization must be"),
        (("--token-budget", "0"), "--token-budget must be"),
        (("--api-ttft", "-5", "--api-tpot", "1"), "--api-ttft must be greater than 0"),
        (("--api-ttft", "5", "--api-tpot", "nan"), "--api-tpot must be greater than 0"),
        (("--api-availability", "1.5"), "--api-availability must be greater than 0 and at most 1"),
        (("--api-ttft", "5"), "--api-ttft has no effect without --api-tpot"),
        (("--purchase-price", "9", "--price", "1"), "--purchase-price cannot be combined with"),
        (("--lifetime", "5"), "--lifetime has no effect without --purchase-price"),
        (("--pue", "1.3"), "--pue has no effect without --power-price"),
        (("--power-price", "0.1", "--pue", "0.9"), "--pue must be from 1 to 10"),
        (("--api-tpot", "5"), "--api-tpot has no effect without --api-ttft"),
    ):
        ran = cli(*arguments, *wrong)
        assert (ran.code, ran.out) == (2, "")
        assert reason in ran.err
    own = cli(*arguments, "--purchase-price", "30000", "--power-price", "0.15", "--carbon", "380")
    assert "for people, 153 for power." in own.out
    assert "take 1,023 kWh per month at full power, with cooling, 389 kg carbon" in own.out
    ran = cli(*arguments, "--on", "MI325X")
    assert (ran.code, ran.err) == (
        2,
        "twostroke: --price is needed: no price of MI325X is known.\n",
    )
    ran = cli(*arguments, "--prices", ".")
    assert (ran.code, ran.err) == (
        4,
        "twostroke: '.' cannot be read: it is a folder, not a file.\n",
    )
    ran = cli(*arguments, "--tpot", "0.01")
    assert (ran.code, ran.out) == (9, "")
    assert "times the objective" in ran.err
