"""What a comparison keeps of its runs, and what it leaves out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.common.workload import WORKS, Timing
from benchmarks.peers.interleaved import Row
from benchmarks.peers.quality import answered_prompts, answers_quality

_DECODE = WORKS["decode-1"]


def _timing(tokens_per_s: float, first_tokens: list[int], flops: int = 0) -> Timing:
    return Timing(32, 1.0, 100, 100 / tokens_per_s, 2.0, first_tokens, flops=flops)


def _row(**rates: list[float]) -> Row:
    """Return a row of the ways of one engine."""
    row = Row(_DECODE)
    side = SimpleNamespace(name="llama.cpp")
    for way, runs in rates.items():
        for rate in runs:
            row.add(side, way, _timing(rate, [7]), 0.0)
    return row


def test_a_way_is_left_out_only_when_it_has_proved_to_be_slower():
    row = _row(good=[100, 101], slow=[50, 51], close=[95, 96], once=[20])
    assert [way for _, way in row.rates if row.is_behind("llama.cpp", way)] == ["slow"]
    assert not row.is_behind("llama.cpp", "never run")


def test_a_disturbed_run_is_counted_and_kept():
    row = Row(_DECODE)
    side = SimpleNamespace(name="vLLM")
    row.add(side, "", _timing(10, [7]), 0.5)
    row.add(side, "", _timing(12, [7]), 0.0)
    assert (row.disturbed, row.runs) == (1, 2)
    assert row.best("vLLM") == ("", [10, 12])


def test_the_share_of_a_limit_is_that_of_the_engine_asked_about():
    row = Row(_DECODE)
    for name, flops in (("Twostroke", 50), ("Twostroke, 8-bit activations", 80)):
        row.add(SimpleNamespace(name=name), "", _timing(100, [7], flops), 0.0)
    assert row.share("flops", 100.0) == pytest.approx(0.5)
    assert row.share("flops", 100.0, "Twostroke, 8-bit activations") == pytest.approx(0.8)
    assert row.share("flops", 100.0, "llama.cpp") is None


def test_first_tokens_are_the_same_only_where_all_agree():
    row = Row(_DECODE)
    answered = {"a": [1, 2, 3, 4], "b": [1, 2, 9, 4], "Twostroke, 8-bit activations": [0] * 4}
    for name, answers in answered.items():
        row.add(SimpleNamespace(name=name), "", _timing(1, answers), 0.0)
    assert row.same_first_tokens == pytest.approx(0.75)


def test_answers_are_held_against_the_references_likeliest_tokens():
    parts = [[5, 6, 7, 8], [1, 2]]
    right = [np.eye(10, dtype=np.float32)[[3, 0, 4, 0]], np.eye(10, dtype=np.float32)[[9, 0]]]
    assert answered_prompts(parts) == [[5], [5, 6, 7], [1]]
    line = answers_quality("vLLM", right, parts, [3, 4, 8])
    assert line.comparison == {"top1_agreement": pytest.approx(2 / 3)}
    assert line.name == "vLLM (3 answers)"
