"""Records what transformers makes of texts and chats with the tokenizers of real models.

PYTHONPATH=src:tests .venv-oracle/bin/python tests/oracle/record_tokenizer.py
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import tokenizers
import transformers

from support.tokenizer_texts import CHATS, texts
from support.transformers_tokenizer import chat_ids, plain_ids, transformers_tokenizer
from twostroke.core.errors import ModelNotFoundError
from twostroke.model.hub import resolve
from twostroke.model.weights.gguf import read_gguf

GOLDEN = Path(__file__).parent.parent / "tokenize" / "golden"
# By the catalogue's names: how many texts at random beside the written ones.
MODELS = {"smollm2": 200, "gemma3-270m": 40, "qwen2.5-coder-0.5b": 40}


def main() -> None:
    """Write a golden file for each model (or for those named) that is in the cache."""
    for name in sys.argv[1:] or MODELS:
        try:
            model = resolve(name)
        except ModelNotFoundError:
            print(f"{name} is not in the cache")
            continue
        record(name, model)


def record(name: str, model: Path) -> None:
    """Write the ids of each text as plain text, and of each rendered chat."""
    tokenizer = transformers_tokenizer(model, read_gguf(model).metadata)
    plain = [{"text": text, "ids": plain_ids(tokenizer, text)} for text in texts(MODELS[name])]
    chats = []
    for messages in CHATS if tokenizer.chat_template else ():
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
    GOLDEN.mkdir(exist_ok=True)
    parts = [f'"{key}": {json.dumps(value)}' for key, value in header.items()]
    parts += [_rows("plain", plain), _rows("chats", chats)]
    file = GOLDEN / f"{name}.json"
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="ascii")


def _rows(name: str, rows: list[dict[str, object]]) -> str:
    """Return a JSON member with one row a line, so that a changed row is a changed line."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return f'"{name}": [\n{lines}\n]'


if __name__ == "__main__":
    main()
