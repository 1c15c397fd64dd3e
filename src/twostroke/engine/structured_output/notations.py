"""Notations of tool call arguments: how a model writes the names and values of one call."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import regex

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

TYPE: Final = "\3"  # stands for the type of a value in the text before the value
# The types of values that are not strings, as such a text names them.
TYPES: Final = ("number", "boolean", "null", "object", "array")
CDATA: Final = ("<![CDATA[", "]]>")  # around a string of XML with any characters
PLAIN_XML: Final = regex.compile(r"[^<&\n]*+")
BLANKS: Final = " \t\r\n"  # around values that are not strings
# The literals of words, and Python's spelling of them, with their types.
_WORDS: Final = {
    "true": ("true", "boolean"),
    "false": ("false", "boolean"),
    "null": ("null", "null"),
    "True": ("true", "boolean"),
    "False": ("false", "boolean"),
    "None": ("null", "null"),
}
_NUMBER: Final = regex.compile(
    r"-?+(?:0|[1-9][0-9]*+)(?<fraction>(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+)"
)
_TYPES_BY_SIGN: Final = {"[": "array", "{": "object", '"': "string"}


class JsonNotation(Frozen, tag="json"):
    """Arguments that are written as one JSON object."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of the notation that a vocabulary may have as special tokens."""
        return ()

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return arguments in this notation."""
        return json.dumps(arguments, ensure_ascii=False)


class TagNotation(Frozen, tag="tags"):
    r"""Arguments that are written one after the other, with marks around each name and each value.

    An argument is: `key_begin`, name, `key_end`, value, `value_end`. A string is written as it is,
    other values as JSON. The closing mark, `value_end` without white space at its ends, cannot
    occur in a value.

    Attributes:
        key_begin: the text before the name, such as `<parameter=`.
        key_end: the text between the name and a value, up to and including white space that is not
            part of the value.
        value_end: the text after a value, such as `\n</parameter>\n`. White space at its begin is
            not part of the value.
        other_key_end: the text between the name and a value that is not a string, if it differs.
            Then the reader knows from this text whether a value is a string. It may contain `TYPE`,
            which stands for the name of the type.
        has_cdata: whether a string with `<`, `&` or a line break is written in a `CDATA` section.
        special_texts: parts of the marks that a vocabulary may have as special tokens.
    """

    key_begin: str
    key_end: str
    value_end: str
    other_key_end: str = ""
    has_cdata: bool = False
    special_texts: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of the notation that a vocabulary may have as special tokens."""
        return self.special_texts

    @property
    def lead(self) -> str:
        """The white space between the opening mark and a value."""
        return self.key_end[len(self.key_end.rstrip(BLANKS)) :]

    @property
    def trail(self) -> str:
        """The white space between a value and the closing mark."""
        return self.value_end[: len(self.value_end) - len(self.value_end.lstrip(BLANKS))]

    @property
    def closing_mark(self) -> str:
        """The text that ends a value."""
        return self.value_end.strip(BLANKS)

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return arguments in this notation."""
        return "".join(self._argument(name, value) for name, value in arguments.items())

    def _argument(self, name: str, value: object) -> str:
        if isinstance(value, str):
            return f"{self.key_begin}{name}{self.key_end}{self.text(value)}{self.value_end}"
        text = json.dumps(value, ensure_ascii=False)
        key_end = self.other_key_end.replace(TYPE, type_name(value)) or self.key_end
        return f"{self.key_begin}{name}{key_end}{text}{self.value_end}"

    def text(self, value: str) -> str:
        """Return a string in this notation, without the marks around it."""
        if self.has_cdata and not PLAIN_XML.fullmatch(value):
            return value.join(CDATA)
        return value


class LiteralNotation(Frozen, tag="literals"):
    """Arguments that are written as names and literals, such as Python's keyword arguments.

    Attributes:
        end: the character after the arguments, which ends them.
        equals: the text between the name and the value of an argument.
        colon: the text between a name and a value inside objects.
        separator: the text between two arguments, members or items.
        quotes: the texts that may surround a string; the first is used to write.
        has_escapes: whether strings have Python's escapes. Else they are written as they are.
        has_quoted_names: whether names inside objects are strings.
        words: how the notation writes true, false and null.
        is_sorted: whether arguments are sorted by their names.
    """

    end: str
    equals: str
    colon: str
    separator: str
    quotes: tuple[str, ...]
    has_escapes: bool
    has_quoted_names: bool
    words: tuple[str, str, str]
    is_sorted: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of the notation that a vocabulary may have as special tokens."""
        return tuple(quote for quote in self.quotes if len(quote) > 1)

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return arguments in this notation."""
        names = sorted(arguments, key=str.lower) if self.is_sorted else [*arguments]
        written = (f"{name}{self.equals}{self.literal(arguments[name])}" for name in names)
        return self.separator.join(written)

    def literal(self, value: object) -> str:
        """Return a value in this notation."""
        if isinstance(value, str):
            return self.quoted(value)
        if isinstance(value, dict):
            members = (
                f"{self.quoted(name) if self.has_quoted_names else name}{self.colon}"
                f"{self.literal(inner)}"
                for name, inner in value.items()
            )
            return f"{{{self.separator.join(members)}}}"
        if isinstance(value, list):
            return f"[{self.separator.join(map(self.literal, value))}]"
        if value is None or isinstance(value, bool):
            return self.words[(True, False, None).index(value)]
        return json.dumps(value)

    def quoted(self, text: str, quote: str = "") -> str:
        """Return a string in quotes; without `quote`, in the first of the notation's quotes."""
        quote = quote or self.quotes[0]
        if self.has_escapes:
            for character, escape in (("\\", "\\\\"), (quote, f"\\{quote}"), ("\n", "\\n")):
                text = text.replace(character, escape)
        return f"{quote}{text}{quote}"


Notation = JsonNotation | TagNotation | LiteralNotation

JSON: Final = JsonNotation()


def type_name(value: object) -> str:
    """Return the name of the JSON type of a value that is not a string; see `TYPES`."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "number"


def to_json_literal(text: str, types: frozenset[str]) -> str | None:
    """Return a text as JSON if it is a JSON literal of one of `types`; None if it is not.

    White space may surround the literal. `True`, `False` and `None` count as literals, too.
    """
    text = text.strip(BLANKS)
    if not text:
        return None
    if (sign_type := _TYPES_BY_SIGN.get(text[0])) is not None:
        return text if sign_type in types and _is_json(text) else None
    if text in _WORDS:
        literal, word_type = _WORDS[text]
        return literal if word_type in types else None
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    is_number = "number" in types or ("integer" in types and not match["fraction"])
    return text if is_number else None


def _is_json(text: str) -> bool:
    """Whether a text is JSON; numbers may have any number of digits."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> Any:
    raise ValueError(name)
