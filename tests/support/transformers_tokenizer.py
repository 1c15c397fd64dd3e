"""SmolLM2's tokenizer in transformers, as the original model has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path


def smollm2_tokenizer(model: Path) -> Any:
    """Return transformers' tokenizer for a SmolLM2 GGUF file, mended.

    transformers rebuilds it from the file but forgets its first step: SmolLM2's tokenizer.json
    cuts single digits out before GPT-2's pattern runs (and no merge of the vocabulary has a digit
    in it). That step is put back here.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
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
    tokenizer: Any, messages: list[dict[str, str]], *, prompted: bool
) -> tuple[str, list[int]]:
    """Return a chat as transformers renders it, and its ids."""
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompted
    )
    return text, tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
