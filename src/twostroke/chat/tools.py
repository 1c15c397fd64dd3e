"""Tools that an answer may call, and the grammar that keeps its calls to their form.

The grammar holds an answer from the mark of a call on, so that names exist and arguments fit.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.sample.lark import NO_FORCING, beginning, special_marks, spelled, text_but, up_to
from twostroke.schema.prepare import ANY_OBJECT, JSON_FORM
from twostroke.schema.size import forces_little

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.chat.call_forms import CallForm
    from twostroke.core.preface import Preface
    from twostroke.tokenize import Tokenizer


class Function(Frozen):
    """A function that may be called, with a schema of its arguments.

    `param` is the request's field with the schema. If the schema cannot be enforced, the request is
    refused for an `is_strict` function, else any object is allowed.
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

    def rules(self, form: CallForm, tokenizer: Tokenizer, preface: Preface | None) -> Iterator[str]:
        """Yield a grammar of answers with calls, or with text before and in place of them.

        That text does not begin as a preface does.
        """
        if not all(forces_little(one.schema) for one in self.functions):
            yield NO_FORCING
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
        after_mark = spell(form.opening.removeprefix(form.mark))
        yield f"call: head {after_mark} body {more if form.is_list else ''} {end}"
        yield up_to("head", form.mark, specials)
        yield "last: TEXT"
        several = "call* last" if self.is_parallel else "call | last"
        others = []
        if preface is not None and preface.begin:
            marks = special_marks((preface.begin,), tokenizer)
            if not marks:  # a special token cannot be in text
                yield f"PREFACE: {beginning(preface, marks)}"
                others = ["PREFACE"]
        if not form.is_bare:
            yield f"start: {several}"
            yield text_but(*others)
            return
        # An answer that begins like a call without its mark is a call.
        for place, name in enumerate(self.names):
            yield f"BARE{place}: {spell(form.opening + form.name(name) + form.middle)}"
        yield f"bare: {' | '.join(f'BARE{place} rest{place}' for place in places)}"
        yield f"start: bare {more} | {several}"
        yield text_but(*others, *(f"BARE{place}" for place in places))


class ToolForm(Frozen):
    """Tools, and the form in which a model calls them, after a preface if there is one."""

    tools: Tools
    form: CallForm
    tokenizer: Tokenizer
    preface: Preface | None = None

    def constraint(self) -> Constraint:
        """Return the grammar of answers."""
        rules = "\n".join(self.tools.rules(self.form, self.tokenizer, self.preface))
        return Constraint("lark", rules, "tools", self.preface)

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
