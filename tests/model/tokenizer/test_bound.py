"""Long texts are refused once they certainly have too many tokens, and never earlier."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from support.byte_tokenizer import byte_tokenizer
from support.piece_tokenizer import piece_tokenizer
from twostroke.model.tokenizer import Piece, Prompt, TooManyTokensError

TOKENIZERS = {"bytes": byte_tokenizer(), "qwen2": byte_tokenizer(pre="qwen2")}
TOKENIZERS["pieces"] = piece_tokenizer()
SIZE = 70_000
WORDS = ("a", "hello ", " ", "é", "e\u0301", "a1 é\x00漢 ", "<|im_end|>")
TEXTS = {text: (text * SIZE)[:SIZE] for text in WORDS}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_is_refused_only_if_it_has_too_many_tokens(name: str, text: str) -> None:
    tokenizer, long = TOKENIZERS[name], TEXTS[text]
    ids = tokenizer.encode(long)
    assert tokenizer.encode(long, max_tokens=len(ids)) == ids
    with pytest.raises(TooManyTokensError) as caught:
        tokenizer.encode(long, max_tokens=1000)
    assert 1000 < caught.value.num_tokens <= len(ids)


def test_a_long_word_is_refused_before_it_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, seen = TOKENIZERS["bytes"], list[str]()
    monkeypatch.setattr(tokenizer._merges, "_symbols", lambda text: seen.append(text) or [4])
    with pytest.raises(TooManyTokensError) as caught:
        tokenizer.encode("z" * SIZE, max_tokens=SIZE - 1)
    assert caught.value.num_tokens == SIZE  # no token has two of them
    assert seen == ["z"]  # the whole word was never turned into symbols


def test_a_text_of_long_tokens_is_encoded_though_it_has_many_characters() -> None:
    runs = ["-" * size for size in (1, 2, 4, 8, 16, 32)]
    tokenizer = byte_tokenizer(more_merges=tuple(f"{run} {run}" for run in runs[:-1]))
    for text in ("-" * 160_000, ("-" * 160 + " ") * 2_000):
        ids = tokenizer.encode(text)
        assert 16 * len(ids) < len(text)
        assert tokenizer.encode(text, max_tokens=len(ids)) == ids
        with pytest.raises(TooManyTokensError) as caught:
            tokenizer.encode(text, max_tokens=len(ids) // 2)
        assert len(ids) // 2 < caught.value.num_tokens <= len(ids)


def test_many_short_words_are_refused_before_all_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = ["-" * size for size in (1, 2, 4, 8, 16, 32)]
    tokenizer = byte_tokenizer(more_merges=tuple(f"{run} {run}" for run in runs[:-1]))
    cut, num_cut = tokenizer._parts.cut, [0]

    def noted(text: str) -> list[str]:
        num_cut[0] += len(text)
        return cut(text)

    monkeypatch.setattr(tokenizer, "_parts", replace(tokenizer._parts, cut=noted, cut_rest=None))
    with pytest.raises(TooManyTokensError):
        tokenizer.encode("a-" * 2_000_000, max_tokens=130_000)
    assert num_cut[0] < 400_000


def test_pieces_of_a_prompt_count_together() -> None:
    tokenizer = TOKENIZERS["bytes"]
    pieces = tuple(Piece(TEXTS["hello "], special=False) for _ in range(3))
    ids = tokenizer.encode_prompt(Prompt(pieces))
    assert tokenizer.encode_prompt(Prompt(pieces), max_tokens=len(ids)) == ids
    with pytest.raises(TooManyTokensError):
        tokenizer.encode_prompt(Prompt(pieces), max_tokens=len(ids) * 2 // 3 + 9)


def test_a_short_text_is_counted_to_its_end() -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert tokenizer.encode("hello " * 100, max_tokens=1) == tokenizer.encode("hello " * 100)
