"""The most expensive bodies that an OpenAPI document allows on each path, as JSON texts."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Schema = dict[str, Any]
    Make = Callable[[], str]  # makes a JSON text, which is large

_MAX_NESTING = 4  # of the field that is made costly
_MAX_DEPTH = 60  # of lists and objects; a server refuses more than 64
_BOUNDARY = "flood"
_NESTED = "unknown field: nested lists"
_LEAST_VALUES = {"string": '"a"', "array": "[]", "boolean": "true", "null": "null"}


class Body(NamedTuple):
    """A request body, with the field that makes it expensive, and the reason."""

    label: str
    data: bytes
    media_type: str = "application/json"


class CostlyBodies:
    """Makes expensive bodies of about `num_bytes` for the paths of a server."""

    def __init__(self, document: Schema, num_bytes: int) -> None:
        """Read the fields of all paths from an OpenAPI document."""
        self._document, self._num_bytes = document, num_bytes

    def of(self, path: str, needed: Schema, *, max_bodies: int, seed: int = 0) -> Iterator[Body]:
        """Yield up to `max_bodies` for a path: each kind if that is enough, else some of them.

        `needed` are the fields that the path needs, with short values. Nested lists, which cost the
        most to decode, are always among the bodies.
        """
        content = self._document["paths"][path]["post"]["requestBody"]["content"]
        draw = random.Random(f"{path} {seed}")
        if "application/json" not in content:
            forms = [*_forms(content["multipart/form-data"]["schema"], self._num_bytes)]
            yield from draw.sample(forms, min(max_bodies, len(forms)))
            return
        schema = self._resolved(content["application/json"]["schema"])
        base = {name: json.dumps(value) for name, value in needed.items()}
        makes: dict[str, Make] = {"repeated keys": partial(self._repeated, base)}
        for label, name, make in (*self._fields(schema, 0), *self._foreign_fields()):
            makes.setdefault(label, partial(_object_with, base, name, make))
        labels = sorted(makes)
        chosen_labels = draw.sample(labels, min(max_bodies, len(labels)))
        for label in dict.fromkeys([_NESTED, *chosen_labels][:max_bodies]):
            yield Body(label, makes[label]().encode())

    def _repeated(self, base: dict[str, str]) -> str:
        pair = _object(base or {"a": "1"})[1:-1]
        return "{" + self._many(pair) + "}"

    def _many(self, text: str) -> str:
        return ", ".join([text] * max(1, self._num_bytes // (len(text) + 2)))

    def _foreign_fields(self) -> Iterator[tuple[str, str, Make]]:
        """Yield a field that no path has."""
        yield "unknown field: a word", "foreign", self._word
        yield _NESTED, "foreign", self._nested_lists
        yield "unknown field: too deep", "foreign", lambda: "[" * self._num_bytes
        yield "unknown field: digits", "foreign", lambda: "9" * self._num_bytes
        yield "unknown field: many of them", "foreign", self._foreign_names

    def _foreign_names(self) -> str:
        return ", ".join(["1", *(f'"f{number}": 1' for number in range(self._num_bytes // 12))])

    def _fields(self, schema: Schema, depth: int) -> Iterator[tuple[str, str, Make]]:
        """Yield a label, the name and a costly value of each field of an object."""
        for name, part in schema.get("properties", {}).items():
            for label, make in self._values(part, depth + 1):
                yield f"{name}{label}", name, make

    def _values(self, schema: Schema, depth: int) -> Iterator[tuple[str, Make]]:
        """Yield expensive values of a schema, each with a label: its position and its kind."""
        schema = self._resolved(schema)
        if depth > _MAX_NESTING or "const" in schema or "enum" in schema:
            return
        for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from self._values(part, depth)
        kinds = _kinds(schema)
        if "string" in kinds:
            yield ": a word", self._word
            yield ": spaces", lambda: f'"{" " * self._num_bytes}"'
            yield ": escapes", lambda: '"' + "\\ud83d\\ude42\\u0000" * (self._num_bytes // 18) + '"'
        if kinds & {"integer", "number"}:
            yield ": digits", lambda: "9" * self._num_bytes
            yield ": a great exponent", lambda: "1e999999999"
        if "array" in kinds:
            items = schema.get("items", {})
            yield ": many items", lambda: f"[{self._many(self._least_value(items))}]"
            yield ": nested lists", self._nested_lists
            inner = self._values(items, depth + 1) if items else ()
            for label, make in inner:
                yield f"[0]{label}", partial(_listed, make)
        if "object" in kinds:
            yield from self._objects(schema, depth)

    def _nested_lists(self) -> str:
        return f"[{self._many('[' * _MAX_DEPTH + ']' * _MAX_DEPTH)}]"

    def _word(self) -> str:
        return f'"{"z" * self._num_bytes}"'

    def _objects(self, schema: Schema, depth: int) -> Iterator[tuple[str, Make]]:
        needed = self._needed(schema)
        for label, name, make in self._fields(schema, depth):
            yield f".{label}", partial(_object_with, needed, name, make)
        if schema.get("additionalProperties", True) is not False or not schema.get("properties"):
            yield ": many keys", partial(self._many_keys, schema, needed)
            yield ": nested objects", self._nested_objects

    def _many_keys(self, schema: Schema, needed: dict[str, str]) -> str:
        least_value = self._least_value(schema.get("additionalProperties"))
        num_keys = self._num_bytes // (len(least_value) + 12)
        return _object(needed | {f"k{number}": least_value for number in range(num_keys)})

    def _nested_objects(self) -> str:
        return '{"a": ' * _MAX_DEPTH + self._word() + "}" * _MAX_DEPTH

    def _needed(self, schema: Schema) -> dict[str, str]:
        properties = schema.get("properties", {})
        return {
            name: self._least_value(properties.get(name)) for name in schema.get("required", ())
        }

    def _least_value(self, schema: Schema | bool | None, depth: int = 0) -> str:
        """Return a short value that a schema allows."""
        if not isinstance(schema, dict) or depth > _MAX_NESTING:
            return "1"
        schema = self._resolved(schema)
        if "const" in schema or "enum" in schema:
            return json.dumps(schema.get("const", (schema.get("enum") or [None])[0]))
        for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            if part.get("type") != "null":
                return self._least_value(part, depth + 1)
        kind = next((kind for kind in _kinds(schema) if kind != "null"), "null")
        if kind == "object":
            return _object(self._needed(schema))
        return _LEAST_VALUES.get(kind, str(max(1, schema.get("minimum", 1))))

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            part: Any = self._document
            for name in schema["$ref"].removeprefix("#/").split("/"):
                part = part[name]
            schema = part
        return schema


def _kinds(schema: Schema) -> set[str]:
    """Return the types that a schema allows; all of them if it allows anything."""
    if not schema.keys() & {"type", "anyOf", "oneOf"}:
        return {"string", "number", "array", "object"}
    kinds = schema.get("type", ())
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _listed(make: Make) -> str:
    return f"[{make()}]"


def _object(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def _object_with(fields: dict[str, str], name: str, make: Make) -> str:
    return _object(fields | {name: make()})


def _forms(schema: Schema, num_bytes: int) -> Iterator[Body]:
    """Yield multipart forms: many parts, long names, and files of many lines and of one."""
    media_type = f"multipart/form-data; boundary={_BOUNDARY}"
    properties = schema["properties"]
    file_name = next(name for name, part in properties.items() if "contentMediaType" in part)
    purpose = _part("purpose", b"batch") if "purpose" in properties else b""

    def body(label: str, part: bytes) -> Body:
        return Body(label, b"%s%s--%s--\r\n" % (purpose, part, _BOUNDARY.encode()), media_type)

    small, line = _part("a", b"b"), b'{"custom_id": "a", "body": {}}\n'
    many_lines = line * (num_bytes // len(line))
    yield body("many parts", small * (num_bytes // len(small)))
    yield body("a long value", _part("a", b"z" * num_bytes))
    yield body("a long name", _part("z" * num_bytes, b"b"))
    yield body("a file of a word", _part(file_name, b"z" * num_bytes, "a.jsonl"))
    yield body("a file of lines", _part(file_name, many_lines, "a.jsonl"))
    yield body("a file of line ends", _part(file_name, b"\n" * num_bytes, "a.jsonl"))
    yield body("beginnings of an end", _part(file_name, b"\r\n--flo" * (num_bytes // 7), "a"))
    yield body("a long file name", _part(file_name, line, "z" * num_bytes))


def _part(name: str, data: bytes, file_name: str = "") -> bytes:
    file = f'; filename="{file_name}"' if file_name else ""
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    return head.encode() + data + b"\r\n"
