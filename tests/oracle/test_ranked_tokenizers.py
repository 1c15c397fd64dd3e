"""Token ids beside the official tokenizers of Mistral and OpenAI, on their whole vocabularies."""

from __future__ import annotations

import random
from importlib.resources import files
from typing import Any

import pytest

from support.byte_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN
from support.ranked_tokenizer import ranked_tokenizer
from support.tokenizer_texts import old_texts
from twostroke.model.tokenizer import from_gguf

pytest.importorskip("mistral_common", reason="it is in tests/oracle/requirements.txt")
DENSE = "abcABC'sSdDlLeE  \n\r/!?.-_0123456789éÉßñ日本ก\u0301€👍\u00a0\u3000\t"


@pytest.mark.parametrize("name", ["tekken", "gpt-4o"])
def test_ids_of_ranked_vocabularies_are_equal(name: str) -> None:
    from support.ranked_encodings import ENCODINGS

    try:
        encoding = ENCODINGS[name]()
    except OSError as error:
        pytest.skip(f"its ranks could not be fetched: {error}")
    ours = ranked_tokenizer(encoding.ranks, name, encoding.num_special)
    for text in [*old_texts(10_000, seed=6), *_dense(5_000)]:
        expected = [rank + encoding.num_special for rank in encoding.encode_ordinary(text)]
        assert ours.encode(text) == expected, ascii(text)
        assert ours.decode(expected) == text


@pytest.mark.parametrize("version", ["240216.model.v2", "240323.model.v3", "241114.model.v7"])
def test_ids_of_mistral_s_sentencepiece_vocabularies_are_equal(version: str) -> None:
    sentencepiece = pytest.importorskip(
        "sentencepiece", reason="it is in tests/oracle/requirements.txt"
    )
    file = files("mistral_common") / "data" / f"mistral_instruct_tokenizer_{version}"
    theirs = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
    ours = from_gguf(_pieces(theirs))
    for text in [*old_texts(10_000, seed=8), *_dense(5_000)]:
        assert ours.encode(text) == theirs.encode(text), ascii(text)


@pytest.mark.parametrize("version", ["240216.model.v2", "241114.model.v7"])
def test_forced_text_keeps_its_bytes_in_mistral_s_vocabularies(version: str) -> None:
    """They put a space before every text, and normalize none."""
    sentencepiece = pytest.importorskip(
        "sentencepiece", reason="it is in tests/oracle/requirements.txt"
    )
    file = files("mistral_common") / "data" / f"mistral_instruct_tokenizer_{version}"
    ours = from_gguf(_pieces(sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())))
    for text in [*old_texts(2_000, seed=12), *_dense(2_000), "\u2581a", "<s>", "cafe\u0301"]:
        ids = ours.encode_exact(text)
        assert b"".join(map(ours.token_bytes, ids)) == text.encode()
        assert not ours.special_ids.intersection(ids)
        assert ours.encode(f"\n{text}") == [*ours.encode("\n"), *ids] or "\u2581" in text


def _dense(count: int) -> list[str]:
    """Return strings of few kinds of characters, where patterns and merges meet often."""
    rng = random.Random(9)
    few = (rng.sample(DENSE, rng.randint(1, 8)) for _ in range(count))
    return ["".join(rng.choices(some, k=rng.randint(1, 80))) for some in few]


def _pieces(model: Any) -> dict[str, object]:
    ids = range(model.vocab_size())
    kinds = {model.is_control: CONTROL, model.is_unknown: UNKNOWN, model.is_byte: BYTE}
    types = [next((kind for is_kind, kind in kinds.items() if is_kind(id_)), NORMAL) for id_ in ids]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(id_) for id_ in ids],
        "tokenizer.ggml.scores": [model.get_score(id_) for id_ in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }
