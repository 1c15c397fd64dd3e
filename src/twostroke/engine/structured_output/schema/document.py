"""A JSON schema's document: its schemas, where they are, and what their references name."""

from __future__ import annotations

import json
import math
import time
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urljoin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Keywords by their contents: one schema (of `_LISTS` a list of them), or schemas under names.
SCHEMAS: Final = frozenset(
    (
        *("additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if"),
        *("items", "not", "oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems"),
        "unevaluatedProperties",
    )
)
NAMED_SCHEMAS: Final = frozenset(
    (
        *("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties"),
        "properties",
    )
)
_LISTS: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")  # `items` in old drafts
TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
# Numbers beyond have no digits that would help anybody.
_MOST_DIGITS: Final = 400
_MOST_SHOWN: Final = 80  # characters of a path's end
_OLD_DRAFTS: Final = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")


class Resource:
    """A schema with an identifier, and the anchors in it.

    In an `is_old` draft, a reference hides the keywords beside it.
    """

    def __init__(self, uri: str, root: dict[str, Any], *, is_old: bool) -> None:
        """Begin without anchors."""
        self.uri = uri
        self.root = root
        self.is_old = is_old
        self.anchors: dict[str, dict[str, Any]] = {}
        self.dynamic: dict[str, dict[str, Any]] = {}


class Node:
    """A schema at its place; two nodes are equal only if they are the same place."""

    __slots__ = ("path", "resource", "schema")

    def __init__(self, schema: dict[str, Any], path: str, resource: Resource) -> None:
        """Keep what identifies it."""
        self.schema = schema
        self.path = path
        self.resource = resource

    def place(self, keyword: str) -> str:
        """Return a keyword with the JSON pointer of its schema; `#` is the root."""
        return f"{keyword[:_MOST_SHOWN]} ({_end(self.path) or '#'})"


class Document:
    """A schema's text, read and indexed; nothing outside of it is ever looked up."""

    def __init__(self, text: str) -> None:
        """Read a text.

        Raises:
            ValueError: it is not a schema; the sentence says why.
        """
        try:
            root = json.loads(text, parse_float=_number, parse_constant=_no_number)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(root, dict | bool):
            raise ValueError("it must be an object")  # noqa: TRY004 - a wrong value, as others are
        schema: dict[str, Any] = {"not": {}} if root is False else {} if root is True else root
        self._resources: dict[str, Resource] = {}
        self._nodes: dict[int, Node] = {}
        self._made: dict[object, Node] = {}
        is_old = any(draft in str(schema.get("$schema", "")) for draft in _OLD_DRAFTS)
        resource = Resource("", schema, is_old=is_old)
        self._resources[""] = resource
        self._index(schema, resource)
        self.root = self._nodes[id(schema)]

    def node(self, schema: dict[str, Any], near: Node) -> Node:
        """Return the node of a schema that was found in that of another node."""
        found = self._nodes.get(id(schema))
        if found is None:
            found = self._nodes[id(schema)] = Node(schema, near.path, near.resource)
        return found

    def made(self, schema: dict[str, Any], near: Node, key: object = None) -> Node:
        """Return the node of a schema that follows from another node: one for each `key`."""
        key = (json.dumps(schema, default=str) if key is None else key, id(near.resource))
        if key not in self._made:
            self._made[key] = self.node(schema, near)
        return self._made[key]

    def referred(self, node: Node, reference: str) -> dict[str, Any] | bool:
        """Return the schema that a reference names.

        Raises:
            ValueError: there is none in this document.
        """
        uri, _, fragment = reference.partition("#")
        resource: Resource | None = node.resource
        if uri:
            resource = self._resources.get(_joined_uri(node.resource.uri, uri))
        found: Any = None
        if resource is not None:
            fragment = unquote(fragment)
            if fragment.startswith("/"):
                found = self._pointed(resource, fragment)
            else:
                found = resource.anchors.get(fragment) if fragment else resource.root
        if not isinstance(found, dict | bool):
            shown = reference[:_MOST_SHOWN]
            raise ValueError(f"{node.place('$ref')} names nothing in the schema: '{shown}'")  # noqa: TRY004 - a wrong value
        return found

    def dynamic(self, node: Node, reference: str) -> dict[str, Any] | bool | None:
        """Return the schema that a `$dynamicRef` names, or None if that depends on the instance."""
        fragment = reference.partition("#")[2]
        found = self.referred(node, reference)
        if not isinstance(found, dict) or found.get("$dynamicAnchor") != fragment:
            return found
        # The outermost resource of any evaluation is the document.
        outer = self._resources[""].dynamic.get(fragment)
        if outer is not None:
            return outer
        several = [one for one in self._resources.values() if fragment in one.dynamic]
        return found if len({id(one) for one in several}) == 1 else None

    def _pointed(self, resource: Resource, pointer: str) -> object:
        here: Any = resource.root
        near = self._nodes[id(here)]
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(here, list) and key.isdecimal() and int(key) < len(here):
                here = here[int(key)]
            else:
                here = here.get(key) if isinstance(here, dict) else None
            if isinstance(here, dict):
                near = self._nodes.get(id(here), near)
        if isinstance(here, dict) and id(here) not in self._nodes:
            self._index(here, near.resource, pointer)
        return here

    def _index(self, schema: dict[str, Any], resource: Resource, path: str = "") -> None:
        """Note a schema and all in it, with their identifiers."""
        waiting: list[tuple[Any, str, Resource]] = [(schema, path, resource)]
        while waiting:
            part, here, around = waiting.pop()
            if isinstance(part, bool):
                continue
            if not isinstance(part, dict):
                raise ValueError(f"'{_end(here)}' must be a schema")  # noqa: TRY004 - a wrong value
            inner = self._identified(part, around)
            self._nodes[id(part)] = node = Node(part, here, inner)
            for keyword, value in part.items():
                check = _SHAPES.get(keyword)
                if check is not None and not check(value):
                    shown = json.dumps(value, default=str)[:_MOST_SHOWN]
                    raise ValueError(f"{node.place(keyword)} has a wrong value: {shown}")
            waiting += ((one, where, inner) for one, where in _inside(part, here))

    def _identified(self, schema: dict[str, Any], around: Resource) -> Resource:
        """Return the resource that a schema belongs to, and note its anchors."""
        resource = around
        identifier = schema.get("$id", schema.get("id"))
        is_hidden = around.is_old and "$ref" in schema
        if isinstance(identifier, str) and not is_hidden:
            uri, _, fragment = identifier.partition("#")
            if uri:
                old = around.is_old
                if isinstance(schema.get("$schema"), str):
                    old = any(draft in schema["$schema"] for draft in _OLD_DRAFTS)
                resource = Resource(_joined_uri(around.uri, uri), schema, is_old=old)
                if schema is around.root:  # the document's own identifier
                    self._resources[""] = resource
                self._resources.setdefault(resource.uri, resource)
            elif fragment:
                around.anchors.setdefault(fragment, schema)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                resource.anchors.setdefault(name, schema)
                if keyword == "$dynamicAnchor":
                    resource.dynamic.setdefault(name, schema)
        return resource


def _inside(schema: dict[str, Any], outer: str) -> Iterator[tuple[Any, str]]:
    """Yield the schemas in a schema, each with the end of its path."""
    for keyword, value in schema.items():
        path = _joined(outer, keyword)
        if keyword in NAMED_SCHEMAS:
            for name, inner in value.items():
                if keyword != "dependencies" or not isinstance(inner, list):
                    yield inner, _joined(path, name)
        elif keyword in SCHEMAS:
            if isinstance(value, list) and keyword in _LISTS:
                yield from ((inner, _joined(path, str(i))) for i, inner in enumerate(value))
            else:
                yield value, path


def _joined(path: str, step: str) -> str:
    """Return a JSON pointer, or of a long one the end: names may be long, and schemas many."""
    return f"{path}/{step}"[-_MOST_SHOWN - 1 :]


def _end(path: str) -> str:
    return path if len(path) <= _MOST_SHOWN else f"…{path[-_MOST_SHOWN:]}"


def _joined_uri(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:  # such as of a wrong IPv6 address
        return uri


def _number(text: str) -> int | Decimal:
    """Return a number as written: whole ones as integers, so that `2.0` is 2."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("Infinity")
    if not value.is_finite() or abs(value.adjusted()) > _MOST_DIGITS:
        raise ValueError(f"the number {text[:_MOST_SHOWN]} is too large or too small")
    return int(value) if value == value.to_integral_value() else value


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


def is_number(value: object) -> bool:
    """Return whether a value is a number as `Document` reads them."""
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_limit(value: object) -> bool:
    return isinstance(value, bool) or is_number(value)  # true and false: draft 4


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(name in TYPES for name in names)


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


_SHAPES: Final[dict[str, Callable[[object], bool]]] = {
    **dict.fromkeys(NAMED_SCHEMAS, _is(dict)),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "enum"), _is(list)),
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef", "pattern"), _is(str)),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _is_count),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _is_count),
    **dict.fromkeys(("minimum", "maximum"), is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _is_limit),
    "multipleOf": lambda value: is_number(value) and value > 0,  # type: ignore[operator]
    "required": lambda value: isinstance(value, bool) or _are_texts(value),  # true: draft 3
    "dependentRequired": lambda value: (
        isinstance(value, dict) and all(map(_are_texts, value.values()))
    ),
    "type": _is_type,
}


class Deadline:
    """Time for some work. All are equal: what was made within one is known within another."""

    def __init__(self, limit_s: float = math.inf) -> None:
        """Begin now."""
        self._limit_s, self._at_s = limit_s, time.monotonic() + limit_s

    def check(self) -> None:
        """Raise TimeoutError if the time is over; the sentence says how long it was."""
        if time.monotonic() >= self._at_s:
            raise TimeoutError(f"took longer than {self._limit_s:g} s to compile: simplify it.")

    def __eq__(self, other: object) -> bool:
        """Whether this is a deadline, too."""
        return isinstance(other, Deadline)

    def __hash__(self) -> int:
        """Return the same for all."""
        return 0
