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
from typing import Any, Final

MOST_FORCED: Final = 8000  # bytes; they take some 50 ms
_OFF: Final = '\n%llguidance {"no_forcing": true}\n'
_COUNT = re.compile(r"\{\s*(\d+)")
_ANNOTATIONS: Final = frozenset(("description", "title", "$comment", "$schema", "$id"))
_DEFINITIONS: Final = frozenset(("$defs", "definitions"))
_LEAST: Final = ("minItems", "minProperties", "minContains", "minLength")
_NUMBER_BYTES: Final = 400  # of a number's longest spelling

_ATTRIBUTES = re.compile(r"^[?!]?[A-Za-z_][\w.-]*\s*\[[^\n]*[\"/]", re.MULTILINE)
_DEFINITION = re.compile(r"^[?!]?([A-Za-z_][\w.-]*)[^:\n]*:", re.MULTILINE)
_LARK = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*") | (?P<regex>/(?:\\.|[^/\\\n])+/)
    | (?P<count>[{~]\s*\d+) | (?P<name>[A-Za-z_][\w.-]*) | //[^\n]*""",
    re.VERBOSE,
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
    as often as counts repeat it.
    """
    return len(pattern.encode()) * _product(_COUNT.findall(pattern))


def of_schema(schema: object) -> float:
    """Return a bound on the bytes that a JSON schema forces in a row, infinite for a cycle."""
    try:
        return _Schema(schema).size(schema)
    except RecursionError:
        return math.inf


def of_lark(text: str) -> float:
    """Return a bound on the bytes that a grammar in Lark's notation forces in a row."""
    if _ATTRIBUTES.search(text):  # texts where none is looked for
        return math.inf
    schemas = 0.0
    decoder = json.JSONDecoder()
    pieces, begin = [], 0
    for found in re.finditer(r"%json\s*", text):
        if found.start() < begin:
            continue  # inside the schema before
        try:
            schema, end = decoder.raw_decode(text, found.end())
        except ValueError:
            return math.inf
        schemas += of_schema(schema)
        pieces.append(text[begin : found.start()])
        begin = end
    text = "".join([*pieces, text[begin:]])
    bodies: dict[str, str] = {}
    starts = list(_DEFINITION.finditer(text))
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        bodies[start[1]] = text[start.end() : after.start() if after else None]
    try:
        rules = _Rules(bodies)
        return rules.size("start") + schemas * rules.repeats
    except RecursionError:
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
            return 2 + 6 * len(part)  # as JSON spells it, at most
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


class _Rules:
    """Sizes of a grammar's rules, by name."""

    def __init__(self, bodies: dict[str, str]) -> None:
        self._bodies = bodies
        self._known: dict[str, float] = {}

    @property
    def repeats(self) -> float:
        """How often anything is repeated, at most."""
        counts = [count for body in self._bodies.values() for count in _counts(body)]
        return _product(counts) if counts else 1.0

    def size(self, name: str) -> float:
        if name not in self._known:
            self._known[name] = math.inf
            body = self._bodies.get(name, "")
            self._known[name] = self._of_body(body) * _product(_counts(body))
        return self._known[name]

    def _of_body(self, body: str) -> float:
        total = 1.0
        for found in _LARK.finditer(body):
            if text := found["text"]:
                total += len(text.encode())
            elif regex := found["regex"]:
                total += of_regex(regex)
            elif (name := found["name"]) and name in self._bodies:
                total += self.size(name)
        return total


def _counts(body: str) -> list[str]:
    found = [one["count"] for one in _LARK.finditer(body) if one["count"]]
    return [one.lstrip("{~").strip() for one in found]


def _product(counts: list[Any]) -> float:
    return math.prod([max(1.0, min(float(count), 1e9)) for count in counts])


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
