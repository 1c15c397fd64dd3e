"""Tools that an answer may call."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.engine.chat.call_forms import Unmarked
from twostroke.engine.structured_output.lark import (
    section_begin,
    special_marks,
    text_until,
    text_without_prefix,
    to_lark,
)
from twostroke.engine.structured_output.schema.prepare import ANY_OBJECT, JSON_FORM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.core.constraint import ReasoningSection
    from twostroke.engine.chat.call_forms import CallForm
    from twostroke.model.tokenizer import Tokenizer


# A schema with one of these keywords may allow arguments that `properties` does not list.
_MORE_ARGUMENTS: Final = frozenset(
    ("$ref", "additionalProperties", "allOf", "anyOf", "minProperties", "oneOf")
) | {"patternProperties"}
_SAY_NOTHING: Final = frozenset(("$schema", "description", "title", "type"))


class Function(Frozen):
    """A function that may be called, with a schema of its arguments.

    `param` is the request's field with the schema. If the schema cannot be enforced, the request is
    refused for an `is_strict` function, else any object is allowed. Clients see the argument
    `input` of an `is_custom` one as text, not JSON.
    """

    name: str
    schema: dict[str, Any]
    param: str
    is_strict: bool
    is_custom: bool = False

    @classmethod
    def described(
        cls, name: str, parameters: dict[str, Any] | None, param: str, *, is_strict: bool = False
    ) -> Function:
        """Return a function whose arguments follow the JSON schema `parameters`.

        Many tools have schemas that no grammar can enforce. Such a schema is an error only if the
        function `is_strict`; otherwise its arguments may be any object. A schema that is not for
        an object is found here, all others when the schema is compiled.

        Raises:
            RequestError: the schema of an `is_strict` function is not for an object.
        """
        schema = _closed(parameters or {})
        function = cls(name, schema, param, is_strict)
        if schema.get("type", "object") == "object":
            return function
        if is_strict:
            raise RequestError("cannot be followed: its type must be object.", field=param)
        return function.freed()

    def constraint(self) -> Constraint:
        """Return the form of its arguments alone."""
        return Constraint("json_schema", json.dumps(self.schema), self.param)

    def freed(self) -> Function:
        """Return it with any object for its arguments."""
        return replace(self, schema=dict(ANY_OBJECT))


class Tools(Frozen):
    """The tools of a request.

    `shown` are the tools for the prompt, as the client sent them; `functions` are those that may be
    called: one must be if `is_forced`, several may be if `is_parallel`.
    """

    shown: tuple[dict[str, Any], ...]
    functions: tuple[Function, ...]
    is_forced: bool
    is_parallel: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The functions' names."""
        return tuple(function.name for function in self.functions)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows no arguments besides those in its `properties`.

    JSON Schema allows other arguments by default, but most functions would fail with them. If a
    schema mentions no arguments, the function has none. If a schema can describe arguments outside
    `properties`, it is returned unchanged.
    """
    if schema.keys() <= _SAY_NOTHING and schema.get("type", "object") == "object":
        return {"type": "object", "properties": {}, "additionalProperties": False}
    names = schema.get("properties")
    if not isinstance(names, dict) or not _MORE_ARGUMENTS.isdisjoint(schema):
        return schema
    required = schema.get("required", [])
    if not isinstance(required, list) or any(name not in names for name in map(str, required)):
        return schema
    return schema | {"additionalProperties": False}


class ToolForm(Frozen):
    """Tools, and the form in which a model calls them, after a preface if there is one.

    With `answer`, an answer that does not call has this form, without other text. It may be due
    where the conversation `has_result`.
    """

    tools: Tools
    form: CallForm
    tokenizer: Tokenizer
    preface: ReasoningSection | None = None
    answer: Constraint | None = None
    has_result: bool = False

    @property
    def unmarked(self) -> Unmarked:
        """Which calls without marks are calls; JSON cannot begin with a fence.

        Small models begin each JSON like a call, so after a result that alone does not make one.
        """
        if self.answer is None:
            return Unmarked.ALL
        if self.answer.notation != "json_schema":
            return Unmarked.NONE
        return Unmarked.FENCED if self.has_result and not self.form.is_bare else Unmarked.ALL

    def constraint(self) -> Constraint:
        """Return the grammar of answers."""
        grammar = CallGrammar(self.tools, self.form, self.tokenizer, self.preface)
        if self.tools.is_forced:
            rules = grammar.calls()
        elif self.answer is not None:
            rules = grammar.calls_beside_form(self.unmarked)
        else:
            rules = grammar.calls_in_text()
        answer = None if self.tools.is_forced else self.answer
        return Constraint("lark", "\n".join(rules), "tools", self.preface, answer)

    def without_refused(self, refusal: Callable[[Constraint], str | None]) -> ToolForm:
        """Return the same with any object for arguments whose schema cannot be enforced.

        `refusal` returns the reason, or None.

        Raises:
            RequestError: such a tool is strict.
        """
        functions = []
        for function in self.tools.functions:
            why = refusal(function.constraint())
            if why is not None and function.is_strict:
                reason = "of the function '{name}' cannot be followed. {why}"
                raise RequestError(reason, field=function.param, name=function.name, why=why)
            functions.append(function if why is None else function.freed())
        if tuple(functions) == self.tools.functions:
            return self
        return replace(self, tools=replace(self.tools, functions=tuple(functions)))


_BLANK: Final = r"[\t-\r ]"
_MOST_UNMARKED: Final = 8  # calls; a model that would rather write text repeats the same one
_NUM_BLANKS: Final = 9  # before the end of a call without marks
_EITHER_KEY: Final = ("arguments", "parameters")


class CallGrammar:
    """Writes a grammar of answers, in Lark's notation."""

    def __init__(
        self, tools: Tools, form: CallForm, tokenizer: Tokenizer, preface: ReasoningSection | None
    ) -> None:
        """Describe calls of `tools` in `form`; other text does not begin as `preface` does."""
        self._tools = tools
        self._form = form
        self._tokenizer = tokenizer
        self._preface = preface
        self._specials = special_marks(form.all_marks, tokenizer)
        self._spell = partial(to_lark, specials=self._specials)
        more = f"({self._spell(form.between + form.head)} body)*"
        self._more = more if tools.is_parallel else ""

    def calls(self) -> Iterator[str]:
        """Yield the rules of answers that only call."""
        yield from self._bodies()
        yield f"start: {self._spell(self._form.opening)} body {self._more} {self._end}"

    def calls_beside_form(self, unmarked: Unmarked) -> Iterator[str]:
        """Yield the rules of answers that only call, where another grammar allows other answers.

        `unmarked` calls may lack their marks. Those without a fence are beside JSON: their signs
        are cut as those of JSON are, so that either can go on after each, up to the key of the
        arguments. From there on it is a call: the longest terminal is taken, and this one is longer
        than a key of JSON. An unmarked call is the only one: a model that would rather write text
        repeats it otherwise.
        """
        form, names = self._form, self._tools.names
        yield from self._bodies()
        mark = form.mark if form.is_bare else ""
        start = f"{self._spell(mark + form.opening)} body {self._more} {self._end}"
        if unmarked is not Unmarked.NONE:
            yield from self._unmarked(r"```(json)?")
            start += " | unmarked"
        if unmarked is Unmarked.ALL:
            keys = " | ".join(json.dumps(f'"{key}": ') for key in _EITHER_KEY)
            yield f"key: {keys}"
            for place, name in enumerate(names):
                quoted = json.dumps(json.dumps(name))
                yield rf'bare{place}: "{{" "\"name\"" ": " {quoted} ", " key args{place} "}}"'
            start += f" | {_any('bare', names)}"
        yield f"start: {start}"

    def calls_in_text(self) -> Iterator[str]:
        """Yield the rules of answers with calls, or with text before and in place of them.

        An answer that begins like a call without marks is one; its braces may be doubled, and a
        fence of Markdown may be around it.
        """
        form, tools = self._form, self._tools
        yield from self._bodies()
        after_mark = self._spell(form.opening.removeprefix(form.mark))
        yield f"call: head {after_mark} body {self._more if form.is_list else ''} {self._end}"
        yield text_until("head", form.mark, self._specials)
        yield "last: TEXT"
        yield from self._unmarked(rf"{_BLANK}*([;,]{_BLANK}*)?(```(json)?)?")
        many = f"unmarked{{1,{_MOST_UNMARKED}}}"
        several = f"{many} | call* last" if tools.is_parallel else "unmarked | call | last"
        yield f"start: {several}"
        others = [f"UNMARKED{place}" for place in range(len(tools.names))]
        if self._preface is not None and self._preface.begin:
            marks = special_marks((self._preface.begin,), self._tokenizer)
            if not marks:  # a special token cannot be in text
                yield f"PREFACE: {section_begin(self._preface, marks)}"
                others.append("PREFACE")
        yield text_without_prefix(*others)

    def _unmarked(self, before: str) -> Iterator[str]:
        """Yield the rules of a call without marks, as `CallReader` reads it, after a pattern."""
        names = self._tools.names
        for place, name in enumerate(names):
            yield f"UNMARKED{place}: /{before}{_named_pattern(name)}/"
            yield f"unmarked{place}: UNMARKED{place} args{place} CLOSE AFTER?"
        yield f"unmarked: {_any('unmarked', names)}"
        yield rf"CLOSE: /{_BLANK}{{0,{_NUM_BLANKS}}}\}}\}}?/"
        yield f"AFTER: /{_BLANK}+|{_BLANK}*```{_BLANK}*/"

    def _bodies(self) -> Iterator[str]:
        """Yield the rules of arguments, and of a call from its name to its tail."""
        form, functions = self._form, self._tools.functions
        id_ = f" {self._spell(form.id_mark)} /[a-zA-Z0-9]{{9}}/ " if form.id_mark else ""
        for place, one in enumerate(functions):
            name, middle = form.name(one.name), form.middle
            head = self._spell(name + middle)
            if id_:
                head = f"{self._spell(name)}{id_}{self._spell(middle)}"
            schema = json.dumps({"type": "object", **one.schema, "x-guidance": JSON_FORM})
            yield f"args{place}: %json {schema}"
            yield f"body{place}: {head} args{place} {self._spell(form.tail)}"
        yield f"body: {_any('body', functions)}"

    @property
    def _end(self) -> str:
        return self._spell(self._form.end)


def _any(rule: str, of: tuple[object, ...]) -> str:
    """Return the alternatives of a rule, one for each function."""
    return " | ".join(f"{rule}{place}" for place in range(len(of)))


def _named_pattern(name: str) -> str:
    """Return what comes before the arguments of a call without marks; braces may be doubled."""
    escaped = re.escape(name).replace("/", r"\/")  # which would end a pattern of the grammar
    parts = [r"\{\{?", '"name"', ":", f'"{escaped}"', ",", '"(arguments|parameters)"', ":"]
    return f"{_BLANK}*" + "".join(f"{part}{_BLANK}*" for part in parts)
