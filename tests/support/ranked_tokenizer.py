"""A GGUF file's tokenizer, made from ranked byte strings of tiktoken and tekken.json."""

from __future__ import annotations

import base64
from itertools import starmap
from typing import TYPE_CHECKING

from support.byte_tokenizer import CONTROL, NORMAL, byte_characters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.tokenizer import Tokenizer

_CHARACTERS = byte_characters()


def ranked_tokenizer(ranks: Mapping[bytes, int], pre: str, num_special: int = 0) -> Tokenizer:
    """Return the tokenizer of a file with that pre-tokenizer; its ids begin with control tokens."""
    from twostroke.model.tokenizer import from_gguf

    ordered = sorted(ranks, key=ranks.__getitem__)
    specials = [f"<SPECIAL_{id_}>" for id_ in range(num_special)]
    return from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": specials + [_spell(token) for token in ordered],
            "tokenizer.ggml.token_type": [CONTROL] * num_special + [NORMAL] * len(ordered),
            "tokenizer.ggml.merges": _merges(ordered, ranks),
        }
    )


def tekken_ranks(description: Mapping[str, object]) -> tuple[dict[bytes, int], int]:
    """Return the ranks of a tekken.json that are in use, and how many control tokens precede."""
    config, vocab = description["config"], description["vocab"]
    assert isinstance(config, dict)
    assert isinstance(vocab, list)
    num_special = config["default_num_special_tokens"]
    used = vocab[: config["default_vocab_size"] - num_special]
    return {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in used}, num_special


def _merges(ordered: list[bytes], ranks: Mapping[bytes, int]) -> list[str]:
    """Return every way to make each token of two others, as files converted from ranks have it."""
    lines: list[str] = []
    for token in ordered:
        cuts = ((token[:index], token[index:]) for index in range(1, len(token)))
        known_merges = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        known_merges.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        lines += starmap("{} {}".format, ((_spell(a), _spell(b)) for a, b in known_merges))
    return lines


def _spell(token: bytes) -> str:
    return "".join([_CHARACTERS[value] for value in token])
