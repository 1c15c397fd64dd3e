"""N-gram drafts from the request itself, from a prediction, and from earlier answers."""

from __future__ import annotations

import pytest

from twostroke.core.request import Hints, Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.speculation import DraftCost, DraftOutcome, NgramProposer

RIGHT, WRONG, UNTRIED = (
    DraftOutcome([0], [0], [7, 8]),
    DraftOutcome([0], [], [7, 8]),
    DraftOutcome([], [], [7]),
)


def propose(proposer, request, max_drafts):
    """Return the drafts that are proposed for one request."""
    [proposal] = proposer.propose([request], DraftCost(0.0, 0.0, max_drafts))
    return proposal


def make(prompt, output=(), prediction=(), salt=b""):
    return Request(
        "r",
        [*prompt, *output],
        len(prompt),
        SamplingParams(),
        seed=0,
        salt=salt,
        hints=Hints(prediction=tuple(prediction)),
    )


def test_repeated_words_are_continued_as_before():
    request = make([1, 2, 3, 4, 5, 6, 9, 1, 2], [3])
    proposal = propose(NgramProposer(), request, 3)
    assert proposal.tokens == (4, 5, 6)
    assert proposal.source == "context"


def test_nothing_is_drafted_where_nothing_matches():
    assert propose(NgramProposer(), make([1, 2, 3, 4], [5]), 8) is None
    assert propose(NgramProposer(), make([1], [2]), 8) is None


def test_the_output_itself_is_searched_as_it_grows():
    proposer, request = NgramProposer(), make([1, 2, 3], [7])
    assert propose(proposer, request, 8) is None
    request.tokens += [8, 9, 4, 7, 8, 9]
    assert propose(proposer, request, 2).tokens == (4, 7)


def test_most_places_decide_and_say_how_sure_they_are():
    history = [5, 5, 5, 1, 5, 5, 5, 1, 5, 5, 5, 2, 0]
    proposal = propose(NgramProposer(), make([*history, 9, 5, 5], [5]), 1)
    sure = propose(NgramProposer(), make([5, 5, 5, 1, 9, 5, 5], [5]), 1)
    assert proposal.tokens == sure.tokens == (1,)
    assert proposal.chances[0] == pytest.approx(sure.chances[0] * 2 / 3)


def test_a_prediction_is_offered_from_its_beginning():
    proposer = NgramProposer()
    request = make([1, 2], [10], prediction=range(10, 20))
    assert propose(proposer, request, 3).tokens == (11, 12, 13)
    assert propose(proposer, request, 3).source == "prediction"
    request.tokens += [11, 99]  # the answer leaves it here
    assert propose(proposer, request, 3) is None
    request.tokens += [14, 15, 16]  # and comes back
    assert propose(proposer, request, 9).tokens == (17, 18, 19)


def test_a_prediction_that_was_never_right_is_not_offered():
    assert propose(NgramProposer(), make([1, 2], [3], prediction=[10, 11, 12]), 8) is None


def test_an_answer_that_has_ended_is_remembered_for_its_tenant():
    proposer = NgramProposer()
    proposer.finish(make([1, 2, 3], [20, 21, 22, 23, 24], salt=b"a"))
    later_request = make([3], [20, 21, 22], salt=b"a")
    assert propose(proposer, later_request, 8).tokens == (23, 24)
    assert propose(proposer, later_request, 8).source == "memory"
    assert propose(proposer, make([3], [20, 21, 22], salt=b"b"), 8) is None


def test_drafts_end_with_the_answer_that_they_come_from():
    proposer = NgramProposer()
    for _ in range(2):
        proposer.finish(make([1], [20, 21, 22, 23]))
    assert propose(proposer, make([9], [20, 21, 22]), 8).tokens == (23,)
    assert propose(proposer, make([9], [21, 22, 23]), 8) is None


def test_memory_of_all_tenants_together_is_bounded(monkeypatch):
    monkeypatch.setattr("twostroke.engine.speculation.token_index._MAX_TOKENS", 100)
    proposer = NgramProposer()
    for tenant in range(10):
        proposer.finish(make([1, 2, 3], range(30), salt=bytes([tenant])))
    remembered = proposer._memory._tenants
    assert sum(len(index) for indices in remembered.values() for index in indices) <= 100
    assert list(remembered) == [bytes([8]), bytes([9])]


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("twostroke.engine.speculation.token_index._GENERATION_TOKENS", 100)
    monkeypatch.setattr("twostroke.engine.speculation.token_index._MAX_TENANTS", 3)
    proposer = NgramProposer()
    for number in range(100):
        proposer.finish(make([1], range(1000 + 10 * number, 1010 + 10 * number)))
    newest, oldest = make([1], [1990, 1991, 1992]), make([1], [1000, 1001, 1002])
    assert propose(proposer, newest, 2).tokens == (1993, 1994)
    assert propose(proposer, oldest, 2) is None
    assert sum(map(len, proposer._memory.of(newest))) < 300
    for tenant in range(10):
        proposer.finish(make([1], range(10), salt=b"%d" % tenant))
    assert len(proposer._memory._tenants) == 3


def test_acceptance_rates_follow_the_outcomes_of_drafts():
    proposer, request = NgramProposer(), make([1, 2, 3, 4, 5, 1, 2], [3])
    first = propose(proposer, request, 1)
    for _ in range(20):
        proposer.learn(request, propose(proposer, request, 1), WRONG)
    bad = propose(proposer, request, 1)
    for _ in range(60):
        proposer.learn(request, propose(proposer, request, 1), RIGHT)
    good = propose(proposer, request, 1)
    assert bad.chances < first.chances < good.chances
    other = propose(proposer, make([1, 2, 3, 4, 5, 1, 2], [3]), 1)
    assert first.chances < other.chances < good.chances  # others hear of it, too


def test_rates_of_untried_drafts_recover():
    proposer, request = NgramProposer(), make([1, 2, 3, 4, 5, 1, 2], [3])
    first = propose(proposer, request, 1)
    for _ in range(50):
        proposer.learn(request, propose(proposer, request, 1), WRONG)
    assert propose(proposer, request, 1).chances[0] < 0.2
    for _ in range(3000):
        proposer.learn(request, propose(proposer, request, 1), UNTRIED)
    assert propose(proposer, request, 1).chances[0] == pytest.approx(first.chances[0], abs=0.05)


def test_nothing_is_kept_of_a_request_that_has_ended():
    proposer, request = NgramProposer(), make([1, 2, 3, 4, 1, 2], [3])
    assert propose(proposer, request, 1) is not None
    proposer.finish(request)
    assert not proposer._requests


def test_of_many_requests_in_short_steps_some_are_looked_at_in_turn():
    proposer, short = NgramProposer(), DraftCost(0.0, 1e9, 4)
    requests = [make([1, 2, 3, 4, number, 1, 2], [3]) for number in range(100, 108)]
    seen = []
    for _ in requests:
        result = proposer.propose(requests, short)
        seen += [index for index, proposal in enumerate(result) if proposal]
    assert sorted(seen) == list(range(8))
    lucky = seen[-1]
    proposer.learn(requests[lucky], result[lucky], RIGHT)
    for _ in requests:
        assert proposer.propose(requests, short)[lucky]
    proposer.learn(requests[lucky], result[lucky], WRONG)
    assert sum(bool(proposer.propose(requests, short)[lucky]) for _ in requests) == 1
    assert all(proposer.propose(requests, DraftCost(0.0, 1.0, 4)))
