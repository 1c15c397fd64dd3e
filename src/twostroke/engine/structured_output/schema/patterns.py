"""Translates regular expressions of ECMA-262 for llguidance, and matches texts against them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.engine.structured_output.schema.automata import without_look_around

if TYPE_CHECKING:
    from collections.abc import Callable

    import jsonschema_rs

_SPACES: Final = (
    r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
    r"\x{feff}"
)
_SETS: Final = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_CONTROLS: Final = {"f": r"\x0c", "n": r"\n", "r": r"\r", "t": r"\t", "v": r"\x0b", "0": r"\x00"}
# An escape sequence, with a group for each form.
_ESCAPE: Final = re.compile(
    r"\\(?:(?P<set>[dDwWsS])|(?P<control>[fnrtv]|0(?![0-9]))|c(?P<letter>[A-Za-z])"
    r"|x(?P<hex2>[0-9A-Fa-f]{2})|u(?P<pair>[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2})"
    r"|u(?P<hex4>[0-9A-Fa-f]{4})|u\{(?P<hex>[0-9A-Fa-f]{1,6})\}"
    r"|(?P<property>[pP]\{[A-Za-z_=]{1,40}\})|(?P<self>[^0-9A-Za-z]))"
)
_COUNT: Final = re.compile(r"\{\d{1,9}(?:,\d{0,9})?\}")
_GROUP: Final = re.compile(r"\((?:\?:|\?<[A-Za-z_$][\w$]*>|(?!\?))")
# A part of a pattern from which `relax_pattern` removes assertions. Sets that regular expression
# engines read differently do not match.
_PART: Final = re.compile(
    r"(?P<edge>\\[bB])|\\.|\[(?!\^?\])(?:\\.|[^\]\[\\])*\]|(?P<look>\(\?<?[=!])|\(|\)|[^\\\[()]+",
    re.DOTALL,
)
# A part of a translated pattern: an escape, a set with sets inside, or a character.
_TRANSLATED_PART: Final = re.compile(
    r"\\.|\[\^?(?:\\.|\[\^?(?:\\.|[^\]\\])*\]|[^\]\[\\])*\]|.", re.DOTALL
)
_EMPTY: Final = "(?:)"
# A pattern that lists texts, such as `^(a|b)$`.
_LIST: Final = re.compile(r"\^(?:\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\)|([\w -]+))\$")
ANY_CHARACTER: Final = r"[\x00-\x{10ffff}]"
_ANYTHING: Final = rf"{ANY_CHARACTER}*"
# Control characters that an answer has only if a pattern mentions them. In a translated pattern
# they are written as `\\u{7}`, so that `schema.escapes` finds them. A set with all of them would
# also allow quotes and backslashes.
UNMENTIONED_CONTROLS: Final = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_CONTROL_CODES: Final = (*range(8), 0x0B, *range(0x0E, 0x20), 0x7F)
_CONTROL_ESCAPES: Final = {
    text: f"\\u{{{code:x}}}"
    for code in _CONTROL_CODES
    for text in (f"\\x{code:02x}", f"\\x{{{code:x}}}")
}
_LAST_CONTROL: Final = r"[^\u{1f}]"
_NOTHING: Final = r"[^\x00-\x{10ffff}]"
_MAX_CACHED_PATTERNS: Final = 512
_MAX_CACHED_MATCHERS: Final = 32  # a hostile pattern's matcher takes up to half a megabyte


class RegexPattern(Frozen):
    """A regular expression of a JSON schema, and its translation for llguidance.

    Attributes:
        source: the expression of the schema.
        text: the translation for llguidance.
        other_texts: further translations; a string must match `text` and all of these.
    """

    source: str
    text: str
    other_texts: tuple[str, ...] = ()


@lru_cache(_MAX_CACHED_PATTERNS)
def translate_pattern(source: str) -> RegexPattern | None:
    """Translate a JSON schema's `pattern` into a regular expression for llguidance.

    As JSON Schema demands, the pattern may match anywhere in a string. None if it cannot be
    translated exactly.
    """
    pattern = _translate_parts(source)
    if pattern is not None:
        return pattern
    texts = without_look_around(source)
    return RegexPattern(source, texts[0], texts[1:]) if texts else None


def _translate_parts(source: str) -> RegexPattern | None:
    """Translate a pattern for llguidance part by part, from left to right.

    None if the pattern has look-around, inner anchors or other parts that llguidance lacks; the
    caller then rewrites the whole pattern.
    """
    parts: list[str] = []
    offset = 0
    was_count = False
    while offset < len(source):
        character = source[offset]
        is_count = False
        if character == "\\":
            escape = _ESCAPE.match(source, offset)
            if escape is None:
                return None
            parts.append(_translate_escape(escape, inside=False))
            offset = escape.end()
        elif character == "[":
            inner, offset = _set(source, offset + 1)
            if inner is None:
                return None
            parts.append(inner)
        elif character == "(":
            group = _GROUP.match(source, offset)
            if group is None:  # look-around
                return None
            parts.append("(?:")
            offset = group.end()
        elif character == "{":
            count = _COUNT.match(source, offset)
            parts.append(count.group() if count else r"\{")
            offset = count.end() if count else offset + 1
            is_count = count is not None
        else:
            if character != "?" or not was_count:  # a lazy count matches the same texts
                parts.append(_plain(character))
                is_count = character in "*+?"
            offset += 1
        was_count = is_count
    parts = [_CONTROL_ESCAPES.get(part, part) for part in parts]
    return RegexPattern(source, "".join(parts)) if _has_outer_anchors(parts) else None


@lru_cache(_MAX_CACHED_PATTERNS)
def relax_pattern(source: str) -> RegexPattern | None:
    r"""Translate a pattern for llguidance, leaving out its look-around, `\b` and `\B`.

    Used if the exact translation fails. These assertions only restrict the matches, so the result
    matches all texts that the pattern matches, and more. None if this cannot be translated either.
    """
    parts: list[str] = []
    offset = 0
    depth = 0  # open groups of an assertion that is being skipped, with the assertion itself
    while offset < len(source):
        match = _PART.match(source, offset)
        if match is None:
            return None
        part = match.group()
        offset = match.end()
        if depth:
            depth += (part[0] == "(") - (part == ")")
        elif match["look"]:
            depth = 1
            parts.append(_EMPTY)
        else:
            parts.append(_EMPTY if match["edge"] else part)
    while parts and parts[-1] == _EMPTY:
        parts.pop()
    return translate_pattern("".join(parts)) if parts and not depth else None


def _plain(character: str) -> str:
    if character == ".":
        return r"[^\n\r\x{2028}\x{2029}]"
    return character if character in "*+?|()^$" else _literal(character)


def _literal(character: str) -> str:
    """Return a regular expression that matches one literal character."""
    if character.isalnum() or ord(character) > 127 or character in "_ ":
        return character
    return (
        f"\\x{ord(character):02x}"
        if ord(character) < 32 or ord(character) == 127
        else (f"\\{character}")
    )


def _translate_escape(match: re.Match[str], *, inside: bool) -> str:
    """Translate an escape sequence of a pattern, such as the class of digits, for llguidance.

    With `inside`, the escape is inside `[...]`, so a set of characters is returned without
    brackets.
    """
    name = match.lastgroup
    value = match[match.lastgroup or 0]
    if name == "set":
        content = _SETS[value.lower()]
        if value.isupper():
            return f"[^{content}]"
        return content if inside else f"[{content}]"
    if name == "property" and not inside:
        return _without_controls(f"\\{value}")
    if name in _ESCAPES:
        return _ESCAPES[name](value)
    number = int(value, 16)
    if 0xD800 <= number < 0xE000 or number > 0x10FFFF:  # no text has such a character
        return "" if inside else _NOTHING
    return f"\\x{{{number:x}}}"


def _pair(value: str) -> str:
    """Return the regular expression for the character that a UTF-16 surrogate pair stands for."""
    high, low = int(value[:4], 16), int(value[-4:], 16)
    return f"\\x{{{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:x}}}"


_ESCAPES: Final[dict[str | None, Callable[[str], str]]] = {
    "control": lambda value: _CONTROLS[value],
    "letter": lambda value: f"\\x{ord(value.upper()) - 64:02x}",
    "pair": _pair,
    "property": lambda value: f"\\{value}",
    "self": _literal,
}


def _set(source: str, offset: int) -> tuple[str | None, int]:
    """Translate a bracketed set of characters of a pattern, such as `[a-z]`, for llguidance.

    `offset` is after the opening bracket. Returns the translation, or None if the set is not
    supported, and the offset after the closing bracket.
    """
    is_negated = source.startswith("^", offset)
    offset += is_negated
    # The members, and whether each is one character.
    members: list[tuple[str, bool]] = []
    while offset < len(source) and source[offset] != "]":
        if source[offset] == "\\":
            if source.startswith(r"\b", offset):
                members.append((r"\x08", True))
                offset += 2
                continue
            escape = _ESCAPE.match(source, offset)
            if escape is None:
                return None, offset
            is_character = escape.lastgroup not in {"set", "property"}
            members.append((_translate_escape(escape, inside=True), is_character))
            offset = escape.end()
        else:
            character = source[offset]
            members.append((character if character == "-" else _literal(character), True))
            offset += 1
    if offset == len(source):
        return None, offset
    text = "".join(
        r"\-" if member == "-" and not _is_range(members, i) else member
        for i, (member, _) in enumerate(members)
    )
    if not members:
        return (r"[\x00-\x{10ffff}]" if is_negated else _NOTHING), offset + 1
    if is_negated:
        return f"[^{text}{UNMENTIONED_CONTROLS}]", offset + 1
    if all(member in _CONTROL_ESCAPES or member == "-" for member, _ in members):
        controls = "".join(_CONTROL_ESCAPES.get(member, member) for member, _ in members)
        if "-" in controls:
            return f"[[{controls}]&&{_LAST_CONTROL}]", offset + 1
        return f"[{controls}]", offset + 1
    may_have_controls = r"\x" in text or r"\p" in text
    return _without_controls(f"[{text}]") if may_have_controls else f"[{text}]", offset + 1


def _without_controls(text: str) -> str:
    """Return the regular expression of a set of characters, with control characters removed."""
    return rf"[{text}&&[^{UNMENTIONED_CONTROLS}]]"


def _is_range(members: list[tuple[str, bool]], index: int) -> bool:
    """Whether a hyphen in a set makes a range of the two characters beside it.

    `index` is the index of the hyphen in `members`.
    """
    if not 0 < index < len(members) - 1 or not (members[index - 1][1] and members[index + 1][1]):
        return False
    return not (index > 2 and members[index - 2][0] == "-" and _is_range(members, index - 2))


def _has_outer_anchors(parts: list[str]) -> bool:
    """Whether a pattern's anchors stand only at the ends of its alternatives.

    Each `^` must begin an alternative, and each `$` must end one. llguidance supports no other
    anchors.
    """
    for index, part in enumerate(parts):
        before = parts[index - 1] if index else "|"
        after = parts[index + 1] if index + 1 < len(parts) else "|"
        if part == "^" and before not in {"|", "(?:", "^"}:
            return False
        if part == "$" and after not in {"|", ")", "$"}:
            return False
    return True


def whole_text_pattern(pattern: str) -> str | None:
    """Return a translated pattern in a form that matches a text as a whole.

    Without this, a translated pattern may match anywhere in a text. None if the pattern has anchors
    inside groups.
    """
    alternatives = [""]
    depth = 0  # of groups
    offset = 0
    while offset < len(pattern):
        part = _TRANSLATED_PART.match(pattern, offset)
        assert part
        text = part.group()
        depth += (text == "(") - (text == ")")
        if text == "|" and not depth:
            alternatives.append("")
        elif text in {"^", "$"} and depth:
            return None
        else:
            alternatives[-1] += text
        offset = part.end()
    return "|".join(map(_whole_alternative, alternatives))


def _whole_alternative(pattern: str) -> str:
    """Return one alternative of a pattern, without anchors, in a form that matches a whole text."""
    before = "" if pattern.startswith("^") else _ANYTHING
    is_end = pattern.endswith("$") and not pattern.endswith("\\$")
    return f"{before}(?:{pattern.removeprefix('^')[: -1 if is_end else None]})" + (
        "" if is_end else _ANYTHING
    )


@lru_cache(_MAX_CACHED_MATCHERS)
def _matcher(source: str) -> jsonschema_rs.Validator | None:
    import jsonschema_rs  # slow: most processes match no patterns

    try:
        return jsonschema_rs.validator_for(
            {"pattern": source}, pattern_options=jsonschema_rs.RegexOptions()
        )
    except ValueError:
        return None


def matches(pattern: RegexPattern, text: str) -> bool:
    """Return whether a schema's pattern matches a text, in linear time.

    True for a pattern that the matching library cannot compile.
    """
    matcher = _matcher(pattern.source)
    return matcher is None or matcher.is_valid(text)


def listed_texts(pattern: RegexPattern) -> list[str]:
    """Return the texts that a pattern lists, such as "a" and "b" for `^(a|b)$`.

    The result is empty for patterns that do more than list texts.
    """
    match = _LIST.fullmatch(pattern.source)
    return (match[1] or match[2]).split("|") if match else []


def are_disjoint(x: RegexPattern, y: RegexPattern) -> bool:
    """Return whether the fixed beginnings of two patterns differ, so that no text matches both.

    False if a pattern has no fixed beginning.
    """
    a, b = (_prefix(pattern.source) for pattern in (x, y))
    return bool(a and b) and not (a.startswith(b) or b.startswith(a))


def _prefix(source: str) -> str:
    """Return the fixed text with which all matches of a pattern begin; empty if it has none."""
    if "|" in source or not source.startswith("^"):
        return ""
    match = re.match(r"[\w/ -]*", source[1:])
    text = match.group() if match else ""
    after = source[1 + len(text) :]
    return text[:-1] if after[:1] in {"*", "?", "{"} else text


def pattern_without(words: list[str]) -> str | None:
    """Return a regular expression of all texts but these words; None if it would be too large."""
    if any(len(word) > 64 for word in words) or sum(map(len, words)) > 2000:
        return None
    return f"^{_other_texts(sorted(set(words)), 0)}$"


def _other_texts(words: list[str], depth: int) -> str:
    """Return a regular expression for the rest of texts that are not equal to any of `words`.

    All words share their first `depth` characters, and the expression matches the text after these
    characters.
    """
    rest = [word for word in words if len(word) > depth]
    heads = sorted({word[depth] for word in rest})
    options = (
        [f"[^{''.join(map(_literal, heads))}{UNMENTIONED_CONTROLS}]{_ANYTHING}"]
        if heads
        else [_ANYTHING]
    )
    if len(rest) < len(words):  # a word ends here, so the text must be longer
        options = options if heads else [f"{ANY_CHARACTER}+"]
    elif heads:
        options.append("")
    options += [
        _literal(head) + _other_texts([word for word in rest if word[depth] == head], depth + 1)
        for head in heads
    ]
    return f"(?:{'|'.join(options)})"
