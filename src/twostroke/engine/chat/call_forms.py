"""The forms in which models write tool calls, such as JSON between `<tool_call>` tags."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.engine.chat import harmony
from twostroke.engine.structured_output.notations import (
    JSON,
    TYPE,
    JsonNotation,
    LiteralNotation,
    Notation,
    TagNotation,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twostroke.model.tokenizer import Tokenizer


# Characters that stand for the number of a call, from 0 or from 1, and for its id.
INDEX: Final = "\0"
NUMBER: Final = "\1"
ID: Final = "\2"
# With patterns of their characters.
PLACEHOLDERS: Final = {INDEX: r"\d", NUMBER: r"\d", ID: r"[\w.:\-]"}


class Unmarked(Enum):
    """Which answers count as tool calls although they lack the call mark, such as `<tool_call>`.

    Only answers that begin with a JSON object that names a function can count: ALL of these
    answers, only FENCED ones (in a Markdown fence), or NONE.
    """

    ALL = "all"
    FENCED = "fenced"  # only objects in a Markdown fence
    NONE = "none"


class CallForm(Frozen, kw_only=True):
    """The form in which a model writes tool calls.

    The calls of an answer are written as `begin`, then each call with `between` between the calls,
    then `end`. A call is `head`, the function's name, `middle`, the arguments and `tail`.

    Attributes:
        mark: the call mark, the text by which calls are recognized, such as `<tool_call>`; `begin`
            or `head` starts with it.
        begin: the text before the first call.
        head: the text before the name of a call. `head` and `middle` may contain one of
            `PLACEHOLDERS`.
        name_prefix: a prefix that calls add to a function's name, such as `functions.`.
        id_mark: the text between the name and an id, if the form has ids.
        middle: the text before the arguments.
        notation: how the arguments are written.
        tail: the text after the arguments.
        between: the text between two calls.
        end: the text after the last call.
        is_quoted: whether the name is a JSON string.
        is_bare: whether calls are written without `mark`, as the whole answer.
        loose_begin: a part at the end of `head` that some models write without the part before it.
        marks: further texts of the form that may be special tokens of a vocabulary.
        described_as: words in a prompt's instructions that show that the model uses this form.
        has_own_tokens: whether the form can be recognized by its special tokens: no model with
            another form has all of them.
        has_channels: whether a call is a message in a channel (`harmony.py`).
    """

    mark: str
    begin: str = ""
    head: str = '{"name": '
    name_prefix: str = ""
    id_mark: str = ""
    middle: str = ', "arguments": '
    notation: Notation = JSON
    tail: str = "}"
    between: str = "\n"
    end: str = ""
    is_quoted: bool = True
    is_bare: bool = False
    loose_begin: str = ""
    marks: tuple[str, ...] = ()
    described_as: str = ""
    has_own_tokens: bool = False
    has_channels: bool = False

    @property
    def opening(self) -> str:
        """The text that a model writes from the first call mark up to the first call's name."""
        return f"{self.begin}{self.head}"

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All texts in this form of tool calls that may be special tokens of the vocabulary."""
        return tuple(filter(None, (self.mark, self.id_mark, *self.marks, *self.notation.marks)))

    @property
    def has_json(self) -> bool:
        """Whether arguments are written as JSON objects."""
        return isinstance(self.notation, JsonNotation)

    @property
    def is_list(self) -> bool:
        """Whether the calls of an answer share one beginning and one end."""
        return bool(self.begin)

    def name(self, name: str) -> str:
        """Return a function's name as calls contain it: as a JSON string, or with a prefix."""
        return json.dumps(name) if self.is_quoted else self.name_prefix + name

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Write tool calls in this form, from their names and the JSON of their arguments."""
        written = []
        for index, (name, arguments) in enumerate(calls):
            head, middle = (_with_number(text, index) for text in (self.head, self.middle))
            values = self._arguments(arguments)
            written.append(f"{head}{self.name(name)}{middle}{values}{self.tail}")
        return f"{self.begin}{self.between.join(written)}{self.end}"

    def _arguments(self, arguments: str) -> str:
        """Return arguments in the form's notation; JSON that is no object stays as it is."""
        if self.has_json:
            return arguments
        try:
            values = json.loads(arguments)
        except ValueError:
            return arguments
        return self.notation.write(values) if isinstance(values, dict) else arguments

    def example(self) -> str:
        """Return an example of a tool call in this form, which a prompt shows to the model."""
        return self.write([("the function's name", '{"the argument\'s name": "its value"}')])

    def fitted(
        self, prompt: str, answer: str, after: str, arguments: Mapping[str, str]
    ) -> CallForm | None:
        """Return this form with a chat template's white space; None for a template of another form.

        Used to find the form that a chat template writes, from a test conversation that ends with
        a call.

        Args:
            prompt: the rendered conversation up to the name of the call.
            answer: the part of `prompt` from the begin of the answer with the call.
            after: the text from the end of the name, perhaps with more text after the call.
            arguments: the arguments of the call.
        """
        if self.has_json:
            before = answer if self.is_bare else prompt
            fits = json.dumps(arguments) in after and self._fits(before, after)
            return self if fits else None
        if isinstance(self.notation, LiteralNotation):
            before = answer.lstrip().removeprefix(self.mark) if self.is_bare else prompt
            return _fit_literals(self, self.notation, before, after, arguments)
        return _fit(self, prompt, after, arguments)

    def _fits(self, before: str, after: str) -> bool:
        """Whether a rendered call with JSON arguments has this form; white space is ignored.

        `before` is the rendered text up to the call's name, `after` the text from the end of the
        name.
        """
        quote = '"' if self.is_quoted else ""
        opening = _any_index(_without_blanks(self.opening + quote + self.name_prefix))
        following = _any_index(_without_blanks(quote + (self.id_mark or self.middle)))
        before = _without_blanks(before)
        after = _without_blanks(after)
        if self.is_bare:
            begins = re.fullmatch(opening, before.removeprefix(self.mark))
        else:
            begins = re.search(rf"{opening}\Z", before)
        has_end = _without_blanks(self.end) in after
        return has_end and begins is not None and re.match(following, after) is not None

    def is_known_to(self, tokenizer: Tokenizer) -> bool:
        """Whether a model's vocabulary has the special tokens of this form of tool calls.

        This tells the form of calls if the chat template writes no calls.
        """
        return self.has_own_tokens and all(tokenizer.find(mark) for mark in self.all_marks)

    def is_shown(self, text: str) -> bool:
        """Whether a rendered prompt shows this form of tool calls to the model, in instructions."""
        if self.is_bare:
            return False
        prompt = _without_blanks(text)
        if self.described_as and _without_blanks(self.described_as) in prompt:
            return True
        parts = [self.opening]
        if isinstance(self.notation, TagNotation):
            parts.append(self.notation.key_begin)
        patterns = (_any_index(_without_blanks(part)) for part in parts)
        return all(re.search(pattern, prompt) for pattern in patterns)


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
_GRANITE: Final = CallForm(
    mark="<|tool_call|>",
    begin="<|tool_call|>[",
    between=", ",
    end="]",
    described_as="<|tool_call|> followed by a JSON list",  # of Granite 3.3
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
    marks=(
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
)

_TAGS: Final = CallForm(  # Qwen3-Coder, Qwen 3.5, Nemotron 3, Step
    mark="<tool_call>",
    head="<tool_call>\n<function=",
    middle=">\n",
    notation=TagNotation("<parameter=", ">\n", "\n</parameter>\n"),
    tail="</function>\n</tool_call>",
    is_quoted=False,
    loose_begin="<function=",
    marks=("</tool_call>",),
)
_PAIR_TAGS: Final = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_PAIRS: Final = CallForm(  # GLM 4.5 and later, Laguna, Ling
    mark="<tool_call>",
    head="<tool_call>",
    middle="\n",
    notation=TagNotation(
        "<arg_key>",
        "</arg_key>\n<arg_value>",
        "</arg_value>\n",
        special_texts=_PAIR_TAGS,
    ),
    tail="</tool_call>",
    is_quoted=False,
    marks=("</tool_call>",),
)
_INVOKE: Final = CallForm(  # MiniMax M2
    mark="<minimax:tool_call>",
    begin="<minimax:tool_call>\n",
    head='<invoke name="',
    middle='">\n',
    notation=TagNotation('<parameter name="', '">', "</parameter>\n"),
    tail="</invoke>\n",
    between="",
    end="</minimax:tool_call>",
    is_quoted=False,
    marks=("</minimax:tool_call>",),
)


def _dsml(prefix: str, element: str) -> CallForm:
    """Return a form of `<invoke>` elements, in which each value says whether it is a string."""
    return replace(
        _INVOKE,
        mark=f"<{prefix}{element}>",
        begin=f"<{prefix}{element}>\n",
        head=f'<{prefix}invoke name="',
        notation=TagNotation(
            f'<{prefix}parameter name="',
            '" string="true">',
            f"</{prefix}parameter>\n",
            other_key_end='" string="false">',
            special_texts=(prefix,),
        ),
        tail=f"</{prefix}invoke>\n",
        end=f"</{prefix}{element}>",
        marks=(),
    )


_KIMI: Final = CallForm(
    mark="<|tool_calls_section_begin|>",
    begin="<|tool_calls_section_begin|>",
    head="<|tool_call_begin|>",
    name_prefix="functions.",
    middle=f":{INDEX}<|tool_call_argument_begin|>",
    tail="<|tool_call_end|>",
    between="",
    end="<|tool_calls_section_end|>",
    is_quoted=False,
    marks=(
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    has_own_tokens=True,
)
_COHERE: Final = CallForm(
    mark="<|START_ACTION|>",
    begin="<|START_ACTION|>[\n    ",
    head=f'{{"tool_call_id": "{INDEX}", "tool_name": ',
    middle=', "parameters": ',
    between=",\n    ",
    end="\n]<|END_ACTION|>",
    marks=("<|END_ACTION|>",),
    has_own_tokens=True,
)
_PYTHON: Final = LiteralNotation(
    end=")",
    equals="=",
    colon=": ",
    separator=", ",
    quotes=("'", '"'),
    has_escapes=True,
    has_quoted_names=True,
    words=("True", "False", "None"),
)
_KEYWORDS: Final = CallForm(  # LFM2 and LFM2.5
    mark="<|tool_call_start|>",
    begin="<|tool_call_start|>[",
    head="",
    middle="(",
    notation=_PYTHON,
    tail=")",
    between=", ",
    end="]<|tool_call_end|>",
    is_quoted=False,
    marks=("<|tool_call_end|>",),
    has_own_tokens=True,
)
_GEMMA: Final = CallForm(  # Gemma 4
    mark="<|tool_call>",
    head="<|tool_call>call:",
    middle="{",
    notation=LiteralNotation(
        end="}",
        equals=":",
        colon=":",
        separator=",",
        quotes=('<|"|>',),
        has_escapes=False,
        has_quoted_names=False,
        words=("true", "false", "null"),
        is_sorted=True,
    ),
    tail="}<tool_call|>",
    between="",
    is_quoted=False,
    marks=("<tool_call|>",),
    has_own_tokens=True,
)


def _pairs_in_list(suffix: str) -> CallForm:
    """Return Hy3's form of tool calls, whose tags may have a suffix."""
    names = ("tool_call", "tool_sep", "arg_key", "arg_value")
    call, separator, key, value = (f"{name}{suffix}" for name in names)
    texts = (f"<{key}>", f"</{key}>", f"<{value}>", f"</{value}>", f"<{separator}>")
    return replace(
        _PAIRS,
        mark=f"<tool_calls{suffix}>",
        begin=f"<tool_calls{suffix}>\n",
        head=f"<{call}>",
        middle=f"<{separator}>\n",
        notation=TagNotation(
            f"<{key}>", f"</{key}>\n<{value}>", f"</{value}>\n", special_texts=texts
        ),
        tail=f"</{call}>\n",
        between="",
        end=f"</tool_calls{suffix}>",
        marks=(f"<{call}>", f"</{call}>", f"</tool_calls{suffix}>"),
    )


HARMONY: Final = CallForm(
    mark=harmony.CHANNEL,
    head=" to=functions.",
    middle=f"{harmony.CHANNEL}commentary json{harmony.MESSAGE}",
    tail=harmony.CALL,
    between="",
    is_quoted=False,
    marks=harmony.MARKS,
    has_channels=True,
)

# The forms that `CallReader` reads, all but `HARMONY`. A model has the first form that fits the
# calls in its template's output.
FORMS: Final[dict[str, CallForm]] = {
    "hermes": HERMES,
    "mistral list": CallForm(mark="[TOOL_CALLS]", begin="[TOOL_CALLS] [", between=", ", end="]"),
    "mistral with ids": replace(_MISTRAL, id_mark="[CALL_ID]"),
    "mistral": _MISTRAL,
    "phi": replace(
        _GRANITE,
        end="]<|/tool_call|>",
        marks=("<|/tool_call|>",),
        described_as="",
        has_own_tokens=True,
    ),
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
    "tags": _TAGS,
    "seed": replace(
        _TAGS,
        mark="<seed:tool_call>",
        head="<seed:tool_call>\n<function=",
        notation=TagNotation("<parameter=", ">", "</parameter>\n"),
        tail="</function>\n</seed:tool_call>",
        marks=("</seed:tool_call>",),
    ),
    "pairs": _PAIRS,
    "pairs in a list": _pairs_in_list(""),
    "hy3": _pairs_in_list(":opensource"),
    "invoke": _INVOKE,
    "dsml": _dsml("｜DSML｜", "function_calls"),  # DeepSeek V3.2
    "dsml tools": _dsml("｜DSML｜", "tool_calls"),  # DeepSeek V4
    "gcml": _dsml("｜GCML｜", "tool_calls"),  # GigaChat 3.5
    "atem": replace(  # Muse Glimmer
        _INVOKE,
        mark="<atem:function_calls>",
        begin="<atem:function_calls>\n",
        head='<atem:invoke name="',
        notation=TagNotation('<atem:parameter name="', '">', "</atem:parameter>\n"),
        tail="</atem:invoke>\n",
        end="</atem:function_calls>",
        marks=("</atem:function_calls>",),
    ),
    "keywords": _KEYWORDS,
    "keywords in lines": replace(  # Olmo 3
        _KEYWORDS,
        mark="<function_calls>",
        begin="<function_calls>\n",
        between="\n",
        end="\n</function_calls>",
        marks=("</function_calls>",),
        has_own_tokens=False,
    ),
    "bare keywords": replace(  # Llama 4
        _KEYWORDS,
        mark="<|python_start|>",
        begin="[",
        end="]",
        is_bare=True,
        marks=(),
        has_own_tokens=False,
    ),
    "params": CallForm(  # MiniCPM5
        mark='<function name="',
        head='<function name="',
        middle='">',
        notation=TagNotation(
            '<param name="',
            '">',
            "</param>",
            has_cdata=True,
            special_texts=("<param", "</param>"),
        ),
        tail="</function>",
        is_quoted=False,
        marks=("<function", "</function>"),
    ),
    "xtml": CallForm(  # Kimi K3
        mark="<|open|>tools<|sep|>",
        begin="<|open|>tools<|sep|>",
        head='<|open|>call tool="',
        middle=f'" index="{NUMBER}"<|sep|>',
        notation=TagNotation(
            '<|open|>argument key="',
            '" type="string"<|sep|>',
            "<|close|>argument<|sep|>",
            other_key_end=f'" type="{TYPE}"<|sep|>',
            special_texts=("<|open|>", "<|sep|>", "<|close|>"),
        ),
        tail="<|close|>call<|sep|>",
        between="",
        end="<|close|>tools<|sep|>",
        is_quoted=False,
    ),
    "gemma": _GEMMA,
    "kimi": _KIMI,
    "cohere": _COHERE,
    "nemotron list": CallForm(
        mark="<TOOLCALL>", begin="<TOOLCALL>[", between=", ", end="]</TOOLCALL>"
    ),
    "list": CallForm(  # Apriel
        mark="<tool_calls>",
        begin="<tool_calls>[",
        between=", ",
        end="]</tool_calls>",
        marks=("</tool_calls>",),
    ),
    "lines": CallForm(  # MiniMax M1
        mark="<tool_calls>",
        begin="<tool_calls>\n",
        end="\n</tool_calls>",
        marks=("</tool_calls>",),
    ),
    "apertus": CallForm(
        mark="<|tools_prefix|>",
        begin="<|tools_prefix|>[",
        head="{",
        middle=": ",
        between=", ",
        end="]<|tools_suffix|>",
        marks=("<|tools_suffix|>",),
        has_own_tokens=True,
    ),
    "functions": CallForm(  # functionary 3.1
        mark="<function=",
        head="<function=",
        middle=">",
        tail="</function>",
        between="",
        is_quoted=False,
    ),
    "solar": CallForm(
        mark="<|tool_calls|>",
        begin="<|tool_calls|>",
        head=f"<|tool_call:begin|>{ID}<|tool_call:name|>",
        middle="<|tool_call:args|>",
        tail="<|tool_call:end|>",
        between="",
        is_quoted=False,
        marks=(
            "<|tool_call:begin|>",
            "<|tool_call:name|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
        ),
        has_own_tokens=True,
    ),
    "functools": CallForm(mark="functools[", begin="functools[", between=", ", end="]"),
    "gigachat": CallForm(
        mark="<|function_call|>",
        head='<|function_call|>{"name": ',
        between="",
        has_own_tokens=True,
    ),
    "gigachat message": CallForm(  # GigaChat 3.0
        mark="<|message_sep|>",
        head='<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": ',
        between="",
        marks=("<|role_sep|>",),
    ),
    "llama": CallForm(mark="<|python_tag|>", middle=', "parameters": ', between="; ", is_bare=True),
}


def _fit(form: CallForm, before: str, after: str, arguments: Mapping[str, str]) -> CallForm | None:
    """Return a form with tags, with the white space of a rendered call; None if it does not fit.

    `before` and `after` are the texts before and after the call's name, `arguments` the call's
    arguments. The call has one argument. The call may have other white space than the form, or
    none.
    """
    notation = form.notation
    assert isinstance(notation, TagNotation)
    [(name, value)] = arguments.items()
    parts: dict[str, Any] = {
        "begin": form.begin,
        "head": form.head,
        "middle": form.middle,
        "key_begin": notation.key_begin,
        "key_end": notation.key_end,
        "value_end": notation.value_end,
        "tail": form.tail,
        "end": form.end,
    }
    patterns = {part: _blank_pattern(part, text) for part, text in parts.items()}
    if form.end:
        patterns["tail"] = f"{patterns['tail'][:-1]}\\s*)"
    opening = re.search(rf"{patterns['begin']}{patterns['head']}\Z", before)
    closing = re.match(
        f"{patterns['middle']}{patterns['key_begin']}{re.escape(name)}{patterns['key_end']}"
        f"{re.escape(value)}{patterns['value_end']}{patterns['tail']}{patterns['end']}",
        after,
    )
    if opening is None or closing is None:
        return None
    fitted_parts = {**opening.groupdict(), **closing.groupdict()}
    if not PLACEHOLDERS.keys().isdisjoint(form.middle):
        fitted_parts["middle"] = form.middle
    keys = {part: fitted_parts[part] for part in ("key_begin", "key_end", "value_end")}
    frame = {part: fitted_parts[part] for part in parts if part not in keys}
    return replace(form, **frame, notation=replace(notation, **keys))


def _fit_literals(
    form: CallForm, notation: LiteralNotation, before: str, after: str, arguments: Mapping[str, str]
) -> CallForm | None:
    """Return a form with literals, with the white space and quotes of a rendered call.

    `before` and `after` are the texts before and after the call's name. None if the rendered call,
    which has one argument, is in another form.
    """
    [(name, value)] = arguments.items()
    frame = ("begin", "head", "middle", "tail", "end")
    patterns = {part: _blank_pattern(part, getattr(form, part)) for part in frame}
    if form.end:
        patterns["tail"] = f"{patterns['tail'][:-1]}\\s*)"
    quotes = "|".join(map(re.escape, notation.quotes))
    start = r"\A\s*" if form.is_bare else ""
    opening = re.search(rf"{start}{patterns['begin']}{patterns['head']}\Z", before)
    closing = re.match(
        rf"{patterns['middle']}{re.escape(name)}\s*{re.escape(notation.equals)}\s*"
        rf"(?P<quote>{quotes}){re.escape(value)}(?P=quote)\s*{patterns['tail']}{patterns['end']}",
        after,
    )
    if opening is None or closing is None:
        return None
    fitted_parts = {**opening.groupdict(), **closing.groupdict()}
    quote = fitted_parts.pop("quote")
    other_quotes = [other for other in notation.quotes if other != quote]
    return replace(form, **fitted_parts, notation=replace(notation, quotes=(quote, *other_quotes)))


def _blank_pattern(name: str, text: str) -> str:
    """Return a regular expression of a part of a form that accepts any white space.

    The match of the part becomes the group `name`. White space between two parts belongs to the
    first part.
    """
    words = r"\s*".join(map(_any_index, text.split()))
    before = r"\s*" if name == "value_end" else ""
    has_blanks_after = name in {"middle", "key_end", "value_end"} or (name == "begin" and text)
    after = r"\s*" if has_blanks_after else ""
    return f"(?P<{name}>{before}{words}{after})"


def _with_number(text: str, index: int) -> str:
    """Replace placeholders in a text by the number or the id of the call with this index."""
    text = text.replace(INDEX, str(index)).replace(NUMBER, str(index + 1))
    return text.replace(ID, f"call{index:06}")


def _any_index(text: str) -> str:
    """Return a regular expression of a text that accepts any number or id for a placeholder."""
    pattern = re.escape(text)
    for placeholder, character in PLACEHOLDERS.items():
        pattern = pattern.replace(re.escape(placeholder), f"{character}+")
    return pattern


def _without_blanks(text: str) -> str:
    """Return a text without its white space, to compare rendered texts."""
    return "".join(text.split())
