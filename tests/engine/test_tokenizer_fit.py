"""A model folder's tokenizer must fit the rows of the model's embedding table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.tiny import Tiny, write_tiny_folder
from twostroke.core.errors import ModelFormatError
from twostroke.model.loader import build_tokenizer
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path


def change(folder: Path, *, text_tokens: int, special_tokens: int) -> None:
    """Give a folder's tokenizer more tokens than the model has rows."""
    path = folder / "tokenizer.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = description["model"]["vocab"]
    first = max(vocabulary.values(), default=-1) + 1
    first = max(first, *(token["id"] + 1 for token in description["added_tokens"]))
    vocabulary |= {f"more{i}": first + i for i in range(text_tokens)}
    template = description["added_tokens"][0]
    for i in range(special_tokens):
        token = {"id": first + text_tokens + i, "content": f"<|more{i}|>", "special": True}
        description["added_tokens"].append({**template, **token})
    path.write_text(json.dumps(description), encoding="utf-8")


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", Tiny())
    num_rows = load_path(folder).spec.vocab_size
    change(folder, text_tokens=7, special_tokens=0)
    output = f"has {num_rows + 7} tokens, its embedding table {num_rows} rows: .* another model"
    with pytest.raises(ModelFormatError, match=output):
        build_tokenizer(load_path(folder))


def test_special_tokens_beyond_the_rows_are_left_alone(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", Tiny())
    change(folder, text_tokens=0, special_tokens=1)
    tokenizer = build_tokenizer(load_path(folder))
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
