"""Lookahead decoding: the n-grams that the window collects and the n-grams that are proposed."""

from __future__ import annotations

import random

import pytest

from twostroke.core.draft_tree import path_to
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import NO_TOKEN
from twostroke.engine.speculation import DraftCost, DraftOutcome, Lookahead

FREE = DraftCost(0.0, 100.0, 24)


def next_token(before: int) -> int:
    """Return the next token of a model that depends on the previous token only."""
    return (7 * before + 3) % 23


def make(prompt=(1, 2, 3)) -> Request:
    return Request("r", [*prompt, 5], len(prompt), SamplingParams(), 0)


def step(method: Lookahead, request: Request, draw=next_token, price=FREE):
    """Run a step that computes all drafts; return the proposal and the number of right drafts."""
    [proposal] = method.propose([request], price)
    if proposal is None:
        request.tokens.append(draw(request.tokens[-1]))
        return None, 0
    drawn_tokens = [draw(request.tokens[-1]), *map(draw, proposal.tokens)]
    right, at = [], -1
    while True:
        children = [i for i, parent in enumerate(proposal.parents) if parent == at]
        token = drawn_tokens[at + 1]
        request.tokens.append(token)
        at = next((i for i in children if proposal.tokens[i] == token), None)
        if at is None:
            break
        right.append(at)
    method.learn(request, proposal, DraftOutcome(range(len(proposal.tokens)), right, drawn_tokens))
    return proposal, len(right)


@pytest.mark.parametrize("length", [3, 4, 5])
@pytest.mark.parametrize("num_columns", [1, 2, 6])
def test_a_window_is_a_trunk_with_columns(num_columns, length):
    method, request = Lookahead(num_columns, length), make()
    proposal, _ = step(method, request)
    assert len(proposal.tokens) == num_columns * (length - 1) - 1
    paths = [path_to(i, proposal.parents) for i in range(len(proposal.tokens))]
    leaves = [path for i, path in enumerate(paths) if i not in proposal.parents]
    # Column j: j cells of the trunk, then the other length - 2 of its own.
    assert sorted(map(len, leaves)) == [j + length - 2 for j in range(num_columns)]
    assert set(proposal.tokens) <= {1, 2, 3, 5}, "of a new request nothing else is known"
    assert sum(parent == -1 for parent in proposal.parents) == min(num_columns, 2)


def test_collected_runs_are_what_the_model_says():
    method, request = Lookahead(4, 4, 2), make()
    for _ in range(3):  # until every cell has been drawn
        step(method, request)
    method._requests[request].pool.clear()
    step(method, request)
    pool = method._requests[request].pool
    assert pool
    for first, runs in pool.items():
        for run in runs:
            run_tokens = [first, *run]
            assert [next_token(token) for token in run_tokens[1:-1]] == run_tokens[2:]


def test_runs_are_tried_and_right():
    method, request = Lookahead(4, 3, 2), make()
    accepted = [step(method, request)[1] for _ in range(60)]
    assert sum(accepted[20:]) > 40  # the text goes round: runs of two tokens behind each
    text = request.tokens[3:]
    assert [next_token(token) for token in text[:-1]] == text[1:]


def test_of_runs_the_last_ones_are_kept():
    rng = random.Random(1)
    method, request = Lookahead(4, 3, 2), make()
    for _ in range(100):
        step(method, request, lambda _: rng.randrange(6))
    pool = method._requests[request].pool
    assert max(map(len, pool.values())) == 2
    proposal, _ = step(method, request, lambda _: rng.randrange(6))
    assert len(proposal.tokens) <= 7 + 2 * 2


def test_runs_that_begin_alike_share_their_beginning():
    method, request = Lookahead(1, 4, 3), make()
    step(method, request)
    search = method._requests[request]
    search.pool[request.tokens[-1]] = dict.fromkeys([(4, 5, 6), (4, 5, 7), (8, 9, 9)])
    [proposal] = method.propose([request], DraftCost(0.3, 100.0, 24))  # without the window
    assert len(proposal.tokens) == 7
    assert sorted(proposal.tokens) == [4, 5, 6, 7, 8, 9, 9]
    assert list(proposal.values) == sorted(proposal.values, reverse=True)


def test_nothing_is_proposed_where_rows_cost_much():
    method, request = Lookahead(), make()
    assert method.propose([request], DraftCost(0.5, 100.0, 24)) == [None]


def test_tokens_that_could_not_be_drawn_are_not_collected():
    method, request = Lookahead(3, 3), make()
    [proposal] = method.propose([request], FREE)
    drawn_tokens = [NO_TOKEN] * (1 + len(proposal.tokens))
    method.learn(request, proposal, DraftOutcome(range(len(proposal.tokens)), [], drawn_tokens))
    assert not method._requests[request].pool
    [proposal] = method.propose([request], FREE)
    assert NO_TOKEN not in proposal.tokens


def test_only_columns_that_were_computed_go_on():
    method, request = Lookahead(3, 3), make()
    [proposal] = method.propose([request], FREE)
    window = [list(column) for column in method._requests[request].window]
    # The first row is column 0's second cell, the next ones are the trunk and column 1's.
    method.learn(request, proposal, DraftOutcome((0, 1), (), (9, 10, 11)))
    now = method._requests[request].window
    assert now[0] == [window[0][1], 10]
    assert now[1:] == window[1:]
    method.learn(request, proposal, DraftOutcome((), (), (9,)))
    assert now[0] == [window[0][1], 10]


def test_accepted_tokens_move_the_window():
    method, request = Lookahead(3, 3), make()
    [proposal] = method.propose([request], FREE)
    window = [list(column) for column in method._requests[request].window]
    method.learn(request, proposal, DraftOutcome((0,), (0,), (9, 10)))
    assert method._requests[request].window[:2] == window[1:]


def test_nothing_is_kept_of_a_request_that_has_ended():
    method, request = Lookahead(), make()
    step(method, request)
    method.finish(request)
    assert not method._requests
    method.finish(request)
    method.learn(request, None, DraftOutcome((), (), ()))
