"""A request's text in a draft model's tokens, and its drafts in the target model's tokens."""

from __future__ import annotations

import math

import pytest

from support.byte_tokenizer import END, START, byte_characters, byte_tokenizer
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import TokenLogprobs
from twostroke.engine.speculation import TokenTranslator
from twostroke.engine.speculation.acceptance import AcceptanceRate
from twostroke.engine.speculation.draft_model import PRIOR, DraftModelSequence, DraftTokens
from twostroke.model.tokenizer import Translation

TARGET = byte_tokenizer(more_merges=("Ġw o", "Ġwo r", "Ġwor l", "Ġworl d", "a b", "ab c"))
DRAFT = byte_tokenizer(more_merges=("o Ġ", "b c", "d Ċ"))
WORDS = TokenTranslator(Translation(TARGET, DRAFT), Translation(DRAFT, TARGET))


def transcript_of(words: TokenTranslator = WORDS, stride: int = 2048) -> DraftTokens:
    return DraftTokens(words, stride)


def request_of(text: str) -> Request:
    ids = TARGET.encode(text, parse_special=True)
    return Request("r", ids, len(ids), SamplingParams(), 0)


def test_a_text_is_followed_in_the_drafts_own_tokens() -> None:
    request, transcript = request_of(f"{START}user\nhello world{END}"), transcript_of()
    transcript.follow(request)
    assert transcript.tokens == DRAFT.encode(f"{START}user\nhello world{END}", parse_special=True)
    for token in TARGET.encode("abc\nhello world abc world\n"):
        request.tokens.append(token)
        transcript.follow(request)
        text = TARGET.decode(request.tokens, skip_special=False)
        assert transcript.tokens == DRAFT.encode(text, parse_special=True)
        assert transcript.num_prompt <= transcript.num_settled <= len(transcript.tokens)


@pytest.mark.parametrize("stride", [1, 3, 16])
@pytest.mark.parametrize(
    "text", ["hello world abc hello world abc\n" * 3, f"{START}user\nhello{END}" * 3, "é" * 40, ""]
)
def test_a_long_prompt_is_followed_in_pieces(text: str, stride: int) -> None:
    """No step translates the whole prompt, and the tokens are the same as translated at once."""
    at_once, request = transcript_of(), request_of(text + " abc")
    at_once.follow(request)
    transcript = transcript_of(stride=stride)
    num_rounds = 0
    while transcript.follow(request) or transcript.is_behind:
        num_rounds += 1
        assert num_rounds <= 3 * len(request.tokens)
        output = transcript.tokens
        assert not transcript.is_ready
        assert len(output) == transcript.num_settled
        assert output == at_once.tokens[: len(output)]
    assert num_rounds or stride >= len(request.tokens)
    assert transcript.is_ready
    assert transcript.tokens == at_once.tokens
    assert 0 < transcript.num_prompt <= transcript.num_settled
    num_prompt = transcript.num_prompt
    request.tokens += TARGET.encode(" world" * 40)
    while transcript.follow(request) or transcript.is_behind:
        pass
    assert DRAFT.decode(transcript.tokens) == TARGET.decode(request.tokens)
    assert transcript.num_prompt == num_prompt


def test_settled_tokens_never_change() -> None:
    """The draft model computes final tokens once, and shares pages of the prompt's tokens."""
    request, transcript = request_of("hello world abc hello"), transcript_of()
    transcript.follow(request)
    settled = transcript.tokens[: transcript.num_settled]
    prompt = transcript.tokens[: transcript.num_prompt]
    for token in TARGET.encode(" world\nabc"):
        request.tokens.append(token)
        transcript.follow(request)
        assert transcript.tokens[: len(settled)] == settled
        settled = transcript.tokens[: transcript.num_settled]
    assert transcript.tokens[: transcript.num_prompt] == prompt


def draft_sequence_of(drafts: list[int], sure: list[float]) -> DraftModelSequence:
    rate, ids = AcceptanceRate(PRIOR).for_request(), range(DRAFT.vocab_size)
    result = DraftModelSequence(request_of("hello"), rate, 10, ids, draft_tokens=transcript_of())
    for draft, sureness in zip(drafts, sure, strict=False):
        result.take(draft, TokenLogprobs(math.log(sureness)))
    return result


def test_drafts_are_translated_into_the_targets_tokens() -> None:
    drafts = DRAFT.encode(" world abc")
    assert len(drafts) > len(TARGET.encode(" world abc"))
    proposal = draft_sequence_of(drafts, [0.9, 0.5, 0.8, 0.95, 0.6, 0.4, 0.9] * 3).proposal(
        "draft", 24
    )
    assert proposal is not None
    assert list(proposal.tokens) == TARGET.encode(" world abc")
    assert [kind // 10 for kind in proposal.kinds] == [0] * (len(proposal.tokens) - 1) + [1]


def test_a_translated_token_has_the_probability_of_its_drafts() -> None:
    proposal = draft_sequence_of(DRAFT.encode(" worldabc"), [0.9] * 9).proposal("draft", 24)
    assert proposal is not None
    num_pieces = len(DRAFT.encode(" world"))
    assert proposal.kinds[0] == min(int(0.9**num_pieces * 10), 9)


def test_no_more_is_drafted_than_is_asked_for() -> None:
    proposal = draft_sequence_of(DRAFT.encode(" world abc world"), [0.9] * 20).proposal("draft", 2)
    assert proposal is not None
    assert list(proposal.tokens) == TARGET.encode(" world abc world")[:2]


def test_a_draft_with_prefix_tokens_gets_them() -> None:
    wanting = byte_tokenizer(more_merges=("o Ġ",), add_bos_token=True)
    words = TokenTranslator(Translation(TARGET, wanting), Translation(wanting, TARGET))
    request, transcript = request_of("hello world"), transcript_of(words)
    for token in TARGET.encode(" abc"):
        transcript.follow(request)
        text = TARGET.decode(request.tokens)
        assert transcript.tokens == wanting.encode(text, add_special=True)
        request.tokens.append(token)
    beginning = request_of(f"{START}hello")
    transcript = transcript_of(words)
    transcript.follow(beginning)
    assert transcript.tokens == wanting.encode(f"{START}hello", parse_special=True)


@pytest.mark.parametrize("odd", [[0xFF], [0xC3], [0x80, 0x80], [0xF0, 0x9F]])
def test_bytes_that_are_not_text_are_left_out(odd: list[int]) -> None:
    marks = [TARGET.find(byte_characters()[byte]) or 0 for byte in odd]
    ids = [*TARGET.encode("hello world"), *marks, *TARGET.encode(" abc")]
    request, transcript = Request("r", ids, len(ids), SamplingParams(), 0), transcript_of()
    for token in TARGET.encode("hello world hello world abc"):
        transcript.follow(request)
        output = TARGET.decode(request.tokens).replace("\ufffd", "")
        assert DRAFT.decode(transcript.tokens) == output
        request.tokens.append(token)
    assert transcript.num_read > len(TARGET.encode("hello world")) + len(odd)


def test_nothing_is_drafted_after_half_a_character() -> None:
    request, transcript = request_of("hello"), transcript_of()
    request.tokens += [TARGET.find(char) or 0 for char in "ðŁ"]
    transcript.follow(request)
    assert not transcript.is_ready
    request.tokens += TARGET.encode("🙂")[-2:]
    transcript.follow(request)
    assert transcript.is_ready


@pytest.mark.parametrize("text", ["é", "🙂🙂", "\ufffd", "é" * 9])
def test_characters_that_are_cut_are_followed_once_they_are_whole(text: str) -> None:
    request, transcript = request_of("hello"), transcript_of()
    transcript.follow(request)
    for token in TARGET.encode(text + " world"):
        request.tokens.append(token)
        transcript.follow(request)
        assert "hello" in DRAFT.decode(transcript.tokens)
    assert DRAFT.decode(transcript.tokens) == f"hello{text} world"
