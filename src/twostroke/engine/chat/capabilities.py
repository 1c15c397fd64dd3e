"""Finds out by small test conversations whether a chat template supports tools and calls."""

from __future__ import annotations

import json
import re
from itertools import product
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.engine.chat.call_forms import FORMS, HARMONY, HERMES, CallForm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.chat.template import ChatTemplate
    from twostroke.model.tokenizer import Tokenizer

# Texts of the test conversations.
_TOOL: Final = "probed_tool"
_CALL: Final = "probed_call"
_OTHER_CALL: Final = "other_call"
_ANSWER: Final = "probed answer"
_CALL_IDS: Final = ("call_0123456789abcdef01234567", "abcdef123", f"functions.{_CALL}:0")
_ARGUMENTS: Final = {"probed_key": "value"}
_USER: Final = {"role": "user", "content": "Hello"}
PROBED_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "It probes.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
_SHORT_TOOL: Final[dict[str, Any]] = {"type": "function", "function": {"name": _TOOL}}


class TemplateCapabilities(Frozen):
    """The features of tools and tool calls that a chat template supports.

    Features that the template lacks are replaced: tools, calls and results then become text of
    other messages.

    Attributes:
        form: how the model writes calls.
        shows_tools: whether the template writes the tools of its variable `tools` into the prompt.
        needs_whole_tools: whether the template fails on a tool without description or parameters.
        shows_tools_of_system: whether the template writes the tools in the system message's field
            `tools` into the prompt.
        writes_calls: whether the template writes the calls of earlier answers into the prompt.
        writes_results: whether the template writes messages of the role tool into the prompt.
        takes_several: whether an answer may have more than one call.
        has_short_ids: whether ids of calls must be nine letters or digits.
        has_named_ids: whether ids of calls must have the name of the function and the number of the
            call, because the template shows them in place of the name.
        has_tool_responses: whether results are a field of the answer with their calls.
        has_null_content: whether the content of an answer with calls and no text must be null.
        has_text_arguments: whether arguments are a string of JSON, not an object.
        needs_object_arguments: whether the template fails on arguments that are not an object.
    """

    form: CallForm = HERMES
    shows_tools: bool = False
    needs_whole_tools: bool = False
    shows_tools_of_system: bool = False
    writes_calls: bool = False
    writes_results: bool = False
    takes_several: bool = True
    has_short_ids: bool = False
    has_named_ids: bool = False
    has_tool_responses: bool = False
    has_null_content: bool = False
    has_text_arguments: bool = False
    needs_object_arguments: bool = False


def find_capabilities(template: ChatTemplate, tokenizer: Tokenizer) -> TemplateCapabilities:
    """Render test conversations to find how a chat template supports tools, calls and results."""
    probe = _Probe(template)
    rendered = probe.render([_USER])
    shows_tools = _TOOL in rendered
    needs_whole_tools = shows_tools and _TOOL not in probe.render([_USER], tool=_SHORT_TOOL)
    for call_id, content, is_text in product(_CALL_IDS, ("", None), (False, True)):
        probe = _Probe(template, call_id, content, is_text=is_text)
        if form := probe.find_form():
            break
    else:
        without_calls = _without_calls(probe, rendered, tokenizer)
        return replace(without_calls, needs_whole_tools=needs_whole_tools)
    null_probe = replace(probe, content=None)
    if null_probe.find_form() and null_probe.size() < probe.size():  # an empty text makes a turn
        probe = null_probe
    return TemplateCapabilities(
        form,
        shows_tools=shows_tools,
        needs_whole_tools=needs_whole_tools,
        writes_calls=True,
        writes_results=probe.writes_results(),
        takes_several=probe.takes_several(),
        has_short_ids=call_id == _CALL_IDS[1],
        has_named_ids=call_id == _CALL_IDS[2],
        has_tool_responses=probe.reads_tool_responses(),
        has_null_content=probe.content is None,
        has_text_arguments=is_text,
        needs_object_arguments=not is_text and not probe.writes_call_with("no JSON"),
    )


def _without_calls(probe: _Probe, rendered: str, tokenizer: Tokenizer) -> TemplateCapabilities:
    """Return the capabilities of a chat template that does not write the tool calls of messages.

    `rendered` is a prompt for which the template was given a tool. If the prompt shows the tool,
    the form of calls is found in its instructions. If they do not show it, the vocabulary's special
    tokens tell the form.
    """
    forms = FORMS.values()
    known_form = next((form for form in forms if form.is_known_to(tokenizer)), None)
    if _TOOL in rendered:
        form = next((form for form in forms if form.is_shown(rendered)), known_form)
        results = probe.writes_results(has_calls=False)
        return (
            TemplateCapabilities(form, shows_tools=True, writes_results=results) if form else _NONE
        )
    if known_form is None or not probe.reads_system():
        return _NONE
    return TemplateCapabilities(known_form, shows_tools_of_system=True)


_NONE: Final = TemplateCapabilities()


class _Probe(Frozen):
    """Renders test conversations that have tool calls with a chat template.

    Templates differ in the tool calls that they accept. A probe uses one variant of calls: its
    fields are the call's id, the message's content, and whether arguments are text or an object.
    """

    template: ChatTemplate
    call_id: str = _CALL_IDS[0]
    content: str | None = ""
    is_text: bool = False

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        has_tools: bool = True,
        tool: dict[str, Any] = PROBED_TOOL,
    ) -> str:
        """Return a test conversation as the template renders it; empty if it is refused."""
        try:
            return self.template.render(
                messages,
                add_generation_prompt=False,
                tools=[tool] if has_tools else None,
                has_text_arguments=self.is_text,
            ).text
        except TwostrokeError:
            return ""

    def reads_system(self) -> bool:
        """Whether the template shows tools that stand in the system message's field `tools`."""
        system = {"role": "system", "content": "", "tools": json.dumps([PROBED_TOOL])}
        return _TOOL in self.render([system, _USER], has_tools=False)

    def find_form(self) -> CallForm | None:
        """Return the form in which the template writes tool calls, from a test conversation.

        None if the template writes no calls, or writes them in an unknown form.
        """
        plain = self.render([_USER, {"role": "assistant", "content": _ANSWER}]).partition(_ANSWER)[
            0
        ]
        text = self.render([_USER, self._answer(_CALL)])
        num_common = len(commonprefix([text, plain]))  # noqa: RUF071 (they are not paths)
        # The name may also stand before the call, as the recipient of the message.
        for match in re.finditer(_CALL, text):
            before, after = text[: match.start()], text[match.end() :]
            answer = before[num_common:]
            for form in (HARMONY, *FORMS.values()):
                fitted_form = form.fitted(before, answer, after, _ARGUMENTS)
                if fitted_form is not None:
                    return fitted_form
        return None

    def writes_results(self, *, has_calls: bool = True) -> bool:
        """Whether the template shows the results of tools, which are messages of the role tool."""
        answer = self._answer(_CALL) if has_calls else {"role": "assistant", "content": "Let me"}
        result = {"role": "tool", "content": _ANSWER, "tool_call_id": self.call_id, "name": _CALL}
        return _ANSWER in self.render([_USER, answer, result])

    def reads_tool_responses(self) -> bool:
        """Whether results should be in the field `tool_responses` of the answer with their calls.

        That is the case if only results in that field are shown with the name of their function.
        """
        if "tool_responses" not in self.template.keys:
            return False
        answer = self._answer(_CALL)
        result = {"role": "tool", "content": _ANSWER, "tool_call_id": self.call_id, "name": _CALL}
        response = {"tool_responses": [{"name": _CALL, "response": _ANSWER}]}
        as_message = self.render([_USER, answer, result])
        as_field = self.render([_USER, answer | response])
        return _ANSWER in as_field and as_field.count(_CALL) > as_message.count(_CALL)

    def size(self) -> int:
        """Return the length in characters of a rendered test conversation with a tool call.

        Used to choose whether a message with calls has an empty text or null as its content.
        """
        return len(self.render([_USER, self._answer(_CALL)]))

    def writes_call_with(self, arguments: str) -> bool:
        """Whether the template shows a tool call with arguments that are not a JSON object."""
        answer = self._answer(_CALL)
        answer["tool_calls"][0]["function"]["arguments"] = arguments
        return _CALL in self.render([_USER, answer])

    def takes_several(self) -> bool:
        """Whether the template shows both of two tool calls in one answer."""
        return _OTHER_CALL in self.render([_USER, self._answer(_CALL, _OTHER_CALL)])

    def _answer(self, *names: str) -> dict[str, Any]:
        arguments = json.dumps(_ARGUMENTS)  # parsed where the template wants objects
        calls = [
            {
                "id": self.call_id,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name in names
        ]
        return {"role": "assistant", "content": self.content, "tool_calls": calls}
