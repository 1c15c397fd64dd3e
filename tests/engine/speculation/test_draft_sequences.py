"""Draft sequences: acceptance rates by probability, leaves beside the chain, and their end."""

from __future__ import annotations

import math

import pytest

from twostroke.core.draft_tree import ROOT
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import NO_TOKEN, TokenLogprobs
from twostroke.engine.speculation.acceptance import AcceptanceRate
from twostroke.engine.speculation.draft_sequences import DraftSequence
from twostroke.engine.speculation.proposal import DraftOutcome

TOKEN_IDS = (10, 20, 30, 40)


def drafts_of(*draws: tuple[int, dict[int, float]]) -> DraftSequence:
    """Return a draft sequence with these tokens, each with the probabilities of its step."""
    rate = AcceptanceRate([(kind + 0.5) / 10 for kind in range(10)], 0.6).for_request()
    result = DraftSequence(Request("r", [], 0, SamplingParams(), 0), rate, 10, TOKEN_IDS)
    for drawn_token, chances in draws:
        top = sorted(chances.items(), key=lambda item: -item[1])
        logprobs = TokenLogprobs(
            math.log(chances[drawn_token]),
            tuple(token for token, _ in top),
            tuple(math.log(chance) for _, chance in top),
        )
        assert result.take(drawn_token, logprobs)
    return result


def test_drafts_have_the_targets_ids_and_rates_by_probability() -> None:
    proposal = drafts_of((1, {1: 0.97}), (3, {3: 0.91})).proposal("eagle", 8)
    assert proposal is not None
    assert proposal.tokens == (20, 40)
    assert proposal.chances == pytest.approx((0.95, 0.95))
    assert proposal.parents == ()
    assert proposal.source == "eagle"


def test_likely_tokens_become_leaves() -> None:
    result = drafts_of((0, {0: 0.55, 1: 0.35, 2: 0.02}), (3, {3: 0.85, 0: 0.12}))
    proposal = result.proposal("eagle", 8)
    assert proposal is not None
    by_token = dict(zip(proposal.tokens, proposal.parents, strict=True))
    first, second = proposal.tokens.index(10), proposal.tokens.index(40)
    assert proposal.parents[first] == ROOT
    assert proposal.parents[second] == first
    assert by_token[20] == ROOT
    assert sorted(proposal.tokens) == [10, 10, 20, 40]  # of the third token it was too unsure
    assert list(proposal.values) == sorted(proposal.values, reverse=True)


def test_no_more_are_proposed_than_are_wanted() -> None:
    result = drafts_of((0, {0: 0.5, 1: 0.3, 2: 0.2}), (0, {0: 0.5, 1: 0.3, 2: 0.2}))
    proposal = result.proposal("eagle", 3)
    assert proposal is not None
    assert len(proposal.tokens) == 3


def test_a_token_that_was_not_drawn_is_not_drafted() -> None:
    result = drafts_of()
    assert not result.take(NO_TOKEN, None)
    assert result.proposal("eagle", 8) is None


def test_a_text_with_wrong_drafts_is_left_alone_and_tried_again() -> None:
    result = drafts_of((1, {1: 0.97}))
    proposal = result.proposal("eagle", 8)
    assert proposal is not None
    for _ in range(40):
        result.rate.learn(proposal, DraftOutcome([0], [], [10]))
    assert result.rate.first < 0.1
    assert not result.rate.pays(0.2)
    assert result.rate.pays(0.01)
    tries = 0
    while not result.rate.pays(0.2):
        tries += 1
    assert 10 < tries < 1000


def test_odds_learn_from_leaves_too() -> None:
    result = drafts_of((0, {0: 0.55, 1: 0.45}))
    before = result.rate.of(4)
    for _ in range(30):
        proposal = result.proposal("eagle", 8)
        assert proposal is not None
        leaf = proposal.tokens.index(20)
        result.rate.learn(proposal, DraftOutcome(range(2), [leaf], [20, 30, 30]))
    assert result.rate.of(4) > before + 0.2
    assert result.rate.of(5) < 0.4
