"""`twostroke profile`: its tables, its JSON, its plot and its refusals."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from support.tiny import tiny_of, write_tiny_gguf
from twostroke.core.hardware import Hardware
from twostroke.lab.measure import profile as module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Ran

    Cli = Callable[..., Ran]

SMALL = ("--streams", "1,3", "--context", "20", "--prefill", "40", "--steps", "2")
LIMITS = Hardware("test", 2, 10**9, bandwidth=1e9, peak=2e9, peak_kind="x", source="measured")
FIGURES = {
    "time_s", "share", "waiting_s", "bytes", "flops", "flops_per_byte", "bytes_per_s",
    "flops_per_s", "floor_s", "times_floor",
}  # fmt: skip


@pytest.fixture(autouse=True)
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fixed limits of the machine instead of measuring them."""
    monkeypatch.setattr(module, "machine", lambda *arguments, remeasure: LIMITS)


def test_each_step_is_a_table_with_advice(cli: Cli, tiny: str) -> None:
    ran = cli("profile", tiny, *SMALL)
    assert ran.code == 0
    first, *_ = ran.out.splitlines()
    assert "1.0 GB/s" in first
    tables = ran.out.split("\n\n")
    headings = [text for text in tables if text.startswith("OPERATION")]
    assert len(headings) == 3
    for text in headings:
        names = [line[:24].rstrip() for line in text.splitlines()]
        assert names[1] == "embed"
        assert names[-3:] == ["set-up and results", "scheduler", "whole step"]
        for line in text.splitlines()[1:]:  # the times end where their heading does
            time = line[: text.index(" MS ") + 3].split()[-1]
            assert float(time.replace(",", "")) >= 0
    figures = re.findall(r"(\S+) ms a step.*\(2 steps of (\S+) ms to (\S+) ms", ran.out)
    assert len(figures) == 3
    for mean, fastest, slowest in figures:
        times = [float(text.replace(",", "")) for text in (fastest, mean, slowest)]
        assert times == sorted(times)
    assert "decode, 3 streams after 20 tokens" in ran.out
    assert "prefill, 40 tokens" in ran.out
    assert ran.out.count("Improve next: ") == 3
    assert "Measuring prefill, 40 tokens" in ran.err


def test_json_is_for_scripts(cli: Cli, tiny: str) -> None:
    body = json.loads(cli("profile", tiny, *SMALL, "--json").out)
    assert list(body) == ["model", "backend", "machine", "steps"]
    assert body["machine"]["bandwidth"] == 1e9
    names = [step["name"].split(",")[0] for step in body["steps"]]
    assert names == ["decode", "decode", "prefill"]
    for step in body["steps"]:
        assert set(step["whole"]) == FIGURES
        assert step["num_measured"] == 2
        rows = step["operations"]
        assert all(set(row) >= FIGURES | {"name", "layer", "calls"} for row in rows)
        for figure in ("bytes", "flops"):
            assert sum(row[figure] for row in rows) == step["whole"][figure]
        assert step["whole"]["time_s"] == step["run_s"]["median"] + step["scheduler_s"]


@pytest.mark.parametrize(("share", "is_said"), [(None, False), (0.01, False), (0.5, True)])
def test_a_disturbed_measurement_says_so(
    cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch, share: float | None, is_said: bool
) -> None:
    monkeypatch.setattr(module.OtherProgramsLoad, "share", lambda watch: share)
    arguments = ("profile", tiny, "--prefill", "8", "--steps", "1")
    assert ("other programs took 50% of the processors" in cli(*arguments).out) == is_said
    [step] = json.loads(cli(*arguments, "--json").out)["steps"]
    assert step["others_share"] == share


def test_layers_are_rows_of_their_own(cli: Cli, tiny: str) -> None:
    arguments = ("--streams", "2", "--context", "9", "--steps", "1")
    ran = cli("profile", tiny, *arguments, "--layers")
    for layer in (0, 1):
        assert f"ffn_down add [{layer}]" in ran.out
    assert "prefill" not in ran.out  # only what was asked for


def test_the_picture_holds_each_operation(cli: Cli, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "roof.svg"
    body = json.loads(cli("profile", tiny, *SMALL, "--json", "--plot", str(path)).out)
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for step in body["steps"]:
        assert any((text or "").startswith(step["name"]) for text in texts)
        for row in step["operations"]:
            if row["flops"]:
                assert row["name"] in texts


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--context", "100000"), "--context may be up to 507"),
        (("--prefill", "512"), "--prefill may be up to 511"),
        (("--streams", "0"), "'0' is not a list of numbers from 1"),
        (("--streams", "1,,2"), "'1,,2' is not a list of numbers"),
        (("--prefill", "many"), "'many' is not a list of numbers"),
        (("--streams", "1000000", "--context", "400"), "lower --streams or --context"),
        (("--level", "avx9"), "There is no instruction-set level 'avx9'"),
        (("--plot", "roof.pdf"), "--plot must end in .svg or .png, got 'roof.pdf'."),
        (("--plot", "nowhere/roof.svg"), "--plot is in a folder that does not exist: 'nowhere'."),
        (("--plot", "/proc/roof.svg"), "--plot is in a folder that cannot be written, '/proc': "),
        (("--stream", "1"), "Did you mean '--streams'?"),
        (("--steps", "0"), "--steps"),
        (("--backend", "reference"), "--backend must be cpu or gpu, which time their operations."),
        (("--device", "cuda:1"), "--device needs the backend gpu or torch."),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    cli: Cli, tiny: str, words: tuple[str, ...], sentence: str
) -> None:
    ran = cli("profile", tiny, *words)
    assert ran.code != 0
    assert sentence in ran.err
    assert ran.out == ""


@pytest.mark.usefixtures("patient_ranks")
def test_ranks_show_what_they_wait_for(cli: Cli, tiny: str) -> None:
    ranks = ("--tensor-parallel", "2", "--streams", "16", "--context", "40", "--prefill", "40")
    ran = cli("profile", tiny, *ranks, "--steps", "2")
    assert ran.code == 0
    assert ran.out.count("Rank 0 spends in collectives ") == 2
    assert ran.out.count("Predicted: ") == 2
    [headings, *_] = [line for line in ran.out.splitlines() if line.startswith("OPERATION")]
    words = headings.split()
    assert [words.count(word) for word in ("RANK", "WAITING")] == [2, 2]
    body = json.loads(cli("profile", tiny, *ranks, "--steps", "2", "--json").out)
    for step in body["steps"]:
        names = {operation["name"]: operation["ranks"] for operation in step["operations"]}
        assert set(names["gather"]) == {"0", "1"}
        for times in names.values():
            assert all(time["time_s"] >= time["waiting_s"] >= 0 for time in times.values())
        in_gathers_s = sum(names["gather"]["0"][part] for part in ("time_s",))
        assert 0 < in_gathers_s < step["run_s"]["high"]
    assert "leave it out, or the ranks" in cli("profile", tiny, *ranks, "--plot", "roof.svg").err


@pytest.mark.usefixtures("patient_ranks")
def test_ranks_show_their_recurrent_layers(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "hybrid.gguf", tiny_of("qwen3.5-moe"))
    ranks = ("--expert-parallel", "2", "--streams", "3", "--context", "20", "--prefill", "20")
    body = json.loads(cli("profile", str(path), *ranks, "--steps", "2", "--json").out)
    assert len(body["steps"]) == 2
    for step in body["steps"]:
        names = {operation["name"]: operation["ranks"] for operation in step["operations"]}
        for name in ("convolution", "delta rule"):
            assert set(names[name]) == {"0", "1"}


def test_an_unknown_model_is_refused(cli: Cli) -> None:
    assert cli("profile", "smolm2").code == 3


def test_a_plot_without_matplotlib_names_the_extra(
    cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ran = cli("profile", tiny, *SMALL, "--plot", "roof.svg")
    assert ran.code == 2
    assert "[plots]'" in ran.err
