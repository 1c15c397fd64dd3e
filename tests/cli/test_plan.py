"""`twostroke plan`: its tables, its JSON and its refusals."""

from __future__ import annotations

import errno
import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from support.configs import write_config
from support.native import native_dir
from twostroke.lab.measure.single_step import StepShape
from twostroke.lab.planner import load_planned_model
from twostroke.lab.planner.calibration import measure


def test_tables_and_formulas_are_printed(cli, config):
    lines = cli("plan", config, "--on", "h100-sxm", "--tpot", "10", "--explain").out.splitlines()
    assert lines[0].startswith("Yes: 62 streams (limited by TPOT) ")
    assert lines[1].startswith("llama-8b on H100-SXM: 8.03 G weights (bf16)")
    assert any(line.startswith("STREAMS") for line in lines)
    assert any(line.startswith("weights w4a16") for line in lines)
    knee = next(line for line in lines if line.startswith("knee ="))
    assert "295" in knee


def test_the_command_that_a_plan_prints_simulates_its_load(cli, config):
    arguments = (
        "--on",
        "H100-SXM",
        "--mfu",
        "0.5",
        "--mbu",
        "0.8",
        "--tpot",
        "25",
        "--cached",
        "0.25",
    )
    planned = json.loads(cli("plan", config, *arguments, "--json").out)
    printed = cli("plan", config, *arguments).out.splitlines()
    (command,) = (line for line in printed if line.startswith("  twostroke simulate"))
    words = shlex.split(command)[1:]
    report = json.loads(cli(*words, "--requests", "1500", "--json").out)["report"]
    load = planned["loads"][-1]
    assert report["latencies"]["tpot"]["mean"] == pytest.approx(load["tpot_s"], rel=0.1)
    assert report["concurrency"] == pytest.approx(load["at_work"], rel=0.1)
    assert report["hit_rate"] == pytest.approx(0.25, abs=0.01)


def test_a_context_that_does_not_fit_is_made_shorter(cli, tmp_path):
    """131,072 tokens of an 8B model take 17.2 GB, and an L4 has 5.5 GB beside its weights."""
    config = write_config(tmp_path / "8b.json", "8B", max_position_embeddings=131072)
    printed = cli("plan", config, "--on", "L4").out.splitlines()
    (command,) = (line for line in printed if line.startswith("  twostroke simulate"))
    ran = cli(*shlex.split(command)[1:], "--requests", "20", "--json")
    assert json.loads(ran.out)["report"]["num_completed"] == 20
    ran = cli("simulate", config, "--on", "L4", "--rate", "1")
    assert (ran.code, ran.out) == (6, "")
    length = re.search(r"use --context-length (\d+)", ran.err)[1]
    assert f"--context-length {length}" in command
    assert cli("plan", config, "--on", "H200").out.count("--context-length") == 0


def test_json_holds_what_the_tables_show(cli, config):
    arguments = ("--on", "A100-80GB", "--weights", "w4a16", "--streams", "8", "--json")
    plan = json.loads(cli("plan", config, *arguments).out)
    assert plan["chosen"]["streams"] == 8
    assert plan["stored"] == "w4a16"
    assert plan["chosen"] in plan["rows"]
    assert plan["memory"]["weights"] < 6.2e9  # 16 bits for embeddings and logits


def test_a_file_is_planned_on_this_machine(cli, tiny):
    out = cli("plan", str(tiny), "--prompt", "16", "--output", "8").out
    first = out.splitlines()[1]
    assert "F32" in first
    peak_kind = json.loads(cli("doctor", "--json").out)["measured"]["peak_kind"]
    assert first.endswith(f"arithmetic {peak_kind}")
    assert "links" not in out.partition("WHAT IF")[0]
    out = cli("plan", str(tiny), "--prompt", "1", "--output", "8", "--devices", "2").out
    assert "First token of a prompt of 1 token:" in out
    assert "links is not known" in out


def test_a_configuration_is_planned_without_the_parts_that_run_models(config):
    """A plan takes less than a second, most of it for imports."""
    script = (
        "import sys; from twostroke.cli.app import run\n"
        f"assert run(['plan', {config!r}, '--on', 'L4']) == 0\n"
        "heavy = {'engine.loading', 'tokenize', 'backends.cpu', 'measure.profile'}\n"
        "names = {f'twostroke.{name}' for name in heavy} | {'http.client'}\n"
        "print(*sorted(names & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stderr.split() == []


def test_wrong_options_are_named_as_they_are_written(cli, config):
    for options, reason in (
        (("--on", "H100-SXN"), "--on must be one of here, "),
        (("--tpot", "-1"), "--tpot must be greater than 0 and at most 1,000,000,000, got -1."),
        (("--mfu", "1e-300"), "--mfu must be from 0.001 to 1, got 1e-300."),
        (("--devices", "0"), "--devices must be from 1 to 1,024, got 0."),
        (("--weights", "int9"), "int8"),
    ):
        ran = cli("plan", config, "--on", "L4", *options)
        assert ran.code == 2
        assert reason in ran.err


def test_an_impossible_plan_has_its_own_exit_code(cli, config):
    arguments = ("plan", config, "--on", "L4", "--tpot", "0.01")
    ran = cli(*arguments)
    assert ran.code == 9
    assert "times the objective" in ran.err
    assert "WHAT IF" in ran.out
    assert ran.out.startswith("No: Each further token takes at least ")
    ran = cli(*arguments, "--json")
    assert ran.code == 9
    assert json.loads(ran.out)["verdict"] in ran.err
    assert cli("plan", config, "--on", "L4", "--tpot", "1000").code == 0


def test_a_model_that_does_not_fit_prints_nothing_but_the_error(cli, config, tmp_path):
    path = tmp_path / "plan.svg"
    for more_options, reason in (
        (("--prompt", "200000"), "8b cannot answer these requests"),
        (("--streams", "5000"), "5000 streams do not fit"),
        (("--streams", "8", "--token-budget", "9"), "At most 1 of 8 streams can decode at once"),
    ):
        arguments = ("plan", config, "--on", "L4", *more_options, "--plot", str(path))
        ran = cli(*arguments)
        assert (ran.code, ran.out, ran.err.count("\n")) == (9, "", 1)
        assert reason in ran.err
        assert not path.exists()
        ran = cli(*arguments, "--json")
        assert json.loads(ran.out)["verdict"] in ran.err


def test_small_times_keep_their_digits(cli, tiny):
    lines = cli("plan", tiny, "--on", "B200", "--prompt", "16", "--output", "8").out.splitlines()
    tokens_ms = [line.split()[1] for line in lines if line.lstrip()[:2] == "1 "]
    assert 0 < float(tokens_ms[0]) < 0.01
    assert len(tokens_ms[0].lstrip("0.")) == 3


def test_given_shares_stand_in_place_of_measured_steps(cli, tiny):
    ran = cli("plan", tiny, "--calibrate", "--mbu", "0.5")
    assert (ran.code, ran.out) == (2, "")
    assert "--mbu has no effect on measured steps (--calibrate)" in ran.err


def test_a_path_that_is_no_model_is_refused(cli, tmp_path):
    ran = cli("plan", str(tmp_path / "nothing.json"), "--on", "L4")
    assert ran.code == 3


def test_the_plot_names_both_strokes_and_the_objectives(cli, config, tmp_path):
    path = tmp_path / "plan.svg"
    arguments = ("--on", "H100-SXM", "--tpot", "10", "--ttft", "100", "--plot")
    assert cli("plan", config, *arguments, str(path)).code == 0
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for expected in (
        "llama-8b on H100-SXM",
        "Arithmetic intensity (FLOP/byte)",
        "Latency (ms)",
        "objective of TTFT: 100 ms",
        "objective of TPOT: 10 ms",
    ):
        assert expected in texts
    assert any(text.startswith("prefill, 1,024 tokens: the whole step, ") for text in texts)
    assert any(text.startswith("attention ") for text in texts)
    first = path.read_bytes()
    assert cli("plan", config, *arguments, str(path)).code == 0
    assert path.read_bytes() == first
    image = tmp_path / "plan.PNG"
    assert cli("plan", config, *arguments, str(image)).code == 0
    assert image.read_bytes().startswith(b"\x89PNG")


def test_the_report_is_whole_and_fetches_nothing(cli, config, tmp_path):
    path = tmp_path / "plan.html"
    arguments = ("--on", "H100-SXM", "--tpot", "10", "--html", str(path))
    lines = cli("plan", config, *arguments, "--explain").out.splitlines()
    page = path.read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.search(r"<(script|link|img|iframe)|@import|url\((?!#)", page)
    assert "RunPod Mar-2026" in page
    for line in lines[lines.index("") + 1 :]:
        for word in line.split() if "twostroke simulate" not in line else ():
            assert word.rstrip(":").replace("&", "&amp;") in page


def test_names_do_not_become_markup(cli, config, tmp_path):
    folder = tmp_path / "<b>$x$ & co"
    Path(config).rename(folder)
    arguments = ("--on", "H100-SXM", "--plot", str(tmp_path / "a.svg"), "--html")
    assert cli("plan", str(folder), *arguments, str(tmp_path / "a.html")).code == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;$x$ &amp; co on H100-SXM" in page
    assert "<b>" not in page


def test_files_that_cannot_be_written_are_refused(cli, config, tmp_path, monkeypatch):
    (tmp_path / "folder.svg").mkdir()
    for options, reason in (
        (("--plot", "plan.pdf"), "--plot must end in .svg or .png, got 'plan.pdf'."),
        (("--plot", "plan"), "--plot must end in .svg or .png, got 'plan'."),
        (("--html", "plan.svg"), "--html must end in .html, got 'plan.svg'."),
        (("--html", "no/plan.html"), "--html is in a folder that does not exist: 'no'."),
        (("--plot", str(tmp_path / "folder.svg")), "is a directory"),
    ):
        ran = cli("plan", config, "--on", "L4", *options)
        assert ran.code == 2
        assert reason in ran.err
        assert ran.out == ""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for options in (("--plot", "plan.svg"), ("--html", "plan.html")):
        ran = cli("plan", config, "--on", "L4", *options)
        assert ran.code == 2
        assert "[plots]'" in ran.err


def test_a_full_disk_leaves_the_old_file(cli, config, tmp_path, monkeypatch):
    path = tmp_path / "plan.html"
    path.write_text("old")

    def fail(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    ran = cli("plan", config, "--on", "L4", "--html", str(path))
    assert ran.code == 1
    assert ran.err == f"twostroke: '{path}' cannot be written: No space left on device.\n"
    assert ran.out == ""
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["plan.html"]


def test_steps_count_for_as_many_threads_as_they_were_measured_on(cli, tiny, monkeypatch):
    native_dir()
    identity = load_planned_model(str(tiny)).identity
    shapes = (StepShape.decode(1, 20), StepShape.prefill(30))
    measure(str(tiny), identity, shapes, lambda _: None, num_steps=2, num_threads=1)
    arguments = ("plan", tiny, "--prompt", "16", "--output", "8", "--threads")
    ran = cli(*arguments, "1")
    assert "Times are corrected by 2 steps measured on 1 thread on" in ran.out
    assert "--threads 1" in next(
        line for line in ran.out.splitlines() if "twostroke simulate" in line
    )
    monkeypatch.setattr(
        "twostroke.lab.planner.calibrate_from_server", lambda *_: 1
    )  # a server's threads
    ran = cli(*arguments[:-1], "--calibrate", "--server", "http://127.0.0.1:1")
    assert "--threads 1" in next(
        line for line in ran.out.splitlines() if "twostroke simulate" in line
    )
    ran = cli(*arguments, "2")
    assert "Times are corrected" not in ran.out
    assert "Steps were measured on 1 thread: --threads 1 plans with them." in ran.err
    ran = cli("plan", tiny, "--on", "L4", "--threads", "1")
    assert (ran.code, ran.out) == (2, "")
    assert "--threads has no effect without --on here" in ran.err


def test_several_devices_are_ranked_by_cost_in_one_table(cli, config):
    load = ("--prompt", "300", "--output", "100", "--weights", "int8")
    ran = cli("plan", config, "--on", "c7g.16xlarge", "--on", "L4", "--on", "T4", *load)
    assert ran.code == 0
    verdict, about, _, headings, *rows = ran.out.splitlines()
    assert verdict.startswith("Yes: ")
    assert about.startswith("Times are limits")
    assert headings.split()[:2] == ["DEVICE", "STREAMS"]
    names = [row.split()[0] for row in rows]
    assert sorted(names) == ["L4", "T4", "c7g.16xlarge"]
    assert f" on {names[0]} costs least" in verdict
    table_run = cli(
        "plan", config, "--on", "c7g.16xlarge", "--on", "L4", "--on", "T4", *load, "--json"
    )
    plans = json.loads(table_run.out)["plans"]
    assert [plan["device"] for plan in plans] == names
    costs = [plan["chosen"]["usd_per_1k"] for plan in plans]
    assert costs == sorted(costs)


def test_all_devices_of_the_table_are_ranked_and_the_unfit_ones_are_last(cli, tmp_path):
    large = write_config(tmp_path / "large.json", "70B")
    ran = cli("plan", large, "--on", "all", "--tpot", "60")
    assert ran.code == 0
    rows = ran.out.splitlines()[4:]
    is_unfit = ["It does not fit" in row or "times the objective" in row for row in rows]
    assert is_unfit == sorted(is_unfit)
    assert (is_unfit[0], is_unfit[-1]) == (False, True)
    none = cli("plan", large, "--on", "L4", "--on", "T4")
    assert none.code == 9
    assert "none of the 2 devices" in none.out
    assert "none of the 2 devices" in none.err


@pytest.mark.parametrize(
    ("option", "name"),
    [(("--price", "2"), "--price"), (("--explain",), "--explain"), (("--calibrate",), "--calib")],
)
def test_options_about_one_device_are_refused_for_several(cli, config, option, name):
    ran = cli("plan", config, "--on", "L4", "--on", "T4", *option)
    assert ran.code == 2
    assert name in ran.err
    assert "--on names several" in ran.err


def test_a_plan_for_users_begins_with_what_they_see_and_what_they_need(cli, config):
    load = ("--prompt", "300", "--output", "100", "--users", "300", "--think", "10")
    ran = cli("plan", config, "--on", "L4", *load, "--ttft", "1000")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("Yes: 300 users on ")
    assert "$ an hour." in ran.out.splitlines()[0]
    load_of_users = json.loads(cli("plan", config, "--on", "L4", *load, "--json").out)["user_load"]
    assert (load_of_users["num_users"], load_of_users["think_s"]) == (300, 10.0)
    ranked = cli("plan", config, "--on", "L4", "--on", "H100-SXM", *load, "--ttft", "1000")
    assert " costs least, " in ranked.out
    assert "what 300 users see on average" in ranked.out
    alone = cli("plan", config, "--on", "L4", "--think", "3")
    assert alone.code == 2
    assert "--think has no effect without --users" in alone.err
