"""Added and special tokens of folders whose small files differ, beside transformers."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from transformers import PreTrainedTokenizerFast

from support.vocabulary_kinds import FOLDER_KINDS, kind_json
from twostroke.model.tokenizer import from_tokenizer_json

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ("<s>", "</s>", "<|im_end|>", "<tool>", "<new>", "<other>", "yes", "[SEP]", "[MASK]", "é")
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image")
PROBES = (
    "<s>yes</s> no<|im_end|>",
    "a <new> b<other> <new><other>x",
    "[SEP] [MASK][SEP]  yes yes <tool> é",
    "yes<tool>no <unk> <|im_start|>",
)


def random_token(rng: random.Random, text: str, *, typed: bool = False) -> dict[str, Any]:
    """Return a text with flags. Words of the vocabulary are found in every text, as by us.

    The tokenizers library lets merges lead to special tokens that it does not find; we do not.
    """
    token: dict[str, Any] = {
        flag: rng.random() < 0.3 for flag in ("lstrip", "rstrip", "single_word", "normalized")
    }
    if text.isalpha():
        token |= {"single_word": False, "normalized": False}
    token |= {"content": text, "special": rng.random() < 0.5}
    return token | ({"__type": "AddedToken"} if typed else {})


def random_named(rng: random.Random, *, typed: bool) -> dict[str, Any]:
    """Return values of `bos_token` and the like: texts, or objects with flags."""
    named_tokens: dict[str, Any] = {}
    for name in NAMES:
        if rng.random() < 0.35:
            text = rng.choice(TEXTS)
            as_object = rng.random() < 0.4
            value = random_token(rng, text, typed=typed) if as_object else text
            named_tokens[f"{name}_token"] = value
    return named_tokens


def random_files(rng: random.Random, size: int) -> dict[str, dict[str, Any]]:
    """Return the contents of side files by name, as folders of several years have them."""
    config: dict[str, Any] = random_named(rng, typed=True)
    files = {"tokenizer_config.json": config}
    extras = [rng.choice(TEXTS) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.4:
        kind = rng.choice(["additional_special_tokens", "extra_special_tokens"])
        config[kind] = extras
    elif rng.random() < 0.3:
        config["extra_special_tokens"] = {"audio_token": rng.choice(TEXTS)}
    for name in ("add_bos_token", "add_eos_token"):
        if rng.random() < 0.25:
            config[name] = rng.random() < 0.5
    if rng.random() < 0.5:
        texts = rng.sample(TEXTS, rng.randint(0, 5))
        config["added_tokens_decoder"] = {
            str(size + index): random_token(rng, text) for index, text in enumerate(texts)
        }
        return files
    if rng.random() < 0.6:
        files["special_tokens_map.json"] = random_named(rng, typed=False)
        if rng.random() < 0.4:
            more_tokens = [rng.choice(TEXTS) for _ in range(rng.randint(0, 3))]
            files["special_tokens_map.json"]["additional_special_tokens"] = more_tokens
    if rng.random() < 0.6:
        texts = rng.sample(TEXTS, rng.randint(0, 5))
        files["added_tokens.json"] = {text: size + index for index, text in enumerate(texts)}
    return files


@pytest.mark.parametrize("kind", ["bytes", "bytes_with_prefix", "prepend", "replace_and_split"])
@pytest.mark.parametrize("seed", range(60))
def test_side_files_are_read_as_transformers_reads_them(
    tmp_path: Path, kind: str, seed: int
) -> None:
    rng = random.Random(f"{kind} {seed}")
    description = kind_json(FOLDER_KINDS[kind])
    description["post_processor"] = rng.choice([description["post_processor"], None])
    files = random_files(rng, len(description["model"]["vocab"]))
    for name, content in {"tokenizer.json": description, **files}.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = from_tokenizer_json(tmp_path)
    files_text = json.dumps(files)
    assert dict(ours.named_texts) == theirs.special_tokens_map, files_text
    for text in PROBES:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, parse_special=True) == expected, (text, files_text)
    expected = theirs.encode("yes no")
    assert ours.encode("yes no", add_special=True, parse_special=True) == expected, files_text
    added = theirs.added_tokens_decoder
    assert ours.special_ids == {id_ for id_, token in added.items() if token.special}, files_text
    assert {id_: ours.token_text(id_) for id_ in added} == {
        id_: token.content for id_, token in added.items()
    }
