"""Regular expressions of ECMA-262, as llguidance reads them, and which texts they match."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import jsonschema_rs

from twostroke.core.frozen import Frozen
from twostroke.engine.structured_output.schema.automata import without_look_around

if TYPE_CHECKING:
    from collections.abc import Callable

_SPACES: Final = (
    r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
    r"\x{feff}"
)
_SETS: Final = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_CONTROLS: Final = {"f": r"\x0c", "n": r"\n", "r": r"\r", "t": r"\t", "v": r"\x0b", "0": r"\x00"}
# What follows a backslash; what is in no group stands for itself.
_ESCAPE: Final = re.compile(
    r"\\(?:(?P<set>[dDwWsS])|(?P<control>[fnrtv]|0(?![0-9]))|c(?P<letter>[A-Za-z])"
    r"|x(?P<hex2>[0-9A-Fa-f]{2})|u(?P<pair>[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2})"
    r"|u(?P<hex4>[0-9A-Fa-f]{4})|u\{(?P<hex>[0-9A-Fa-f]{1,6})\}"
    r"|(?P<property>[pP]\{[A-Za-z_=]{1,40}\})|(?P<self>[^0-9A-Za-z]))"
)
_COUNT: Final = re.compile(r"\{\d{1,9}(?:,\d{0,9})?\}")
_GROUP: Final = re.compile(r"\((?:\?:|\?<[A-Za-z_$][\w$]*>|(?!\?))")
# A part of a pattern whose assertions are left out, but no set that engines read in several ways.
_PIECE: Final = re.compile(
    r"(?P<edge>\\[bB])|\\.|\[(?!\^?\])(?:\\.|[^\]\[\\])*\]|(?P<look>\(\?<?[=!])|\(|\)|[^\\\[()]+",
    re.DOTALL,
)
_EMPTY: Final = "(?:)"
_LIST: Final = re.compile(r"\^(?:\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\)|([\w -]+))\$")
ANY_ONE: Final = r"[\x00-\x{10ffff}]"
_ANYTHING: Final = rf"{ANY_ONE}*"
# Control characters that an answer has only if a pattern names them. Their spelling in a pattern,
# such as `\\u{7}`, tells `schema.escapes` about them. A set of all of them would also allow quotes
# and backslashes.
UNWRITTEN: Final = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_UNWRITTEN_CODES: Final = (*range(8), 0x0B, *range(0x0E, 0x20), 0x7F)
_EACH_UNWRITTEN: Final = {
    text: f"\\u{{{code:x}}}"
    for code in _UNWRITTEN_CODES
    for text in (f"\\x{code:02x}", f"\\x{{{code:x}}}")
}
_LAST_CONTROL: Final = r"[^\u{1f}]"
_NOTHING: Final = r"[^\x00-\x{10ffff}]"
_MOST_KNOWN: Final = 512
_MOST_MATCHERS: Final = 32  # one of a hostile pattern takes up to half a megabyte


class RegexPattern(Frozen):
    """A regular expression as its author wrote it (`source`), and for llguidance (`text`).

    If there are `other_texts`, a value must match all of them as well.
    """

    source: str
    text: str
    other_texts: tuple[str, ...] = ()


@lru_cache(_MOST_KNOWN)
def translated(source: str) -> RegexPattern | None:
    """Return a pattern for llguidance, or None if it cannot be one.

    Text in front of its first match, and after it, is free, as JSON Schema has it.
    """
    pattern = _spelled_alike(source)
    if pattern is not None:
        return pattern
    texts = without_look_around(source)
    return RegexPattern(source, texts[0], texts[1:]) if texts else None


def _spelled_alike(source: str) -> RegexPattern | None:
    """Return a pattern that needs no rewriting; None if llguidance does not know a part of it."""
    parts: list[str] = []
    place, was_count = 0, False
    while place < len(source):
        here, is_count = source[place], False
        if here == "\\":
            found = _ESCAPE.match(source, place)
            if found is None:
                return None
            parts.append(_escaped(found, inside=False))
            place = found.end()
        elif here == "[":
            inner, place = _set(source, place + 1)
            if inner is None:
                return None
            parts.append(inner)
        elif here == "(":
            group = _GROUP.match(source, place)
            if group is None:  # look-around
                return None
            parts.append("(?:")
            place = group.end()
        elif here == "{":
            count = _COUNT.match(source, place)
            parts.append(count.group() if count else r"\{")
            place = count.end() if count else place + 1
            is_count = count is not None
        else:
            if here != "?" or not was_count:  # a lazy count matches the same texts
                parts.append(_plain(here))
                is_count = here in "*+?"
            place += 1
        was_count = is_count
    parts = [_EACH_UNWRITTEN.get(part, part) for part in parts]
    return RegexPattern(source, "".join(parts)) if _has_outer_anchors(parts) else None


@lru_cache(_MOST_KNOWN)
def relaxed(source: str) -> RegexPattern | None:
    r"""Return a pattern without its look-around, `\b` and `\B`, or None if that cannot be one.

    These only restrict what the rest matches, so it matches each text that the whole one does.
    """
    kept: list[str] = []
    place = depth = 0  # depth: groups that are open in an assertion, itself included
    while place < len(source):
        found = _PIECE.match(source, place)
        if found is None:
            return None
        piece, place = found.group(), found.end()
        if depth:
            depth += (piece[0] == "(") - (piece == ")")
        elif found["look"]:
            depth = 1
            kept.append(_EMPTY)
        else:
            kept.append(_EMPTY if found["edge"] else piece)
    while kept and kept[-1] == _EMPTY:
        kept.pop()
    return translated("".join(kept)) if kept and not depth else None


def _plain(character: str) -> str:
    if character == ".":
        return r"[^\n\r\x{2028}\x{2029}]"
    return character if character in "*+?|()^$" else _literal(character)


def _literal(character: str) -> str:
    """Return one character that stands for itself."""
    if character.isalnum() or ord(character) > 127 or character in "_ ":
        return character
    return (
        f"\\x{ord(character):02x}"
        if ord(character) < 32 or ord(character) == 127
        else (f"\\{character}")
    )


def _escaped(found: re.Match[str], *, inside: bool) -> str:
    """Return an escape; `inside` of brackets, a set without its own."""
    name, value = found.lastgroup, found[found.lastgroup or 0]
    if name == "set":
        content = _SETS[value.lower()]
        if value.isupper():
            return f"[^{content}]"
        return content if inside else f"[{content}]"
    if name == "property" and not inside:
        return _writable(f"\\{value}")
    if name in _ESCAPES:
        return _ESCAPES[name](value)
    number = int(value, 16)
    if 0xD800 <= number < 0xE000 or number > 0x10FFFF:  # no text has it
        return "" if inside else _NOTHING
    return f"\\x{{{number:x}}}"


def _pair(value: str) -> str:
    """Return the character that two halves of an escape in UTF-16 make."""
    high, low = int(value[:4], 16), int(value[-4:], 16)
    return f"\\x{{{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:x}}}"


_ESCAPES: Final[dict[str | None, Callable[[str], str]]] = {
    "control": lambda value: _CONTROLS[value],
    "letter": lambda value: f"\\x{ord(value.upper()) - 64:02x}",
    "pair": _pair,
    "property": lambda value: f"\\{value}",
    "self": _literal,
}


def _set(source: str, place: int) -> tuple[str | None, int]:
    """Return the set of characters in brackets, and the place after it; None if it is not one."""
    is_negated = source.startswith("^", place)
    place += is_negated
    members: list[tuple[str, bool]] = []  # and whether it is one character
    while place < len(source) and source[place] != "]":
        if source[place] == "\\":
            if source.startswith(r"\b", place):
                members.append((r"\x08", True))
                place += 2
                continue
            found = _ESCAPE.match(source, place)
            if found is None:
                return None, place
            is_one = found.lastgroup not in {"set", "property"}
            members.append((_escaped(found, inside=True), is_one))
            place = found.end()
        else:
            members.append(
                (source[place] if source[place] == "-" else _literal(source[place]), True)
            )
            place += 1
    if place == len(source):
        return None, place
    text = "".join(
        r"\-" if one == "-" and not _is_range(members, i) else one
        for i, (one, _) in enumerate(members)
    )
    if not members:
        return (r"[\x00-\x{10ffff}]" if is_negated else _NOTHING), place + 1
    if is_negated:
        return f"[^{text}{UNWRITTEN}]", place + 1
    if all(member in _EACH_UNWRITTEN or member == "-" for member, _ in members):
        named = "".join(_EACH_UNWRITTEN.get(member, member) for member, _ in members)
        return f"[[{named}]&&{_LAST_CONTROL}]" if "-" in named else f"[{named}]", place + 1
    return _writable(f"[{text}]") if r"\x" in text or r"\p" in text else f"[{text}]", place + 1


def _writable(text: str) -> str:
    return rf"[{text}&&[^{UNWRITTEN}]]"


def _is_range(members: list[tuple[str, bool]], place: int) -> bool:
    """Return whether a hyphen stands between two characters that begin no other range."""
    if not 0 < place < len(members) - 1 or not (members[place - 1][1] and members[place + 1][1]):
        return False
    return not (place > 2 and members[place - 2][0] == "-" and _is_range(members, place - 2))


def _has_outer_anchors(parts: list[str]) -> bool:
    """Return whether each `^` begins an alternative, and each `$` ends one."""
    for place, part in enumerate(parts):
        before = parts[place - 1] if place else "|"
        after = parts[place + 1] if place + 1 < len(parts) else "|"
        if part == "^" and before not in {"|", "(?:", "^"}:
            return False
        if part == "$" and after not in {"|", ")", "$"}:
            return False
    return True


@lru_cache(_MOST_MATCHERS)
def _matcher(source: str) -> jsonschema_rs.Validator | None:
    try:
        return jsonschema_rs.validator_for(
            {"pattern": source}, pattern_options=jsonschema_rs.RegexOptions()
        )
    except ValueError:
        return None


def matches(pattern: RegexPattern, text: str) -> bool:
    """Return whether a pattern matches a text, in linear time; true if nobody can tell."""
    matcher = _matcher(pattern.source)
    return matcher is None or matcher.is_valid(text)


def spelled(pattern: RegexPattern) -> list[str]:
    """Return the texts that a pattern matches, if it lists them, such as `^(a|b)$`."""
    found = _LIST.fullmatch(pattern.source)
    return (found[1] or found[2]).split("|") if found else []


def are_apart(one: RegexPattern, other: RegexPattern) -> bool:
    """Return whether no text matches both patterns, as far as their beginnings show."""
    a, b = (_begun(pattern.source) for pattern in (one, other))
    return bool(a and b) and not (a.startswith(b) or b.startswith(a))


def _begun(source: str) -> str:
    """Return the text that all matches begin with, if it is easy to see."""
    if "|" in source or not source.startswith("^"):
        return ""
    found = re.match(r"[\w/ -]*", source[1:])
    text = found.group() if found else ""
    after = source[1 + len(text) :]
    return text[:-1] if after[:1] in {"*", "?", "{"} else text


def without(words: list[str]) -> str | None:
    """Return llguidance's pattern of all texts but these, or None if it would be too large."""
    if any(len(word) > 64 for word in words) or sum(map(len, words)) > 2000:
        return None
    return f"^{_but(sorted(set(words)), 0)}$"


def _but(words: list[str], depth: int) -> str:
    """Return an expression of what may follow `depth` characters, which all words share."""
    rest = [word for word in words if len(word) > depth]
    heads = sorted({word[depth] for word in rest})
    options = (
        [f"[^{''.join(map(_literal, heads))}{UNWRITTEN}]{_ANYTHING}"] if heads else [_ANYTHING]
    )
    if len(rest) < len(words):  # the text ends here in one of the words: it must go on
        options = options if heads else [f"{ANY_ONE}+"]
    elif heads:
        options.append("")
    options += [
        _literal(head) + _but([word for word in rest if word[depth] == head], depth + 1)
        for head in heads
    ]
    return f"(?:{'|'.join(options)})"
