"""`twostroke bench` and `bench compare`: their reports, files and refusals."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import pytest

from support.fake_endpoint import EndpointBehavior, FakeEndpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = ("--clients", "2", "--requests", "30", "--prompt", "40", "--output", "6")


@pytest.fixture
def server() -> Iterator[FakeEndpoint]:
    server = FakeEndpoint(EndpointBehavior(step_s=0.001))
    yield server
    server.close()


def test_the_report_begins_with_the_verdict(cli, server):
    ran = cli("bench", server.url, *SMALL, "--slo", "reading")
    lines = ran.out.splitlines()
    assert "few samples" in lines[0]
    assert ran.code == lines[0].startswith("This run is NOT VALID")
    assert f"fake at {server.url}, chat" in lines
    assert any(line.startswith("2 clients (closed loop): 30 requests, with 40 ") for line in lines)
    titles = [line.split("  ")[0] for line in lines]
    assert titles.index("TTFT") < titles.index("TPOT") < titles.index("E2E")
    assert "of the scheduled requests meet the objectives (TTFT 200.0 ms, TPOT 120.0 ms)" in ran.out
    assert not ran.err


def test_files_and_json_have_the_run(cli, server, tmp_path):
    record, table = tmp_path / "run.json", tmp_path / "run.csv"
    ran = cli("bench", server.url, *SMALL, "--json", "--record", str(record), "--csv", str(table))
    body = json.loads(ran.out)
    assert body["report"]["run"]["num_completed"] == 30
    assert body["setup"]["num_clients"] == 2
    assert {finding["name"] for finding in body["findings"]} >= {"few samples"}
    assert len(list(csv.DictReader(table.read_text().splitlines()))) == 30
    assert len(json.loads(record.read_text())["requests"]) == 30
    again = cli("bench", server.url, "--trace", str(record), "--speed", "2", "--json")
    assert json.loads(again.out)["report"]["run"]["num_completed"] == 30


def test_loads_are_described(cli, server, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("at_s,input_tokens,output_tokens\n" + "0,40,5\n0.1,60,5\n" * 5)
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "What?", "max_tokens": 3}\n' * 4)
    refused = cli("bench", server.url, "--trace", str(path), "--clients", "2", "--speed", "3")
    assert refused.code == 2
    assert "--speed has no effect with --clients" in refused.err
    for arguments, words in (
        (("--trace", str(path)), "trace.csv (open loop): 10 requests, 90 per second"),
        (("--trace", str(path), "--clients", "2"), "lengths of trace.csv, 2 clients (closed loop)"),
        (("--dataset", str(dataset), "--rate", "50"), "prompts.jsonl, poisson arrivals (open"),
        (("--dataset", str(dataset), "--clients", "1"), "prompts.jsonl, 1 client (closed loop): 4"),
        (("--rate", "40", "--duration", "0.5", "--prompt", "20", "--output", "3"), "(open loop)"),
    ):
        assert words in cli("bench", server.url, *arguments).out


def test_runs_are_compared(cli, server, tmp_path):
    before, after = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    cli("bench", server.url, *SMALL, "--record", before)
    server.behavior.step_s = 0.1
    arguments = ("--clients", "10", "--requests", "30", "--prompt", "40", "--output", "6")
    cli("bench", server.url, *arguments, "--record", after)
    ran = cli("bench", "compare", before, after)
    assert "The loads differ: load 2 clients and 10 clients; clients 2 and 10." in ran.out
    assert "figures changed by more than chance." in ran.out
    body = json.loads(cli("bench", "compare", before, after, "--json").out)
    words = {row["title"]: row["change"] for row in body["figures"]}
    assert words["TPOT P50"] == words["E2E P50"] == "worse"
    assert cli("bench", "compare", before, before).out.startswith("No figure changed")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Which load? Give --clients, --rate or --trace."),
        (("--clients", "1", "--rate", "1"), "--clients cannot be combined with --rate"),
        (("--rate", "1", "--trace", "azure-conv"), "--rate cannot be combined with --trace"),
        (("--clients", "1", "--arrivals", "gamma"), "--arrivals has no effect without --rate"),
        (("--clients", "1", "--speed", "2"), "--speed has no effect without --rate"),
        (("--rate", "0"), "--rate must be greater than 0"),
        (("--rate", "1", "--slo", "readng"), "Did you mean 'reading'?"),
        (("--rate", "1", "--slo", "reading", "--ttft", "1"), "--slo cannot be combined with"),
        (("--rate", "1", "--shared", "2000"), "--shared must be at least 0 and below"),
        (("--trace", "FILE", "--prompt", "5"), "--prompt has no effect with --trace"),
        (("--clients", "1", "--dataset", "FILE", "--spread", "1"), "--spread has no effect with"),
        (("--clients", "1", "--dataset", "FILE"), "prompts.jsonl, line 2: it must have either"),
        (("--clients", "1", "--dataset", "FILE", "--scale", "2"), "--scale has no effect with"),
        (("--clients", "1", "--record", "/nowhere/a.json"), "--record is in a folder that does"),
    ],
)
def test_refusals_are_sentences(cli, tmp_path, arguments, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    arguments = [str(path) if word == "FILE" else word for word in arguments]
    ran = cli("bench", "http://127.0.0.1:9", *arguments)
    assert ran.code == 2
    assert words in ran.err
    assert not ran.out


def test_endpoints_that_cannot_be_measured_are_sentences(cli, server, tmp_path):
    ran = cli("bench", "http://127.0.0.1:9", *SMALL)
    assert (ran.code, ran.err) == (
        1,
        "twostroke: http://127.0.0.1:9 cannot be reached: Connection refused.\n",
    )
    assert cli("bench", "ftp://host", *SMALL).err.startswith("twostroke: url must be a URL such as")
    server.behavior.key = "right"
    key = tmp_path / "key"
    key.write_text("wrong\n")
    ran = cli("bench", server.url, *SMALL, "--api-key-file", str(key))
    assert "refuses the key (HTTP 401): give one by --api-key-file" in ran.err
    key.write_text("right\n")
    assert cli("bench", server.url, *SMALL, "--api-key-file", str(key)).out
    server.behavior.key = None
    ran = cli("bench", f"{server.url}/v1/chat/completions", *SMALL)
    assert f"{server.url}/v1/chat/completions has no /v1/chat/completions: give the URL" in ran.err


def test_a_duration_without_requests_is_refused(cli, server):
    ran = cli("bench", server.url, "--rate", "0.001", "--duration", "0.001", "--seed", "1")
    assert ran.code == 2
    assert ran.err == "twostroke: --duration ends before the first request is due.\n"


def test_one_request_of_each_client_has_rates(cli, server):
    small = ("--clients", "2", "--requests", "2", "--prompt", "40", "--output", "60")
    run = json.loads(cli("bench", server.url, *small, "--json").out)["report"]["run"]
    assert run["requests_per_s"] == pytest.approx(2 / run["duration_s"], rel=0.2)
    assert 1 < run["concurrency"] <= 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "it is not a JSON object"),
        ('{"prompt": "a", "messages": []}', "it must have either prompt or messages"),
        ('{"prompt": 5}', "prompt must be a text"),
        ('{"messages": ["a"]}', "messages must be a list of objects with a role"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be a whole number from 1"),
    ],
)
def test_lines_that_are_no_prompts_are_named(cli, tmp_path, line, reason):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n' + line + "\n")
    ran = cli("bench", "http://127.0.0.1:9", "--clients", "1", "--dataset", str(path))
    assert f"prompts.jsonl, line 3: {reason}" in ran.err


def test_a_dataset_with_too_few_prompts_is_refused(cli, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n')
    arguments = ("--clients", "1", "--dataset", str(path), "--requests", "2")
    ran = cli("bench", "http://127.0.0.1:9", *arguments)
    assert "--requests must be at most 1, the number of prompts in prompts.jsonl" in ran.err
