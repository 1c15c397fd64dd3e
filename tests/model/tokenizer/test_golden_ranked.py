"""Mistral Nemo's and Phi-4-mini's tokenizers against tiktoken's results for the same texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.ranked_tokenizer import ranked_tokenizer

_FOLDER = Path(__file__).parent / "golden"


@pytest.mark.parametrize("pre", ["tekken", "gpt-4o"])
def test_ids_equal_the_recorded_ones_and_round_trip(pre: str) -> None:
    golden: dict[str, Any] = json.loads((_FOLDER / f"{pre}.json").read_bytes())
    tokens = map(bytes.fromhex, " ".join(golden["tokens"]).split())
    tokenizer = ranked_tokenizer({token: rank for rank, token in enumerate(tokens)}, pre)
    assert len(golden["plain"]) >= 90
    for row in golden["plain"]:
        assert tokenizer.encode(row["text"]) == row["ids"], ascii(row["text"])
        assert tokenizer.decode(row["ids"]) == row["text"]
