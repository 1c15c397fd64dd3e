"""Added and special tokens that only the small files of a folder have (see tests/oracle, too)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.byte_tokenizer import byte_metadata
from support.gguf_writer import Typed
from support.vocabulary_kinds import (
    BOS,
    EOS,
    FOLDER_KINDS,
    GGUF_KINDS,
    UNK,
    kind_json,
    kind_metadata,
)
from twostroke.core.errors import ModelFormatError
from twostroke.engine.chat.template import ChatTemplate
from twostroke.model.tokenizer import Piece, Tokenizer, from_gguf, from_tokenizer_json

if TYPE_CHECKING:
    from pathlib import Path

SIZE = len(kind_json(FOLDER_KINDS["bytes"])["model"]["vocab"])
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


def tokenizer_of(folder: Path, **files: Any) -> Tokenizer:
    """Return the tokenizer of a folder with these side files, by their names without `.json`."""
    for name, content in {"tokenizer": kind_json(FOLDER_KINDS["bytes"]), **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return from_tokenizer_json(folder)


def test_tokens_of_the_configuration_are_found_as_tokenizer_json_s_own_are(tmp_path: Path) -> None:
    listed = {
        str(SIZE): {"content": "<turn>", "special": True, **PLAIN},
        str(SIZE + 1): {"content": "<cell>", "special": False, **PLAIN},
        "2": {"content": EOS, "special": True, **PLAIN, "rstrip": True},
    }
    tokenizer = tokenizer_of(tmp_path, tokenizer_config={"added_tokens_decoder": listed})
    assert tokenizer.encode("<turn>", parse_special=True) == [SIZE]
    assert len(tokenizer.encode("<turn>")) > 1
    assert tokenizer.encode("<cell>") == [SIZE + 1]
    assert tokenizer.vocab_size == SIZE + 2
    yes = tokenizer.encode("yes")
    assert tokenizer.encode(f"{EOS}  yes", parse_special=True) == [2, *yes]  # its flag is new


def test_named_and_additional_tokens_are_special_and_get_the_next_ids(tmp_path: Path) -> None:
    config = {
        "bos_token": BOS,
        "sep_token": "<sep>",
        "cls_token": {"content": "<cls>", "__type": "AddedToken", **PLAIN},
        "mask_token": "yes",
        "image_token": "<image>",
        "additional_special_tokens": ["<more>", BOS],
    }
    tokenizer = tokenizer_of(tmp_path, tokenizer_config=config)
    added = ("<sep>", "<cls>", "<image>", "<more>")
    assert [tokenizer.find(text) for text in added] == [*range(SIZE, SIZE + 4)]
    assert tokenizer.special_ids >= {*range(SIZE, SIZE + 4), tokenizer.find("yes")}
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    assert dict(tokenizer.named_texts) == named | {"cls_token": "<cls>"}
    assert tokenizer.additional_texts == ("<more>", BOS)


def test_older_folders_have_files_of_their_own(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(
        tmp_path,
        tokenizer_config={"sep_token": BOS},
        special_tokens_map={
            "sep_token": {"content": "<sep>", **PLAIN},
            "additional_special_tokens": ["<more>"],
        },
        added_tokens={"<sep>": SIZE, "<cell>": SIZE + 1},
    )
    assert dict(tokenizer.named_texts) == {"sep_token": "<sep>"}
    assert tokenizer.additional_texts == ("<more>",)
    assert tokenizer.encode("<cell>") == [SIZE + 1]
    assert tokenizer.encode("<sep><more>", parse_special=True) == [SIZE, SIZE + 2]
    assert len(tokenizer.encode("<sep>")) > 1


def test_the_older_files_do_not_count_beside_the_newer_one(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(
        tmp_path,
        tokenizer_config={"added_tokens_decoder": {}, "unk_token": UNK},
        special_tokens_map={"unk_token": "<other>"},
        added_tokens={"<cell>": SIZE},
    )
    assert dict(tokenizer.named_texts) == {"unk_token": UNK}
    assert tokenizer.vocab_size == SIZE


@pytest.mark.parametrize("id_", ["-1", "x", "1.5"])
def test_a_wrong_token_id_is_refused_with_its_value(tmp_path: Path, id_: str) -> None:
    listed = {id_: {"content": "<turn>"}}
    with pytest.raises(ModelFormatError, match=f"has the id '{id_}'"):
        tokenizer_of(tmp_path, tokenizer_config={"added_tokens_decoder": listed})


def test_templates_write_all_named_tokens(tmp_path: Path) -> None:
    config = {"sep_token": "<sep>", "mask_token": "<mask>", "image_token": "<image>"}
    tokenizer = tokenizer_of(tmp_path, tokenizer_config=config)
    source = "{{ sep_token }}{{ messages[0].content }}{{ mask_token }}{{ image_token }}"
    template = ChatTemplate(source, tokenizer)
    prompt = template.render([{"role": "user", "content": "<sep>"}])
    assert prompt.pieces == (
        Piece("<sep>", special=True),
        Piece("<sep>"),
        Piece("<mask>", special=True),
        Piece("<image>", special=True),
    )


def test_gguf_files_name_the_same_tokens() -> None:
    metadata = byte_metadata(seperator_token_id=2, cls_token_id=0, mask_token_id=3)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    named = from_gguf(metadata).named_texts
    assert named["sep_token"] == tokens[2]
    assert named["cls_token"] == tokens[0]
    assert named["mask_token"] == tokens[3]


@pytest.mark.parametrize("name", ["bytes", "pieces"])
def test_folders_and_files_of_one_vocabulary_have_the_same_ids(tmp_path: Path, name: str) -> None:
    """The two kinds of test tokenizers agree, so results for one hold for the other."""
    metadata = kind_metadata(GGUF_KINDS[name])
    plain = {key: v.value if isinstance(v, Typed) else v for key, v in metadata.items()}
    folder = FOLDER_KINDS["bytes" if name == "bytes" else "replace_and_split"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(kind_json(folder)), encoding="utf-8")
    ours, theirs = from_gguf(plain), from_tokenizer_json(tmp_path)
    for text in ("yes no", " Paris is the", "é日本\n\n", '{"name": "x"}'):
        assert ours.encode(text) == theirs.encode(text)


def test_null_is_no_list_of_added_tokens(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": None, "additional_special_tokens": None, "unk_token": UNK}
    assert tokenizer_of(tmp_path, tokenizer_config=config).named_texts["unk_token"] == UNK
