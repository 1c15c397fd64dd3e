"""Token ids and rendered chats, compared with transformers live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.character_classes import disputed
from support.tokenizer_texts import CHATS, texts
from support.transformers_tokenizer import chat_ids, plain_ids, smollm2_tokenizer
from twostroke.tokenize import Tokenizer, from_gguf, from_tokenizer_json
from twostroke.tokenize.templates import ChatTemplate
from twostroke.weights.gguf import read_gguf

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> Any:
    return smollm2_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def ours(smollm2_path: Path) -> Tokenizer:
    return from_gguf(read_gguf(smollm2_path).metadata)


@pytest.fixture(scope="module")
def from_folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("folder")
    theirs.save_pretrained(folder)
    return from_tokenizer_json(folder)


def test_ids_of_ten_thousand_texts_are_equal(
    ours: Tokenizer, from_folder: Tokenizer, theirs: Any
) -> None:
    for text in _undisputed(num_random=10_000, seed=2):
        expected = plain_ids(theirs, text)
        assert ours.encode(text) == expected, ascii(text)
        assert from_folder.encode(text) == expected, ascii(text)


def test_special_tokens_of_vouched_text_are_equal(ours: Tokenizer, theirs: Any) -> None:
    for text in _undisputed(num_random=2_000, seed=3):
        expected = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, parse_special=True) == expected, ascii(text)


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("place", range(len(CHATS)))
def test_chats_are_equal(ours: Tokenizer, theirs: Any, place: int, prompted: bool) -> None:
    template = ChatTemplate.for_tokenizer(ours)
    prompt = template.render(CHATS[place], add_generation_prompt=prompted)
    text, ids = chat_ids(theirs, CHATS[place], prompted=prompted)
    assert prompt.text == text
    assert ours.encode_prompt(prompt) == ids


def _undisputed(num_random: int, seed: int) -> list[str]:
    """Texts without the characters that Unicode got after one side's tables (ADR 0005)."""
    kept = [text for text in texts(num_random, seed) if disputed().isdisjoint(text)]
    assert len(kept) > 0.98 * num_random
    return kept
