"""A SentencePiece-style tokenizer small enough to reason about, and its slow, plain twin."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from twostroke.model.tokenizer import Tokenizer, from_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
UNK, START, END, TAG = "<unk>", "<s>", "</s>", "<tag>"
# In the order of their scores, the best first; "s>▁" reaches across a space.
MERGED = ["he", "ll", "▁he", "hell", "llo", "▁hell", "lo", "▁hello", "aa", "aaa", "aaaa"]
MERGED += ["▁a", "ab", "bab", "s>▁b", "s>", ">▁", ">▁b", "日本", "é▁"]
LETTERS = "▁helosabw>é日本"


def piece_metadata(**keys: object) -> dict[str, object]:
    """Return the tokenizer's GGUF metadata; `keys` sets keys, None removes one."""
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    runs = ["  ", "   ", "    "]
    tokens = [UNK, START, END, TAG, *runs, *byte_tokens, *LETTERS, *MERGED]
    types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *[USER_DEFINED] * len(runs)]
    types += [BYTE] * 256 + [NORMAL] * (len(LETTERS) + len(MERGED))
    scores = [-1000.0] * (4 + len(runs)) + [0.0] * 256
    scores += [-1e9] * len(LETTERS)
    scores += [-float(index) for index in range(len(tokens) - len(scores))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata.update((f"tokenizer.ggml.{key}", value) for key, value in keys.items())
    return {key: value for key, value in metadata.items() if value is not None}


def piece_tokenizer(**keys: object) -> Tokenizer:
    """Return the tokenizer that `piece_metadata` describes."""
    return from_gguf(piece_metadata(**keys))


def slow_pieces(text: str, scores: Mapping[str, float]) -> list[str]:
    """Merge a marked text by SentencePiece's rule, searching all neighbours for each merge.

    Of neighbours whose joined text has a score, the best score is merged first, and the leftmost of
    equal scores.
    """
    pieces = list(text)
    while True:
        results = [
            (-scores[a + b], index)
            for index, (a, b) in enumerate(pairwise(pieces))
            if a + b in scores and a in scores and b in scores
        ]
        if not results:
            return pieces
        index = min(results)[1]
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]


def spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str | None]:
    """Return the texts of tokens."""
    return [tokenizer.token_text(id_) for id_ in ids]
