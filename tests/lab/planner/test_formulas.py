"""The planner's formulas, compared with worked examples with known answers."""

from __future__ import annotations

import pytest

from twostroke.lab.planner.plan import expected_tokens_per_round
from twostroke.lab.planner.prices import cached_prompt_usd, usd_per_million_tokens
from twostroke.model.program.batch import BatchShape
from twostroke.model.program.work import ShareOfExperts


def test_tokens_of_a_round_are_those_of_the_paper():
    cases = ((0.6, 2, 1.96), (0.7, 3, 2.533), (0.8, 5, 3.689), (0.9, 10, 6.862), (1.0, 4, 5.0))
    for acceptance, drafts, expected in cases:
        assert expected_tokens_per_round(acceptance, drafts) == pytest.approx(expected, abs=5e-4)


def test_experts_that_a_batch_touches():
    for num_tokens, expected in ((8, 57.4), (32, 163.3), (128, 251.6)):
        share = ShareOfExperts(8, 256)(BatchShape.prefill(num_tokens))
        assert 256 * share == pytest.approx(expected, abs=0.05)


def test_prices():
    assert usd_per_million_tokens(2.0, 100) == pytest.approx(5.556, abs=5e-4)
    thousand_answers = usd_per_million_tokens(2.0, 100) * 0.2  # of 200 tokens
    assert thousand_answers == pytest.approx(1.11, abs=5e-3)
    thousand_prefills = 2.0 / (100 * 60) * 1000  # 100 a minute
    assert thousand_answers + thousand_prefills == pytest.approx(1.44, abs=5e-3)
    for write, expected in ((1.25, 0.0669), (2.0, 0.0714)):
        usd = cached_prompt_usd(
            num_tokens=2000, calls=100, usd_per_million=3.0, read_share=0.1, write_share=write
        )
        assert usd == pytest.approx(expected, abs=5e-5)
