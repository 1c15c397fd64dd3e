"""A model's reasoning: the marks around it, and the fields of a request that switch it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from msgspec import field
from msgspec.structs import replace

from twostroke.core.constraint import ReasoningSection
from twostroke.core.errors import Field, RequestError, nearest
from twostroke.core.frozen import Frozen
from twostroke.core.sampling import MAX_TOKENS
from twostroke.engine.chat.harmony import BEGIN_OF_REASONING, END_OF_REASONING, is_harmony
from twostroke.engine.structured_output.lark import special_marks
from twostroke.model.tokenizer import Piece, Prompt

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from twostroke.engine.chat.template import ChatTemplate
    from twostroke.model.tokenizer import Tokenizer

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
# The most tokens of reasoning at an effort, for templates without a variable for the effort. The
# other efforts have no limit.
EFFORT_BUDGETS: Final = {"minimal": 512, "low": 2048, "medium": 8192}
NO_BUDGET: Final = -1  # reasoning without a limit, although the server has a default budget
# Names of template variables.
_SWITCHES: Final = ("enable_thinking", "thinking")
_EFFORT: Final = "reasoning_effort"
_STRENGTH: Final = "reasoning_strength"  # Muse Glimmer's name of the effort
_BUDGET: Final = "thinking_budget"
# Names that a client's variables cannot have.
_RESERVED_NAMES: Final = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message")
)
MAX_VARIABLES: Final = 16
_MAX_VARIABLES_CHARS: Final = 16 * 1024  # of JSON
_MAX_QUOTED_CHARS: Final = 40  # of a wrong name, in an error

_PAIRS: Final = (
    ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|channel>thought", "<channel|>"),
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ("<|think|>", "<|end|><|begin|>assistant"),  # Solar
    ("to=self<|message|>", "<|eom|><|start|>assistant"),  # Muse Glimmer
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
# Keys under which templates look for the reasoning of an earlier answer. Requests use the first.
_KEYS: Final = ("reasoning_content", "reasoning", "thinking", "tool_plan")
# Names of switches in templates with words for their values: the words for on and off.
_NAMED_SWITCHES: Final = {"thinking_mode": ("enabled", "disabled")}
# The word for no reasoning of templates that know only low and high efforts.
_NO_EFFORT: Final = "no_think"
# Efforts of models that were trained with `low`, `medium` and `high`, for efforts beyond these.
_NEAREST_EFFORTS: Final = {"minimal": "low", "xhigh": "high"}


class ReasoningMarks(Frozen):
    """The texts around a model's reasoning.

    Attributes:
        begin, end: the text before and the text after the reasoning, such as `<think>` and
            `</think>`.
        is_of_template: whether the chat template has the marks, not only the vocabulary.
        is_opened: whether each rendered prompt ends with `begin`, so that the answer starts with
            reasoning.
        closing: `end` with the white space that the template writes around it.
        has_two_efforts: whether the template's efforts are `no_think`, `low` and `high`.
        has_channels: whether the reasoning is a message in a channel (`harmony.py`).
    """

    begin: str
    end: str
    is_of_template: bool
    is_opened: bool = False
    closing: str = ""
    has_two_efforts: bool = False
    has_channels: bool = False

    @property
    def begins_turn(self) -> bool:
        """Whether `end` is the text that begins the model's next message (in Solar and Muse).

        Every prompt ends with this text, also if no reasoning comes before it.
        """
        return self.end.endswith("assistant")


class Thinking(Frozen):
    """The fields of a request that switch the model's reasoning.

    Attributes:
        is_on: switches reasoning on or off; None leaves that to the template.
        effort: one of `EFFORTS`; None leaves that to the template.
        param: the request's field with `is_on` or `effort`, for errors.
        budget: maximum number of tokens of the reasoning: 0 for an answer without reasoning,
            `NO_BUDGET` for no limit. With None, the effort sets the budget, or else the server.
        sets_budget: whether the request itself sets the budget.
        variables: further variables of the chat template.
        variables_param: the request's field with `variables`, for errors.
    """

    is_on: bool | None = None
    effort: str | None = None
    param: str = ""
    budget: int | None = None
    sets_budget: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    variables_param: str = "chat_template_kwargs"


AS_IT_IS: Final = Thinking()


def find_marks(template: ChatTemplate, tokenizer: Tokenizer) -> ReasoningMarks | None:
    """Return the marks around a model's reasoning, from its chat template or its vocabulary.

    None if there are no marks.
    """
    if is_harmony(template.source, tokenizer):
        return ReasoningMarks(
            BEGIN_OF_REASONING, END_OF_REASONING, is_of_template=True, has_channels=True
        )
    for begin, end in _PAIRS:
        if end in template.source or end in template.formatted_texts:
            return _marks_in(template, begin, end)
    for begin, end in _PAIRS:
        if all(_is_spelled_by_tokens(mark, tokenizer) for mark in (begin, end)):
            return ReasoningMarks(begin, end, is_of_template=False)
    return None


def find_opened_marks(text: str, template: ChatTemplate) -> ReasoningMarks | None:
    """Return the marks around a model's reasoning if a rendered prompt ends with the first mark.

    `text` is the prompt, which `template` made.
    """
    is_on_line = text.endswith("\n")
    text = text.rstrip()
    for begin, end in _PAIRS:
        if text.endswith(begin):
            marks = replace(_marks_in(template, begin, end), is_opened=True)
            return replace(marks, closing=f"\n{end}\n\n") if is_on_line else marks
    return None


def find_written_marks(before: str, after: str, template: ChatTemplate) -> ReasoningMarks | None:
    """Return the marks around the reasoning of a rendered answer; None if it has none.

    `before` and `after` are the texts around the reasoning in a prompt that `template` made.
    """
    for begin, end in _PAIRS:
        if before.rstrip().endswith(begin) and after.lstrip().startswith(end):
            return _marks_in(template, begin, end)
    return None


def _marks_in(template: ChatTemplate, begin: str, end: str) -> ReasoningMarks:
    """Return `ReasoningMarks` with `begin` and `end`, and with facts from the template's source.

    In the source, a line break may be written literally or as an escape sequence.
    """
    lines = template.source.replace("\\n", "\n")
    closings = (f"\n{end}\n\n", f"\n{end}\n")
    return ReasoningMarks(
        begin,
        end,
        is_of_template=True,
        closing=next((closing for closing in closings if closing in lines), end),
        has_two_efforts=_NO_EFFORT in template.source and _EFFORT in template.variables,
    )


def _is_spelled_by_tokens(mark: str, tokenizer: Tokenizer) -> bool:
    """Whether a mark is a token of the vocabulary, or contains a special token."""
    return tokenizer.find(mark) is not None or bool(special_marks((mark,), tokenizer))


def preface_of(marks: ReasoningMarks, prompt: Prompt, continued: str) -> ReasoningSection | None:
    """Return the reasoning section that may begin the answer to a prompt.

    None if the reasoning ends in the prompt, or the answer continues text after the reasoning.
    `continued` is the text at the end of the prompt that the answer continues.
    """
    if marks.has_channels:
        section = ReasoningSection(marks.begin, marks.end, has_channels=True)
        return None if continued.strip() else section
    inside = ReasoningSection("", marks.end, marks.closing)
    if continued.strip():
        _, opened, since = continued.rpartition(marks.begin)
        return inside if opened and marks.end not in since else None
    text = prompt.text.rstrip()
    before = text.removesuffix(marks.end).rstrip()
    if text.endswith(marks.end) and (not marks.begins_turn or before.endswith(marks.begin)):
        return None
    if text.endswith(marks.begin):
        return inside
    return ReasoningSection(marks.begin, marks.end, marks.closing)


def supported_part(
    thinking: Thinking, template_names: Collection[str], marks: ReasoningMarks | None
) -> tuple[Thinking, list[RequestError]]:
    """Return a request's reasoning fields without fields that the template does not support.

    Also returns errors about the unsupported fields. `template_names` are the names of the
    variables that the template reads.
    """
    if thinking is AS_IT_IS:
        return thinking, []
    _check_variables(thinking.variables, thinking.variables_param)
    errors = {
        name: _unknown_variable(thinking, name, template_names)
        for name, value in thinking.variables.items()
        if name not in template_names
        and name not in _RESERVED_NAMES
        and not _is_met(name, value, marks)
    }
    variables = {name: value for name, value in thinking.variables.items() if name not in errors}
    supported = replace(thinking, variables=variables)
    if (contradiction := _contradiction(supported)) is not None:
        return replace(supported, is_on=None, effort=None), [*errors.values(), contradiction]
    try:
        _switch_variables(thinking, template_names, marks)
    except RequestError as error:
        return replace(supported, is_on=None, effort=None), [*errors.values(), error]
    return supported, [*errors.values()]


def variables_of(
    thinking: Thinking, template_names: Collection[str], marks: ReasoningMarks | None
) -> dict[str, object]:
    """Return the chat template's variables that carry out a request's reasoning fields.

    `template_names` are the names of the variables that the template reads.

    Raises:
        RequestError: the template does not support the request.
    """
    if thinking is AS_IT_IS:
        return {}
    variables = dict(thinking.variables)
    _check_variables(variables, thinking.variables_param)
    if reserved := sorted(_RESERVED_NAMES.intersection(variables)):
        where = f"{thinking.variables_param}.{reserved[0]}"
        raise RequestError("is a name that the chat template itself uses.", field=where)
    for name in [name for name in variables if name not in template_names]:
        if not _is_met(name, variables[name], marks):
            raise _unknown_variable(thinking, name, template_names)
        del variables[name]
    return _switch_variables(thinking, template_names, marks) | variables


def check_budget(budget: int | None, param: str) -> None:
    """Check the maximum number of reasoning tokens that a request's field `param` sets.

    Raises:
        RequestError: the number is below `NO_BUDGET` or above `MAX_TOKENS`.
    """
    if budget is not None and not NO_BUDGET <= budget <= MAX_TOKENS:
        reason = f"must be from {NO_BUDGET} (no limit) to {MAX_TOKENS}, got {budget}."
        raise RequestError(reason, field=param)


def with_budget(
    thinking: Thinking, template_names: Collection[str], default: int | None
) -> Thinking:
    """Return a request's reasoning fields with the budget that applies to them.

    It is the request's own budget; or the budget of its effort, if the template has no variable for
    the effort; or `default`, the server's. A default of 0, which switches reasoning off, does not
    apply to requests that switch it on.
    """
    if thinking.budget is not None:
        return thinking
    budget = default
    has_effort = _EFFORT in template_names or _STRENGTH in template_names
    if thinking.effort in EFFORT_BUDGETS and not has_effort:
        budget = EFFORT_BUDGETS[thinking.effort]
    if budget is None or (budget == 0 and _asks_for_reasoning(thinking)):
        return thinking
    return replace(thinking, budget=budget, sets_budget=False)


def _asks_for_reasoning(thinking: Thinking) -> bool:
    """Whether a request's fields switch reasoning on."""
    if thinking.effort is not None:
        return thinking.effort != "none"
    if thinking.is_on is not None:
        return thinking.is_on
    return any(thinking.variables.get(name) is True for name in _SWITCHES)


def is_switched_off(thinking: Thinking) -> bool:
    """Whether a request asks for an answer without reasoning."""
    if thinking.budget == 0:
        return True
    if thinking.effort is not None:
        return thinking.effort == "none"
    if thinking.is_on is not None:
        return not thinking.is_on
    return any(thinking.variables.get(name) is False for name in _SWITCHES)


def close_reasoning(prompt: Prompt, marks: ReasoningMarks, tokenizer: Tokenizer) -> Prompt:
    """End the reasoning that a prompt opens, so that the model answers without reasoning.

    Templates with a switch write the same: an empty line between the marks, and one after them. A
    prompt that does not open the reasoning at its end is returned unchanged.
    """
    if not prompt.text.rstrip().endswith(marks.begin):
        return prompt
    is_on_lines = prompt.text.endswith("\n")
    end = Piece(marks.end, special=tokenizer.find(marks.end) is not None)
    pieces = (Piece("\n"), end, Piece("\n\n")) if is_on_lines else (end,)
    return Prompt((*prompt.pieces, *pieces))


def with_reasoning(
    messages: Sequence[Mapping[str, object]], keys: Collection[str]
) -> Sequence[Mapping[str, object]]:
    """Rename the key of the reasoning in messages to the key that the chat template reads."""
    name = next((key for key in _KEYS if key in keys), _KEYS[0])
    if name == _KEYS[0] or not any(_KEYS[0] in message for message in messages):
        return messages
    return [
        {name if key == _KEYS[0] else key: value for key, value in message.items()}
        for message in messages
    ]


def _switch_variables(
    thinking: Thinking, template_names: Collection[str], marks: ReasoningMarks | None
) -> dict[str, object]:
    """Return the template's variables that switch reasoning as a request's fields ask.

    Raises:
        RequestError: the template cannot switch reasoning like this.
    """
    is_on = thinking.is_on
    effort = thinking.effort
    if effort is not None and effort not in EFFORTS:
        reason = f"must be one of {', '.join(EFFORTS)}, got {{value!r}}."
        raise RequestError(reason, field=thinking.param, value=effort[:40])
    if effort is not None:
        is_on = effort != "none"
    budget = thinking.budget
    if budget == 0:  # the engine ends the reasoning where the template has no switch
        is_on, effort = False, None
    budgets: dict[str, object] = {}
    if budget is not None and budget != NO_BUDGET and _BUDGET in template_names:
        budgets[_BUDGET] = budget
    if is_on is None:
        return budgets
    variables = budgets | _switches(template_names, marks, is_on=is_on, effort=effort)
    is_met = is_on == _reasons(marks) or (not is_on and _can_be_closed(marks))
    if variables or is_met or budget == 0:
        return variables
    problem = "always reasons" if _reasons(marks) else "does not support reasoning"
    reason = f"cannot be followed: this model's chat template {problem}. Leave it out."
    raise RequestError(reason, field=thinking.param)


def _switches(
    template_names: Collection[str],
    marks: ReasoningMarks | None,
    *,
    is_on: bool,
    effort: str | None,
) -> dict[str, object]:
    """Return the template's variables that switch reasoning on or off, and set the effort."""
    variables: dict[str, object] = {name: is_on for name in _SWITCHES if name in template_names}
    for name, (on, off) in _NAMED_SWITCHES.items():
        if name in template_names:
            variables[name] = on if is_on else off
    if _BUDGET in template_names and not is_on:
        variables[_BUDGET] = 0
    if is_on and effort is not None and _STRENGTH in template_names:
        variables[_STRENGTH] = _NEAREST_EFFORTS.get(effort, effort)
    if _EFFORT not in template_names:
        return variables
    if marks is not None and marks.has_two_efforts:
        level = "low" if effort in {"minimal", "low"} else "high"
        variables[_EFFORT] = level if is_on else _NO_EFFORT
    elif is_on and effort is not None:
        has_three_efforts = marks is not None and marks.has_channels
        nearest_effort = _NEAREST_EFFORTS.get(effort, effort)
        variables[_EFFORT] = nearest_effort if has_three_efforts else effort
    return variables


def _contradiction(thinking: Thinking) -> RequestError | None:
    """Return an error if a request's reasoning fields contradict its template variables.

    None if nothing contradicts.
    """
    is_on = thinking.is_on
    if thinking.effort is not None:
        if thinking.effort not in EFFORTS:
            return None
        is_on = thinking.effort != "none"
    for name in _SWITCHES:
        value = thinking.variables.get(name)
        if is_on is not None and isinstance(value, bool) and value != is_on:
            reason = "contradicts {switch}. Send one of the two."
            switch = f"{thinking.variables_param}.{name}"
            return RequestError(reason, field=thinking.param, switch=Field(switch))
    return None


def _is_met(name: str, value: object, marks: ReasoningMarks | None) -> bool:
    """Whether a reasoning switch can be obeyed although the template lacks the variable `name`.

    For example, a request to switch reasoning off is always obeyed by a model that never reasons.
    """
    if name not in _SWITCHES or not isinstance(value, bool):
        return False
    if value:
        return _reasons(marks)
    return not _reasons(marks) or _can_be_closed(marks)


def _unknown_variable(
    thinking: Thinking, name: str, template_names: Collection[str]
) -> RequestError:
    word = name[:_MAX_QUOTED_CHARS]
    reason = "is not a variable of this model's chat template.{hint}"
    hint = nearest(word, sorted(template_names))
    return RequestError(reason, field=f"{thinking.variables_param}.{word}", hint=hint)


def _reasons(marks: ReasoningMarks | None) -> bool:
    return marks is not None and marks.is_of_template


def _can_be_closed(marks: ReasoningMarks | None) -> bool:
    """Whether prompts open the reasoning at their end, so that `close_reasoning` can end it."""
    return marks is not None and marks.is_opened


def _check_variables(variables: Mapping[str, Any], param: str) -> None:
    has_valid_count = len(variables) <= MAX_VARIABLES
    is_small = has_valid_count and len(json.dumps(variables)) <= _MAX_VARIABLES_CHARS
    if not is_small:
        limits = f"{MAX_VARIABLES} variables and {_MAX_VARIABLES_CHARS:,} characters"
        raise RequestError(f"takes at most {limits}.", field=param)
