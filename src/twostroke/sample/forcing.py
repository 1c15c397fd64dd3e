"""How long a text a grammar may force.

Where a text can go on in one way only, llguidance follows it to its end, byte by byte and within no
limit of its own: some microseconds a byte, in the middle of a step. `(a{1000}){1000}` is a million
bytes, and rules that double each other are any number. So grammars that may force much are told not
to look for it: the same texts are allowed, in whatever tokens, and nothing is guessed from them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_FORCED: Final = 8000  # bytes; they take some 50 ms
_OFF: Final = '\n%llguidance {"no_forcing": true}\n'
_COUNT = re.compile(r"\{\s*+(\d++)")
_EXTENDED = re.compile(r"\(\?[A-Za-z]*x")
# A class of characters is one, with the classes in it; an escape takes its letter along.
_CLASS: Final = r"\[\^?+\]?+(?:\\.|[^][\\]%s)*+\]"
_REGEX_PART = re.compile(
    rf"\\.|{_CLASS % ('|' + _CLASS % ('|' + _CLASS % ''))}|\{{\s*+(?P<count>\d++)[^{{}}]*+\}}|.",
    re.DOTALL,
)
_REPEATED: Final = frozenset("*+?")
_ANNOTATIONS: Final = frozenset(("description", "title", "$comment", "$schema", "$id"))
_DEFINITIONS: Final = frozenset(("$defs", "definitions"))
_LEAST: Final = ("minItems", "minProperties", "minContains", "minLength")
_NUMBER_BYTES: Final = 400  # of a number's longest spelling

# What matches never gives back a part of it: the time is linear, also in texts that nobody closes.
_PART = re.compile(
    r"""^[^\S\n]*+[?!]?(?P<head>[A-Za-z_][\w-]*+)[^\S\n]*+
        (?:\[(?P<options>(?:"(?:\\.|[^"\\\n])*+"|[^]"\n])*+)\][^\S\n]*+)?:
    | (?P<blank>[^\S\n]++|\n|(?://|\#)[^\n]*+)
    | (?P<text>"(?:\\.|[^"\\])*+") | (?P<regex>/(?:\\.|[^/\\])++/)
    | %(?P<nested>json|lark)\s*+ | [{~]\s*+(?P<count>\d++) | (?P<name>[A-Za-z_][\w-]*+)
    | (?P<sign>.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def without_long_forcing(grammar: str) -> str:
    """Return a grammar that forces no more than `MOST_FORCED` bytes, or does not look for it.

    `grammar` is in Lark's notation, or llguidance's own object.
    """
    is_lark = grammar[:1] != "{"
    parts: list[dict[str, Any]] = (
        [{"lark_grammar": grammar}] if is_lark else json.loads(grammar)["grammars"]
    )
    if sum(_of_part(part) for part in parts) <= MOST_FORCED:
        return grammar
    if is_lark:
        return grammar + _OFF  # the last word counts
    first = {**parts[0], "name": "unforced"}
    if lark := first.get("lark_grammar"):
        first["lark_grammar"] = lark + _OFF
        return json.dumps({"grammars": [first, *parts[1:]]})
    outer = {"name": "outer", "lark_grammar": f"start: @unforced{_OFF}"}
    return json.dumps({"grammars": [outer, first, *parts[1:]]})


def _of_part(part: dict[str, Any]) -> float:
    if lark := part.get("lark_grammar"):
        return of_lark(lark)
    return of_schema(part.get("json_schema"))


def of_regex(pattern: str) -> float:
    """Return a bound on the bytes that a regular expression forces in a row.

    It forces no more than the shortest way to its end has, wherever it is: each of its characters,
    as often as the counts behind it and around it repeat it.
    """
    every_count = len(pattern.encode()) * _product(map(float, _COUNT.findall(pattern)))
    if _EXTENDED.search(pattern):  # there are comments, in which signs are none
        return every_count
    outer: list[float] = []  # what stands before each open group
    total = last = 0.0  # of the innermost group, and of what a count would repeat
    for found in _REGEX_PART.finditer(pattern):
        size = float(len(found[0].encode()))
        if count := found["count"]:
            size += last * (max(1.0, float(count)) - 1)
        elif found[0] == "[":  # classes in classes, deeper than is looked
            return every_count
        elif found[0] == "(":
            outer.append(total)
            total = last = 0.0
            continue
        elif found[0] == ")":
            if not outer:
                return math.inf
            size += total
            total = outer.pop()
        total += size
        # A count may stand behind another one, or behind signs, and then repeats what they do.
        last = size + last if count or found[0] in _REPEATED else size
    return math.inf if outer else total


def of_schema(schema: object) -> float:
    """Return a bound on the bytes that a JSON schema forces in a row, infinite for a cycle."""
    try:
        return _Schema(schema).size(schema)
    except RecursionError:
        return math.inf


def of_lark(text: str) -> float:
    """Return a bound on the bytes that a grammar in Lark's notation forces in a row."""
    try:
        return _Rules(_bodies(text)).size("start")
    except (ValueError, RecursionError):
        return math.inf


class _Schema:
    """Sizes of a schema's parts; what is referred to is looked at once."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._known: dict[str, float] = {}

    def size(self, part: object) -> float:
        if isinstance(part, dict):
            return self._of_object(part)
        if isinstance(part, list):
            return 2 + sum(1 + self.size(one) for one in part)
        if isinstance(part, str):
            return len(json.dumps(part))  # nobody spells it longer
        return _NUMBER_BYTES if isinstance(part, float) else 24

    def _of_object(self, part: dict[str, Any]) -> float:
        total = 2.0
        for name, value in part.items():
            if name in _DEFINITIONS or (name in _ANNOTATIONS and isinstance(value, str)):
                continue
            if name in {"$ref", "$dynamicRef"} and isinstance(value, str):
                total += self._of_reference(value)
            elif name == "pattern" and isinstance(value, str):
                total += of_regex(value)
            else:
                total += 4 + of_regex(name) + self.size(value)
        least = [part[name] for name in _LEAST if isinstance(part.get(name), int)]
        return total * _product(least)

    def _of_reference(self, name: str) -> float:
        if name not in self._known:
            self._known[name] = math.inf  # as long as it is not known: a cycle
            found = _at(self._root, name)
            self._known[name] = math.inf if found is None else self.size(found)
        return self._known[name]


@dataclass(slots=True)
class _Body:
    """What stands behind a rule's colon."""

    size: float = 1.0  # of its own texts, expressions and schemas
    names: list[str] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)


class _Rules:
    """Sizes of a grammar's rules, by name."""

    def __init__(self, bodies: dict[str, _Body]) -> None:
        self._bodies = bodies
        self._known: dict[str, float] = {}

    def size(self, name: str) -> float:
        if name not in self._known:
            self._known[name] = math.inf  # as long as it is not known: a cycle
            body = self._bodies.get(name, _Body())
            inner = sum(self.size(one) for one in body.names if one in self._bodies)
            self._known[name] = (body.size + inner) * _product(body.counts)
        return self._known[name]


def _bodies(text: str) -> dict[str, _Body]:
    """Return the rules of a grammar by name.

    Raises:
        ValueError: it has something of which no bound is known, or that is never closed.
    """
    body, place = _Body(), 0  # what stands before the first rule is of none
    bodies: dict[str, _Body] = {}
    while found := _PART.match(text, place):
        place = found.end()
        if head := found["head"]:
            body = bodies.setdefault(head, _Body())
            _check_options(found["options"] or "")
        elif word := found["text"]:
            body.size += len(word.encode())
        elif word := found["regex"]:
            body.size += of_regex(word)
        elif found["nested"] == "json":
            schema, place = json.JSONDecoder().raw_decode(text, place)
            body.size += of_schema(schema)
        elif count := found["count"]:
            body.counts.append(float(count))
        elif name := found["name"]:
            body.names.append(name)
        elif found["nested"] or found["sign"] in {'"', "/"}:
            raise ValueError(found[0])
    return bodies


def _check_options(options: str) -> None:
    if '"' in options or "/" in options:  # such as where a text stops
        raise ValueError(options)


def _product(counts: Iterable[float]) -> float:
    return math.prod([float(max(1, min(count, 1e9))) for count in counts])


def _at(root: object, reference: str) -> object | None:
    """Return what a JSON pointer of the same document refers to; None for what is not there."""
    if not reference.startswith("#"):
        return None
    here = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and key in here:
            here = here[key]
        elif isinstance(here, list) and key.isdecimal() and int(key) < len(here):
            here = here[int(key)]
        else:
            return None
    return here if reference == "#" or reference.startswith("#/") else None
