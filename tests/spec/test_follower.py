"""A request as a draft knows it, in its own tokens and in those of another vocabulary."""

from __future__ import annotations

import pytest

from support.byte_tokenizer import END, START, byte_characters, byte_tokenizer
from twostroke.cache import PagePool, PrefixIndex
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.schedule.ticket import Ticket
from twostroke.spec import Outcome, Words
from twostroke.spec.follower import PRIOR, Follower
from twostroke.spec.hope import Hope
from twostroke.spec.odds import Odds
from twostroke.tokenize import Translation

TARGET = byte_tokenizer(more_merges=("Ġw o", "Ġwo r", "Ġwor l", "Ġworl d", "a b", "ab c"))
DRAFT = byte_tokenizer(more_merges=("o Ġ", "b c", "d Ċ"))
WORDS = Words(Translation(TARGET, DRAFT), Translation(DRAFT, TARGET))


def follower_of(words: Words | None = WORDS, stride: int = 2048) -> Follower:
    mirror = Request("m", [], 0, SamplingParams(), 0)
    ticket = Ticket(mirror, (0, 0), 1000, PrefixIndex(PagePool(8, 16, (None,))).chain(b""))
    odds, hope = Odds(PRIOR).for_request(), Hope(0.75, 0.75)
    return Follower(mirror, ticket, odds, words, hope, 500, stride=stride)


def request_of(text: str) -> Request:
    ids = TARGET.encode(text, parse_special=True)
    return Request("r", ids, len(ids), SamplingParams(), 0)


def test_a_text_is_followed_in_the_drafts_own_tokens() -> None:
    request, follower = request_of(f"{START}user\nhello world{END}"), follower_of()
    follower.go_on(request)
    assert follower.mirror.tokens == DRAFT.encode(
        f"{START}user\nhello world{END}", parse_special=True
    )
    for token in TARGET.encode("abc\nhello world abc world\n"):
        request.tokens.append(token)
        follower.go_on(request)
        text = TARGET.decode(request.tokens, skip_special=False)
        assert follower.mirror.tokens == DRAFT.encode(text, parse_special=True)
        assert follower.mirror.num_prompt <= follower.num_same <= len(follower.mirror.tokens)


@pytest.mark.parametrize("stride", [1, 3, 16])
@pytest.mark.parametrize(
    "text", ["hello world abc hello world abc\n" * 3, f"{START}user\nhello{END}" * 3, "é" * 40, ""]
)
def test_a_long_prompt_is_followed_in_pieces(text: str, stride: int) -> None:
    """So that no step waits for all of it, and with the tokens that it would have at once."""
    at_once, request = follower_of(), request_of(text + " abc")
    at_once.go_on(request)
    follower = follower_of(stride=stride)
    num_rounds = 0
    while follower.go_on(request) or follower.is_behind:
        num_rounds += 1
        assert num_rounds <= 3 * len(request.tokens)
        said = follower.mirror.tokens
        assert follower.is_done
        assert len(said) == follower.num_same
        assert said == at_once.mirror.tokens[: len(said)]
    assert num_rounds or stride >= len(request.tokens)
    assert (follower.is_new, follower.is_done) == (False, False)
    assert follower.mirror.tokens == at_once.mirror.tokens
    assert 0 < follower.mirror.num_prompt <= follower.num_same
    num_prompt = follower.mirror.num_prompt
    request.tokens += TARGET.encode(" world" * 40)
    while follower.go_on(request) or follower.is_behind:
        pass
    assert DRAFT.decode(follower.mirror.tokens) == TARGET.decode(request.tokens)
    assert follower.mirror.num_prompt == num_prompt


def test_what_is_settled_never_changes() -> None:
    """Rows of settled tokens are computed once, and shared with others from the prompt's."""
    request, follower = request_of("hello world abc hello"), follower_of()
    follower.go_on(request)
    settled = follower.mirror.tokens[: follower.num_same]
    prompt = follower.mirror.tokens[: follower.mirror.num_prompt]
    for token in TARGET.encode(" world\nabc"):
        follower.mirror.num_computed = len(follower.mirror.tokens)
        request.tokens.append(token)
        follower.go_on(request)
        assert follower.mirror.tokens[: len(settled)] == settled
        assert follower.mirror.num_computed >= len(settled) - 1
        settled = follower.mirror.tokens[: follower.num_same]
    assert follower.mirror.tokens[: follower.mirror.num_prompt] == prompt


def test_guesses_are_said_in_the_targets_tokens() -> None:
    request, follower = request_of("hello"), follower_of()
    follower.go_on(request)
    sure = [0.9, 0.5, 0.8, 0.95, 0.6, 0.4, 0.9]
    guesses = DRAFT.encode(" world abc")
    assert len(guesses) > len(TARGET.encode(" world abc"))
    for guess, sureness in zip(guesses, sure * 3, strict=False):
        follower.add(guess, sureness)
    proposal = follower.proposal(24)
    assert proposal is not None
    assert list(proposal.tokens) == TARGET.encode(" world abc")
    assert [kind // 10 for kind in proposal.kinds] == [0] * (len(proposal.tokens) - 1) + [1]
    assert proposal.odds[-1] < proposal.odds[0] + 1


def test_a_token_is_as_sure_as_the_guesses_that_it_is_made_of() -> None:
    follower = follower_of()
    follower.go_on(request_of("hello"))
    for guess, sureness in zip(DRAFT.encode(" worldabc"), (0.9,) * 9, strict=False):
        follower.add(guess, sureness)
    proposal = follower.proposal(24)
    assert proposal is not None
    num_pieces = len(DRAFT.encode(" world"))
    assert proposal.kinds[0] == min(int(0.9**num_pieces * 10), 9)


def test_right_guesses_are_not_computed_again() -> None:
    request, follower = request_of("hello world"), follower_of()
    follower.go_on(request)
    mirror = follower.mirror
    mirror.num_computed = len(mirror.tokens)
    for guess in DRAFT.encode(" hello hello"):
        follower.add(guess, 0.9)
        mirror.num_computed += 1
    before = mirror.num_computed
    request.tokens += TARGET.encode(" hello hello")
    follower.go_on(request)
    assert mirror.num_computed >= before - 2
    request.tokens += TARGET.encode("abc")
    follower.go_on(request)
    assert 0 < mirror.num_pending < 6


def test_without_words_tokens_are_the_requests_own() -> None:
    request, follower = request_of("hello world"), follower_of(None)
    follower.go_on(request)
    assert follower.mirror.tokens == request.tokens
    follower.add(7, 0.95)
    follower.add(8, 0.15)
    proposal = follower.proposal(24)
    assert proposal is not None
    assert (proposal.tokens, proposal.kinds) == ((7, 8), (9, 1))
    follower.odds.learn(proposal, Outcome([0, 1], [0], [7, 9, 9]))
    assert follower.odds.of(1) < PRIOR[1]
    request.tokens += [7, 9]
    follower.mirror.num_computed = len(follower.mirror.tokens)
    follower.go_on(request)
    assert follower.mirror.num_pending == 1


def test_no_more_is_guessed_than_is_asked_for() -> None:
    follower = follower_of()
    follower.go_on(request_of("hello"))
    for guess in DRAFT.encode(" world abc world"):
        follower.add(guess, 0.9)
    proposal = follower.proposal(2)
    assert proposal is not None
    assert list(proposal.tokens) == TARGET.encode(" world abc world")[:2]


def test_a_draft_that_wants_a_beginning_gets_it() -> None:
    wanting = byte_tokenizer(more_merges=("o Ġ",), add_bos_token=True)
    words = Words(Translation(TARGET, wanting), Translation(wanting, TARGET))
    request, follower = request_of("hello world"), follower_of(words)
    for token in TARGET.encode(" abc"):
        follower.go_on(request)
        text = TARGET.decode(request.tokens)
        assert follower.mirror.tokens == wanting.encode(text, add_special=True)
        request.tokens.append(token)
    beginning = request_of(f"{START}hello")
    follower = follower_of(words)
    follower.go_on(beginning)
    assert follower.mirror.tokens == wanting.encode(f"{START}hello", parse_special=True)


@pytest.mark.parametrize("odd", [[0xFF], [0xC3], [0x80, 0x80], [0xF0, 0x9F]])
def test_bytes_that_are_no_text_hide_nothing_else(odd: list[int]) -> None:
    marks = [TARGET.find(byte_characters()[byte]) or 0 for byte in odd]
    ids = [*TARGET.encode("hello world"), *marks, *TARGET.encode(" abc")]
    request, follower = Request("r", ids, len(ids), SamplingParams(), 0), follower_of()
    for token in TARGET.encode("hello world hello world abc"):
        follower.go_on(request)
        said = TARGET.decode(request.tokens).replace("\ufffd", "")
        assert DRAFT.decode(follower.mirror.tokens) == said
        request.tokens.append(token)
    assert follower.num_seen > len(TARGET.encode("hello world")) + len(odd)


def test_half_a_character_is_no_place_to_guess_at() -> None:
    request, follower = request_of("hello"), follower_of()
    request.tokens += [TARGET.find(char) or 0 for char in "ðŁ"]
    follower.go_on(request)
    assert follower.is_done
    request.tokens += TARGET.encode("🙂")[-2:]
    follower.go_on(request)
    assert not follower.is_done


@pytest.mark.parametrize("text", ["é", "🙂🙂", "\ufffd", "é" * 9])
def test_characters_that_are_cut_are_followed_once_they_are_whole(text: str) -> None:
    request, follower = request_of("hello"), follower_of()
    follower.go_on(request)
    for token in TARGET.encode(text + " world"):
        request.tokens.append(token)
        follower.go_on(request)
        assert "hello" in DRAFT.decode(follower.mirror.tokens)
    assert DRAFT.decode(follower.mirror.tokens) == f"hello{text} world"
