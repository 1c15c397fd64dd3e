"""`twostroke simulate --what-if`: its table, its JSON, and changes that are not valid."""

from __future__ import annotations

import json

import pytest

LOAD = ("--on", "h100-sxm", "--rate", "4", "--requests", "40", "--output", "10", "--ttft", "30")


def test_each_change_is_a_row_after_the_settings_as_they_are(cli, config):
    changes = ("--what-if", "replicas=2,token-budget=512", "--what-if", "kv-format=int8")
    ran = cli("simulate", config, *LOAD, *changes)
    lines = ran.out.splitlines()
    assert [line[:27].strip() for line in lines[:4]] == [
        "WHAT IF", "as it is", "replicas=2,token-budget=512", "kv-format=int8"
    ]  # fmt: skip
    assert "TTFT" in lines[1]
    assert lines[-1].startswith("As it is, TTFT breaks first, above ")


def test_changes_are_those_of_the_options(cli, config):
    changed = cli("simulate", config, *LOAD, "--what-if", "token-budget=512", "--json")
    body = json.loads(changed.out)
    assert body["is_complete"] is True
    direct = json.loads(cli("simulate", config, *LOAD, "--token-budget", "512", "--json").out)
    assert body["what_if"][1]["report"] == direct["report"]
    assert body["what_if"][1]["missed_first"] == "ttft"


def test_usual_changes_are_those_that_differ(cli, config):
    ran = cli("simulate", config, *LOAD, "--what-if", "usual", "--no-prefix-cache")
    names = [line.split("  ")[0] for line in ran.out.splitlines()[1:7]]
    assert names == [
        *("as it is", "replicas=2", "token-budget=128", "token-budget=512"),
        *("kv-format=int8", "acceptance=0.7,draft-cost=0.1"),
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("replica=2", "--replica is none of them. Did you mean '--replicas'?"),
        ("rate=5", "--rate is none of them"),
        ("replicas=two", "'two' is not a valid integer"),
        ("replicas", "needs a value, as in replicas=2"),
        ("no-prefix-cache=1", "takes --no-prefix-cache without a value"),
    ],
)
def test_other_changes_are_refused(cli, config, change, reason):
    ran = cli("simulate", config, *LOAD, "--what-if", change)
    assert ran.code == 2
    assert reason in ran.err


def test_the_first_refusal_says_why_no_load_is_good(cli, config, tmp_path):
    trace = tmp_path / "long.jsonl"
    lengths = (100, 1 << 18)  # the second is longer than the context
    trace.write_text(
        "".join(
            json.dumps({"arrival_s": n, "prompt_tokens": lengths[n % 2], "output_tokens": 5}) + "\n"
            for n in range(20)
        )
    )
    load = ("--trace", str(trace), "--ttft", "5000", "--what-if", "replicas=2")
    ran = cli("simulate", config, "--on", "h100-sxm", *load)
    assert "requests miss the objectives at every load (refusals)" in ran.out
    assert "First refusal: request 2: " in ran.out


def test_what_if_needs_objectives_and_no_sweep(cli, config):
    ran = cli("simulate", config, *LOAD[:-2], "--what-if", "usual")
    assert "--what-if needs an objective" in ran.err
    ran = cli("simulate", config, *LOAD, "--what-if", "usual", "--sweep")
    assert "--sweep cannot be combined with --what-if" in ran.err


def test_a_change_that_is_not_possible_is_skipped(cli, config):
    ran = cli("simulate", config, *LOAD, "--what-if", "replicas=5000", "--what-if", "replicas=2")
    assert "not possible: " in ran.err
    assert [line.split("  ")[0] for line in ran.out.splitlines()[1:3]] == ["as it is", "replicas=2"]
