"""The grammar that keeps calls to their form: functions exist, and arguments fit."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Final

from twostroke.engine.chat.call_forms import Unmarked
from twostroke.engine.structured_output.lark import (
    beginning,
    special_marks,
    spelled,
    text_but,
    up_to,
)
from twostroke.engine.structured_output.schema.prepare import JSON_FORM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.core.constraint import ReasoningSection
    from twostroke.engine.chat.call_forms import CallForm
    from twostroke.engine.chat.tools import Tools
    from twostroke.model.tokenizer import Tokenizer

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
        self._spell = partial(spelled, specials=self._specials)
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
        yield up_to("head", form.mark, self._specials)
        yield "last: TEXT"
        yield from self._unmarked(rf"{_BLANK}*([;,]{_BLANK}*)?(```(json)?)?")
        many = f"unmarked{{1,{_MOST_UNMARKED}}}"
        several = f"{many} | call* last" if tools.is_parallel else "unmarked | call | last"
        yield f"start: {several}"
        others = [f"UNMARKED{place}" for place in range(len(tools.names))]
        if self._preface is not None and self._preface.begin:
            marks = special_marks((self._preface.begin,), self._tokenizer)
            if not marks:  # a special token cannot be in text
                yield f"PREFACE: {beginning(self._preface, marks)}"
                others.append("PREFACE")
        yield text_but(*others)

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
