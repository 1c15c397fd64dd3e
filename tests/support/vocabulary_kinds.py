"""Small vocabularies of every kind that model files have, as GGUF metadata and as tokenizer.json.

All have the same special tokens, spell the same words, and have byte tokens for all other text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from msgspec import field

from support.character_map import CHARACTER_MAP
from support.gguf_writer import F32, I32, Typed
from support.tiny import CHAT_TEMPLATE, byte_alphabet
from twostroke.core.frozen import Frozen
from twostroke.model.tokenizer import Tokenizer, from_gguf, from_tokenizer_json
from twostroke.model.tokenizer.alphabets import SPACE, byte_level_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNK, BOS, EOS, TAG = "<unk>", "<s>", "</s>", "<tool>"
SPECIALS = (UNK, BOS, EOS, "<|im_start|>", "<|im_end|>")
# Words with a space come first, so that they are merged before what they contain.
WORDS = [" yes", "yes", " no", "no", " Paris", " France", " is", "is", " the", "the", "true"]
WORDS += ["name", ' {"', '{"', '":', ' "', "é", " é", "e\u0301", "日本", "\n\n", "s>"]
LETTERS = sorted({char for word in WORDS for char in word} | {*"abcdefghijklmnop,.[]}:<|_"})


class Kind(Frozen):
    """A kind of vocabulary: `model` and `keys` are a GGUF file's, the rest a tokenizer.json's.

    `spelling` is how it spells text: as "bytes" (GPT-2), or as "pieces" (SentencePiece).
    """

    spelling: str
    model: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    normalizers: tuple[dict[str, Any], ...] = ()
    pre_tokenizers: tuple[dict[str, Any], ...] = ()
    strips_space: bool = False

    @property
    def is_byte_level(self) -> bool:
        """Whether a token's text spells bytes."""
        return self.spelling == "bytes"


_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Prepend", "prepend": SPACE}
_BYTES = {"type": "ByteLevel", "use_regex": True, "trim_offsets": True}
_TO_BYTES = {"type": "ByteLevel"}
_DIGITS = {"type": "Digits", "individual_digits": True}
_SPLIT = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


def _metaspace(scheme: str, *, split: bool) -> dict[str, Any]:
    return {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": scheme,
        "split": split,
    }


GGUF_KINDS = {
    "bytes": Kind("bytes", "gpt2", {"pre": "gpt-2"}),
    "bytes_with_prefix": Kind("bytes", "gpt2", {"pre": "gpt-2", "add_space_prefix": True}),
    "bytes_nfc": Kind("bytes", "gpt2", {"pre": "qwen2"}),
    "pieces_with_prefix": Kind("pieces", "llama", {"add_space_prefix": True}),
    "pieces": Kind("pieces", "llama", {"add_space_prefix": False}),
    "pieces_by_merges": Kind("pieces", "gemma4", {"pre": "gemma4"}),
}
FOLDER_KINDS = {
    "bytes": Kind("bytes", pre_tokenizers=({**_BYTES, "add_prefix_space": False},)),
    "bytes_with_prefix": Kind("bytes", pre_tokenizers=({**_BYTES, "add_prefix_space": True},)),
    "bytes_nfc": Kind(
        "bytes",
        normalizers=({"type": "NFC"},),
        pre_tokenizers=({**_BYTES, "add_prefix_space": False},),
    ),
    "bytes_nfkc": Kind(
        "bytes",
        normalizers=({"type": "NFKC"},),
        pre_tokenizers=({**_BYTES, "add_prefix_space": True},),
    ),
    "bytes_folded": Kind(
        "bytes",
        normalizers=({"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}),
        pre_tokenizers=({**_BYTES, "add_prefix_space": False}, _DIGITS),
    ),
    "bytes_normalized": Kind(
        "bytes",
        normalizers=({"type": "Precompiled", "precompiled_charsmap": CHARACTER_MAP}, _TO_BYTES),
        pre_tokenizers=(_DIGITS,),
    ),
    "prepend": Kind("pieces", normalizers=(_PREPEND, _REPLACE), strips_space=True),
    "prepend_nfkc": Kind(
        "pieces", normalizers=({"type": "NFKC"}, _PREPEND, _REPLACE), strips_space=True
    ),
    "metaspace": Kind(
        "pieces", pre_tokenizers=(_metaspace("always", split=True),), strips_space=True
    ),
    "metaspace_first": Kind(
        "pieces", pre_tokenizers=(_metaspace("first", split=False),), strips_space=True
    ),
    "metaspace_never": Kind("pieces", pre_tokenizers=(_metaspace("never", split=True),)),
    "replace_and_split": Kind("pieces", normalizers=(_REPLACE,), pre_tokenizers=(_SPLIT,)),
}


def kind_metadata(kind: Kind) -> dict[str, Any]:
    """Return the GGUF metadata of a vocabulary, with a chat template."""
    tokens, merges = _tokens_and_merges(kind)
    types = [_type_of(token, kind) for token in tokens]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": kind.model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(I32, types),
        "tokenizer.ggml.bos_token_id": tokens.index(BOS),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.unknown_token_id": tokens.index(UNK),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **{f"tokenizer.ggml.{key}": value for key, value in kind.keys.items()},
    }
    if kind.model == "llama":
        metadata["tokenizer.ggml.scores"] = Typed(F32, [-float(id_) for id_ in range(len(tokens))])
    else:
        metadata["tokenizer.ggml.merges"] = merges
    return metadata


def gguf_tokenizer(kind: Kind) -> Tokenizer:
    """Return the tokenizer of a GGUF file of that kind."""
    plain = {
        key: value.value if isinstance(value, Typed) else value
        for key, value in kind_metadata(kind).items()
    }
    return from_gguf(plain)


def kind_json(kind: Kind) -> dict[str, Any]:
    """Return the tokenizer.json of a vocabulary."""
    tokens, merges = _tokens_and_merges(kind)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    decoders: list[dict[str, Any]] = [{**_BYTES, "add_prefix_space": False}]
    if not kind.is_byte_level:
        decoders = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
    if kind.strips_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    begin = {BOS: {"id": BOS, "ids": [tokens.index(BOS)], "tokens": [BOS]}}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": tokens.index(text), "content": text, "special": text != TAG, **flags}
            for text in (*SPECIALS, TAG)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [*kind.normalizers]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*kind.pre_tokenizers]}
        if kind.pre_tokenizers
        else None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": BOS, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": begin,
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": None if kind.is_byte_level else UNK,
            "fuse_unk": not kind.is_byte_level,
            "byte_fallback": not kind.is_byte_level,
            "vocab": {token: id_ for id_, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def write_kind(folder: Path, kind: Kind) -> Path:
    """Write the files of a folder's tokenizer, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"bos_token": BOS, "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer.json").write_text(json.dumps(kind_json(kind)), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def all_tokenizers(folder: Path) -> Iterator[tuple[str, Tokenizer]]:
    """Yield every kind's name and tokenizer; folders are written below `folder`."""
    for name, kind in GGUF_KINDS.items():
        yield f"gguf_{name}", gguf_tokenizer(kind)
    for name, kind in FOLDER_KINDS.items():
        yield f"folder_{name}", from_tokenizer_json(write_kind(folder / name, kind))


def _tokens_and_merges(kind: Kind) -> tuple[list[str], list[str]]:
    def spell(text: str) -> str:
        return byte_level_text(text) if kind.is_byte_level else text.replace(" ", SPACE)

    tokens = [*SPECIALS, TAG]
    if kind.is_byte_level:
        tokens += byte_alphabet()
    else:
        tokens += [f"<0x{value:02X}>" for value in range(256)]
    merges: list[str] = []
    letters = [] if kind.is_byte_level else [spell(char) for char in LETTERS]
    tokens += [letter for letter in letters if letter not in tokens]
    for word in map(spell, WORDS):
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    return tokens, merges


def _type_of(token: str, kind: Kind) -> int:
    if token in SPECIALS:
        return UNKNOWN if token == UNK else CONTROL
    if token == TAG:
        return USER_DEFINED
    is_byte = not kind.is_byte_level and token.startswith("<0x") and len(token) == 6
    return BYTE if is_byte else NORMAL
