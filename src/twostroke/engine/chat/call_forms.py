"""The forms in which models write tool calls: marks, and the text between them."""

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
    """Which answers count as tool calls although the model left out the call marks.

    Such an answer begins with a JSON object that names a function: ALL of these answers, only
    FENCED ones (in a Markdown fence), or NONE.
    """

    ALL = "all"
    FENCED = "fenced"  # only objects in a Markdown fence
    NONE = "none"


class CallForm(Frozen, kw_only=True):
    """The form in which a model writes tool calls.

    Calls are: `begin`; head, name, middle, arguments, tail of each call; `end`.

    Attributes:
        mark: the first text of calls; `begin` or `head` starts with it.
        begin: the text before the first call.
        head: the text before the name of a call.
        id_mark: the text between the name and an id, if the form has ids.
        middle: the text before the arguments, which are a JSON object.
        tail: the text after the arguments.
        between: the text between two calls.
        end: the text after the last call.
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
        """The text that a model writes from the first call mark up to the first call's name."""
        return f"{self.begin}{self.head}"

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All texts in this form of tool calls that may be special tokens of the vocabulary."""
        return tuple(filter(None, (self.mark, self.id_mark, *self.marks)))

    @property
    def is_list(self) -> bool:
        """Whether the calls of an answer share one beginning and one end."""
        return bool(self.begin)

    def name(self, name: str) -> str:
        """Return a function's name as calls in this form have it, perhaps as a JSON string."""
        return json.dumps(name) if self.is_quoted else name

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Write tool calls in this form, from their names and the JSON of their arguments."""
        written = [
            f"{self.head}{self.name(name)}{self.middle}{arguments}{self.tail}"
            for name, arguments in calls
        ]
        return f"{self.begin}{self.between.join(written)}{self.end}"

    def example(self) -> str:
        """Return an example of a tool call in this form, which a prompt shows to the model."""
        return self.write([("the function's name", '{"the argument\'s name": "its value"}')])

    def fits(self, before: str, after: str) -> bool:
        """Whether a test conversation's tool call was rendered in this form.

        Used to find the form that a chat template writes. `before` is the rendered answer up to the
        function's name, `after` the text from the end of the name, perhaps with more text after the
        call. Blanks are ignored.
        """
        quote = '"' if self.is_quoted else ""
        opening = _without_blanks(self.opening + quote)
        following = _without_blanks(quote + (self.id_mark or self.middle))
        before = _without_blanks(before)
        after = _without_blanks(after)
        if self.is_bare:
            begins = before.removeprefix(self.mark) == opening
        else:
            begins = before.endswith(opening)
        return begins and after.startswith(following) and _without_blanks(self.end) in after

    def is_known_to(self, tokenizer: Tokenizer) -> bool:
        """Whether a model's vocabulary has the special tokens of this form of tool calls.

        Used to guess the form of calls if the chat template writes no calls.
        """
        return self.has_own_tokens and all(tokenizer.find(mark) for mark in self.all_marks)

    def is_shown(self, text: str) -> bool:
        """Whether a rendered prompt shows this form of tool calls to the model, in instructions."""
        return not self.is_bare and _without_blanks(self.opening) in _without_blanks(text)


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

# A model has the first form that fits the calls in its template's output.
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


def _without_blanks(text: str) -> str:
    """Return a text without its blanks, to compare rendered texts."""
    return "".join(text.split())
