"""`twostroke bench` and `bench compare`: their reports, files and refusals."""

from __future__ import annotations

import csv
import json
import shutil
import ssl
import subprocess
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


def test_a_run_without_answers_has_no_figures_of_answers(cli):
    server = FakeEndpoint(EndpointBehavior(error_after=2))
    try:
        ran = cli("bench", server.url, *SMALL)
    finally:
        server.close()
    assert ran.code == 1
    assert "2 clients (closed loop): 30 requests\n" in ran.out
    assert "A chunk has" not in ran.out
    assert "Prefix cache" not in ran.out


def test_one_request_has_no_intervals(cli, server):
    ran = cli("bench", server.url, "--clients", "1", "--requests", "1", "--output", "6")
    assert "TTFT" in ran.out
    assert "[" not in ran.out


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


def test_an_html_report_has_the_command_and_the_costs(cli, server, tmp_path):
    report = tmp_path / "run.html"
    ran = cli("bench", server.url, *SMALL, "--price", "2", "--html", str(report), "--json")
    resources = json.loads(ran.out)["resources"]
    assert resources["cost"]["usd_per_hour"] == 2
    assert resources["use"] is None
    text = report.read_text()
    assert f"<code>twostroke bench {server.url} --clients 2 --requests 30" in text
    assert text.index("few samples") < text.index("<h1>")
    assert cli("bench", server.url, *SMALL, "--price", "2").out.count("Costs: $") == 1


def test_wrong_options_about_the_machine_are_sentences(cli, tmp_path):
    for arguments, words in (
        (("--html", "run.txt"), "--html must end in .html"),
        (
            ("--html", str(tmp_path / "none" / "run.html")),
            "--html is in a folder that does not",
        ),
        (("--on", "H100-SXN"), "Did you mean 'H100-SXM'?"),
        (("--kv-format", "int8"), "--kv-format has no effect without --model-config"),
        (("--model-config", "nothing.gguf"), "nothing.gguf"),
        (("--price", "-1"), "--price must be greater than 0"),
    ):
        ran = cli("bench", "http://127.0.0.1:9", *SMALL, *arguments)
        assert ran.code != 0
        assert words in ran.err
        assert not ran.out


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
    report = tmp_path / "both.html"
    assert cli("bench", "compare", before, after, "--html", str(report)).code == 0
    assert report.read_text().count(f"<code>twostroke bench {server.url}") == 2


def test_runs_that_do_not_compare_need_force(cli, server, tmp_path):
    before, after = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    cli("bench", server.url, *SMALL, "--record", before)
    longer = ("--clients", "2", "--requests", "30", "--prompt", "90", "--output", "6")
    cli("bench", server.url, *longer, "--record", after)
    ran = cli("bench", "compare", before, after)
    assert ran.code == 2
    assert "Prompts have 40 and 90 tokens on average" in ran.err
    assert "Compare them anyway with --force." in ran.err
    assert cli("bench", "compare", before, after, "--force").code == 0


def test_several_loads_are_one_table_and_one_record(cli, server, tmp_path):
    record, table = tmp_path / "sweep.json", tmp_path / "sweep.csv"
    small = ("--requests", "20", "--prompt", "40", "--output", "6", "--ttft", "5000")
    ran = cli("bench", server.url, "--clients", "1,2", *small, "--record", str(record))
    lines = ran.out.splitlines()
    heading = next(number for number, line in enumerate(lines) if line.startswith("LOAD"))
    assert [line.split("  ")[0] for line in lines[heading + 1 :]] == ["1 client", "2 clients"]
    # On a busy machine the client can be late, which makes a load not valid.
    assert lines[0].startswith(("Read 2 of 2 loads with care: few samples", "- "))
    assert "100.0%" in lines[-1]
    saved = json.loads(record.read_text())
    assert [point["setup"]["num_clients"] for point in saved["points"]] == [1, 2]
    assert [len(point["answers"]) for point in saved["points"]] == [20, 20]
    assert saved["points"][0]["setup"]["objectives"]["ttft_s"] == 5.0
    compared = json.loads(cli("bench", "compare", str(record), str(record), "--json").out)
    assert [load["load"] for load in compared["loads"]] == ["1 client", "2 clients"]
    assert "is not a recorded run" in cli("bench", server.url, "--trace", str(record)).err
    ran = cli("bench", server.url, "--rate", "50,100", *small, "--json", "--csv", str(table))
    points = json.loads(ran.out)["points"]
    assert points[0]["load"]["rate"] < points[1]["load"]["rate"]
    assert points[0]["report"]["run"]["num_completed"] == 20
    assert [row["run"] for row in csv.DictReader(table.read_text().splitlines())] == (
        ["1"] * 20 + ["2"] * 20
    )


def test_conversations_have_a_line_for_each_turn(cli, server):
    small = ("--clients", "2", "--requests", "9", "--prompt", "40", "--output", "6")
    ran = cli("bench", server.url, *small, "--turns", "3")
    lines = ran.out.splitlines()
    heading = next(number for number, line in enumerate(lines) if line.startswith("TURN"))
    assert [line.split()[:2] for line in lines[heading + 1 : heading + 4]] == [
        ["1", "3"],
        ["2", "3"],
        ["3", "3"],
    ]
    body = json.loads(cli("bench", server.url, *small, "--tool-calls", "2", "--json").out)
    assert [turn["num_requests"] for turn in body["turns"]] == [9]


def test_definitions_of_other_tools_stand_beside_ours(cli, server):
    ran = cli("bench", server.url, *SMALL, "--definitions")
    titles = [line.split("  ")[0] for line in ran.out.splitlines()]
    assert titles.index("TTFT mean") < titles.index("E2E p90") < titles.index("output tokens/s")
    body = json.loads(cli("bench", server.url, *SMALL, "--definitions", "--json").out)
    assert set(body["definitions"]["ttft_p50"]) == {
        "twostroke",
        "vllm",
        "aiperf",
        "guidellm",
        "inference-perf",
    }
    refused = cli("bench", server.url, "--clients", "1,2", "--definitions")
    assert "--definitions has no effect on several loads" in refused.err


def test_a_search_reports_the_capacity(cli, server):
    small = ("--requests", "20", "--prompt", "40", "--output", "6", "--sweep", "--rate", "40")
    body = json.loads(cli("bench", server.url, *small, "--ttft", "5000", "--json").out)
    assert body["capacity"]["rate"] >= 40
    assert body["points"][0]["load"]["num_clients"] == 1
    ran = cli("bench", server.url, *small, "--ttft", "0.001")
    assert ran.code == 1
    assert ran.out.startswith("There is no goodput capacity: even with one request at a time")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sweep", "--ttft", "9", "--requests", "1"), "--sweep needs at least 2 requests"),
        (("--clients", "1", "--think", "1"), "--think has no effect without --turns"),
        (("--clients", "1", "--tool-time", "1"), "--tool-time has no effect without --tool-calls"),
        (("--clients", "1", "--turns", "2", "--shared", "9"), "--turns cannot be combined with"),
        (("--clients", "1", "--turns", "0"), "--turns must be from 1 to 1,000, got 0"),
        (("--clients", "1", "--insecure"), "--insecure has no effect on a URL that is not https"),
        (("--sweep",), "--sweep needs an objective: --ttft, --tpot or --slo."),
        (("--sweep", "--ttft", "9", "--clients", "1"), "--clients cannot be combined with --sweep"),
        (("--sweep", "--ttft", "9", "--rate", "1,2"), "--rate must be one number with --sweep"),
        (("--sweep", "--ttft", "9", "--good", "2"), "--good must be greater than 0 and at most 1"),
        (("--rate", "1", "--good", "0.5"), "--good has no effect without --sweep"),
        (("--rate", "1,x"), "'1,x' is not a list of numbers"),
        (("--clients", "0"), "'0' is not a list of numbers from 1 to 10000"),
        ((), "Which load? Give --clients, --rate, --trace or --sweep."),
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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_certificates_are_checked_unless_they_are_to_be_trusted(cli, tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=bench"]
    files = ["-keyout", str(key), "-out", str(certificate), "-days", "2"]
    name = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *files, *name], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = FakeEndpoint(EndpointBehavior(), tls=context)
    small = ("--clients", "1", "--requests", "3", "--prompt", "20", "--output", "4")
    try:
        for trust in (("--insecure",), ("--ca-file", str(certificate))):
            assert f"fake at {server.url}, chat" in cli("bench", server.url, *small, *trust).out
        ran = cli("bench", server.url, *small)
        assert "certificate is not trusted" in ran.err
        assert "--ca-file, or accept any certificate by --insecure" in ran.err
        ran = cli("bench", server.url, *small, "--ca-file", str(tmp_path / "none.pem"))
        assert "--ca-file cannot be read: No such file" in ran.err
        ran = cli("bench", server.url, *small, "--ca-file", str(key))
        assert "--ca-file has no certificate in PEM form" in ran.err
    finally:
        server.close()


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
