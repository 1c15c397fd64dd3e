"""Tokenizers of the larger real models against transformers' results for the same input."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from twostroke.core.errors import ModelNotFoundError
from twostroke.engine.chat.template import ChatTemplate
from twostroke.model.hub import resolve
from twostroke.model.tokenizer import StreamDecoder, Tokenizer, from_gguf
from twostroke.model.weights.gguf import read_gguf

pytestmark = pytest.mark.models
_FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Recorded:
    """A tokenizer and its recorded results; `composes`: whether it composes characters (NFC)."""

    tokenizer: Tokenizer
    golden: dict[str, Any]
    composes: bool


@pytest.fixture(scope="module", params=["gemma3-270m", "qwen2.5-coder-0.5b"])
def recorded(request: pytest.FixtureRequest) -> Recorded:
    try:
        path = resolve(request.param)
    except ModelNotFoundError as error:
        pytest.skip(f"needs the real model: {error}")
    golden = json.loads((_FOLDER / f"{request.param}.json").read_bytes())
    metadata = read_gguf(path).metadata
    composes = metadata.get("tokenizer.ggml.pre") == "qwen2"
    return Recorded(from_gguf(metadata), golden, composes)


def test_ids_equal_the_recorded_ones(recorded: Recorded) -> None:
    assert len(recorded.golden["plain"]) >= 100
    for row in recorded.golden["plain"]:
        assert recorded.tokenizer.encode(row["text"]) == row["ids"], ascii(row["text"])


def test_recorded_texts_round_trip(recorded: Recorded) -> None:
    for row in recorded.golden["plain"]:
        if recorded.composes and not row["text"].isascii():
            continue  # what it composes comes back composed
        drops_space = recorded.tokenizer.strip_space
        decoder = StreamDecoder(recorded.tokenizer, drops_space=drops_space)
        streamed = "".join([decoder.feed(id_) for id_ in row["ids"]]) + decoder.finish()
        assert recorded.tokenizer.decode(row["ids"]) == streamed == row["text"]


def test_chats_equal_the_recorded_ones(recorded: Recorded) -> None:
    if not recorded.golden["chats"]:
        assert not recorded.tokenizer.chat_templates
        return
    template = ChatTemplate.for_tokenizer(recorded.tokenizer)
    for row in recorded.golden["chats"]:
        prompt = template.render(row["messages"], add_generation_prompt=row["prompted"])
        assert prompt.text == row["text"]
        assert recorded.tokenizer.encode_prompt(prompt) == row["ids"]
