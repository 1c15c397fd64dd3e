"""A tokenizer small enough to follow by hand: all 256 bytes, a few merges and special tokens."""

from __future__ import annotations

from twostroke.model.tokenizer import Tokenizer, from_gguf
from twostroke.model.tokenizer.alphabets import byte_level_bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
START, END, DOC, TOOL = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool>"
_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ã ©", "ð Ł", "Ġ Ġ", "< |"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """Return the 256 characters of the byte-level alphabet, by byte."""
    candidates = (chr(code) for code in range(0x21, 0x180))
    spelled = ((byte_level_bytes(char), char) for char in candidates)
    results = {value[0]: char for value, char in spelled if len(value) == 1}
    return [results[value] for value in range(256)]


def byte_metadata(
    *, more_merges: tuple[str, ...] = (), odd: tuple[tuple[str, int], ...] = (), **keys: object
) -> dict[str, object]:
    """Return the tokenizer's GGUF metadata; `odd` adds tokens with types, `keys` sets keys."""
    all_merges = [*_MERGES, *more_merges]
    tokens = [START, END, DOC, TOOL]
    types = [CONTROL, CONTROL, CONTROL, USER_DEFINED]
    plain = [*byte_characters(), *(merge.replace(" ", "") for merge in all_merges)]
    plain = [text for text in dict.fromkeys(plain) if text not in {text for text, _ in odd}]
    tokens += plain + [text for text, _ in odd]
    types += [NORMAL] * len(plain) + [kind for _, kind in odd]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": all_merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHATML,
    }
    metadata.update((f"tokenizer.ggml.{key}", value) for key, value in keys.items())
    return {key: value for key, value in metadata.items() if value is not None}


def byte_tokenizer(**keys: object) -> Tokenizer:
    """Return the tokenizer."""
    return from_gguf(byte_metadata(**keys))  # type: ignore[arg-type]
