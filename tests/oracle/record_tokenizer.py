"""Records what transformers makes of texts and chats with SmolLM2's tokenizer.

transformers rebuilds the tokenizer from the GGUF file but forgets its first step: SmolLM2's own
tokenizer.json cuts single digits out before GPT-2's pattern runs (and no merge of the vocabulary
has a digit in it). This script puts that step back, so the recording is of the original model's
tokenizer.

    PYTHONPATH=src .venv-oracle/bin/python tests/oracle/record_tokenizer.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import tokenizers
import transformers
from tokenizers import pre_tokenizers
from tokenizer_texts import CHATS, texts

from twostroke.weights import resolve

GOLDEN = Path(__file__).parent.parent / "tokenize" / "golden" / "smollm2.json"


def original(model: Path) -> transformers.PreTrainedTokenizerFast:
    """Return SmolLM2's tokenizer in transformers, as its tokenizer.json has it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def record(model: Path) -> dict[str, object]:
    """Return the recording: ids of each text as plain text, and of each rendered chat."""
    tokenizer = original(model)
    tokenizer.backend_tokenizer.encode_special_tokens = True
    plain = [
        {
            "text": text,
            "ids": tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids,
        }
        for text in texts()
    ]
    tokenizer.backend_tokenizer.encode_special_tokens = False
    chats = []
    for messages in CHATS:
        for prompted in (True, False):
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompted
            )
            ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            chats.append(
                {
                    "messages": messages,
                    "add_generation_prompt": prompted,
                    "text": text,
                    "ids": ids,
                }
            )
    return {
        "made_by": "tests/oracle/record_tokenizer.py",
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "model_file": model.name,
        "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
        "plain": plain,
        "chats": chats,
    }


def main() -> None:
    """Write the golden file."""
    recording = record(resolve("smollm2"))
    lines = json.dumps(recording, ensure_ascii=True, separators=(",", ":")).replace(
        '{"text"', '\n{"text"'
    )
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(lines.replace('{"messages"', '\n{"messages"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
