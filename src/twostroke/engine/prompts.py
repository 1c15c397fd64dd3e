"""From what a caller says to token ids: plain text, ids, or a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.engine.client import ModelCard


def encode_text(card: ModelCard, prompt: str | Sequence[int]) -> list[int]:
    """Return the token ids of a prompt to be continued; ids pass through."""
    if isinstance(prompt, str):
        return card.tokenizer.encode(prompt, add_special=True)
    return list(prompt)


def encode_chat(card: ModelCard, messages: Sequence[Mapping[str, object]]) -> list[int]:
    """Return the token ids of a conversation, ready for the assistant's turn.

    Raises:
        RequestError: the model has no chat template, or the messages do not suit it.
    """
    if card.chat_template is None:
        message = f"{card.name} has no chat template: use plain completions instead."
        raise RequestError(message, param="messages")
    prompt = card.chat_template.render(messages, add_generation_prompt=True)
    return card.tokenizer.encode_prompt(prompt)
