"""The ways of cutting text into words before the merges, by the names that GGUF files use."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.errors import ModelFormatError, nearest
from twostroke.tokenize.words import GPT2

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging.

    `patterns` apply one after the other, each cutting further what the ones before it left whole;
    matches and the stretches between them both stay. `ignore_merges` takes a word that is in the
    vocabulary as it stands. `nfc` composes characters first. `add_bos` is the default where the
    file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # What a file without a name means, as llama.cpp reads it.
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    "gpt-2": PreTokenizer((GPT2,)),
    # HuggingFaceTB/SmolLM2 tokenizer.json: single digits, then ByteLevel with its own pattern.
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    # meta-llama/Meta-Llama-3 tokenizer.json.
    "llama-bpe": PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    # Qwen/Qwen2 tokenizer.json, which normalizes to NFC.
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer of that GGUF name; ModelFormatError if it is not known."""
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelFormatError(
            f"The model's pre-tokenizer '{name}' (tokenizer.ggml.pre) is not known; "
            f"known are {known}.{nearest(name, PRE_TOKENIZERS)}"
        )
    return found
