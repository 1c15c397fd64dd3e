"""Translates the regular expressions of tokenizer.json files from Oniguruma's syntax to `regex`'s.

`tokenizers` compiles them with Oniguruma in Ruby's syntax (https://github.com/kkos/oniguruma,
doc/RE). Most patterns mean the same in both. The differences cause no errors: `&&` in a class is an
intersection in Oniguruma and two characters in `regex`; `+` after `{1,3}` repeats once more in
Oniguruma and is possessive in `regex`. A pattern that `regex` would read as more than Oniguruma, or
that would take too much memory, is refused.
"""

from __future__ import annotations

import re
from typing import Final

import regex

_HEX: Final = "0-9A-Fa-f"
_WORD_IN_CLASS: Final = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}"
_WORD: Final = f"{_WORD_IN_CLASS}²³¹¼½¾"
_ESCAPES: Final = {
    "h": f"[{_HEX}]",
    "H": f"[^{_HEX}]",
    "w": f"[{_WORD}]",
    "W": f"[^{_WORD}]",
    "b": f"(?:(?<=[{_WORD}])(?![{_WORD}])|(?<![{_WORD}])(?=[{_WORD}]))",
    "B": f"(?:(?<=[{_WORD}])(?=[{_WORD}])|(?<![{_WORD}])(?![{_WORD}]))",
    "A": r"\A",
    "Z": r"(?=\n?\Z)",
    "z": r"\Z",
    "O": "(?s:.)",
    "N": r"[^\n]",
    "R": r"(?>\r\n|[\n-\r\x85\u2028\u2029])",
    "X": r"\X",
}
_ESCAPES_IN_CLASS: Final = {
    "h": _HEX,
    "H": f"[^{_HEX}]",
    "w": _WORD_IN_CLASS,
    "W": f"[^{_WORD_IN_CLASS}]",
    "b": r"\x08",
}
# Escapes with the same meaning inside and outside a class. Other letters stand for themselves.
_ESCAPES_ANYWHERE: Final = {
    **{letter: f"\\{letter}" for letter in "tnrfavsSdD"},
    "e": r"\x1b",
}
_REFUSED_ESCAPES: Final = "gGKyYMcCxuo"  # c, x, u and o if not followed by a valid number
# Classes that `regex` defines differently, as members of a class.
_NAMED_CLASSES: Final = {
    "digit": r"\p{Nd}",
    "word": _WORD_IN_CLASS,
    "xdigit": _HEX,
    "alnum": r"\p{Alphabetic}\p{Nd}",
    "punct": r"\p{P}\p{S}",
}
_NAMED_PROPERTIES: Final = {**_NAMED_CLASSES, "punct": r"\p{P}"}
_PROPERTY: Final = re.compile(r"\\([pP])\{(\^?)([^{}]*)\}")
_POSIX_CLASS: Final = re.compile(r"\[:(\^?)(\w+):\]")
_CODE: Final = re.compile(
    r"\\(?:x\{([0-9A-Fa-f]{1,8})\}|u([0-9A-Fa-f]{4})|x([0-7][0-9A-Fa-f])|x([0-9A-Fa-f])(?![0-9A-Fa-f])"
    r"|o\{([0-7]{1,11})\}|(?:c|C-)([@-_a-z]))"
)
_OCTAL: Final = re.compile(r"\\([0-7]{1,3})")
_DIGITS: Final = re.compile(r"\\([1-9]\d{0,4})")
_INTERVAL: Final = re.compile(r"\{(?:(\d+)(?:(,)(\d*))?|,(\d+))\}")
_OPTIONS: Final = re.compile(r"\(\?([imx]*)(?:-([imx]*))?([:)])")
_NAMED_GROUP: Final = re.compile(r"\(\?(?:<(\w+)>|'(\w+)')")
_REFERENCE: Final = re.compile(r"\\k(?:<(-?\w+)>|'(-?\w+)')")
_CONDITION: Final = re.compile(r"\(\?\((?:<(\w+)>|'(\w+)'|(\d{1,4}))\)")
_GROUPS: Final = ("(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>")
_COMMENT: Final = re.compile(r"\(\?#(?:[^\\)]|\\.)*\)", re.DOTALL)
_EXTENDED: Final = re.compile(r"(?:[ \t\n\r\f\v]|#[^\n]*(?:\n|\Z))+")
_OPERATORS: Final = "|~-"  # set operators in `regex`, if doubled
_EMPTY_CLASS, _FULL_CLASS = r"[^\x00-\U0010FFFF]", r"[\x00-\U0010FFFF]"
_MAX_LENGTH: Final = 1 << 15  # characters of a pattern
_MAX_REPETITIONS: Final = 100_000  # as in Oniguruma
_MAX_SIZE: Final = 200_000  # characters and classes of the expanded pattern: some 80 MB
_ESCAPE_SIZES: Final = {"w": 4, "W": 4, "b": 20, "B": 20}
_MAX_DEPTH: Final = 50  # groups, classes and repetitions inside each other


def compile_pattern(pattern: str, form: str = "{}") -> regex.Pattern[str]:
    """Compile an Oniguruma pattern of a tokenizer.json for Python's `regex` package.

    As in Oniguruma, `^` and `$` match at every line. `form` is a template in the syntax of `regex`;
    the translated pattern replaces its `{}`. Raises regex.error if the pattern is not valid or too
    large.
    """
    if len(pattern) > _MAX_LENGTH:
        raise regex.error(f"it has more than {_MAX_LENGTH} characters")
    translation = _Translation(pattern)
    text = form.replace("{}", translation.translate())
    # Version 1 has sets of classes.
    version = regex.VERSION1 if translation.has_sets else regex.VERSION0
    return regex.compile(text, regex.MULTILINE | version)


class _Translation:
    """Translates an Oniguruma pattern to `regex`'s syntax, from left to right.

    `has_sets` tells whether the pattern has nested or intersected character classes. Most methods
    read the next part of the pattern and return its translation. Some also return its size: the
    number of characters and classes that `regex` keeps in memory for the part, after it has
    expanded all repetitions. Patterns that are too large are refused.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0
        self._depth = 0
        self._num_groups = 0
        self._ignores_case = False
        self._names: list[str] = []
        # If a pattern has named groups, its other groups do not capture.
        self._has_names = _NAMED_GROUP.search(pattern) is not None
        self.has_sets = False

    def translate(self) -> str:
        """Return the translation of the whole Oniguruma pattern."""
        text, _ = self._alternatives(extended=False)
        if self._position < len(self._pattern):
            raise self._error("a parenthesis is closed that is not open")
        return text

    def _error(self, reason: str) -> regex.error:
        return regex.error(f"{reason}, at character {self._position}")

    def _next(self, size: int = 1) -> str:
        start = self._position
        self._position += size
        return self._pattern[start : self._position]

    def _at(self, text: str) -> bool:
        return self._pattern.startswith(text, self._position)

    def _take(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        match = expression.match(self._pattern, self._position)
        if match:
            self._position = match.end()
        return match

    def _deeper(self, levels: int = 1) -> None:
        self._depth += levels
        if self._depth > _MAX_DEPTH:
            raise self._error(f"its parts are nested more than {_MAX_DEPTH} levels deep")

    def _checked(self, size: int) -> int:
        if size > _MAX_SIZE:
            raise self._error("its repetitions multiply to too many parts")
        return size

    def _alternatives(self, *, extended: bool) -> tuple[str, int]:
        """Translate the alternatives (`a|b`) of a pattern or group, up to its end.

        Returns (translation, size). With `extended`, white space and comments in the pattern are
        ignored.
        """
        self._deeper()
        parts = []
        size = 0
        while self._position < len(self._pattern) and not self._at(")"):
            if self._take(_COMMENT) or (extended and self._take(_EXTENDED)):
                continue
            if self._at("|"):
                parts.append(self._next())
                continue
            part, part_size = self._repeated(extended=extended)
            parts.append(part)
            size = self._checked(size + part_size)
        self._depth -= 1
        return "".join(parts), size

    def _repeated(self, *, extended: bool) -> tuple[str, int]:
        """Translate the pattern's next part and its repetitions; return (translation, size)."""
        text, size = self._part(extended=extended)
        num_repetitions = 0
        while True:
            while self._take(_COMMENT) or (extended and self._take(_EXTENDED)):
                pass
            repetition, times = self._repetition()
            if not repetition:
                self._depth -= num_repetitions
                return text, size
            if num_repetitions:
                text = f"(?:{text})"
            text += repetition
            size = self._checked(size * (times + 1))
            num_repetitions += 1
            self._deeper()

    def _repetition(self) -> tuple[str, int]:
        """Translate a repetition such as `*` or `{2,3}`.

        Returns (translated text, copies of the repeated part that `regex` keeps). The text is empty
        if no repetition comes next.
        """
        if self._position < len(self._pattern) and self._pattern[self._position] in "?*+":
            text = self._next()
            return text + (self._next() if self._at("?") or self._at("+") else ""), 0
        interval = self._take(_INTERVAL)
        if not interval:
            return "", 0
        first_text, comma, last_text, only_last = interval.groups()
        numbers = [
            int(number)
            for number in (first_text, last_text, only_last)
            if number and len(number) < 9
        ]
        if len(numbers) < sum(map(bool, (first_text, last_text, only_last))) or max(numbers) > (
            _MAX_REPETITIONS
        ):
            raise self._error(f"it repeats a part more than {_MAX_REPETITIONS} times")
        if only_last is None and not comma:
            return f"{{{numbers[0]}}}", numbers[0]  # a `?` after it makes it optional
        first, last = (0, numbers[0]) if only_last else (numbers[0], (*numbers, None)[1])
        if last is not None and last < first:  # swapped limits make it possessive
            return f"{{{last},{first}}}+", first
        text = f"{{{first},{'' if last is None else last}}}"
        return text + (self._next() if self._at("?") else ""), max(numbers)

    def _part(self, *, extended: bool) -> tuple[str, int]:
        """Translate the pattern's next character, class or group; return (translation, size)."""
        char = self._pattern[self._position]
        if char == "(":
            return self._group(extended=extended)
        if char == "[":
            return self._class(), 1
        if char == "\\":
            size = _ESCAPE_SIZES.get(self._pattern[self._position + 1 : self._position + 2], 1)
            return self._escape(), size
        if char in "?*+" or _INTERVAL.match(self._pattern, self._position):
            raise self._error("nothing is there to repeat")
        if char == "^":  # not after the last line break of a text
            self._position += 1
            return r"(?:\A|(?<=\n)(?!\Z))", 1
        if char in ".$":
            return self._next(), 1
        return regex.escape(self._next(), special_only=False), 1

    def _group(self, *, extended: bool) -> tuple[str, int]:
        options = self._take(_OPTIONS)
        if options:
            on, off, end = options[1], options[2] or "", options[3]
            extended = (extended or "x" in on) and "x" not in off
            on, off = (flags.replace("m", "s").replace("x", "") for flags in (on, off))
            on, off = "".join(sorted({*on} - {*off})), "".join(sorted({*off}))
            opening = f"(?{on}{'-' * bool(off)}{off}:" if on or off else "(?:"
            ignored = self._ignores_case
            self._ignores_case = (ignored or "i" in on) and "i" not in off
            text, size = self._alternatives(extended=extended)
            self._ignores_case = ignored
            if end == ":":
                self._close()
            # Without a colon, options hold up to the end of the group, alternatives included.
            return f"{opening}{text})", size
        if condition := self._take(_CONDITION):
            number = self._reference(condition[1] or condition[2] or condition[3])
            opening = f"(?({number})"
        elif name := self._take(_NAMED_GROUP):
            self._names.append(name[1] or name[2])
            self._num_groups += 1
            opening = "("
        elif self._at("(?") or self._at("(*"):
            openings = [group for group in _GROUPS if self._at(group)]
            if not openings:
                raise self._error(f"this version cannot read its group {self._next(4)!r}")
            opening = self._next(len(openings[-1]))
        else:
            self._position += 1
            opening = "(?:" if self._has_names else "("
            self._num_groups += not self._has_names
        text, size = self._alternatives(extended=extended)
        self._close()
        return f"{opening}{text})", size

    def _close(self) -> None:
        if not self._at(")"):
            raise self._error("a group is not closed")
        self._position += 1

    def _reference(self, name: str) -> int:
        """Return the number of the group to which a reference (a name or number) points."""
        if re.fullmatch(r"-?[0-9]{1,4}", name):
            if self._has_names:
                raise self._error("a group is named by its number beside groups with names")
            number = int(name)
            number += self._num_groups + 1 if number < 0 else 0
            if number > 0:
                return number
        elif self._names.count(name) == 1:
            return self._names.index(name) + 1
        raise self._error(f"it refers to {name!r}, which is not the name of one group before it")

    def _escape(self) -> str:
        """Translate the next backslash escape of the pattern, outside a character class."""
        if reference := self._take(_REFERENCE):
            return rf"\g<{self._reference(reference[1] or reference[2])}>"
        digits = _DIGITS.match(self._pattern, self._position)
        if digits and (int(digits[1]) <= max(9, self._num_groups)):
            self._position = digits.end()
            return rf"\g<{self._reference(digits[1])}>"
        return self._escape_anywhere(_ESCAPES)

    def _escape_anywhere(self, translations: dict[str, str]) -> str:
        in_class = translations is _ESCAPES_IN_CLASS
        if code := self._take(_CODE):
            *numbers, octal, control = code.groups()
            if control:
                return self._code(ord(control) & 0x1F)
            hexadecimal = next((number for number in numbers if number), "")
            return self._code(int(octal, 8) if octal else int(hexadecimal, 16))
        if octal_code := self._take(_OCTAL):
            return self._code(int(octal_code[1], 8))
        if name := self._take(_PROPERTY):
            members = _NAMED_PROPERTIES.get(name[3].lower())
            if members:
                is_inverse = (name[1] == "P") != bool(name[2])
                if in_class:
                    return self._members(members, is_inverse=is_inverse)
                members = _WORD if members == _WORD_IN_CLASS else members
                return f"[{'^' * is_inverse}{members}]"
            # Outside a class, `\p{Lu}` is upper case even where case is ignored.
            return f"(?-i:{name[0]})" if self._ignores_case and not in_class else name[0]
        if self._position + 1 >= len(self._pattern):
            raise self._error("it ends with a backslash")
        char = self._next(2)[1]
        whole_pattern = translations.get(char) or _ESCAPES_ANYWHERE.get(char)
        if whole_pattern:
            self.has_sets |= in_class and whole_pattern.startswith("[")
            return whole_pattern
        if char in _REFUSED_ESCAPES:
            raise self._error(f"this version cannot read its escape \\{char}")
        return str(regex.escape(char, special_only=False))

    def _members(self, members: str, *, is_inverse: bool) -> str:
        """Return a character class with these translated members, in brackets.

        With `is_inverse`, return the class of all other characters.
        """
        self.has_sets |= is_inverse
        return f"[^{members}]" if is_inverse else members

    def _code(self, code: int) -> str:
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"{code:#x} is not the number of a character")
        return rf"\U{code:08x}"

    def _class(self) -> str:
        """Translate the character class that begins here, with the classes inside it."""
        self._deeper()
        self._position += 1
        inverse = self._next() if self._at("^") else ""
        operands: list[list[str]] = [[]]
        if self._at("]"):  # at the start, it is a plain character
            operands[-1].append("\\" + self._next())
        while not self._at("]"):
            if self._position >= len(self._pattern):
                raise self._error("a class is not closed")
            if self._at("&&"):
                self._position += 2
                operands.append([])
            else:
                operands[-1].append(self._member())
        self._position += 1
        self._depth -= 1
        if not all(operands):  # an intersection with an empty class is empty
            return _FULL_CLASS if inverse else _EMPTY_CLASS
        self.has_sets |= len(operands) > 1
        return f"[{inverse}{'&&'.join(map(''.join, operands))}]"

    def _member(self) -> str:
        """Translate the next member of a character class.

        A member is a character, an escape, a named class, or a class inside the class.
        """
        char = self._pattern[self._position]
        if char == "\\":
            return self._escape_anywhere(_ESCAPES_IN_CLASS)
        if posix_class := self._take(_POSIX_CLASS):
            members = _NAMED_CLASSES.get(posix_class[2])
            return (
                self._members(members, is_inverse=bool(posix_class[1]))
                if members
                else posix_class[0]
            )
        if char == "[":
            self.has_sets = True
            return self._class()
        if char in _OPERATORS and self._at(char * 2):
            return "\\" + self._next()
        return self._next()
