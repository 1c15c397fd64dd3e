"""`twostroke doctor prompts`: its table of a trace, costs, and sources that are not valid."""

from __future__ import annotations

import json

import pytest

HEADER = '{"recorded_trace": 1, "block_tokens": 16}'


@pytest.fixture
def trace(tmp_path):
    """A trace of two tenants: the prompts of the first part at token 37, and repeat the rest."""
    lines = [HEADER]
    for number in range(5):
        line = {"arrival_s": number, "prompt_tokens": 500, "output_tokens": 5, "tenant": "aa11"}
        if number:
            line |= {"parts_at": 37, "repeated_tokens": 460}
        lines.append(json.dumps(line))
    other = {"arrival_s": 9, "prompt_tokens": 50, "output_tokens": 5, "tenant": "bb22"}
    lines.append(json.dumps(other))
    path = tmp_path / "monday"
    path.write_text("\n".join(lines))
    return str(path)


def test_points_and_costs_are_shown_for_each_tenant(cli, trace):
    ran = cli("doctor", "prompts", trace, "--price", "3")
    lines = [line for line in ran.out.splitlines() if line]
    assert lines[0] == "Tenant aa11: 5 prompts with 2,500 tokens"
    assert lines[1].split() == [
        "PART",
        "AT",
        "TOKEN",
        "PROMPTS",
        "TOKENS",
        "AFTER",
        "WOULD",
        "HIT",
        "$",
    ]
    assert lines[2].split() == ["37", "4", "1,852", "1,840", "(99%)", "0.0055"]
    assert lines[3].startswith("At token 37 something changes, and 99% of the tokens after it")
    assert lines[4] == "Tenant bb22: 1 prompt with 50 tokens"
    assert lines[5] == "No prompt parts from an earlier one."


def test_json_has_the_same_numbers(cli, trace):
    body = json.loads(cli("doctor", "prompts", trace, "--json").out)
    assert body["tenants"][0]["partings"][0]["num_repeated"] == 1840
    assert body["s_per_token"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("missing",), 2, "missing cannot be read"),
        (("TRACE", "--show-text"), 2, "--show-text needs a server"),
        (("http://127.0.0.1:9",), 1, "cannot be reached"),
    ],
)
def test_other_sources_are_refused(cli, trace, arguments, code, reason):
    ran = cli("doctor", "prompts", *(trace if word == "TRACE" else word for word in arguments))
    assert reason in ran.err
    assert ran.code == code


def test_a_file_that_is_no_trace_is_named(cli, tmp_path):
    path = tmp_path / "notes"
    path.write_text("Buy milk.\n")
    ran = cli("doctor", "prompts", str(path))
    assert "notes is not a trace that --record-trace has recorded" in ran.err
