"""The line with an answer's speed, which is printed below the answer."""

from __future__ import annotations

import pytest

from twostroke.cli.figures import AnswerFigures, describe
from twostroke.core.hardware import Hardware
from twostroke.engine.counters import PhaseTotals, PrefillDecodeTotals
from twostroke.engine.output import Timings, Usage

HARDWARE = Hardware("test", 2, 10**9, bandwidth=100.0, peak=1000.0, peak_kind="x", source="x")
STROKES = PrefillDecodeTotals(
    PhaseTotals(steps=1, rows=30, flops=800, bytes=10, time_s=2.0),
    PhaseTotals(steps=4, rows=4, flops=8, bytes=300, time_s=4.0),
)


def test_figures_are_rates_and_shares_of_the_limits() -> None:
    usage = Usage(prompt_tokens=40, cached_tokens=10, completion_tokens=5)
    timings = Timings(arrival_s=10, started_s=11, first_token_s=13, last_token_s=17)
    assert AnswerFigures.of(usage, timings, STROKES, HARDWARE) == AnswerFigures(
        ttft_s=3.0, prefill_tokens_per_s=15.0, decode_tokens_per_s=1.0, mfu=0.4, mbu=0.75
    )


def test_one_token_has_no_rate_of_decoding() -> None:
    figures = AnswerFigures.of(
        Usage(4, 0, 1), Timings(0, 0, 2, 2), PrefillDecodeTotals(STROKES.prefill), HARDWARE
    )
    assert (figures.decode_tokens_per_s, figures.mbu) == (None, None)
    assert figures.prefill_tokens_per_s == 2.0


def test_an_answer_stopped_before_its_first_token_has_no_figures() -> None:
    figures = AnswerFigures.of(
        Usage(4, 0, 0), Timings(10, 0, 0, 0), PrefillDecodeTotals(), HARDWARE
    )
    assert figures == AnswerFigures(None, None, None, None, None)
    assert describe(figures, Usage(4, 0, 0), notes=("stopped",)) == "stopped"


@pytest.mark.parametrize(
    ("ttft_s", "ttft_text"),
    [(0.0123, "12 ms"), (0.9994, "999 ms"), (1.0, "1.00 s"), (12.345, "12.35 s")],
)
def test_time_to_first_token_is_short(ttft_s: float, ttft_text: str) -> None:
    figures = AnswerFigures(ttft_s, None, None, None, None)
    assert describe(figures, Usage(4, 0, 1)) == f"TTFT {ttft_text}"


def test_the_line_is_short_enough_for_a_terminal() -> None:
    line = describe(AnswerFigures(0.134, 1659.3, 320.2, 0.11, 0.561), Usage(36, 0, 40), width=80)
    assert line == (
        "TTFT 134 ms · prefill 1,659 t/s, 11% of peak · decode 320 t/s, 56% of bandwidth"
    )


def test_a_longer_line_is_folded_between_its_parts() -> None:
    figures = AnswerFigures(0.134, 1659.3, 320.2, 0.11, 0.561)
    usage = Usage(36, 32, 40)
    line = describe(figures, usage, notes=("stopped",), width=79)
    assert line.split("\n") == [
        "TTFT 134 ms · prefill 1,659 t/s, 11% of peak · decode 320 t/s, 56% of bandwidth",
        "32 of 36 prompt tokens cached · stopped",
    ]
    assert "\n" not in describe(figures, usage)
    assert len(describe(figures, usage, width=1).split("\n")) == 4
