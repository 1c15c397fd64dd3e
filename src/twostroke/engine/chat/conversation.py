"""`Chat`: renders a conversation into a prompt, and says how to constrain and read its answer."""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from twostroke.core.changing_lines import without_changing_lines
from twostroke.core.constraint import ReasoningSection
from twostroke.core.errors import ModelFormatError, RequestError, TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.engine.chat.capabilities import PROBED_TOOL, find_capabilities
from twostroke.engine.chat.content_marks import find_content_marks
from twostroke.engine.chat.harmony import BEGIN_OF_ANSWER, MARKS, is_harmony, with_one_analysis
from twostroke.engine.chat.messages import (
    RefusedByTemplateError,
    check_are_messages,
    check_messages,
)
from twostroke.engine.chat.reader import AnswerFormat
from twostroke.engine.chat.reasoning import (
    AS_IT_IS,
    close_reasoning,
    find_marks,
    find_opened_marks,
    find_written_marks,
    is_switched_off,
    preface_of,
    supported_part,
    variables_of,
    with_budget,
    with_reasoning,
)
from twostroke.engine.chat.template import DEFAULT, FOR_TOOLS, find_source
from twostroke.engine.chat.tool_prompt import fit_to_template, fitted_tools
from twostroke.engine.chat.tools import ToolForm
from twostroke.engine.chat.turn_order import (
    ALTERNATING,
    STRICTEST,
    arrange_turns,
    find_turn_order,
    is_shown,
    with_system_role,
)
from twostroke.engine.structured_output.lark import special_marks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.core.constraint import Constraint
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.chat.capabilities import TemplateCapabilities
    from twostroke.engine.chat.content_marks import ContentMarks
    from twostroke.engine.chat.reasoning import ReasoningMarks, Thinking
    from twostroke.engine.chat.template import ChatTemplate
    from twostroke.engine.chat.tools import Tools
    from twostroke.engine.chat.turn_order import TurnOrder
    from twostroke.model.tokenizer import Prompt, Tokenizer

_TEXT = "tried text"  # of the answer in a test conversation
_REASONING = "tried reasoning"


class PreparedChat(Frozen):
    """A rendered conversation, and how to constrain and to read the model's answer.

    Attributes:
        prompt: the rendered prompt.
        preface: the reasoning section that may come before the answer.
        section_after_calls: further reasoning that may follow a call in the answer.
        content_marks: the texts around the text of the answer, if the model writes such marks.
        calls: the tools that may be called, and the form of calls.
        tokenizer: the model's tokenizer.
        continues: whether the answer continues text at the end of the prompt.
        has_channels: whether the answer is messages in channels (harmony).
    """

    prompt: Prompt
    preface: ReasoningSection | None
    calls: ToolForm | None
    tokenizer: Tokenizer
    continues: bool = False
    section_after_calls: ReasoningSection | None = None
    content_marks: ContentMarks | None = None
    has_channels: bool = False

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """Return a request's sampling parameters with constraints for tool calls and reasoning.

        Marks of calls and of reasoning stay in the output's text, although they may be special
        tokens.
        """
        if self._drops_space(params):
            params = replace(params, drops_space=True)
        constraint = params.constraint if self.calls is None else self.calls.constraint()
        marks = () if self.calls is None else self.calls.form.all_marks
        if self.has_channels:
            marks = MARKS
            if self.calls is None and constraint is not None and not self.continues:
                constraint = dataclasses.replace(constraint, begin=BEGIN_OF_ANSWER)
        if self.preface is not None:
            later = self.section_after_calls or self.preface
            marks = (later.begin, later.end, *marks)
            constraint = constraint and constraint.after(self.preface)
        if self.content_marks is not None:
            marks = (*self.content_marks.texts, *marks)
        if not marks:
            return params
        shown_ids = frozenset(special_marks(marks, self.tokenizer).values())
        return replace(params, constraint=constraint, preface=self.preface, shown_ids=shown_ids)

    def _drops_space(self, params: SamplingParams) -> bool:
        """Whether the space that the tokenizer adds at the start of an answer is dropped.

        If the client has set a constraint, the space is not dropped, so that the answer is exactly
        a text that the constraint allows.
        """
        if self.continues or not self.tokenizer.strip_space:
            return False
        begins_inside = self.preface is not None and not self.preface.begin
        return params.constraint is None or begins_inside

    def answer_format(self, *, splits_reasoning: bool = True) -> AnswerFormat:
        """Return the format by which the answer's reasoning, text and tool calls are separated.

        Without `splits_reasoning`, reasoning stays in the text.
        """
        reading = AnswerFormat(
            content_marks=self.content_marks,
            has_channels=self.has_channels,
            continues_text=self.has_channels and self.continues,
        )
        if splits_reasoning:
            reading = replace(
                reading, preface=self.preface, section_after_calls=self.section_after_calls
            )
        if self.calls is None:
            return reading
        calls = self.calls
        return replace(
            reading,
            functions=calls.tools.names,
            schemas={function.name: function.schema for function in calls.tools.functions},
            form=calls.form,
            is_forced=calls.tools.is_forced,
            is_pure=calls.answer is not None,
            unmarked=calls.unmarked,
            customs=frozenset(
                function.name for function in calls.tools.functions if function.is_custom
            ),
        )


class ProbedTemplate:
    """A compiled chat template, with properties that are found by rendering test conversations.

    Each property is found when it is used first.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template = template
        self._tokenizer = tokenizer

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        """The chat template's support for tools and tool calls."""
        return find_capabilities(self.template, self._tokenizer)

    @cached_property
    def marks(self) -> ReasoningMarks | None:
        """The texts around the model's reasoning; None if the model does not reason."""
        user = [{"role": "user", "content": "Hello"}]
        try:
            text = self.template.render(self._in_parts(user), tools=self._without_tools).text
        except TwostrokeError:
            text = ""
        opened_marks = find_opened_marks(text, self.template)
        if opened_marks is not None or is_harmony(self.template.source, self._tokenizer):
            return opened_marks or find_marks(self.template, self._tokenizer)
        before, _, after = self._answered.partition(_REASONING)
        written_marks = find_written_marks(before, after, self.template)
        return written_marks or find_marks(self.template, self._tokenizer)

    @cached_property
    def content_marks(self) -> ContentMarks | None:
        """The texts around the text of the model's answers; None without such marks."""
        before = self._answered.partition(_TEXT)[0]
        return find_content_marks(self.template, before, self._tokenizer)

    @cached_property
    def _answered(self) -> str:
        """A rendered test conversation, whose answer has reasoning; empty if it is refused."""
        messages = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": _TEXT, "reasoning_content": _REASONING},
        ]
        try:
            return self.template.render(
                with_reasoning(self._in_parts(messages), self.template.keys),
                add_generation_prompt=False,
                tools=self._without_tools,
            ).text
        except TwostrokeError:
            return ""

    @cached_property
    def turn_order(self) -> TurnOrder:
        """The orders of messages that the chat template accepts."""
        return self._find_turn_order(())

    @cached_property
    def turn_order_with_tools(self) -> TurnOrder:
        """The orders of messages that the chat template accepts if it shows tools.

        Some templates show tools in the first message of the user, which must then exist.
        """
        if not self.capabilities.shows_tools:
            return self.turn_order
        return self._find_turn_order(fitted_tools([PROBED_TOOL], self.capabilities))

    def _find_turn_order(self, tools: Sequence[Mapping[str, Any]]) -> TurnOrder:
        capabilities = self.capabilities
        return find_turn_order(
            partial(self._shows, tools=tools),
            names_developer=self.template.names_developer,
            writes_tools=capabilities.writes_calls and capabilities.writes_results,
        )

    @cached_property
    def _without_tools(self) -> list[Any] | None:
        """The value of the chat template's variable `tools` for requests without tools.

        This is None, or an empty list for templates that fail on None.
        """
        user = [{"role": "user", "content": "Hello"}]
        choices: tuple[list[Any] | None, ...] = (None, [])
        for tools in choices:
            try:
                self.template.render(user, tools=tools)
            except TwostrokeError:
                continue
            return tools
        return None

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether the template fails on a string as content, and needs a list of parts."""
        text = "tried text"
        parts = [{"type": "text", "text": text}]
        return not self._shows_content(text) and self._shows_content(parts)

    @cached_property
    def _shows_all_parts(self) -> bool:
        """Whether the template reads content that is a list of parts, and shows all parts.

        Some templates show only the first part of the system message.
        """
        if not self.template.reads_parts:
            return False
        parts = [{"type": "text", "text": text} for text in ("tried text", "another text")]
        user = {"role": "user", "content": parts}
        for messages in ([user], [{"role": "system", "content": parts}, user]):
            try:
                rendered = self.template.render(messages, tools=self._without_tools).text
            except TwostrokeError:
                continue
            if rendered.count("another text") < len(messages):
                return False
        return True

    def _shows_content(self, content: object) -> bool:
        user = [{"role": "user", "content": content}]
        try:
            return "tried text" in self.template.render(user, tools=self._without_tools).text
        except TwostrokeError:
            return False

    def _shows(self, messages: list[dict[str, Any]], *, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the chat template accepts a test conversation and writes all of its texts."""
        try:
            rendered = self.template.render(
                self._in_parts(fit_to_template(messages, tools, self.capabilities)),
                add_generation_prompt=False,
                tools=[*tools] or self._without_tools,
                has_text_arguments=self.capabilities.has_text_arguments,
            )
        except TwostrokeError:
            return False
        return is_shown(messages, rendered.text)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        thinking: Thinking,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> Prompt:
        """Return a conversation's prompt, rendered with this template; see `Chat.render`.

        `tools` may be called in the answer, and `thinking` is the reasoning that the request asks
        for. With `continue_final_message` the answer continues the last message.
        """
        has_tools = bool(tools) or any(
            message.get("tool_calls") or message.get("role") == "tool" for message in messages
        )
        keep_parts = self._shows_all_parts and not has_tools
        checked = check_messages(messages, keep_parts=keep_parts, has_text_arguments=True)
        options: dict[str, Any] = {
            "continues": continue_final_message,
            "add_generation_prompt": add_generation_prompt,
            "extra_variables": variables_of(thinking, self.template.variables, self.marks),
        }
        if not has_tools:
            prompt = self._render_in_order(
                self._with_known_roles(checked, self.turn_order),
                self.turn_order,
                tools=self._without_tools,
                **options,
            )
        else:
            prompt = self._render_with_tools(checked, tools, **options)
        if add_generation_prompt and self.marks is not None and is_switched_off(thinking):
            return close_reasoning(prompt, self.marks, self._tokenizer)
        return prompt

    def _render_with_tools(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, object]], **options: Any
    ) -> Prompt:
        """Render a conversation that has tools, calls or results.

        If the template fails on the tools, because of a type in their schemas that it does not
        know, they are described as text.
        """
        capabilities = self.capabilities
        if not tools or not capabilities.shows_tools:
            return self._render_fitted(messages, tools, capabilities, **options)
        try:
            return self._render_fitted(messages, tools, capabilities, **options)
        except RefusedByTemplateError as refusal:
            without_tools = replace(capabilities, shows_tools=False)
            try:
                return self._render_fitted(messages, tools, without_tools, **options)
            except RefusedByTemplateError:
                raise refusal from None

    def _render_fitted(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, object]],
        capabilities: TemplateCapabilities,
        **options: Any,
    ) -> Prompt:
        """Render a conversation with tools, calls or results for a template with `capabilities`."""
        shows_tools = bool(tools) and capabilities.shows_tools
        order = self.turn_order_with_tools if shows_tools else self.turn_order
        messages = self._with_known_roles(messages, order)
        return self._render_in_order(
            fit_to_template(messages, tools, capabilities),
            order,
            tools=fitted_tools(tools, capabilities) if shows_tools else self._without_tools,
            has_text_arguments=capabilities.has_text_arguments,
            **options,
        )

    def _with_known_roles(
        self, messages: list[dict[str, Any]], order: TurnOrder
    ) -> list[dict[str, Any]]:
        return messages if order.developer else with_system_role(messages)

    def _in_parts(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with lists of parts as content, if the template needs such lists."""
        if not self._needs_parts:
            return messages
        return [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message["content"], str)
            else message
            for message in messages
        ]

    def _render_in_order(
        self,
        messages: list[dict[str, Any]],
        order: TurnOrder,
        *,
        continues: bool,
        **options: Any,
    ) -> Prompt:
        """Render messages after rearranging them into an order that the chat template accepts.

        If the template refuses that order, too, stricter orders are tried.
        """
        if self.marks is not None and self.marks.has_channels:
            messages = with_one_analysis(messages)
        messages = [
            message | {"content": ""}
            if message["content"] is None and not message.get("tool_calls")
            else message
            for message in messages
        ]
        refusal = None
        for tried_order in (order, ALTERNATING, STRICTEST):
            turns = arrange_turns(messages, tried_order, continues=continues)
            try:
                return self.template.render(
                    with_reasoning(self._in_parts(turns), self.template.keys),
                    continue_final_message=continues,
                    **options,
                )
            except RefusedByTemplateError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal


class Chat:
    """Renders conversations with a model's chat templates, and prepares the reading of answers.

    Templates are compiled when they are used first, because the compiler is slow to import. If the
    model has a separate template for tools, requests with tools use that template.
    """

    def __init__(self, tokenizer: Tokenizer, *, stable_prefix: bool = False) -> None:
        """Prepare the templates of a model with this tokenizer.

        With `stable_prefix`, lines that change with each request are removed from conversations.
        """
        self._tokenizer = tokenizer
        self._has_stable_prefix = stable_prefix

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, stable_prefix: bool = False) -> Chat | None:
        """Return the `Chat` of a tokenizer's model; None if the model has no chat template."""
        if find_source(tokenizer) is None:
            return None
        return cls(tokenizer, stable_prefix=stable_prefix)

    @cached_property
    def refusal(self) -> str | None:
        """Why the model's chat template cannot be compiled; None if the model can chat."""
        try:
            self._plain  # noqa: B018 - compiles the template
        except ModelFormatError as error:
            return _sentence(error)
        return None

    @cached_property
    def tool_refusal(self) -> str | None:
        """Why the model's template for tools cannot be compiled; None if it can or is missing."""
        return self._for_tools[1]

    @cached_property
    def question_refusal(self) -> str | None:
        """Why the chat template fails on a conversation of one question; None if it does not."""
        try:
            self.render([{"role": "user", "content": "Hello"}])
        except RequestError as error:
            return _sentence(error)
        return None

    def prepare(self) -> None:
        """Compile and test the templates now, so that the first request is not delayed."""
        if self.refusal is None:
            for probed in (self._plain, self._for_tools[0]):
                probed.turn_order  # noqa: B018 - found when first used
                probed.turn_order_with_tools  # noqa: B018 - found when first used

    @cached_property
    def _plain(self) -> ProbedTemplate:
        return self._probed(DEFAULT)

    @cached_property
    def _for_tools(self) -> tuple[ProbedTemplate, str | None]:
        """The chat template for requests with tools, and why the model's tool template is not used.

        The reason is None if the tool template is used, or if the model has none.
        """
        if find_source(self._tokenizer, FOR_TOOLS) is None:
            return self._plain, None
        try:
            return self._probed(FOR_TOOLS), None
        except ModelFormatError as error:
            return self._plain, _sentence(error)

    def _probed(self, name: str) -> ProbedTemplate:
        from twostroke.engine.chat.template import ChatTemplate

        return ProbedTemplate(
            ChatTemplate.for_tokenizer(self._tokenizer, name=name), self._tokenizer
        )

    def _template_for(self, *, has_tools: bool) -> ProbedTemplate:
        """Return the chat template for a request with or without tools.

        Raises:
            RequestError: the template cannot be compiled.
        """
        if self.refusal is not None:
            reason = "cannot be answered: {why} Use plain completions instead."
            raise RequestError(reason, field="messages", why=self.refusal)
        return self._for_tools[0] if has_tools else self._plain

    @property
    def capabilities(self) -> TemplateCapabilities:
        """The tool features that the chat template for requests with tools supports."""
        return self._template_for(has_tools=True).capabilities

    @property
    def reasons(self) -> bool:
        """Whether the model reasons before it answers, as its chat template shows."""
        marks = self._template_for(has_tools=False).marks
        return marks is not None and marks.is_of_template

    def prepare_answer(
        self,
        prompt: Prompt,
        tools: Tools | None = None,
        answer: Constraint | None = None,
        *,
        continued: str = "",
        has_result: bool = False,
    ) -> PreparedChat:
        """Return how to constrain and to read the answer to a rendered prompt.

        Args:
            prompt: the prompt.
            tools: the tools that the answer may call.
            answer: the constraint of answers without calls.
            continued: the text of the last message, if the answer continues that message.
            has_result: whether the last message is the result of a tool.
        """
        probed = self._template_for(has_tools=tools is not None)
        preface = None if probed.marks is None else preface_of(probed.marks, prompt, continued)
        calls = later = None
        has_channels = probed.marks is not None and probed.marks.has_channels
        if has_channels and answer is not None and not continued:
            answer = dataclasses.replace(answer, begin=BEGIN_OF_ANSWER)
        if (
            probed.marks is not None
            and preface is not None
            and tools is not None
            and not has_channels
        ):
            later = ReasoningSection(probed.marks.begin, probed.marks.end)
        content_marks = probed.content_marks
        if content_marks is not None:
            content_marks = content_marks.after(
                prompt.text,
                continued,
                preface=preface,
                reasoning_end="" if probed.marks is None else probed.marks.end,
            )
        if tools is not None:
            form = probed.capabilities.form
            calls = ToolForm(
                tools=tools,
                form=form,
                tokenizer=self._tokenizer,
                preface=preface,
                section_after_calls=later,
                content_marks=content_marks,
                answer=answer,
                has_result=has_result,
            )
        return PreparedChat(
            prompt,
            preface,
            calls,
            self._tokenizer,
            continues=bool(continued),
            section_after_calls=later,
            content_marks=content_marks,
            has_channels=has_channels,
        )

    def supported_thinking(
        self, thinking: Thinking, *, has_tools: bool = False
    ) -> tuple[Thinking, list[RequestError]]:
        """Return a request's reasoning fields without fields that the template does not support.

        Also returns errors about the unsupported fields.
        """
        probed = self._template_for(has_tools=has_tools)
        return supported_part(thinking, probed.template.variables, probed.marks)

    def thinking_with_budget(
        self, thinking: Thinking, default: int | None, *, has_tools: bool = False
    ) -> Thinking:
        """Return a request's reasoning fields with the budget of tokens that applies to them.

        `default` is the budget for requests that set none.
        """
        return with_budget(
            thinking, self._template_for(has_tools=has_tools).template.variables, default
        )

    def removed_lines(self, messages: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
        """Return the kinds of lines that `render` removes from a conversation."""
        return without_changing_lines(messages)[1] if self._has_stable_prefix else ()

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

        If the template does not support tools, the prompt describes tools and calls as text.
        Messages that the template refuses or drops are rearranged (`turn_order.py`). With
        `continue_final_message` the answer continues the last message. `thinking` is the
        reasoning that the request asks for.

        Raises:
            RequestError: a message is not valid; or the template refuses the messages, lacks a
                feature that the request needs, or cannot be compiled.
        """
        check_are_messages(messages)
        if self._has_stable_prefix:
            messages, _ = without_changing_lines(messages)
        return self._template_for(has_tools=bool(tools)).render(
            messages,
            tools,
            thinking,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )


def _sentence(error: Exception) -> str:
    """Return an error's text as a sentence that ends with a full stop."""
    return f"{str(error).rstrip('.')}."
