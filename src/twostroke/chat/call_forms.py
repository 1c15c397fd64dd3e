"""The forms in which models write calls of tools: their marks, and the text between them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.tokenize import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How calls are written: `begin`, then each as head, name, middle, arguments and tail, `end`.

    Attributes:
        mark: the text that tells that calls begin; the first in `begin` and `head`.
        begin: before the first call.
        head: before a call's name.
        id_mark: where an id follows the name, the text between.
        middle: before the arguments, which are a JSON object.
        tail: after them.
        between: between a call and the next.
        end: after the last call.
        is_quoted: whether the name is a JSON string.
        is_bare: whether calls are written without `mark`, as the whole answer.
        marks: further texts among these that a vocabulary may have as special tokens.
        has_own_tokens: whether a vocabulary that has them all is that of a model with this form.
    """

    mark: str
    begin: str = ""
    head: str
    id_mark: str = ""
    middle: str
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
        """Return what shows a model how calls are written."""
        return self.write([("the function's name", '{"the argument\'s name": "its value"}')])

    def fits(self, before: str, after: str) -> bool:
        """Whether these texts, but for blanks, surround the name of an answer's only call.

        `before` is what its answer begins with, `after` goes on to whatever follows the call.
        """
        quote = '"' if self.is_quoted else ""
        opening, follows = _bare(self.opening + quote), _bare(quote + (self.id_mark or self.middle))
        bare = _bare(before)
        begins = bare.removeprefix(self.mark) == opening if self.is_bare else bare.endswith(opening)
        return begins and _bare(after).startswith(follows) and _bare(self.end) in _bare(after)

    def is_known_to(self, tokenizer: Tokenizer) -> bool:
        """Whether a vocabulary has tokens that are of use for this form only."""
        return self.has_own_tokens and all(tokenizer.find(mark) for mark in self.all_marks)

    def is_shown(self, text: str) -> bool:
        """Whether a prompt tells the model of this form."""
        return not self.is_bare and _bare(self.opening) in _bare(text)


HERMES: Final = CallForm(
    mark="<tool_call>",
    head='<tool_call>\n{"name": ',
    middle=', "arguments": ',
    tail="}\n</tool_call>",
    marks=("</tool_call>",),
)
_LLAMA: Final = CallForm(
    mark="<|python_tag|>",
    head='{"name": ',
    middle=', "parameters": ',
    between="; ",
    is_bare=True,
)
_MISTRAL_LIST: Final = CallForm(
    mark="[TOOL_CALLS]",
    begin="[TOOL_CALLS] [",
    head='{"name": ',
    middle=', "arguments": ',
    between=", ",
    end="]",
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
_MISTRAL_IDS: Final = CallForm(
    mark="[TOOL_CALLS]",
    head="[TOOL_CALLS]",
    id_mark="[CALL_ID]",
    middle="[ARGS]",
    tail="",
    between="",
    is_quoted=False,
    marks=("[ARGS]",),
)
_PHI: Final = CallForm(
    mark="<|tool_call|>",
    begin="<|tool_call|>[",
    head='{"name": ',
    middle=', "arguments": ',
    between=", ",
    end="]<|/tool_call|>",
    marks=("<|/tool_call|>",),
    has_own_tokens=True,
)
_PHI_SINGLE: Final = CallForm(
    mark="<|tool_call|>",
    head='<|tool_call|>{"name": ',
    middle=', "arguments": ',
    tail="}<|/tool_call|>",
    between="",
    marks=("<|/tool_call|>",),
)
_GRANITE: Final = CallForm(
    mark="<|tool_call|>",
    begin="<|tool_call|>[",
    head='{"name": ',
    middle=', "arguments": ',
    between=", ",
    end="]",
)
_DEEPSEEK_MARKS: Final = (
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_DEEPSEEK_FENCED: Final = CallForm(
    mark="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
    is_quoted=False,
    marks=_DEEPSEEK_MARKS,
)
_DEEPSEEK: Final = CallForm(
    mark="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    between="",
    end="<｜tool▁calls▁end｜>",
    is_quoted=False,
    marks=_DEEPSEEK_MARKS,
)

# The first that fits what a template writes is the model's.
FORMS: Final[dict[str, CallForm]] = {
    "hermes": HERMES,
    "mistral list": _MISTRAL_LIST,
    "mistral with ids": _MISTRAL_IDS,
    "mistral": _MISTRAL,
    "phi": _PHI,
    "phi without lists": _PHI_SINGLE,
    "granite": _GRANITE,
    "deepseek in fences": _DEEPSEEK_FENCED,
    "deepseek": _DEEPSEEK,
    "llama": _LLAMA,
}


def _bare(text: str) -> str:
    return "".join(text.split())
