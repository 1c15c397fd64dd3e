"""Notations of tool call arguments: how a model writes the names and values of one call."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

BLANKS: Final = " \t\r\n"  # around values that are not strings


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
    other values as JSON. The closing mark, `value_end` without blanks at its ends, cannot occur in
    a value.

    Attributes:
        key_begin: the text before the name, such as `<parameter=`.
        key_end: the text between the name and a value. If it ends with blanks, they are no part of
            the value.
        value_end: the text after a value, such as `\n</parameter>\n`. If it begins with blanks,
            they are no part of the value.
        other_key_end: the text between the name and a value that is not a string, if it differs.
            Then a value's type does not depend on its schema.
        special_texts: parts of the marks that a vocabulary may have as special tokens.
    """

    key_begin: str
    key_end: str
    value_end: str
    other_key_end: str = ""
    special_texts: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of the notation that a vocabulary may have as special tokens."""
        return self.special_texts

    @property
    def lead(self) -> str:
        """The blanks between the opening mark and a value."""
        return self.key_end[len(self.key_end.rstrip(BLANKS)) :]

    @property
    def trail(self) -> str:
        """The blanks between a value and the closing mark."""
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
            return f"{self.key_begin}{name}{self.key_end}{value}{self.value_end}"
        text = json.dumps(value, ensure_ascii=False)
        key_end = self.other_key_end or self.key_end
        return f"{self.key_begin}{name}{key_end}{text}{self.value_end}"


Notation = JsonNotation | TagNotation

JSON: Final = JsonNotation()
