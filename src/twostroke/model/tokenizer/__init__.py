"""Tokenizers: text to token ids and back, and exact text from a stream of tokens."""

from __future__ import annotations

from twostroke.model.tokenizer.gguf import from_gguf
from twostroke.model.tokenizer.huggingface import from_tokenizer_json
from twostroke.model.tokenizer.infill import encode_infill, encode_part
from twostroke.model.tokenizer.merges import TooManyTokensError
from twostroke.model.tokenizer.stream import StreamDecoder
from twostroke.model.tokenizer.tokenizer import InfillTokens, Piece, Prompt, Tokenizer
from twostroke.model.tokenizer.translation import Translation

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
