"""Tools that an answer may call, and the grammar of answers with calls."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.engine.chat.call_forms import ID, INDEX, NUMBER, PLACEHOLDERS, Unmarked
from twostroke.engine.chat.harmony import HarmonyGrammar
from twostroke.engine.structured_output.argument_grammar import ArgumentsRule
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
    from twostroke.engine.chat.content_marks import ContentMarks
    from twostroke.model.tokenizer import Tokenizer


# A schema with one of these keywords may allow arguments that `properties` does not list.
_KEYWORDS_FOR_MORE: Final = frozenset(
    ("$ref", "additionalProperties", "allOf", "anyOf", "minProperties", "oneOf")
) | {"patternProperties"}
_BLANK: Final = r"[\t-\r ]"
_MAX_UNMARKED_CALLS: Final = 8  # a model that should write text repeats the same call
_MAX_BLANKS: Final = 9  # before the end of a call without marks
# Grammar expressions of the placeholders in forms.
_NUMBERS: Final = {
    INDEX: "/[0-9]{1,4}/",
    NUMBER: "/[0-9]{1,4}/",
    ID: r"/[a-zA-Z0-9_.:\-]{1,64}/",
}
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
# Keywords that tell nothing about arguments.
_ANNOTATIONS: Final = frozenset(("$schema", "description", "title", "type"))


class Function(Frozen):
    """A function that the model may call in its answer.

    Attributes:
        name: the name of the function.
        schema: the JSON schema of its arguments.
        param: the request's field with the schema, for errors.
        is_strict: whether a schema that no grammar can enforce is an error. Otherwise the arguments
            may be any object.
        is_custom: whether clients see its only argument, `input`, as text instead of JSON.
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

        A schema that no grammar can enforce is an error if the function `is_strict`; otherwise the
        arguments may be any object. This method only checks that the schema allows an object; other
        problems are found when the schema is compiled.

        Raises:
            RequestError: the schema of an `is_strict` function is not for an object.
        """
        schema = _closed(parameters or {})
        function = cls(name, schema, param, is_strict)
        if schema.get("type", "object") == "object":
            return function
        if is_strict:
            raise RequestError("cannot be followed: its type must be object.", field=param)
        return function.without_schema()

    def constraint(self) -> Constraint:
        """Return the constraint that makes a call's arguments follow the function's schema."""
        return Constraint("json_schema", json.dumps(self.schema), self.param)

    def without_schema(self) -> Function:
        """Return the function with a schema that allows any object as arguments."""
        return replace(self, schema=dict(ANY_OBJECT))


class Tools(Frozen):
    """The tools of a request, which the prompt shows and the answer may call.

    Attributes:
        prompt_tools: the tools that the prompt shows, as the client sent them.
        functions: the functions that the answer may call.
        is_forced: whether the answer must call a function.
        is_parallel: whether the answer may have several calls.
    """

    prompt_tools: tuple[dict[str, Any], ...]
    functions: tuple[Function, ...]
    is_forced: bool
    is_parallel: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions that the answer may call."""
        return tuple(function.name for function in self.functions)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Forbid arguments that a function's schema does not list in its `properties`.

    JSON Schema allows other arguments by default, but most functions would fail with them. If a
    schema mentions no arguments, the function has none. If a schema can describe arguments outside
    `properties`, it is returned unchanged.
    """
    if schema.keys() <= _ANNOTATIONS and schema.get("type", "object") == "object":
        return {"type": "object", "properties": {}, "additionalProperties": False}
    names = schema.get("properties")
    if not isinstance(names, dict) or not _KEYWORDS_FOR_MORE.isdisjoint(schema):
        return schema
    required = schema.get("required", [])
    if not isinstance(required, list) or any(name not in names for name in map(str, required)):
        return schema
    return schema | {"additionalProperties": False}


class ToolForm(Frozen):
    """The tools of a request, and the form in which the model calls them.

    Attributes:
        tools: the tools.
        form: how the model writes calls.
        preface: the reasoning section that may come before the answer.
        answer: the constraint of answers without calls, if the request has one.
        has_result: whether the conversation ends with the result of a call.
        section_after_calls: further reasoning that may follow a call.
        content_marks: the texts around the text of an answer, if the model writes such marks.
    """

    tools: Tools
    form: CallForm
    tokenizer: Tokenizer
    preface: ReasoningSection | None = None
    answer: Constraint | None = None
    has_result: bool = False
    section_after_calls: ReasoningSection | None = None
    content_marks: ContentMarks | None = None

    @property
    def unmarked(self) -> Unmarked:
        """Which JSON objects without call marks count as tool calls.

        Small models write each JSON answer like a call. If the conversation ends with a tool's
        result, the model probably answers in text. Then only an object in a Markdown fence is a
        call, since an answer in JSON does not begin with a fence.
        """
        if not self.form.has_json or self.form.has_channels:
            return Unmarked.NONE
        if self.answer is None:
            return Unmarked.ALL
        if self.answer.notation != "json_schema":
            return Unmarked.NONE
        return Unmarked.FENCED if self.has_result and not self.form.is_bare else Unmarked.ALL

    def constraint(self) -> Constraint:
        """Return the constraint of the model's answers, with and without tool calls."""
        answer = None if self.tools.is_forced else self.answer
        if self.form.has_channels:
            rules = self._rules_of_channels()
            return Constraint("lark", "\n".join(rules), "tools", self.preface, answer)
        grammar = CallGrammar(self)
        if self.tools.is_forced:
            rules = grammar.calls()
        elif self.answer is not None:
            rules = grammar.calls_or_constraint(self.unmarked)
        else:
            rules = grammar.calls_in_text()
        return Constraint("lark", "\n".join(rules), "tools", self.preface, answer)

    def _rules_of_channels(self) -> Iterator[str]:
        """Return the rules of a grammar for answers in channels that may call the tools."""
        arguments = [
            arguments_rule(f"args{index}", function, self.form, self.tokenizer)
            for index, function in enumerate(self.tools.functions)
        ]
        grammar = HarmonyGrammar(self.tools.names, arguments, self.tokenizer)
        has_text = not self.tools.is_forced and self.answer is None
        return grammar.calls_or_text() if has_text else grammar.calls()

    def function_constraint(self, function: Function) -> Constraint:
        """Return the constraint of one function's arguments, to test whether it can be enforced."""
        if self.form.has_json:
            return function.constraint()
        rule = arguments_rule("start", function, self.form, self.tokenizer)
        return Constraint("lark", rule, function.param)

    def without_refused(self, refusal: Callable[[Constraint], str | None]) -> ToolForm:
        """Return these tools, with schemas that cannot be enforced replaced by "any object".

        `refusal` returns why no grammar can enforce a constraint, or None if one can.

        Raises:
            RequestError: a function with such a schema is strict.
        """
        functions = []
        for function in self.tools.functions:
            why = refusal(self.function_constraint(function))
            if why is not None and function.is_strict:
                reason = "of the function '{name}' cannot be followed. {why}"
                raise RequestError(reason, field=function.param, name=function.name, why=why)
            functions.append(function if why is None else function.without_schema())
        if tuple(functions) == self.tools.functions:
            return self
        return replace(self, tools=replace(self.tools, functions=tuple(functions)))


def arguments_rule(name: str, function: Function, form: CallForm, tokenizer: Tokenizer) -> str:
    """Return a grammar rule called `name` for a function's arguments, as `form` writes them.

    The rule is a line of a grammar in Lark's notation. `tokenizer` tells which marks are special
    tokens.
    """
    if form.has_json:
        schema = json.dumps({"type": "object", **function.schema, "x-guidance": JSON_FORM})
        return f"{name}: %json {schema}"
    rule = ArgumentsRule(form.notation, function.schema, special_marks(form.all_marks, tokenizer))
    return f"{name}: %arguments {rule.to_text()}"


class CallGrammar:
    """Writes the grammar, in Lark's notation, that an answer with tool calls must follow."""

    def __init__(self, tool_form: ToolForm) -> None:
        """Prepare the grammar for calls of a request's tools.

        Text must not begin like the reasoning section `preface`.
        """
        self._tools = tool_form.tools
        self._form = tool_form.form
        self._tokenizer = tool_form.tokenizer
        self._preface = tool_form.preface
        self._section_after_calls = tool_form.section_after_calls
        self._content_marks = tool_form.content_marks
        self._specials = special_marks(self._form.all_marks, self._tokenizer)
        more_calls = f"({self._to_lark(self._form.between + self._form.head)} body)*"
        self._more_calls = more_calls if self._tools.is_parallel else ""

    def calls(self) -> Iterator[str]:
        """Yield the rules of a grammar for answers that must be tool calls, without text."""
        yield from self._bodies()
        yield f"start: {self._to_lark(self._form.opening)} body {self._more_calls} {self._end}"

    def calls_or_constraint(self, unmarked: Unmarked) -> Iterator[str]:
        """Yield the rules of a grammar for tool calls that is combined with a client's constraint.

        The constraint's grammar has the answers without calls. `unmarked` says which calls may lack
        their marks. A call without marks and fence can look like a JSON answer. So the rules for
        such a call use the terminals of the JSON grammar, and both grammars stay possible until the
        key of the arguments. This key is one terminal, longer than the terminal of a JSON key, so
        it decides that the answer is a call. Only one call without marks is allowed, because a
        model that should write text would repeat it.
        """
        form, names = self._form, self._tools.names
        yield from self._bodies()
        mark = form.mark if form.is_bare else ""
        start = f"{self._to_lark(mark + form.opening)} body {self._more_calls} {self._end}"
        if unmarked is not Unmarked.NONE:
            yield from self._unmarked(r"```(json)?")
            start += " | unmarked"
        if unmarked is Unmarked.ALL:
            keys = " | ".join(json.dumps(f'"{key}": ') for key in _ARGUMENT_KEYS)
            yield f"key: {keys}"
            for index, name in enumerate(names):
                quoted = json.dumps(json.dumps(name))
                yield rf'bare{index}: "{{" "\"name\"" ": " {quoted} ", " key args{index} "}}"'
            start += f" | {_any('bare', names)}"
        yield f"start: {start}"

    def calls_in_text(self) -> Iterator[str]:
        """Yield the rules of a grammar for answers with text, with tool calls, or with both.

        Text comes before calls. An answer that begins like a call without marks is a call. Its
        braces may be doubled, and a Markdown fence may surround it.
        """
        form = self._form
        tools = self._tools
        if not form.has_json:
            yield from self._marked_calls_in_text()
            return
        yield from self._bodies()
        after_mark = self._to_lark(form.opening.removeprefix(form.mark))
        yield f"call: head {after_mark} body {self._more_calls if form.is_list else ''} {self._end}"
        yield from self._text_rules()
        yield from self._unmarked(rf"{_BLANK}*([;,]{_BLANK}*)?(```(json)?)?")
        unmarked_calls = f"unmarked{{1,{_MAX_UNMARKED_CALLS}}}"
        yield from self._reasoning_after_calls()
        parallel = f"{unmarked_calls} | (call {self._may_reason})* last"
        yield f"start: {parallel if tools.is_parallel else 'unmarked | call | last'}"
        unmarked_beginnings = [f"UNMARKED{index}" for index in range(len(tools.names))]
        yield from self._text(unmarked_beginnings)

    def _text_rules(self) -> Iterator[str]:
        """Yield the rule `head`, for text up to a call mark, and `last`, for text without calls.

        If the content marks around text are special tokens, the rules allow them explicitly,
        because terminals of text do not match special tokens.
        """
        head, text = text_until("head", self._form.mark, self._specials), "TEXT"
        marks = self._content_marks
        specials = special_marks(() if marks is None else marks.texts, self._tokenizer)
        if marks is not None and specials:
            opening = f"({to_lark(marks.begin, specials)})? " if marks.begin else ""
            text = f"{opening}TEXT ({to_lark(marks.end, specials)})?"
            head = head.replace("head: TEXT", f"head: {text}")
        yield head
        yield f"last: {text}"

    @property
    def _may_reason(self) -> str:
        """The grammar expression for reasoning that may follow a call; empty if none may."""
        return "" if self._section_after_calls is None else "thought?"

    def _reasoning_after_calls(self) -> Iterator[str]:
        """Yield the rules of `thought`, a reasoning section that may follow a call."""
        section = self._section_after_calls
        if section is None:
            return
        specials = special_marks((section.begin, section.end), self._tokenizer)
        yield r"THOUGHT: /(.|\n)*/"
        yield text_until("thinking", section.end, specials).replace("TEXT", "THOUGHT")
        begin = section_begin(section, specials)
        if not special_marks((section.begin,), self._tokenizer):
            yield f"THOUGHT_BEGIN: {begin}"  # one terminal, as text may begin with the same blanks
            begin = "THOUGHT_BEGIN"
        yield f"thought: {begin} thinking"

    def _text(self, other_beginnings: list[str]) -> Iterator[str]:
        """Yield the terminal `TEXT`, for text that begins neither like reasoning nor like a call.

        `other_beginnings` are the names of further terminals with which `TEXT` must not begin.
        """
        terminals = list(other_beginnings)
        if self._preface is not None and self._preface.begin:
            marks = special_marks((self._preface.begin,), self._tokenizer)
            if not marks:  # text has no special tokens anyway
                yield f"PREFACE: {section_begin(self._preface, marks)}"
                terminals.append("PREFACE")
        yield text_without_prefix(*terminals)

    def _marked_calls_in_text(self) -> Iterator[str]:
        """Yield the rules of a grammar for text and calls that begin with marks.

        Some models leave out the mark, and begin with `loose_begin`. The name after that text
        decides whether it begins a call or is text.
        """
        form = self._form
        yield from self._bodies()
        names = self._tools.names
        bare_beginnings = [f"BARE{index}" for index in range(len(names))] if form.is_bare else []
        yield from self._text(bare_beginnings)
        after_mark = self._to_lark(form.opening.removeprefix(form.mark))
        more_calls = self._more_calls if form.is_list else ""
        yield f"call: {after_mark} body {more_calls} {self._end}"
        yield from self._text_rules()
        yield from self._reasoning_after_calls()
        rest = f"{self._may_reason} answer" if self._tools.is_parallel else '""'
        if form.is_bare:
            for index, name in enumerate(names):
                begin = self._to_lark(form.name(name) + form.middle)
                yield rf"BARE{index}: /{_BLANK}*\[{_BLANK}*/ {begin}"
                yield f"bare{index}: BARE{index} args{index} {self._to_lark(form.tail)}"
            yield f"bare: ({_any('bare', names)}) {more_calls} {self._end}"
        if not form.loose_begin:
            yield f"answer: head call {rest} | last"
            yield f"start: answer{' | bare' if form.is_bare else ''}"
            return
        loose_begin = json.dumps(form.loose_begin)
        names_and_middles = " | ".join(
            self._to_lark(form.name(name) + form.middle) for name in names
        )
        yield f"loose_head[lazy]: TEXT {loose_begin}"
        yield f"NAMES: {names_and_middles}"
        yield r"OTHER: TEXT & ~(NAMES /(.|\n)*/)"
        yield text_until("other_head", form.mark, self._specials).replace("TEXT", "OTHER")
        yield f"other_loose[lazy]: OTHER {loose_begin}"
        tail = self._loose_tail()
        bodies = " | ".join(
            f"{self._to_lark(form.name(name) + form.middle)} args{index} {tail}"
            for index, name in enumerate(names)
        )
        yield f"loose: ({bodies}) {rest} | other_head call {rest} | other_loose loose | other"
        yield "other: OTHER"
        yield f"answer: head call {rest} | loose_head loose | last"
        yield "start: answer"

    def _loose_tail(self) -> str:
        """Return the grammar expression of the text after a call that began with `loose_begin`."""
        first, *others = self._form.tail.split()
        if not others:
            return self._to_lark(first)
        before = self._form.tail.removesuffix(others[-1])
        blanks = before[len(before.rstrip()) :]
        return f"{self._to_lark(before.rstrip())} ({self._to_lark(blanks + others[-1])})?"

    def _unmarked(self, before: str) -> Iterator[str]:
        """Yield grammar rules for a tool call without call marks.

        `before` is a regular expression of the text before the call.
        """
        names = self._tools.names
        for index, name in enumerate(names):
            yield f"UNMARKED{index}: /{before}{_named_pattern(name)}/"
            yield f"unmarked{index}: UNMARKED{index} args{index} CLOSE AFTER?"
        yield f"unmarked: {_any('unmarked', names)}"
        yield rf"CLOSE: /{_BLANK}{{0,{_MAX_BLANKS}}}\}}\}}?/"
        yield f"AFTER: /{_BLANK}+|{_BLANK}*```{_BLANK}*/"

    def _bodies(self) -> Iterator[str]:
        """Yield grammar rules for each function's arguments, and for calls from name to `tail`."""
        form = self._form
        functions = self._tools.functions
        id_ = f" {self._to_lark(form.id_mark)} /[a-zA-Z0-9]{{9}}/ " if form.id_mark else ""
        for index, function in enumerate(functions):
            name = form.name(function.name)
            head = self._to_lark(name + form.middle)
            if id_:
                head = f"{self._to_lark(name)}{id_}{self._to_lark(form.middle)}"
            yield arguments_rule(f"args{index}", function, form, self._tokenizer)
            yield f"body{index}: {head} args{index} {self._to_lark(form.tail)}"
        yield f"body: {_any('body', functions)}"

    def _to_lark(self, text: str) -> str:
        """Return the grammar expression of a text that accepts any number for a placeholder."""
        parts = re.split(f"([{''.join(PLACEHOLDERS)}])", text)
        return " ".join(_NUMBERS.get(part) or to_lark(part, self._specials) for part in parts)

    @property
    def _end(self) -> str:
        return self._to_lark(self._form.end)


def _any(rule: str, functions: tuple[object, ...]) -> str:
    """Return the alternatives `RULE0 | RULE1 | ...`, one for each function."""
    return " | ".join(f"{rule}{index}" for index in range(len(functions)))


def _named_pattern(name: str) -> str:
    """Return a regular expression of an unmarked call of this function, up to its arguments.

    Braces may be doubled.
    """
    escaped = re.escape(name).replace("/", r"\/")  # a slash ends a pattern in Lark
    parts = [r"\{\{?", '"name"', ":", f'"{escaped}"', ",", '"(arguments|parameters)"', ":"]
    return f"{_BLANK}*" + "".join(f"{part}{_BLANK}*" for part in parts)
