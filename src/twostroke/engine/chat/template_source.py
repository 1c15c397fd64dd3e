"""Finds the source of a model's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from twostroke.model.tokenizer import Tokenizer

DEFAULT: Final = "default"  # transformers' name for the usual template
FOR_TOOLS: Final = "tool_use"

_CHATML_MARKS: Final = frozenset(("<|im_start|>", "<|im_end|>"))
_CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def find_source(tokenizer: Tokenizer, name: str = DEFAULT) -> str | None:
    """Return the source of the model's template with this name; None if there is none.

    If the model has no default template, its first template replaces it. If the model has no
    template at all, but its vocabulary has the marks of ChatML, the default is ChatML.
    """
    sources = {key: text for key, text in tokenizer.chat_templates.items() if text.strip()}
    if name in sources or name != DEFAULT:
        return sources.get(name)
    if sources:
        return next(iter(sources.values()))
    return _CHATML if set(tokenizer.special_texts()) >= _CHATML_MARKS else None
