"""Parses a JSON schema: its subschemas, their locations, and the targets of its references."""

from __future__ import annotations

import json
import math
import time
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urljoin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Keywords that hold a schema (`_LISTS`: also a list of schemas), and keywords that hold schemas
# under names.
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
_MAX_EXPONENT: Final = 400  # numbers beyond 1e400 and 1e-400 are refused
_MAX_QUOTED_CHARS: Final = 80  # of a value, and of the end of a path
_OLD_DRAFTS: Final = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")


class Resource:
    """A JSON schema, or a part of one, with its own identifier (`$id`) and the anchors in it.

    References name a resource and an anchor. `is_old` says whether the schema follows a draft
    before 2019, in which `$ref` hides the keywords beside it.
    """

    def __init__(self, uri: str, root: dict[str, Any], *, is_old: bool) -> None:
        """Register a schema at a URI, without anchors yet."""
        self.uri = uri
        self.root = root
        self.is_old = is_old
        self.anchors: dict[str, dict[str, Any]] = {}
        self.dynamic: dict[str, dict[str, Any]] = {}


class Node:
    """A JSON schema or subschema in a document, with its location.

    Nodes are compared by identity: a location has one node.
    """

    __slots__ = ("path", "resource", "schema")

    def __init__(self, schema: dict[str, Any], path: str, resource: Resource) -> None:
        """Wrap a schema, whose JSON pointer in `resource` is `path`."""
        self.schema = schema
        self.path = path
        self.resource = resource

    def location(self, keyword: str) -> str:
        """Return a keyword with its schema's JSON pointer, such as `minimum (/items)`, for errors.

        The pointer of the root is `#`.
        """
        return f"{keyword[:_MAX_QUOTED_CHARS]} ({_end(self.path) or '#'})"


class Document:
    """A parsed JSON schema with an index of its subschemas.

    References to other files are not followed.
    """

    def __init__(self, text: str) -> None:
        """Parse the text of a JSON schema.

        Raises:
            ValueError: the text is not a JSON schema.
        """
        try:
            root = json.loads(text, parse_float=_number, parse_constant=_no_number)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(root, dict | bool):
            raise ValueError("it must be an object")  # noqa: TRY004 - a wrong value, like others
        schema: dict[str, Any] = {"not": {}} if root is False else {} if root is True else root
        self._resources: dict[str, Resource] = {}
        self._nodes: dict[int, Node] = {}
        self._derived: dict[object, Node] = {}
        is_old = any(draft in str(schema.get("$schema", "")) for draft in _OLD_DRAFTS)
        resource = Resource("", schema, is_old=is_old)
        self._resources[""] = resource
        self._index(schema, resource)
        self.root = self._nodes[id(schema)]

    def node(self, schema: dict[str, Any], outer: Node) -> Node:
        """Return the node of a subschema, made if necessary; `outer` is the node of its parent."""
        node = self._nodes.get(id(schema))
        if node is None:
            node = Node(schema, outer.path, outer.resource)
            self._nodes[id(schema)] = node
        return node

    def derived(self, schema: dict[str, Any], outer: Node, key: object = None) -> Node:
        """Return the node of a schema that was made from a part of the document, such as a `not`.

        The same `key` (by default the schema's text) gives the same node, so that equal schemas are
        compared as equal. For errors, the new schema has the location of `outer`.
        """
        key = (json.dumps(schema, default=str) if key is None else key, id(outer.resource))
        if key not in self._derived:
            self._derived[key] = self.node(schema, outer)
        return self._derived[key]

    def resolve(self, node: Node, reference: str) -> dict[str, Any] | bool:
        """Return the schema to which a `$ref` in a node's schema refers.

        Raises:
            ValueError: this document has no such schema.
        """
        uri, _, fragment = reference.partition("#")
        resource: Resource | None = node.resource
        if uri:
            resource = self._resources.get(_joined_uri(node.resource.uri, uri))
        target: Any = None
        if resource is not None:
            fragment = unquote(fragment)
            if fragment.startswith("/"):
                target = self._follow_pointer(resource, fragment)
            else:
                target = resource.anchors.get(fragment) if fragment else resource.root
        if not isinstance(target, dict | bool):
            quoted = reference[:_MAX_QUOTED_CHARS]
            raise ValueError(f"{node.location('$ref')} names nothing in the schema: '{quoted}'")  # noqa: TRY004 - a wrong value
        return target

    def resolve_dynamic(self, node: Node, reference: str) -> dict[str, Any] | bool | None:
        """Return the schema to which a `$dynamicRef` in a node's schema refers.

        None if the schema differs between the values that are validated.
        """
        fragment = reference.partition("#")[2]
        target = self.resolve(node, reference)
        if not isinstance(target, dict) or target.get("$dynamicAnchor") != fragment:
            return target
        # The document is the outermost resource of each evaluation.
        outer = self._resources[""].dynamic.get(fragment)
        if outer is not None:
            return outer
        resources = {
            id(resource) for resource in self._resources.values() if fragment in resource.dynamic
        }
        return target if len(resources) == 1 else None

    def _follow_pointer(self, resource: Resource, pointer: str) -> object:
        """Return the part of a resource's schema that a JSON pointer names; None if there is none.

        A part that is a schema gets a node, even at a location that usually has no schema.
        """
        value: Any = resource.root
        outer = self._nodes[id(value)]
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, dict):
                outer = self._nodes.get(id(value), outer)
        if isinstance(value, dict) and id(value) not in self._nodes:
            self._index(value, outer.resource, pointer)
        return value

    def _index(self, schema: dict[str, Any], resource: Resource, path: str = "") -> None:
        """Index a schema and its subschemas, and check the form of their keywords."""
        waiting: list[tuple[Any, str, Resource]] = [(schema, path, resource)]
        while waiting:
            part, part_path, outer = waiting.pop()
            if isinstance(part, bool):
                continue
            if not isinstance(part, dict):
                raise ValueError(f"'{_end(part_path)}' must be a schema")  # noqa: TRY004 - a wrong value
            inner = self._resource_of(part, outer)
            node = Node(part, part_path, inner)
            self._nodes[id(part)] = node
            for keyword, value in part.items():
                check = _SHAPES.get(keyword)
                if check is not None and not check(value):
                    quoted = json.dumps(value, default=str)[:_MAX_QUOTED_CHARS]
                    raise ValueError(f"{node.location(keyword)} has a wrong value: {quoted}")
            waiting += (
                (subschema, subschema_path, inner)
                for subschema, subschema_path in _subschemas(part, part_path)
            )

    def _resource_of(self, schema: dict[str, Any], outer: Resource) -> Resource:
        """Return a subschema's resource: a new one if it has an `$id`, else the outer schema's.

        Also registers the subschema's anchors.
        """
        resource = outer
        identifier = schema.get("$id", schema.get("id"))
        is_hidden = outer.is_old and "$ref" in schema
        if isinstance(identifier, str) and not is_hidden:
            uri, _, fragment = identifier.partition("#")
            if uri:
                is_old = outer.is_old
                if isinstance(schema.get("$schema"), str):
                    is_old = any(draft in schema["$schema"] for draft in _OLD_DRAFTS)
                resource = Resource(_joined_uri(outer.uri, uri), schema, is_old=is_old)
                if schema is outer.root:  # the document's own identifier
                    self._resources[""] = resource
                self._resources.setdefault(resource.uri, resource)
            elif fragment:
                outer.anchors.setdefault(fragment, schema)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                resource.anchors.setdefault(name, schema)
                if keyword == "$dynamicAnchor":
                    resource.dynamic.setdefault(name, schema)
        return resource


def _subschemas(schema: dict[str, Any], outer_path: str) -> Iterator[tuple[Any, str]]:
    """Yield the subschemas directly inside a schema, each with its JSON pointer."""
    for keyword, value in schema.items():
        path = _joined(outer_path, keyword)
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
    """Return a JSON pointer with one more step; of a long pointer, only the end."""
    return f"{path}/{step}"[-_MAX_QUOTED_CHARS - 1 :]


def _end(path: str) -> str:
    return path if len(path) <= _MAX_QUOTED_CHARS else f"…{path[-_MAX_QUOTED_CHARS:]}"


def _joined_uri(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:  # such as for a wrong IPv6 address
        return uri


def _number(text: str) -> int | Decimal:
    """Return a JSON number exactly: an integer if it is whole (`2.0` is 2), else a Decimal."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("Infinity")
    if not value.is_finite() or abs(value.adjusted()) > _MAX_EXPONENT:
        raise ValueError(f"the number {text[:_MAX_QUOTED_CHARS]} is too large or too small")
    return int(value) if value == value.to_integral_value() else value


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


def is_number(value: object) -> bool:
    """Whether a value of a parsed document is a number; booleans do not count."""
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_limit(value: object) -> bool:
    return isinstance(value, bool) or is_number(value)  # booleans in draft 4


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(name in TYPES for name in names)


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


# Checks of the forms of keywords' values.
_SHAPES: Final[dict[str, Callable[[object], bool]]] = {
    **dict.fromkeys(NAMED_SCHEMAS, _is(dict)),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems", "enum"), _is(list)),
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef", "pattern"), _is(str)),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _is_count),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _is_count),
    **dict.fromkeys(("minimum", "maximum"), is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _is_limit),
    "multipleOf": lambda value: is_number(value) and value > 0,  # type: ignore[operator]
    "required": lambda value: isinstance(value, bool) or _are_texts(value),  # booleans in draft 3
    "dependentRequired": lambda value: (
        isinstance(value, dict) and all(map(_are_texts, value.values()))
    ),
    "type": _is_type,
}


class Deadline:
    """The time at which compiling a JSON schema must end.

    All deadlines are equal, so that the cache of prepared schemas ignores them.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        """Start a time limit of `limit_s` seconds now."""
        self._limit_s = limit_s
        self._at_s = time.monotonic() + limit_s

    def check(self) -> None:
        """Raise TimeoutError if the time limit is over."""
        if time.monotonic() >= self._at_s:
            raise TimeoutError(f"took longer than {self._limit_s:g} s to compile: simplify it.")

    def __eq__(self, other: object) -> bool:
        """Whether `other` is a deadline: all deadlines are equal, so that caches ignore them."""
        return isinstance(other, Deadline)

    def __hash__(self) -> int:
        """Return the same hash for all deadlines, so that caches ignore them."""
        return 0
