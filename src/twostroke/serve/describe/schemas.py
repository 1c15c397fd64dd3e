"""Structs as JSON Schemas: msgspec's, with names for people, descriptions and bounds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.sampling import BOUNDS
from twostroke.serve.describe.fields import PARTS, in_bodies, in_structs, neutral_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from twostroke.serve.describe.facts import Facts

    Struct = type[msgspec.Struct]
    Schema = dict[str, Any]

PREFIX: Final = "#/components/schemas/"
_FORMS: Final = {"http": "openai"}  # what is OpenAI's, for want of another protocol in that layer


class Schemas:
    """The schemas of all structs that requests and responses consist of."""

    def __init__(self, requests: Iterable[Struct], answers: Iterable[Struct], facts: Facts) -> None:
        """Describe request bodies and answers (events of streams and errors among these)."""
        bodies, said = tuple(requests), tuple(answers)
        asked = (*bodies, *(part for parts in PARTS.values() for part in parts))
        self._sent = frozenset(structs_in(said))
        self._told_apart = frozenset(_told_apart(asked))
        kinds = [*dict.fromkeys((*structs_in(asked), *structs_in(said)))]
        self.names = _names(kinds)
        _, found = msgspec.json.schema_components((*asked, *said), ref_template=PREFIX + "{name}")
        renamed = {_full_name(kind): name for kind, name in self.names.items()}
        self._in_bodies, self._in_structs = in_bodies(facts), in_structs(facts)
        self.components: dict[str, Schema] = {}
        for kind, name in self.names.items():
            key = _full_name(kind) if _full_name(kind) in found else kind.__name__
            schema: Schema = _merged(_renamed(found[key], renamed))
            self._complete(kind, schema, is_body=kind in bodies)
            self.components[name] = schema
        self.components = dict(sorted(self.components.items()))

    def ref(self, kind: Struct) -> Schema:
        """Return the reference to a struct's schema."""
        return {"$ref": PREFIX + self.names[kind]}

    def _complete(self, kind: Struct, schema: Schema, *, is_body: bool) -> None:
        """Add what msgspec does not know."""
        del schema["title"]
        schema["description"] = " ".join(schema.get("description", "").split())
        tag = kind.__struct_config__.tag_field
        if tag is not None and kind not in self._sent | self._told_apart:
            schema["required"].remove(tag)
        own = self._in_structs.get(self.names[kind], {})
        schema |= own.get("", {})
        neutral = neutral_fields(kind)
        for name, field in schema["properties"].items():
            if kind in self._sent:  # what has a default is always there
                if "default" in field and name not in schema["required"]:
                    schema["required"].append(name)
                field.pop("default", None)
            elif field.get("default", ...) is None:  # which is the same as leaving it out
                del field["default"]
            more: Schema = {}
            if is_body:
                more |= _bounds(name) if name in BOUNDS and _is_number(field) else {}
                more |= self._in_bodies.get(name, {})
                if not field:  # anything is accepted
                    more = {key: text for key, text in more.items() if key == "description"}
            more |= _neutral(neutral[name]) if name in neutral else {}
            more |= own.get(name, {})
            if (kind, name) in PARTS:
                parts = {"anyOf": [self.ref(part) for part in PARTS[kind, name]]}
                more["anyOf"] = [_of_parts(way, parts) for way in _ways(field)]
            if "anyOf" in more:  # which says all
                field.clear()
            field.update(more)


def structs_in(kinds: Iterable[Struct]) -> Iterator[Struct]:
    """Yield structs and all that are inside them, once each, outer ones first."""
    seen: dict[Struct, None] = {}
    for kind in kinds:
        _collect(msgspec.inspect.type_info(kind), seen)
    yield from seen


def _told_apart(kinds: Iterable[Struct]) -> Iterator[Struct]:
    """Yield the structs that stand beside others in a place: these need their tag."""
    for kind in structs_in(kinds):
        info = msgspec.inspect.type_info(kind)
        assert isinstance(info, msgspec.inspect.StructType)
        waiting = [field.type for field in info.fields]
        while waiting:
            match waiting.pop():
                case msgspec.inspect.UnionType(types=types):
                    beside = [t.cls for t in types if isinstance(t, msgspec.inspect.StructType)]
                    yield from beside if len(beside) > 1 else ()
                    waiting += types
                case (
                    msgspec.inspect.CollectionType(item_type=inner)
                    | msgspec.inspect.DictType(value_type=inner)
                ):
                    waiting.append(inner)


def _collect(kind: msgspec.inspect.Type, seen: dict[Struct, None]) -> None:
    match kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            if cls not in seen:
                seen[cls] = None
                for field in fields:
                    _collect(field.type, seen)
        case msgspec.inspect.UnionType(types=types):
            for one in types:
                _collect(one, seen)
        case (
            msgspec.inspect.CollectionType(item_type=inner)
            | msgspec.inspect.DictType(value_type=inner)
        ):
            _collect(inner, seen)


def _names(kinds: list[Struct]) -> dict[Struct, str]:
    """Return a name for each struct: its own, with as much before it as tells it from others."""
    names: dict[Struct, str] = {}
    for kind in kinds:
        alike = [other for other in kinds if other.__name__ == kind.__name__]
        ways = ((), (-2,), (-1,), (-2, -1))  # of its module's path: the protocol, the file
        names[kind] = next(
            _name(kind, way)
            for way in ways
            if len({_name(other, way) for other in alike}) == len(alike)
        )
    assert len(set(names.values())) == len(names)
    return names


def _name(kind: Struct, way: tuple[int, ...]) -> str:
    path = kind.__module__.split(".")
    before = (_FORMS.get(path[place], path[place]).title().replace("_", "") for place in way)
    return "".join(before) + kind.__name__


def _full_name(kind: Struct) -> str:
    """Return what msgspec calls a struct that shares its name with another."""
    return re.sub(r"[^a-zA-Z0-9.\-_]", "_", f"{kind.__module__}.{kind.__qualname__}")


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """Return a copy of a schema whose references have our names."""
    if isinstance(value, dict):
        return {key: _renamed(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, names) for inner in value]
    if isinstance(value, str) and value.startswith(PREFIX):
        name = value.removeprefix(PREFIX)
        return PREFIX + names.get(name, name)
    return value


def _merged(value: Any) -> Any:
    """Return a schema in which plain alternatives of different types are one with several types.

    Each of their keywords says something about one type alone.
    """
    if isinstance(value, list):
        return [_merged(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    schema = {key: _merged(inner) for key, inner in value.items()}
    ways = schema.get("anyOf", [])
    kinds = [way.get("type") for way in ways]
    if not ways or not all(isinstance(kind, str) for kind in kinds) or len({*kinds}) < len(kinds):
        return schema
    del schema["anyOf"]
    merged = {key: inner for way in ways for key, inner in way.items()}
    return {"type": kinds} | {key: merged[key] for key in merged if key != "type"} | schema


def _ways(field: Schema) -> list[Schema]:
    kinds = field["type"]
    return [{"type": kind} for kind in ([kinds] if isinstance(kinds, str) else kinds)]


def _of_parts(way: Schema, parts: Schema) -> Schema:
    return way | {"items": parts} if way["type"] == "array" else way


def _is_number(field: Schema) -> bool:
    kinds = field.get("type", ())
    return bool({"integer", "number"}.intersection([kinds] if isinstance(kinds, str) else kinds))


def _bounds(name: str) -> Schema:
    bounds = BOUNDS[name]
    low = "exclusiveMinimum" if bounds.above else "minimum"
    return {low: bounds.low, "maximum": bounds.high}


def _neutral(values: tuple[object, ...]) -> Schema:
    """Return the schema of a field that is refused unless it asks for nothing."""
    if not values:
        return {"type": "null", "description": "Not supported: leave it out."}
    return {
        "enum": [None, *values],
        "description": "Not supported: accepted with the value that asks for nothing.",
    }
