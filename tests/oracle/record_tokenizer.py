"""Records what transformers makes of texts and chats with SmolLM2's tokenizer.

PYTHONPATH=src:tests .venv-oracle/bin/python tests/oracle/record_tokenizer.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import tokenizers
import transformers

from support.tokenizer_texts import CHATS, texts
from support.transformers_tokenizer import chat_ids, plain_ids, transformers_tokenizer
from twostroke.weights import resolve
from twostroke.weights.gguf import read_gguf

GOLDEN = Path(__file__).parent.parent / "tokenize" / "golden" / "smollm2.json"


def main() -> None:
    """Write the golden file: ids of each text as plain text, and of each rendered chat."""
    model = resolve("smollm2")
    tokenizer = transformers_tokenizer(model, read_gguf(model).metadata)
    plain = [{"text": text, "ids": plain_ids(tokenizer, text)} for text in texts()]
    chats = []
    for messages in CHATS:
        for prompted in (True, False):
            text, ids = chat_ids(tokenizer, messages, prompted=prompted)
            chats.append({"messages": messages, "prompted": prompted, "text": text, "ids": ids})
    header = {
        "made_by": "tests/oracle/record_tokenizer.py",
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "model_file": model.name,
        "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
    }
    GOLDEN.parent.mkdir(exist_ok=True)
    parts = [f'"{name}": {json.dumps(value)}' for name, value in header.items()]
    parts += [_rows("plain", plain), _rows("chats", chats)]
    GOLDEN.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="ascii")


def _rows(name: str, rows: list[dict[str, object]]) -> str:
    """Return a JSON member with one row a line, so that a changed row is a changed line."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return f'"{name}": [\n{lines}\n]'


if __name__ == "__main__":
    main()
