"""The form of answers that may call tools: their grammar, and how it is relaxed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.engine.chat.call_forms import Unmarked
from twostroke.engine.chat.call_grammar import CallGrammar

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.constraint import ReasoningSection
    from twostroke.engine.chat.call_forms import CallForm
    from twostroke.engine.chat.tools import Tools
    from twostroke.model.tokenizer import Tokenizer


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
