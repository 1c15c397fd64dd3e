"""The forms in which models write calls of tools: their marks, and the text between them."""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.model.tokenizer import Tokenizer


class Unmarked(Enum):
    """Which calls without their marks are calls, at the beginning of an answer."""

    ALL = "all"
    FENCED = "fenced"  # with a fence of Markdown in place of the marks
    NONE = "none"


class CallForm(Frozen, kw_only=True):
    """How calls are written: `begin`, then each as head, name, middle, arguments and tail, `end`.

    Attributes:
        mark: the first text of calls; `begin` or `head` starts with it.
        begin: before the first call.
        head: before a call's name.
        id_mark: between the name and an id, where the form has ids.
        middle: before the arguments, which are a JSON object.
        tail: after them.
        between: between a call and the next.
        end: after the last call.
        is_quoted: whether the name is a JSON string.
        is_bare: whether calls are written without `mark`, as the whole answer.
        marks: other texts of the form that a vocabulary may have as special tokens.
        has_own_tokens: whether only models with this form have all these tokens.
    """

    mark: str
    begin: str = ""
    head: str = '{"name": '
    id_mark: str = ""
    middle: str = ', "arguments": '
    tail: str = "}"
    between: str = "\n"
    end: str = ""
    is_quoted: bool = True
    is_bare: bool = False
    marks: tuple[str, ...] = ()
    has_own_tokens: bool = False

    @property
    def opening(self) -> str:
        """The text before the first call's name."""
        return f"{self.begin}{self.head}"

    @property
    def all_marks(self) -> tuple[str, ...]:
        """Every text that may be a special token."""
        return tuple(filter(None, (self.mark, self.id_mark, *self.marks)))

    @property
    def is_list(self) -> bool:
        """Whether several calls share one beginning and one end."""
        return bool(self.begin)

    def name(self, name: str) -> str:
        """Return a function's name as it is written."""
        return json.dumps(name) if self.is_quoted else name

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return calls as a model would have written them, from names and JSON."""
        written = [
            f"{self.head}{self.name(name)}{self.middle}{arguments}{self.tail}"
            for name, arguments in calls
        ]
        return f"{self.begin}{self.between.join(written)}{self.end}"

    def example(self) -> str:
        """Return an example that shows a model how calls are written."""
        return self.write([("the function's name", '{"the argument\'s name": "its value"}')])

    def fits(self, before: str, after: str) -> bool:
        """Whether the name of an answer's only call is between these texts, ignoring blanks.

        `before` begins with the answer; `after` may go on after the call.
        """
        quote = '"' if self.is_quoted else ""
        opening, follows = _bare(self.opening + quote), _bare(quote + (self.id_mark or self.middle))
        bare = _bare(before)
        begins = bare.removeprefix(self.mark) == opening if self.is_bare else bare.endswith(opening)
        return begins and _bare(after).startswith(follows) and _bare(self.end) in _bare(after)

    def is_known_to(self, tokenizer: Tokenizer) -> bool:
        """Whether a vocabulary has tokens that only this form uses."""
        return self.has_own_tokens and all(tokenizer.find(mark) for mark in self.all_marks)

    def is_shown(self, text: str) -> bool:
        """Whether a prompt shows the model this form."""
        return not self.is_bare and _bare(self.opening) in _bare(text)


HERMES: Final = CallForm(
    mark="<tool_call>",
    head='<tool_call>\n{"name": ',
    tail="}\n</tool_call>",
    marks=("</tool_call>",),
)
_MISTRAL: Final = CallForm(
    mark="[TOOL_CALLS]",
    head="[TOOL_CALLS]",
    middle="[ARGS]",
    tail="",
    between="",
    is_quoted=False,
    marks=("[ARGS]",),
)
_GRANITE: Final = CallForm(mark="<|tool_call|>", begin="<|tool_call|>[", between=", ", end="]")
_DEEPSEEK: Final = CallForm(
    mark="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    between="",
    end="<｜tool▁calls▁end｜>",
    is_quoted=False,
    marks=(
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
)

# The first that fits the calls that a template writes is the model's.
FORMS: Final[dict[str, CallForm]] = {
    "hermes": HERMES,
    "mistral list": CallForm(mark="[TOOL_CALLS]", begin="[TOOL_CALLS] [", between=", ", end="]"),
    "mistral with ids": replace(_MISTRAL, id_mark="[CALL_ID]"),
    "mistral": _MISTRAL,
    "phi": replace(_GRANITE, end="]<|/tool_call|>", marks=("<|/tool_call|>",), has_own_tokens=True),
    "phi without lists": CallForm(
        mark="<|tool_call|>",
        head='<|tool_call|>{"name": ',
        tail="}<|/tool_call|>",
        between="",
        marks=("<|/tool_call|>",),
    ),
    "granite": _GRANITE,
    "deepseek in fences": replace(
        _DEEPSEEK,
        head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        tail="\n```<｜tool▁call▁end｜>",
        between="\n",
    ),
    "deepseek": _DEEPSEEK,
    "llama": CallForm(mark="<|python_tag|>", middle=', "parameters": ', between="; ", is_bare=True),
}


def _bare(text: str) -> str:
    """Return a text without blanks."""
    return "".join(text.split())
