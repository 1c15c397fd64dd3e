"""How much of a conversation's prompt later prompts will share, by template."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates, strict_templates
from support.byte_tokenizer import CHATML, byte_metadata
from twostroke.core.errors import RequestError
from twostroke.engine.chat.conversation import Chat
from twostroke.engine.chat.shared_lengths import find_shared_lengths
from twostroke.model.tokenizer import from_gguf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.model.tokenizer import Prompt, Tokenizer

    Messages = Sequence[dict[str, Any]]

# No special token is near the places where these prompts part.
PLAIN = (
    "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:{% endif %}"
)
# The last user message is rendered in another way than earlier ones.
MARKS_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}[NOW]{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "thinks": family_templates.THINKS,
    "always thinks": family_templates.ALWAYS_THINKS,
    "llama": family_templates.LLAMA,
    "mistral": family_templates.MISTRAL,
    "alternates": strict_templates.ALTERNATES,
    "no system": strict_templates.NO_SYSTEM,
    "plain": PLAIN,
    "marks last": MARKS_LAST,
}
CONVERSATIONS = (
    "user:Hello there",
    "system:Be brief. user:Hello",
    "system:Be brief. user:Why? assistant:<think>x</think>So. user:.dots",
    "user:a assistant:b user:c assistant:d user:hello hello",
)


def conversation(words: str) -> list[dict[str, Any]]:
    parts = words.replace(" user:", "|user:").replace(" assistant:", "|assistant:").split("|")
    return [dict(zip(("role", "content"), part.split(":", 1), strict=True)) for part in parts]


def num_shared(tokenizer: Tokenizer, prompt: Prompt, other: Prompt) -> int:
    """Return how many first tokens two prompts have in common."""
    pairs = zip(tokenizer.encode_prompt(prompt), tokenizer.encode_prompt(other), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


@pytest.mark.parametrize("words", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_snapshots_are_asked_for_where_later_prompts_part(name: str, words: str) -> None:
    tokenizer = from_gguf(byte_metadata() | {"tokenizer.chat_template": TEMPLATES[name]})
    chat, messages = Chat(tokenizer), conversation(words)
    prompt = chat.render(messages)
    tokens = tokenizer.encode_prompt(prompt)
    lengths = find_shared_lengths(tokenizer, prompt, tokens, messages, chat.render)
    assert all(0 < length <= len(tokens) for length in lengths)
    others = [
        [*messages[:-1], {"role": "user", "content": "another text"}],
        [
            *messages,
            {"role": "assistant", "content": "<think>so</think>Because."},
            {"role": "user", "content": "I see."},
        ],
    ]
    for other in others:
        expected = num_shared(tokenizer, prompt, chat.render(other))
        assert any(expected - 1 <= length <= expected for length in lengths), "a token less is fine"
    if name == "chatml":
        assert lengths[-1] == len(tokens), "the next turn continues the whole prompt"


def test_a_conversation_that_the_template_refuses_has_no_length() -> None:
    tokenizer = from_gguf(byte_metadata())
    messages = conversation("user:a")
    prompt = Chat(tokenizer).render(messages)

    def refuse(_messages: object) -> Prompt:
        raise RequestError("no")

    tokens = tokenizer.encode_prompt(prompt)
    assert find_shared_lengths(tokenizer, prompt, tokens, messages, refuse) == ()
