"""Token ids and rendered chats, compared with transformers live, for each tokenizer at hand.

`LLAMA_CPP` may name a source tree of llama.cpp: its vocabularies without weights take part too.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from support.tokenizer_texts import CHATS, old_texts
from support.transformers_tokenizer import chat_ids, plain_ids, transformers_tokenizer
from twostroke.core import env
from twostroke.engine.chat.template import ChatTemplate
from twostroke.model.hub.catalogue import CATALOGUE
from twostroke.model.tokenizer import StreamDecoder, Tokenizer, from_gguf, from_tokenizer_json
from twostroke.model.weights.gguf import read_gguf

_MODELS = ["smollm2", "gemma3-270m", "qwen2.5-coder-0.5b"]
_VOCABULARIES = ["llama-spm", "llama-bpe", "qwen2", "starcoder"]
# Those for which llama.cpp's source lists ids that the original tokenizers gave.
_LISTED = [*_VOCABULARIES, "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "mpt"]
_LISTED += ["phi-3", "refact"]


@dataclass(frozen=True)
class Trio:
    """One tokenizer: from the GGUF file, from a folder that transformers saved, and theirs."""

    ours: Tokenizer
    from_folder: Tokenizer
    theirs: Any


@pytest.fixture(scope="module", params=[*_MODELS, *_VOCABULARIES])
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    path = _file(request.param)
    if not path.is_file():
        pytest.skip(f"there is no {path.name}")
    metadata = read_gguf(path).metadata
    theirs = transformers_tokenizer(path, metadata)
    folder = tmp_path_factory.mktemp("folder")
    theirs.save_pretrained(folder)
    return Trio(from_gguf(metadata), from_tokenizer_json(folder), theirs)


def test_ids_of_ten_thousand_texts_are_equal(trio: Trio) -> None:
    for text in old_texts(num_random=10_000, seed=2):
        expected = plain_ids(trio.theirs, text)
        assert trio.ours.encode(text) == expected, ascii(text)
        assert trio.from_folder.encode(text) == expected, ascii(text)


@pytest.mark.parametrize("name", _LISTED)
def test_ids_that_llama_cpp_lists_are_equal(name: str) -> None:
    path = _file(name)
    if not path.is_file():
        pytest.skip(f"there is no {path.name}")
    ours = from_gguf(read_gguf(path).metadata)
    listed = path.with_suffix(".gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
    rows = path.with_suffix(".gguf.out").read_text().split("\n")
    for text, row in zip(listed, rows, strict=False):
        assert ours.encode(text) == [int(id_) for id_ in row.split()], ascii(text)


def test_special_tokens_of_vouched_text_are_equal(trio: Trio) -> None:
    marks = trio.ours.special_texts()[:40]
    for index, text in enumerate(old_texts(num_random=2_000, seed=3)):
        marked = f"{text}{marks[index % len(marks)]}{text[::-1]}" if index % 2 else text
        expected = trio.theirs.backend_tokenizer.encode(marked, add_special_tokens=False).ids
        assert trio.from_folder.encode(marked, parse_special=True) == expected, ascii(marked)
        # transformers adds GPT-2's <|endoftext|> to a file that has no such token.
        if max(expected, default=0) < trio.ours.vocab_size:
            assert trio.ours.encode(marked, parse_special=True) == expected, ascii(marked)


def test_tokens_added_to_normalized_and_to_raw_text_are_equal(trio: Trio, tmp_path: Path) -> None:
    theirs = copy.deepcopy(trio.theirs)
    written = ["Cafe\u0301", " x", "you ", "日本", "<é|>", "a_b", "\u2581c", "don't"]
    theirs.add_tokens(
        [
            AddedToken(text, normalized=index % 4 > 0, lstrip=index == 4, single_word=index > 5)
            for index, text in enumerate(written)
        ]
    )
    theirs.save_pretrained(tmp_path)
    ours = from_tokenizer_json(tmp_path)
    for index, text in enumerate(old_texts(num_random=2_000, seed=5)):
        mixed = f"{text}{written[index % 8]}{text[: index % 9]}  {written[index % 7]}"
        assert ours.encode(mixed) == plain_ids(theirs, mixed), ascii(mixed)


def test_decoded_and_streamed_texts_are_equal(trio: Trio) -> None:
    for text in old_texts(num_random=500, seed=4):
        ids = plain_ids(trio.theirs, text)
        expected = trio.theirs.backend_tokenizer.decode(ids, skip_special_tokens=True)
        for tokenizer in (trio.ours, trio.from_folder):
            decoder = StreamDecoder(tokenizer, drops_space=tokenizer.strip_space)
            assert tokenizer.decode(ids) == expected, ascii(text)
            assert "".join([decoder.feed(id_) for id_ in ids]) + decoder.finish() == expected


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("index", range(len(CHATS)))
def test_chats_are_equal(trio: Trio, index: int, prompted: bool) -> None:
    if not trio.ours.chat_templates:
        pytest.skip("it has no chat template")
    prompt = ChatTemplate.for_tokenizer(trio.ours).render(
        CHATS[index], add_generation_prompt=prompted
    )
    text, ids = chat_ids(trio.theirs, CHATS[index], prompted=prompted)
    assert prompt.text == text
    assert trio.ours.encode_prompt(prompt) == ids


def _file(name: str) -> Path:
    if name in CATALOGUE:
        return env.cache_dir() / "models" / CATALOGUE[name].file_name
    return Path(os.environ.get("LLAMA_CPP", "llama.cpp")) / f"models/ggml-vocab-{name}.gguf"
