"""Records what tiktoken makes of texts with the vocabularies of Mistral Nemo and of Phi-4-mini.

Of a vocabulary only those tokens are kept that lie inside the texts: no other can play a part.

PYTHONPATH=src:tests .venv-oracle/bin/python tests/oracle/record_ranked.py
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import tiktoken

from support.ranked_encodings import ENCODINGS
from support.tokenizer_texts import texts

GOLDEN = Path(__file__).parent.parent / "tokenize" / "golden"
_NUM_RANDOM = 40


def main() -> None:
    """Write a golden file for each vocabulary."""
    for name, load in ENCODINGS.items():
        record(name, load())


def record(name: str, encoding: Any) -> None:
    """Write the tokens in the order of their ranks, and each text with its ids in that order."""
    chosen_texts = texts(_NUM_RANDOM, seed=7)
    inside = {part for text in chosen_texts for part in _parts(text.encode(), 32)}
    inside |= {bytes([value]) for value in range(256)}
    kept_tokens = sorted((rank, token) for token, rank in encoding.ranks.items() if token in inside)
    index_of_rank = {rank: index for index, (rank, _) in enumerate(kept_tokens)}
    rows = [
        {"text": text, "ids": [index_of_rank[rank] for rank in encoding.encode_ordinary(text)]}
        for text in chosen_texts
    ]
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    tokens = textwrap.wrap(" ".join(token.hex() for _, token in kept_tokens), 98)
    header = {
        "made_by": "tests/oracle/record_ranked.py",
        "tiktoken": tiktoken.__version__,
        "source": encoding.source,
        "pre": name,
    }
    parts = [f'"{key}": {json.dumps(value)}' for key, value in header.items()]
    parts += [_list("tokens", map(json.dumps, tokens)), _list("plain", lines)]
    file = GOLDEN / f"{name}.json"
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="ascii")


def _parts(data: bytes, longest: int) -> set[bytes]:
    starts = range(len(data))
    return {data[a:b] for a in starts for b in range(a + 1, min(a + longest, len(data)) + 1)}


def _list(name: str, lines: Any) -> str:
    return f'"{name}": [\n' + ",\n".join(lines) + "\n]"


if __name__ == "__main__":
    main()
