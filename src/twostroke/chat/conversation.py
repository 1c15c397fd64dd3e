"""A model's conversations: messages and tools to a prompt, and where its reasoning begins."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from twostroke.chat.capabilities import manners_of
from twostroke.chat.messages import check_are_messages, checked_messages
from twostroke.chat.reasoning import AS_IT_IS, marks_of, preface_of, variables_of, with_reasoning
from twostroke.chat.tool_prompt import fitted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.chat.capabilities import Manners
    from twostroke.chat.reasoning import Marks, Thinking
    from twostroke.chat.template import ChatTemplate
    from twostroke.core.preface import Preface
    from twostroke.tokenize import Prompt, Tokenizer


class Chat:
    """A model's chat template, compiled when it is first used: the compiler is slow to import."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _template(self) -> ChatTemplate:
        from twostroke.chat.template import ChatTemplate

        return ChatTemplate.for_tokenizer(self._tokenizer)

    @cached_property
    def manners(self) -> Manners:
        """How tools are shown, and in which form they are called."""
        return manners_of(self._template, self._tokenizer)

    @cached_property
    def _marks(self) -> Marks | None:
        return marks_of(self._template, self._tokenizer)

    def preface(self, prompt: Prompt, continued: str = "") -> Preface | None:
        """Return the reasoning that may come first in what follows a prompt.

        `continued` is the text that is to be gone on from, where it is a message's.
        """
        return None if self._marks is None else preface_of(self._marks, prompt, continued)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        thinking: Thinking = AS_IT_IS,
    ) -> Prompt:
        """Return the prompt of a conversation, in which `tools` may be called.

        A template that knows nothing of tools is given them, and calls of them, in words. The last
        message may be one to be continued. `thinking` is what is asked of the model's reasoning.

        Raises:
            RequestError: the messages are not as they should be, or do not suit the template, or
                it cannot do what is asked of it.
            ModelFormatError: the model's template is not valid.
        """
        template = self._template
        shown, is_text = None, False
        check_are_messages(messages)
        if tools or any(m.get("tool_calls") or m.get("role") == "tool" for m in messages):
            checked = checked_messages(messages, has_text_arguments=True)
            messages = fitted(checked, tools, self.manners)
            shown = tools if tools and self.manners.shows_tools else None
            is_text = self.manners.has_text_arguments
        return template.render(
            with_reasoning(messages, template.keys),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=shown,
            has_text_arguments=is_text,
            **variables_of(thinking, template.variables, self._marks),
        )
