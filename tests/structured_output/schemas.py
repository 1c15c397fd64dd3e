"""Random JSON Schemas of all keywords that are kept to, most of which some value fits."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

    Schema = dict[str, Any]

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_NAMES = ("a", "b", "ab", "role", "kind", "tags", "is_open", "é", 'q"t', "x/y", "c\\d", "two words")
_WORDS = ("user", "admin", "Ada", "", "ü", "a\nb", 'say "x"', "\\", "日本", "🙂", "1", "null")
# Python's `re` and ECMA-262 agree about these, but for the `$` (see `judge`).
_PATTERNS = ("^[a-z]{2,8}$", "^[A-Z][a-z]+( [A-Z][a-z]+)?$", r"^\+[0-9]{1,3} [0-9]{4,9}$", "[0-9]")
_PATTERNS += ("^x", "^a|b$", "[^a-z]", "^$|^[!-~]+$", "é", "^(yes|no)$")
_NAME_PATTERNS = ("^x-", "^[a-z]+$", "^[A-Z]", "_id$", "^[^a-z]+$", "[0-9]")
FORMATS = ("date", "time", "date-time", "duration", "email", "ipv4", "ipv6", "uuid")
_ANNOTATIONS: tuple[Schema, ...] = (
    {"title": "Some value"},
    {"description": "What it is", "x-order": 3},
    {"default": None, "examples": [1]},
    {"deprecated": True, "readOnly": True},
    {"markdownDescription": "*it*"},
)


class Schemas:
    """Makes schemas."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._serial = itertools.count()
        self._definitions: dict[str, Schema] = {}
        self._old = False

    def make(self) -> Schema:
        """Return a schema of a whole answer."""
        self._definitions = {}
        self._old = self._rng.random() < 0.2
        kinds = [self._object, self._object, self._array, self._alternatives, self._parts]
        schema = self._pick(kinds)(0)
        if self._definitions:
            schema |= {"definitions" if self._old else "$defs": self._definitions}
        return {"$schema": DRAFT_7} | schema if self._old else schema

    def _schema(self, depth: int) -> Schema:
        kinds = [self._string, self._string, self._number, self._values, self._types]
        if depth < 3:
            kinds += [self._object, self._object, self._array, self._array, self._alternatives]
            kinds += [self._parts, self._reference, self._excluding]
        schema = self._pick(kinds)(depth)
        return schema | self._pick(_ANNOTATIONS) if self._chance(0.1) else schema

    def _string(self, depth: int) -> Schema:
        del depth
        schema: Schema = {"type": "string"}
        kind = self._rng.randrange(5)
        if kind == 0:
            schema["pattern"] = self._pick(_PATTERNS)
        elif kind == 1:
            schema["format"] = self._pick((*FORMATS, "color"))
        elif kind <= 3:
            low = self._rng.randrange(4)
            bounds = {"minLength": low, "maxLength": low + self._rng.randrange(12)}
            schema |= self._some(bounds, 1)
        return schema

    def _number(self, depth: int) -> Schema:
        del depth
        schema: Schema = {"type": self._pick(("integer", "number"))}
        low = self._rng.randint(-50, 1000)
        lowest = self._pick((low, low + 0.5, float(low)))
        schema |= self._some({self._pick(("minimum", "exclusiveMinimum")): lowest}, 0)
        highest = {self._pick(("maximum", "exclusiveMaximum")): low + self._rng.randint(20, 5000)}
        schema |= self._some(highest, 0)
        if self._chance(0.2):
            schema["multipleOf"] = self._pick((2, 5, 0.5, 0.25, 3))
        return schema

    def _values(self, depth: int) -> Schema:
        del depth
        values = [*self._rng.sample(_WORDS, 3), None, True, self._rng.randint(-9, 9), [1, "a"]]
        values += [{"x": 1.5}, 0, 1.0, {"a": {"b": []}}, False]
        if self._chance(0.3):
            return {"const": self._pick(values)}
        return {"enum": self._rng.sample(values, self._rng.randint(1, 4))}

    def _types(self, depth: int) -> Schema:
        del depth
        simple = ("string", "integer", "boolean", "null", "number")
        return {"type": self._rng.sample(simple, self._rng.randint(1, 3))}

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(_NAMES, self._rng.randint(0, 4))
        schema: Schema = {"type": "object"}
        if names or self._chance(0.5):
            schema["properties"] = {name: self._schema(depth + 1) for name in names}
            schema["required"] = [name for name in names if self._chance(0.6)]
        rest = self._rng.random()
        if rest < 0.4:
            schema["additionalProperties"] = False
        elif rest < 0.7:
            schema["additionalProperties"] = self._schema(depth + 1)
        if self._chance(0.2):
            patterns = self._rng.sample(_NAME_PATTERNS, self._rng.randint(1, 2))
            schema["patternProperties"] = {pattern: self._schema(depth + 2) for pattern in patterns}
        if self._chance(0.15):
            schema["propertyNames"] = self._pick(
                (
                    {"pattern": "^[a-z_]*$"},
                    {"maxLength": 4},
                    {"enum": [*names, "z"]},
                    {"not": {"const": "b"}},
                )
            )
        if self._chance(0.2):
            low = self._rng.randrange(1, 3)
            counts = {"minProperties": low, "maxProperties": low + self._rng.randrange(4)}
            schema |= self._some(counts, 1)
        if len(names) > 1 and self._chance(0.2):
            schema |= self._dependent(names, depth)
        if len(names) > 1 and self._chance(0.2):
            schema |= self._conditional(names, depth)
        if not self._old and self._chance(0.1):
            schema.pop("additionalProperties", None)
            schema["unevaluatedProperties"] = self._pick((False, {"type": "integer"}))
        return schema

    def _dependent(self, names: list[str], depth: int) -> Schema:
        first, second = names[:2]
        inner = {"required": [second], "properties": {second: self._schema(depth + 1)}}
        if self._old:
            return {"dependencies": {first: self._pick(([second], inner))}}
        if self._chance(0.5):
            return {"dependentRequired": {first: [second]}}
        return {"dependentSchemas": {first: inner}}

    def _conditional(self, names: list[str], depth: int) -> Schema:
        first, second = names[:2]
        test = {"properties": {first: self._values(depth)}}
        schema: Schema = {"if": self._pick((test, test | {"required": [first]}))}
        then = {"properties": {second: self._schema(depth + 1)}}
        schema |= self._some({"then": {"required": [second]}, "else": then}, 1)
        return schema

    def _array(self, depth: int) -> Schema:
        low = self._rng.randrange(3)
        schema: Schema = {"type": "array"}
        first = [self._schema(depth + 1) for _ in range(self._rng.randint(1, 2))]
        if self._chance(0.3):
            schema["items" if self._old else "prefixItems"] = first
            if self._chance(0.7):
                rest = self._pick((False, self._schema(depth + 1)))
                schema["additionalItems" if self._old else "items"] = rest
        elif self._chance(0.9):
            schema["items"] = first[0]
        if self._chance(0.7):
            schema |= self._some({"minItems": low, "maxItems": low + self._rng.randrange(4)}, 1)
        if self._chance(0.2):
            schema["uniqueItems"] = True
        if self._chance(0.15):
            schema["contains"] = self._schema(depth + 2)
            if not self._old and self._chance(0.5):
                schema |= self._some({"minContains": self._rng.randrange(3), "maxContains": 2}, 1)
        if not self._old and self._chance(0.1):
            schema["unevaluatedItems"] = self._pick((False, {"type": "boolean"}))
        return schema

    def _alternatives(self, depth: int) -> Schema:
        if self._chance(0.3):
            kinds = self._rng.sample(_WORDS[:3], 2)
            parts = [self._variant(kind, depth) for kind in kinds]
            schema: Schema = {self._pick(("anyOf", "oneOf")): parts}
            return (
                schema | {"discriminator": {"propertyName": "kind"}}
                if self._chance(0.5)
                else schema
            )
        parts = [self._schema(depth + 1) for _ in range(self._rng.randint(1, 3))]
        schema = {self._pick(("anyOf", "anyOf", "oneOf")): parts}
        return schema | self._number(depth) if self._chance(0.1) else schema

    def _variant(self, kind: str, depth: int) -> Schema:
        members = {"kind": {"const": kind}, "value": self._schema(depth + 1)}
        return {
            "type": "object",
            "properties": members,
            "required": ["kind", "value"],
            "additionalProperties": False,
        }

    def _parts(self, depth: int) -> Schema:
        """Return a schema whose keywords are divided over the parts of an `allOf`."""
        schema = self._pick((self._object, self._object, self._array, self._string, self._number))(
            depth
        )
        outer, inner = {}, {}
        together = {"additionalProperties", "additionalItems", "then", "else", "maxContains"}
        together |= {"patternProperties", "properties", "prefixItems", "items", "if", "minContains"}
        together |= {"contains"}
        for keyword, value in schema.items():
            (inner if keyword in together or self._chance(0.5) else outer)[keyword] = value
        if self._old or self._chance(0.5):
            return outer | {"allOf": [inner, *([{}] if self._chance(0.2) else [])]}
        return outer | self._referred(inner)

    def _reference(self, depth: int) -> Schema:
        if self._definitions and self._chance(0.4):
            return {"$ref": self._path(self._pick(list(self._definitions)))}
        if self._chance(0.3):
            return self._tree(depth)
        return self._referred(self._schema(depth + 1))

    def _referred(self, schema: Schema) -> Schema:
        name = f"d{next(self._serial)}"
        self._definitions[name] = schema
        return {"$ref": self._path(name)}

    def _path(self, name: str) -> str:
        return f"#/{'definitions' if self._old else '$defs'}/{name}"

    def _tree(self, depth: int) -> Schema:
        """Return a schema that refers to itself."""
        name = f"d{next(self._serial)}"
        reference = {"$ref": self._path(name)}
        node = {
            "type": "object",
            "properties": {
                "value": self._values(depth),
                "next": {"anyOf": [reference, {"type": "null"}]},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
        if self._chance(0.5):
            node["properties"]["next"] = {"type": "array", "items": reference, "maxItems": 2}
        self._definitions[name] = node
        return dict(reference)

    def _excluding(self, depth: int) -> Schema:
        kinds = (self._string, self._number, self._object, self._types)
        return self._pick(kinds)(depth) | {
            "not": self._pick((self._values, self._string, self._number))(depth)
        }

    def _some(self, pairs: Schema, min_count: int) -> Schema:
        """Return at least so many of these keywords."""
        count = self._rng.randint(min_count, len(pairs))
        return dict(self._rng.sample(list(pairs.items()), count))

    def _pick(self, some: Any) -> Any:
        return self._rng.choice(some)

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share
