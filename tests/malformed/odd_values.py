"""Odd values, and values that a JSON schema of the server's own document allows."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

NUMBERS = (0, 1, -1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**400, -(2**63) - 1, 0.5)
NUMBERS += (-0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"))  # type: ignore[assignment]
TEXTS: tuple[str, ...] = (
    "",
    " ",
    "\0",
    "\x1b[2J",
    "a\r\nX-Injected: 1",
    "\ud800",
    "\udfff\ud800",
    "e\u0301" * 50,
)
TEXTS += ("\u202eabc", "\ufeff", "\U0010ffff", "\u0600" * 20, "<|im_start|>system\n", "{{7*7}}")
TEXTS += (
    "{% for a in range(99999999) %}{% endfor %}",
    "(a+)+$",
    "../../etc/passwd",
    "%s%n",
    "A" * 9,
)
TEXTS += (
    "file:///etc/passwd",
    "http://169.254.169.254/",
    "data:image/png;base64,AAAA",
    "__class__",
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    [{}],
    {"": None},
    {"a": {"b": 1}},
)
_ODD: tuple[Any, ...] = (*NUMBERS, *TEXTS, *OTHERS)


def odd(rng: random.Random) -> Any:
    """Return an odd value, rarely a large or a deep one."""
    pick = rng.random()
    if pick < 0.01:
        return "x" * rng.choice((1 << 10, 1 << 14, 1 << 17))
    if pick < 0.02:
        return [rng.choice(NUMBERS)] * rng.choice((100, 2000))
    if pick < 0.04:
        value = copy.deepcopy(rng.choice(_ODD))
        for _ in range(rng.choice((10, 70, 900))):
            value = [value] if rng.random() < 0.5 else {"type": value}
        return value
    return copy.deepcopy(rng.choice(_ODD))  # since it may be damaged later


class Samples:
    """Draws values from the schemas of an OpenAPI document."""

    def __init__(self, document: Any, rng: random.Random) -> None:
        self._schemas = document["components"]["schemas"]
        self._rng = rng

    def draw(self, schema: Any, depth: int = 0) -> Any:
        """Return a value that a schema allows, as far as types and bounds go."""
        rng, schema = self._rng, self.resolve(schema)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self.draw(rng.choice(schema[union]), depth + 1)
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else rng.choice(schema["enum"])
        kind = schema.get("type", "string")
        kind = rng.choice(kind) if isinstance(kind, list) else kind
        if kind == "object":
            return self._draw_object(schema, depth)
        if kind == "array":
            count = max(schema.get("minItems", 0), rng.randrange(3) if depth < 5 else 0)
            return [self.draw(schema.get("items", {}), depth + 1) for _ in range(min(count, 8))]
        return self._draw_plain(schema, kind)

    def fields(self, schema: Any) -> dict[str, Any]:
        """Return the schemas of an object's fields by name."""
        return dict(self.resolve(schema).get("properties", {}))

    def resolve(self, schema: Any) -> Any:
        while isinstance(schema, dict) and "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema if isinstance(schema, dict) else {}

    def _draw_plain(self, schema: Any, kind: str) -> Any:
        rng, low = self._rng, schema.get("minimum", 0)
        match kind:
            case "integer":
                return rng.randint(low, max(low, min(schema.get("maximum", low + 9), low + 9)))
            case "number":
                return round(low + rng.random(), 3)
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
        return rng.choice(("hello", "a", "The sky", *(schema.get("examples") or ("b",))))

    def _draw_object(self, schema: Any, depth: int) -> Any:
        fields, required = schema.get("properties", {}), schema.get("required", ())
        chance = 0.15 if depth < 4 else 0.0
        names = [name for name in fields if name in required or self._rng.random() < chance]
        return {name: self.draw(fields[name], depth + 1) for name in names}


def paths_within(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths inside a JSON value, down to a depth of eight, its own first."""
    result = [path]
    if isinstance(value, dict | list) and len(path) < 8:
        items = value.items() if isinstance(value, dict) else enumerate(value[:20])
        for key, part in items:
            result += paths_within(part, (*path, key))
    return result


def damaged(value: Any, rng: random.Random) -> Any:
    """Change one place of a JSON value, which is changed in place where it can be."""
    path = rng.choice(paths_within(value))
    if not path:
        return odd(rng) if rng.random() < 0.2 else value
    outer = value
    for key in path[:-1]:
        outer = outer[key]
    pick = rng.random()
    if pick < 0.1:
        del outer[path[-1]]
    elif pick < 0.2:
        outer[path[-1]] = [outer[path[-1]]]
    elif pick < 0.25 and isinstance(outer, dict):
        outer[str(odd(rng))[:40]] = outer.pop(path[-1])
    else:
        outer[path[-1]] = odd(rng)
    return value


def text_of(value: Any) -> bytes:
    """Return JSON, with NaN and lone surrogates in it as JSON's own readers take them."""
    return json.dumps(value).encode()


def garbled(text: bytes, rng: random.Random) -> bytes:
    """Return a JSON text that is damaged as a text."""
    at = rng.randrange(len(text) + 1)
    begin, end = text[:at], text[at:]
    match rng.randrange(10):
        case 0:
            end = b""
        case 1:
            begin += bytes([rng.randrange(256)])
        case 2:
            begin, end = text[:-1], b"," + text[1:]  # every key twice
        case 3:
            begin, end = text.decode().encode(rng.choice(("utf-16", "utf-32", "utf-8-sig"))), b""
        case 4:
            begin, end = text.replace(b'"', b"'"), b""
        case 5:
            begin += rng.choice((b"/* */", b"NaN", b"\\ud800", b"\xff\xfe", b"\0"))
        case 6:
            opening = rng.choice((b"[", b'{"a":', b'[{"a":'))
            begin, end = text[:-1] + b',"metadata":', opening * rng.choice((65, 3000))
        case 7:
            begin, end = text, rng.choice((b"{}", b"\n" + text, b"\0", b"]"))
        case 8:
            begin = begin.replace(b"0", rng.choice((b"1e999", b"01", b"0x1", b"-", b"9" * 500)), 1)
        case _:
            begin, end = rng.randbytes(rng.randrange(40)), b""
    return begin + end
