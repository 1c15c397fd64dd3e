"""Tokenizers: text to ids and back, and exact text out of a stream of tokens."""

from __future__ import annotations

from twostroke.tokenize.gguf import from_gguf
from twostroke.tokenize.huggingface import from_tokenizer_json
from twostroke.tokenize.infill import encode_infill, encode_part
from twostroke.tokenize.merges import TooManyTokensError
from twostroke.tokenize.stream import StreamDecoder
from twostroke.tokenize.tokenizer import InfillTokens, Piece, Prompt, Tokenizer
from twostroke.tokenize.translation import Translation

__all__ = [
    "InfillTokens",
    "Piece",
    "Prompt",
    "StreamDecoder",
    "Tokenizer",
    "TooManyTokensError",
    "Translation",
    "encode_infill",
    "encode_part",
    "from_gguf",
    "from_tokenizer_json",
]
