"""Stored results of the speculation benchmark, and their tables in BENCHMARKS.md."""

from __future__ import annotations

import pytest

from benchmarks.engine import speculation_results
from benchmarks.engine.speculation_results import (
    Line,
    PredictionResult,
    SpeculationResult,
    describe_smallest_gain,
)

_FACTS = {"date": "2026-01-01", "processor": "CPU", "cores": 2, "commit": "abc"}


def _line(task: str, streams: int, ratio: float) -> Line:
    return Line(task, streams, [ratio, 1.0, 9.0], ratio, [10.0], [20.0], 2.5, 0.75, 1, _FACTS)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(speculation_results, "ROWS", tmp_path / "rows")
    monkeypatch.setattr(speculation_results, "machine_slug", lambda _: "here")


def test_a_line_that_is_measured_again_replaces_itself():
    predictions = [PredictionResult(0.5, [1.2], 0.4, 3.0)]
    SpeculationResult(
        "tiny, auto", [_line("chat", 1, 1.5), _line("chat", 4, 1.1)], predictions
    ).save()
    SpeculationResult("tiny, auto", [_line("chat", 4, 1.3), _line("code", 1, 2.0)]).save()
    SpeculationResult("tiny, eagle", [_line("chat", 1, 1.0)]).save()
    auto, eagle = speculation_results.load_results("here")
    assert {(line.task, line.streams): line.ratios[0] for line in auto.lines} == {
        ("chat", 1): 1.5,
        ("chat", 4): 1.3,
        ("code", 1): 2.0,
    }
    assert auto.chosen == predictions
    assert [line.task for line in eagle.lines] == ["chat"]


def test_the_report_has_both_tables():
    lines = [_line("code", 4, 1.5), _line("chat", 1, 1.2), _line("chat", 4, 0.9)]
    text = "\n".join(
        SpeculationResult("tiny, auto", lines, [PredictionResult(1.0, [2.5], 1.0, 3.0)]).parts()
    )
    assert "### Speculation: tiny, auto" in text
    assert "| chat | 1 | 10 (10 to 10) | 20 (20 to 20) | 1.20 x (1.00 to 9.00) | 1.20 x |" in text
    assert "| 100% | 100% | 3.0 | 2.50 x (2.50 to 2.50) | 4.00 x |" in text
    description = describe_smallest_gain(lines)
    assert description.startswith("The least steady one is 0.90 x (chat, 4 streams)")


def test_free_rows_give_what_the_formula_says():
    assert PredictionResult(0.5, [1.0], 0.5, 2.0).predicted == pytest.approx(1.75)
    assert PredictionResult(0.0, [1.0], 0.0, 2.0).predicted == 1


def test_a_damaged_file_is_named(tmp_path):
    SpeculationResult("tiny, auto", [_line("chat", 1, 1.5)]).save()
    [path] = (tmp_path / "rows" / "here" / "guessing").glob("*.json")
    path.write_text("{}")
    with pytest.raises(SystemExit, match=r"tiny-auto\.json is damaged"):
        speculation_results.load_results("here")
    with pytest.raises(SystemExit, match=r"tiny-auto\.json is damaged"):
        speculation_results.load_result("tiny, auto")
