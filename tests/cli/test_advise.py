"""`twostroke advise` and `serve --autotune`: the printed command, and what is logged."""

from __future__ import annotations

import json
import logging
import signal
from typing import TYPE_CHECKING

import click
import pytest

from support.tiny import write_tiny_gguf
from twostroke.cli import autotune
from twostroke.cli.autotune import autotuned
from twostroke.cli.serve import command
from twostroke.core.options import EngineOptions
from twostroke.lab.measure.requests import Objectives
from twostroke.lab.simulator.advice import Advice, Estimate
from twostroke.lab.simulator.machine_speed import MachineSpeed
from twostroke.server.storage.trace_file import check_trace_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A recorded trace of 120 requests that arrive fast."""
    lines = ['{"recorded_trace": 1, "block_tokens": 16}']
    lines += [
        json.dumps({"arrival_s": 0.01 * n, "prompt_tokens": 1000, "output_tokens": 10})
        for n in range(120)
    ]
    path = tmp_path / "monday"
    path.write_text("\n".join(lines))
    return str(path)


def test_the_command_is_printed_with_the_expected_gain(cli, config, trace):
    arguments = ("advise", config, trace, "--on", "h100-sxm", "--ttft", "3000", "--tpot", "9")
    ran = cli(*arguments)
    assert ran.code == 0
    body = json.loads(cli(*arguments, "--json").out)
    (command,) = body["commands"]
    assert ran.out.splitlines()[-1].strip() == command
    assert command.startswith("twostroke serve ")
    changes = body["advice"]["changes"]
    assert ("Expected: " in ran.out) is bool(changes)
    for name, value in changes.items():
        assert f"--{name.replace('_', '-')} {value}" in command
    assert "int8" not in command


def test_the_end_of_the_time_gives_the_best_setting_so_far(cli, config, trace):
    arguments = ("advise", config, trace, "--on", "h100-sxm", "--ttft", "3000", "--tpot", "9")
    ran = cli(*arguments, "--time-limit", "1e-6")
    assert ran.code == 0
    assert "This is a part of the advice: the search ended after 1 setting," in ran.out
    assert "no better setting was found before the end" in ran.out
    assert ran.out.splitlines()[-1].strip().startswith("twostroke serve ")


def test_ctrl_c_gives_the_best_setting_so_far(cli, config, trace, monkeypatch):
    def interrupt(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("twostroke.cli.advise._progress", interrupt)
    arguments = ("--on", "h100-sxm", "--ttft", "3000", "--tpot", "9", "--max-replicas", "3")
    ran = cli("advise", config, trace, *arguments, "--json")
    assert ran.code == 130
    body = json.loads(ran.out)
    assert (body["advice"]["is_partial"], body["advice"]["num_tried"]) == (True, 1)
    assert (body["withheld"], body["fleet"]) == (None, None)
    assert "computing the gain of the best setting so far" in ran.err


def test_a_fleet_has_a_command_for_each_server_and_the_router(cli, config, trace):
    arguments = ("--on", "h100-sxm", "--ttft", "100", "--max-replicas", "3")
    body = json.loads(cli("advise", config, trace, *arguments, "--json").out)
    replicas = body["fleet"]["replicas"]
    assert len(body["commands"]) == replicas + 1
    assert body["commands"][-1].startswith("twostroke route --policy ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "Which objectives? Give --ttft, --tpot or --slo."),
        (("--slo", "redding"), "Did you mean 'reading'?"),
        (("--slo", "reading", "--ttft", "5"), "cannot be combined"),
        (("--ttft", "5", "--requests", "50"), "advice needs at least 100"),
    ],
)
def test_wrong_arguments_are_named(cli, config, trace, arguments, reason):
    ran = cli("advise", config, trace, "--on", "h100-sxm", *arguments)
    assert ran.code == 2
    assert reason in ran.err


@pytest.fixture
def short_trace(tmp_path: Path) -> Path:
    """A recorded trace of 120 short requests that arrive at once."""
    path = tmp_path / "trace"
    lines = ['{"recorded_trace": 1, "block_tokens": 16}']
    lines += [
        json.dumps({"arrival_s": 1e-5 * n, "prompt_tokens": 30, "output_tokens": 9})
        for n in range(120)
    ]
    path.write_text("\n".join(lines))
    return path


def test_autotune_logs_what_is_expected_with_and_without_its_changes(tmp_path, caplog, short_trace):
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    options = EngineOptions()
    with click.Context(command), caplog.at_level(logging.INFO):
        tuned = autotuned(str(model), options, short_trace, Objectives(1e-3, 1e-4))
        same = autotuned(str(model), options, tmp_path / "none", Objectives(1e-3, 1e-4))
    assert same == options
    assert "there is no trace" in caplog.text
    assert tuned.cache == options.cache
    is_changed = tuned.batch != options.batch
    assert ("Without: " in caplog.text) is is_changed
    reasons = ("no other options are better", "no options are enough")
    assert is_changed or any(reason in caplog.text for reason in reasons)


def test_the_first_start_of_a_server_that_records_has_no_trace_yet(tmp_path, caplog):
    trace = tmp_path / "trace"
    check_trace_file(trace)  # makes an empty file, as `serve` does before the tuning
    with click.Context(command), caplog.at_level(logging.INFO):
        same = autotuned("tiny", EngineOptions(), trace, Objectives(1.0))
    assert same == EngineOptions()
    assert "there is no trace" in caplog.text
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_autotune_changes_nothing_under_an_overload(tmp_path, caplog, monkeypatch, short_trace):
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    few, more = (Estimate(share, 1.0, 1.0, 1.0, 9.0) for share in (0.0, 0.4))
    changes = {"max_running": 4}
    advice = Advice(changes, few, more, changes, None, MachineSpeed())
    monkeypatch.setattr("twostroke.lab.simulator.advice.advise", lambda *_, **__: advice)
    with click.Context(command), caplog.at_level(logging.INFO):
        same = autotuned(str(model), EngineOptions(), short_trace, Objectives(1e-3, 1e-4))
    assert same == EngineOptions()
    assert "with the best, 40.0% meet the objectives" in caplog.text


def test_autotune_ends_its_search_in_time(tmp_path, caplog, monkeypatch, short_trace):
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(autotune, "_MAX_SEARCH_S", 0.0)
    monkeypatch.setattr(autotune, "_PROGRESS_INTERVAL_S", 0.0)
    with click.Context(command), caplog.at_level(logging.INFO):
        same = autotuned(str(model), EngineOptions(), short_trace, Objectives(1e-3, 1e-4))
    assert same.batch == EngineOptions().batch
    assert "Autotune: 1 setting tried in" in caplog.text
    assert caplog.text.count("the search ends after 0 s with 1 setting") == 1


@pytest.mark.parametrize(("limit_s", "count"), [(0.0, "50"), (1e9, "120")])
def test_autotune_takes_fewer_requests_if_they_are_slow(
    tmp_path, caplog, monkeypatch, short_trace, limit_s, count
):
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(autotune, "_MIN_REQUESTS", 50)
    monkeypatch.setattr(autotune, "_MAX_SIMULATION_S", limit_s)
    monkeypatch.setattr(autotune, "_MAX_SEARCH_S", 0.0)
    with click.Context(command), caplog.at_level(logging.INFO):
        autotuned(str(model), EngineOptions(), short_trace, Objectives(1e-3, 1e-4))
    assert f"Autotune: simulating the newest {count} requests of " in caplog.text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("smollm2",), "--autotune needs an objective for ttft or tpot, such as --objective"),
        (("--models", "a=smollm2"), "--autotune needs one model"),
    ],
)
def test_autotune_needs_objectives_and_one_model(cli, arguments, reason):
    ran = cli("serve", *arguments, "--autotune", "trace")
    assert ran.code == 2
    assert reason in ran.err
