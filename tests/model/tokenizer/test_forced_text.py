"""Text that an answer is forced to have becomes tokens with exactly its bytes."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.byte_tokenizer import byte_tokenizer
from support.piece_tokenizer import piece_metadata
from support.vocabulary_kinds import FOLDER_KINDS, GGUF_KINDS, gguf_tokenizer, write_kind
from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.model.tokenizer import Tokenizer, from_gguf, from_tokenizer_json

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = [*(f"gguf {name}" for name in GGUF_KINDS), *(f"folder {name}" for name in FOLDER_KINDS)]
CHARACTERS = 'abyesno Prist{":}\n\téè\u0301\u0308日本ﬁÅ\u212b▁😀가\u1112\u1161<s>/unk|_im'
# Names of files from macOS are decomposed; `Å` has two code points; the rest looks like tokens.
TEXTS = ["yes", " yes", "  yes", "cafe\u0301", "\u212b", "ﬁ", "</s>", "<|im_end|>", "<tool>"]
TEXTS += ["<0x41>", "▁yes", "\u2581", "\n\n", "\ud55c\u1112\u1161", '{"name": "é"}', "1 000"]


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    origin, name = request.param.split()
    if origin == "gguf":
        return gguf_tokenizer(GGUF_KINDS[name])
    return from_tokenizer_json(write_kind(tmp_path_factory.mktemp(name), FOLDER_KINDS[name]))


def random_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(CHARACTERS, k=rng.randint(1, 25))) for _ in range(count)]


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_tokens_have_the_bytes_of_the_text_and_none_is_special(tokenizer: Tokenizer) -> None:
    for text in [*TEXTS, *random_texts(300, seed=1)]:
        ids = tokenizer.encode_exact(text)
        assert text_of(tokenizer, ids) == text
        assert not tokenizer.special_ids.intersection(ids)


def test_tokens_are_those_of_the_merges(tokenizer: Tokenizer) -> None:
    for text in ("yes", " yes", " Paris"):
        assert [tokenizer.token_bytes(id_) for id_ in tokenizer.encode_exact(text)] == [
            text.encode()
        ]


def followed(grammars: Grammars, tokenizer: Tokenizer, constraint: Constraint, seed: int) -> str:
    """Return an answer made of forced tokens, and of any allowed token where nothing is forced."""
    rng = random.Random(seed)
    matcher, output = grammars.matcher(constraint), list[int]()
    while len(output) < 400:
        mask = np.zeros((1, matcher.num_words), np.uint32)
        matcher.masks(output, (), (), mask)
        flags = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(flags).tolist()
        assert allowed, (constraint.text, output)
        forced = list(matcher.forced(output))
        assert not forced or forced[0] in allowed
        token = forced[0] if forced else rng.choice(allowed)
        if token in tokenizer.eos_ids:
            break
        output.append(token)
    return text_of(tokenizer, output)


def test_choices_and_schemas_can_be_followed_to_their_end(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    for seed, text in enumerate([*TEXTS, *random_texts(15, seed=2)]):
        for choices in ([text], [text, f"{text}x"], ["yes", text]):
            constraint = Constraint("choice", json.dumps(choices))
            assert followed(grammars, tokenizer, constraint, seed) in choices
        schema = {
            "type": "object",
            "properties": {text: {"const": text}},
            "required": [text],
            "additionalProperties": False,
        }
        constraint = Constraint("json_schema", json.dumps(schema))
        assert json.loads(followed(grammars, tokenizer, constraint, seed)) == {text: text}


def test_characters_that_no_token_spells_end_the_forced_text() -> None:
    metadata = piece_metadata()
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    metadata["tokenizer.ggml.tokens"] = [text.replace("<0x", "<x") for text in tokens]
    metadata["tokenizer.ggml.token_type"] = [1 if kind == 6 else kind for kind in types]
    tokenizer = from_gguf(metadata)
    assert text_of(tokenizer, tokenizer.encode_exact("hello€lo")) == "hello"
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    assert followed(grammars, tokenizer, Constraint("choice", '["hello", "€"]'), 0) == "hello"
    with pytest.raises(RequestError, match="no tokens for a part of the text"):
        followed(grammars, tokenizer, Constraint("choice", '["hello€"]'), 0)


def test_tokens_are_those_of_plain_text_where_nothing_changes_it() -> None:
    tokenizer = byte_tokenizer()
    for text in ("hello wé", "", "  hello"):
        assert tokenizer.encode_exact(text) == tokenizer.encode(text)
