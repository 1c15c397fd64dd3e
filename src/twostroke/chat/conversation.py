"""A model's conversations: messages and tools in; a prompt and how to read its answer out."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.chat.capabilities import find_capabilities
from twostroke.chat.messages import check_are_messages, checked_messages
from twostroke.chat.reader import Reading
from twostroke.chat.reasoning import (
    AS_IT_IS,
    find_marks,
    followed,
    preface_of,
    variables_of,
    with_reasoning,
)
from twostroke.chat.tool_form import ToolForm
from twostroke.chat.tool_prompt import fitted
from twostroke.core.frozen import Frozen
from twostroke.sample.lark import special_marks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.chat.capabilities import TemplateCapabilities
    from twostroke.chat.reasoning import ReasoningMarks, Thinking
    from twostroke.chat.template import ChatTemplate
    from twostroke.chat.tools import Tools
    from twostroke.core.constraint import Constraint
    from twostroke.core.errors import RequestError
    from twostroke.core.preface import Preface
    from twostroke.core.sampling import SamplingParams
    from twostroke.tokenize import Prompt, Tokenizer


class Turn(Frozen):
    """The assistant's turn: its prompt, how the answer is constrained, and how it is read.

    `preface` is the reasoning that may come first, `calls` the tools that may be called.
    With `continues` the prompt has begun the answer's text.
    """

    prompt: Prompt
    preface: Preface | None
    calls: ToolForm | None
    tokenizer: Tokenizer
    continues: bool = False

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the form of calls, which begins after the reasoning.

        The marks of both are shown, although they may be special tokens.
        """
        if self._drops_space(params):
            params = replace(params, drops_space=True)
        constraint = params.constraint if self.calls is None else self.calls.constraint()
        marks = () if self.calls is None else self.calls.form.all_marks
        if self.preface is not None:
            marks = (self.preface.begin, self.preface.end, *marks)
            constraint = constraint and constraint.after(self.preface)
        if not marks:
            return params
        shown_ids = frozenset(special_marks(marks, self.tokenizer).values())
        return replace(params, constraint=constraint, preface=self.preface, shown_ids=shown_ids)

    def _drops_space(self, params: SamplingParams) -> bool:
        """Whether a space at the beginning of the answer is the tokenizer's, and not its text's.

        An answer whose form the client gives has exactly that form.
        """
        if self.continues or not self.tokenizer.strip_space:
            return False
        begins_inside = self.preface is not None and not self.preface.begin
        return params.constraint is None or begins_inside

    def reading(self, *, splits_reasoning: bool = True) -> Reading:
        """Return how to read answers; reasoning may stay part of their text."""
        reading = Reading(preface=self.preface if splits_reasoning else None)
        if self.calls is None:
            return reading
        calls = self.calls
        return replace(
            reading,
            functions=calls.tools.names,
            form=calls.form,
            is_forced=calls.tools.is_forced,
            is_pure=calls.answer is not None,
            unmarked=calls.unmarked,
            customs=frozenset(one.name for one in calls.tools.functions if one.is_custom),
        )


class Chat:
    """A model's chat template, compiled when first used, as the compiler is slow to import."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _template(self) -> ChatTemplate:
        from twostroke.chat.template import ChatTemplate

        return ChatTemplate.for_tokenizer(self._tokenizer)

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        """The template's support for tools and calls."""
        return find_capabilities(self._template, self._tokenizer)

    @cached_property
    def _marks(self) -> ReasoningMarks | None:
        return find_marks(self._template, self._tokenizer)

    @property
    def reasons(self) -> bool:
        """Whether the template writes reasoning."""
        return self._marks is not None and self._marks.is_of_template

    def turn(
        self,
        prompt: Prompt,
        tools: Tools | None = None,
        answer: Constraint | None = None,
        *,
        continued: str = "",
        has_result: bool = False,
    ) -> Turn:
        """Return how to answer a rendered prompt, in which `tools` may be called.

        `answer` is the form of answers that do not call; `continued` is the text of the last
        message, where the answer continues it. Otherwise that may be a tool's (`has_result`).
        """
        preface = None if self._marks is None else preface_of(self._marks, prompt, continued)
        calls = None
        if tools is not None:
            form = self.capabilities.form
            calls = ToolForm(tools, form, self._tokenizer, preface, answer, has_result)
        return Turn(prompt, preface, calls, self._tokenizer, continues=bool(continued))

    def follow(self, thinking: Thinking) -> tuple[Thinking, list[RequestError]]:
        """Return what the template can follow of a request, and the errors about the rest."""
        return followed(thinking, self._template.variables, self._marks)

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

        Where the template does not support tools, text describes them and their calls. The answer
        may continue the last message. `thinking` is the request for reasoning.

        Raises:
            RequestError: the messages are malformed, or the template refuses them or lacks what
                the request asks for.
            ModelFormatError: the model's template is not valid.
        """
        template = self._template
        shown, is_text = None, False
        check_are_messages(messages)
        if tools or any(m.get("tool_calls") or m.get("role") == "tool" for m in messages):
            checked = checked_messages(messages, has_text_arguments=True)
            messages = fitted(checked, tools, self.capabilities)
            shown = tools if tools and self.capabilities.shows_tools else None
            is_text = self.capabilities.has_text_arguments
        return template.render(
            with_reasoning(messages, template.keys),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=shown,
            has_text_arguments=is_text,
            **variables_of(thinking, template.variables, self._marks),
        )
