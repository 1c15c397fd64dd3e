"""The tokenizer of a GGUF file in transformers, as the original model has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import normalizers, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DIGITS_FIRST = ("smollm", "starcoder", "refact", "command-r")
_IGNORES_MERGES = ("llama-bpe", "tekken")


def transformers_tokenizer(model: Path, metadata: Mapping[str, object]) -> Any:
    """Return transformers' tokenizer for a GGUF file, mended.

    transformers rebuilds it from the file but forgets some steps of the original tokenizer.json:
    single digits cut out before GPT-2's pattern (SmolLM2), characters composed first (Qwen2),
    words that are tokens taken whole (Llama 3), and the space that Llama 2 puts before any text,
    also one that begins with a space. They are put back here; the expected ids in llama.cpp's
    source, which come from the originals, agree with that.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    backend = tokenizer.backend_tokenizer
    name = metadata.get("tokenizer.ggml.pre")
    if name in _DIGITS_FIRST:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    if name in _IGNORES_MERGES:
        backend.model.ignore_merges = True
    if str(backend.pre_tokenizer).startswith("Metaspace"):
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    return tokenizer


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of `text`, in which nothing is a special token."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    backend.encode_special_tokens = False
    return ids


def chat_ids(
    tokenizer: Any, messages: list[dict[str, Any]], *, prompted: bool, **extra: object
) -> tuple[str, list[int]]:
    """Return a chat as transformers renders it, and its ids."""
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompted, **extra
    )
    return text, tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
