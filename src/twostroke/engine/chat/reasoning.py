"""A model's reasoning: how it is marked, and what a request asks of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from msgspec import field
from msgspec.structs import replace

from twostroke.core.constraint import ReasoningSection
from twostroke.core.errors import Field, RequestError, nearest
from twostroke.core.frozen import Frozen
from twostroke.model.tokenizer import Piece, Prompt

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from twostroke.engine.chat.template import ChatTemplate
    from twostroke.model.tokenizer import Tokenizer

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_SWITCHES: Final = ("enable_thinking", "thinking")  # as templates call them
_EFFORT: Final = "reasoning_effort"
# Names that a client's variables cannot have.
_OWN: Final = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "has_text_arguments")
)
MAX_VARIABLES: Final = 16
_MAX_VARIABLES_SIZE: Final = 16 * 1024  # characters of JSON
_MAX_SHOWN: Final = 40  # characters of a wrong name in an error

_PAIRS: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
# Where templates look for the reasoning of an earlier answer; the first is the protocol's word.
_KEYS: Final = ("reasoning_content", "reasoning", "thinking")


class ReasoningMarks(Frozen):
    """The texts around a model's reasoning.

    Its chat template writes them if `is_of_template`, and begins each answer with `begin` if
    `is_opened`.
    """

    begin: str
    end: str
    is_of_template: bool
    is_opened: bool = False


class Thinking(Frozen):
    """The reasoning that a request asks for; the template decides what is left out.

    `is_on` switches it, `effort` is one of `EFFORTS`, and `param` is the field of either.
    `variables` are other variables of the chat template, from the field `variables_param`.
    """

    is_on: bool | None = None
    effort: str | None = None
    param: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    variables_param: str = "chat_template_kwargs"


AS_IT_IS: Final = Thinking()


def find_marks(template: ChatTemplate, tokenizer: Tokenizer) -> ReasoningMarks | None:
    """Return how a model marks its reasoning, if its template or its vocabulary says so."""
    for begin, end in _PAIRS:
        if end in template.source:
            return ReasoningMarks(begin, end, is_of_template=True)
    for begin, end in _PAIRS:
        if tokenizer.find(begin) is not None and tokenizer.find(end) is not None:
            return ReasoningMarks(begin, end, is_of_template=False)
    return None


def opened_marks(text: str) -> ReasoningMarks | None:
    """Return the marks of the reasoning that the end of a rendered prompt opens, if it does."""
    text = text.rstrip()
    for begin, end in _PAIRS:
        if text.endswith(begin):
            return ReasoningMarks(begin, end, is_of_template=True, is_opened=True)
    return None


def preface_of(marks: ReasoningMarks, prompt: Prompt, continued: str) -> ReasoningSection | None:
    """Return the reasoning that may come first after a prompt, or None if it is over.

    `continued` is the text at the prompt's end that the answer continues, if any.
    """
    inside = ReasoningSection("", marks.end)
    if continued.strip():
        _, opened, since = continued.rpartition(marks.begin)
        return inside if opened and marks.end not in since else None
    text = prompt.text.rstrip()
    if text.endswith(marks.end):
        return None
    return inside if text.endswith(marks.begin) else ReasoningSection(marks.begin, marks.end)


def followed(
    thinking: Thinking, known: Collection[str], marks: ReasoningMarks | None
) -> tuple[Thinking, list[RequestError]]:
    """Return what a template can follow of a request, and the errors about the rest."""
    if thinking is AS_IT_IS:
        return thinking, []
    _check_variables(thinking.variables, thinking.variables_param)
    errors = {
        name: _unknown_variable(thinking, name, known)
        for name, value in thinking.variables.items()
        if name not in known and name not in _OWN and not _is_met(name, value, marks)
    }
    given = {name: value for name, value in thinking.variables.items() if name not in errors}
    kept = replace(thinking, variables=given)
    if (contradiction := _contradiction(kept)) is not None:
        return replace(kept, is_on=None, effort=None), [*errors.values(), contradiction]
    try:
        _switched(thinking, known, marks)
    except RequestError as error:
        return replace(kept, is_on=None, effort=None), [*errors.values(), error]
    return kept, [*errors.values()]


def variables_of(
    thinking: Thinking, known: Collection[str], marks: ReasoningMarks | None
) -> dict[str, object]:
    """Return the template's variables for a request; the template reads those in `known`.

    Raises:
        RequestError: the template does not support the request.
    """
    if thinking is AS_IT_IS:
        return {}
    given = dict(thinking.variables)
    _check_variables(given, thinking.variables_param)
    if own := sorted(_OWN.intersection(given)):
        where = f"{thinking.variables_param}.{own[0]}"
        raise RequestError("is a name that the chat template itself uses.", field=where)
    for name in [name for name in given if name not in known]:
        if not _is_met(name, given[name], marks):
            raise _unknown_variable(thinking, name, known)
        del given[name]
    return _switched(thinking, known, marks) | given


def is_switched_off(thinking: Thinking) -> bool:
    """Return whether a request asks for an answer without reasoning."""
    if thinking.effort is not None:
        return thinking.effort == "none"
    if thinking.is_on is not None:
        return not thinking.is_on
    return any(thinking.variables.get(name) is False for name in _SWITCHES)


def closed(prompt: Prompt, marks: ReasoningMarks, tokenizer: Tokenizer) -> Prompt:
    """Return a prompt that opens the model's reasoning with that reasoning ended at once.

    Templates with a switch write the same: an empty line between the marks, and one after them.
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
    """Return messages with the reasoning of earlier answers where the template looks for it."""
    name = next((key for key in _KEYS if key in keys), _KEYS[0])
    if name == _KEYS[0] or not any(_KEYS[0] in message for message in messages):
        return messages
    return [
        {name if key == _KEYS[0] else key: value for key, value in message.items()}
        for message in messages
    ]


def _switched(
    thinking: Thinking, known: Collection[str], marks: ReasoningMarks | None
) -> dict[str, object]:
    is_on, effort = thinking.is_on, thinking.effort
    if effort is not None and effort not in EFFORTS:
        reason = f"must be one of {', '.join(EFFORTS)}, got {{value!r}}."
        raise RequestError(reason, field=thinking.param, value=effort[:40])
    if effort is not None:
        is_on = effort != "none"
    if is_on is None:
        return {}
    found: dict[str, object] = {name: is_on for name in _SWITCHES if name in known}
    if is_on and effort is not None and _EFFORT in known:
        found[_EFFORT] = effort
    if found or is_on == _reasons(marks) or (not is_on and _can_be_closed(marks)):
        return found
    what = "always reasons" if _reasons(marks) else "does not support reasoning"
    reason = f"cannot be followed: this model's chat template {what}. Leave it out."
    raise RequestError(reason, field=thinking.param)


def _contradiction(thinking: Thinking) -> RequestError | None:
    """Return the error of a field that contradicts a switch in the variables, which is followed."""
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
    """Return whether a switch that the template does not read is followed nevertheless."""
    if name not in _SWITCHES or not isinstance(value, bool):
        return False
    if value:
        return _reasons(marks)
    return not _reasons(marks) or _can_be_closed(marks)


def _unknown_variable(thinking: Thinking, name: str, known: Collection[str]) -> RequestError:
    word = name[:_MAX_SHOWN]
    reason = "is not a variable of this model's chat template.{hint}"
    hint = nearest(word, sorted(known))
    return RequestError(reason, field=f"{thinking.variables_param}.{word}", hint=hint)


def _reasons(marks: ReasoningMarks | None) -> bool:
    return marks is not None and marks.is_of_template


def _can_be_closed(marks: ReasoningMarks | None) -> bool:
    """Whether the prompt opens the reasoning, so that `closed` leaves none to the model."""
    return marks is not None and marks.is_opened


def _check_variables(given: Mapping[str, Any], param: str) -> None:
    is_small = len(given) <= MAX_VARIABLES and len(json.dumps(given)) <= _MAX_VARIABLES_SIZE
    if not is_small:
        limits = f"{MAX_VARIABLES} variables and {_MAX_VARIABLES_SIZE:,} characters"
        raise RequestError(f"takes at most {limits}.", field=param)
