"""Tools of a chat request: what the model may call, and what its answer then looks like.

A grammar keeps the answer to the form of the model's calls from their mark on, so that names exist
and arguments fit.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.sample.lark import beginning, special_marks, spelled, text_but, up_to
from twostroke.sample.schema import ANY_OBJECT, JSON_FORM, check_keywords

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from twostroke.core.preface import Preface
    from twostroke.engine.call_forms import CallForm
    from twostroke.tokenize import Tokenizer

MAX_TOOLS: Final = 128
# Beside `properties`, these say themselves which arguments there may be.
_MORE_ARGUMENTS: Final = frozenset(
    ("$ref", "additionalProperties", "allOf", "anyOf", "minProperties", "oneOf")
) | {"patternProperties"}
_MAX_NAME: Final = 64
NAME_PATTERN: Final = rf"^[A-Za-z0-9_.-]{{1,{_MAX_NAME}}}$"
_NAME: Final = re.compile(NAME_PATTERN)


class FunctionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call; without `parameters` it takes any object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    """One tool; there are functions only."""

    function: FunctionBody


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which function."""

    name: str


class NamedChoice(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    """This function is to be called, and no other."""

    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class Function:
    """What may be called, with arguments that a schema allows.

    `param` is the field that has the schema, which nothing but a `is_strict` function has to keep
    to where it cannot.
    """

    name: str
    schema: dict[str, Any]
    param: str
    is_strict: bool

    def constraint(self) -> Constraint:
        """Return the form of its arguments alone."""
        return Constraint("json_schema", json.dumps(self.schema), self.param)

    def freed(self) -> Function:
        """Return it with any object for its arguments."""
        return replace(self, schema=dict(ANY_OBJECT))


@dataclass(frozen=True, slots=True)
class Tools:
    """What may be called in an answer.

    `shown` are the tools for the prompt, as the client sent them; `functions` are those that may be
    called. One of them must be if `is_forced`, and several may be behind one another if
    `is_parallel`.
    """

    shown: tuple[dict[str, Any], ...]
    functions: tuple[Function, ...]
    is_forced: bool
    is_parallel: bool

    @property
    def names(self) -> tuple[str, ...]:
        """What the functions are called."""
        return tuple(function.name for function in self.functions)

    def freed(self, names: Collection[str]) -> Tools:
        """Return the same with any object for the arguments of some functions."""
        free = (one.freed() if one.name in names else one for one in self.functions)
        return replace(self, functions=tuple(free)) if names else self

    def rules(self, form: CallForm, tokenizer: Tokenizer, preface: Preface | None) -> Iterator[str]:
        """Yield a grammar of answers with calls, or with text before and in place of them.

        That text does not begin as a preface does.
        """
        specials = special_marks(form.all_marks, tokenizer)
        spell = partial(spelled, specials=specials)
        id_ = f" {spell(form.id_mark)} /[a-zA-Z0-9]{{9}}/ " if form.id_mark else ""
        for place, one in enumerate(self.functions):
            name, tail = form.name(one.name), spell(form.tail)
            head = f"{spell(name)}{id_}{spell(form.middle)}" if id_ else spell(name + form.middle)
            schema = json.dumps({"type": "object", **one.schema, "x-guidance": JSON_FORM})
            yield f"rest{place}: %json {schema} {tail}"
            yield f"body{place}: {head} rest{place}"
        places = range(len(self.functions))
        yield f"body: {' | '.join(f'body{place}' for place in places)}"
        more = f"({spell(form.between + form.head)} body)*" if self.is_parallel else ""
        end = spell(form.end)
        if self.is_forced:
            yield f"start: {spell(form.opening)} body {more} {end}"
            return
        behind_mark = spell(form.opening.removeprefix(form.mark))
        yield f"call: head {behind_mark} body {more if form.is_list else ''} {end}"
        yield up_to("head", form.mark, specials)
        yield "last: TEXT"
        several = "call* last" if self.is_parallel else "call | last"
        others = []
        if preface is not None and preface.begin:
            marks = special_marks((preface.begin,), tokenizer)
            if not marks:  # a token, which no text has
                yield f"PREFACE: {beginning(preface, marks)}"
                others = ["PREFACE"]
        if not form.is_bare:
            yield f"start: {several}"
            yield text_but(*others)
            return
        # What begins as a call does, without the mark, is one: no other text begins so.
        for place, name in enumerate(self.names):
            yield f"BARE{place}: {spell(form.opening + form.name(name) + form.middle)}"
        yield f"bare: {' | '.join(f'BARE{place} rest{place}' for place in places)}"
        yield f"start: bare {more} | {several}"
        yield text_but(*others, *(f"BARE{place}" for place in places))


@dataclass(frozen=True, slots=True)
class ToolForm:
    """Tools as a model is to call them, behind a preface if there is one."""

    tools: Tools
    form: CallForm
    tokenizer: Tokenizer
    preface: Preface | None = None

    def constraint(self) -> Constraint:
        """Return what answers are held to."""
        rules = "\n".join(self.tools.rules(self.form, self.tokenizer, self.preface))
        return Constraint("lark", rules, "tools", self.preface)

    def without_refused(self, refusal: Callable[[Constraint], str | None]) -> ToolForm:
        """Return it with any arguments for tools whose schema a grammar refuses.

        `refusal` says why, or nothing.

        Raises:
            RequestError: such a tool is strict.
        """
        refused = set[str]()
        for function in self.tools.functions:
            why = refusal(function.constraint())
            if why is not None and function.is_strict:
                message = f"{function.param} of the function '{function.name}': {why}"
                raise RequestError(message, param=function.param)
            if why is not None:
                refused.add(function.name)
        return replace(self, tools=self.tools.freed(refused)) if refused else self


def to_tools(
    tools: Sequence[ToolBody] | None, choice: ToolChoice | None, *, parallel: bool | None
) -> Tools | None:
    """Return what may be called, or None if nothing.

    Raises:
        RequestError: too many tools, a name that is none or is there twice, a schema that a
            `strict` function cannot be kept to, or the choice of a function that is not there.
    """
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise RequestError("tool_choice needs tools.", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        message = f"tools takes at most {MAX_TOOLS} tools, not {len(tools)}."
        raise RequestError(message, param="tools")
    functions = [tool.function for tool in tools]
    known: dict[str, Function] = {}
    for place, function in enumerate(functions):
        where = f"tools[{place}].function"
        _check_name(function.name, where)
        if function.name in known:
            message = f"{where}.name: there is another '{function.name}' before it."
            raise RequestError(message, param=f"{where}.name")
        known[function.name] = _callable(function, f"{where}.parameters")
    if choice == "none":
        return None
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if name not in known:
            message = f"tool_choice names '{name[:_MAX_NAME]}', which is not among the tools."
            raise RequestError(message, param="tool_choice.function.name")
        known = {name: known[name]}
    is_named = isinstance(choice, NamedChoice)
    return Tools(
        shown=tuple(_shown(function) for function in functions),
        functions=tuple(known.values()),
        is_forced=is_named or choice == "required",
        is_parallel=parallel is not False and not is_named,
    )


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        message = f"{where}.name must be 1 to {_MAX_NAME} letters, digits, '_', '-' and '.'."
        raise RequestError(message, param=f"{where}.name")


def _callable(function: FunctionBody, param: str) -> Function:
    """Return what may be called: with any object, where there is no more that can be kept to.

    Tools come from programs that write schemas for other readers: unless `strict`, a keyword that
    cannot be kept to frees the arguments instead of refusing the request.
    """
    schema = _closed(function.parameters or dict(ANY_OBJECT))
    made = Function(function.name, schema, param, bool(function.strict))
    try:
        check_keywords(json.dumps(schema))
    except ValueError as error:
        if function.strict:
            message = f"{param} cannot be kept to: {error}{'' if str(error).endswith('?') else '.'}"
            raise RequestError(message, param=param) from None
        return made.freed()
    return made if schema.get("type", "object") == "object" else made.freed()


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows no arguments but those that it names, if it names them itself.

    A function that is called with others fails, and a schema that leaves them open hardly means it.
    """
    names = schema.get("properties")
    if not isinstance(names, dict) or not _MORE_ARGUMENTS.isdisjoint(schema):
        return schema
    required = schema.get("required", [])
    if not isinstance(required, list) or any(name not in names for name in map(str, required)):
        return schema
    return schema | {"additionalProperties": False}


def _shown(function: FunctionBody) -> dict[str, Any]:
    shown = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    known = {key: value for key, value in shown.items() if value is not None}
    return {"type": "function", "function": known}
