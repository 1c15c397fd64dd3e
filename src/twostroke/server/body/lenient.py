"""Removes unknown fields from a decoded body, so that they do not fail the request."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect
from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.core.mismatch import extra_of, join_path, type_of, union_members
from twostroke.server.body.explain import MAX_NAME_LENGTH, explain, unknown_field
from twostroke.server.body.well_known import KNOWN_HINTS, has_meaning
from twostroke.server.http.errors import UnknownFieldError
from twostroke.server.http.ignored import MAX_IGNORED, Ignored

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_EXACT_INTEGER = 2**53  # a float64 holds larger integers only approximately


@dataclass(slots=True)
class _StructFields:
    """The fields of a request struct, for the removal of unknown fields from request bodies.

    Attributes:
        names: the names of all fields and of the tag.
        is_closed: whether the struct refuses unknown fields, which are then removed.
        searchable: the shapes of fields whose values may need a change.
        droppable_types: the types of fields that are ignored if their value is wrong.
    """

    names: frozenset[str]
    is_closed: bool
    searchable: dict[str, _Shape] = field(default_factory=dict)
    droppable_types: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Shape:
    """The facts about a field's type by which `_LenientWalk` searches its values.

    A type whose values never need a change has no shape, and the search skips its values.

    Attributes:
        item: the shape of a list's items; None without a list, or if items need no change.
        max_items: longer lists are not searched, since they are refused anyway.
        structs: the fields of each struct, by the struct's tag; None for a struct without a
            tag.
        tag_field: the name of the field with the tag.
        is_integer: whether a whole number that is written as a fraction (15.0) becomes 15.
        omission_rules: the types of list items to keep or refuse, from
            `field.unknown_left_out`; None keeps items of unknown types.
    """

    item: _Shape | None = None
    max_items: int | None = None
    structs: dict[str | None, _StructFields] = field(default_factory=dict)
    tag_field: str | None = None
    is_integer: bool = False
    omission_rules: Mapping[str, Any] | None = None

    def is_omitted(self, item: Any) -> bool:
        """Whether an item of a request's list is removed because its type is unknown."""
        if self.omission_rules is None or type(item) is not dict:
            return False
        shape = self.item or _Shape()
        tag = item.get(shape.tag_field or _TAG)
        if not isinstance(tag, str) or tag in shape.structs or tag in self.omission_rules["known"]:
            return False
        return not any(word in tag for word in self.omission_rules["refused"])

    def fields_of(self, value: Mapping[str, Any]) -> _StructFields | None:
        """Return the fields that a JSON object may have; None if its tag is unknown."""
        tag = value.get(self.tag_field) if self.tag_field is not None else None
        if tag is None and len(self.structs) == 1:
            return next(iter(self.structs.values()))
        return self.structs.get(tag) if isinstance(tag, str) else None


def drop_unknown(value: Any, kind: Any, where: str = "") -> list[Ignored]:
    """Remove the fields that a request type does not have from a decoded body.

    Returns reports of the removed fields. The body is changed in place. Fields marked as droppable
    are removed, too, if their value is wrong, and integers written as fractions (15.0) become
    integers. The time is linear in the size of the body. `where` is the path of `value` inside the
    whole body.

    Raises:
        UnknownFieldError: a field without which the answer would mean something else.
    """
    walk = _LenientWalk()
    if (shape := _shape_of(kind)) is not None:
        walk.fit(value, shape, where)
    return list(walk.ignored.values())


class _LenientWalk:
    """One pass through a decoded body, which removes unknown fields.

    The attribute `ignored` collects the reports of removed fields; a field that is removed several
    times is reported once.
    """

    def __init__(self) -> None:
        self.ignored: dict[tuple[int, str], Ignored] = {}

    def fit(self, value: Any, shape: _Shape, where: str) -> Any:
        """Return a value of the body without unknown fields; lists and objects change in place."""
        if type(value) is dict:
            if (fields := shape.fields_of(value)) is not None:
                self._fit_object(value, fields, where)
        elif type(value) is list:
            if shape.omission_rules is not None:
                self._omit_items(value, shape, where)
            if shape.item is not None and len(value) <= (shape.max_items or len(value)):
                for index, item in enumerate(value):
                    if type(item) in _CHANGEABLE_TYPES:
                        value[index] = self.fit(item, shape.item, f"{where}[{index}]")
        elif type(value) is float and shape.is_integer:
            return int(value) if value.is_integer() and abs(value) < _MAX_EXACT_INTEGER else value
        return value

    def _omit_items(self, items: list[Any], shape: _Shape, where: str) -> None:
        """Remove items of unknown types from a list of the body, and report each type once."""
        kept_items = [item for item in items if not shape.is_omitted(item)]
        if len(kept_items) == len(items):
            return
        tag_field = (shape.item and shape.item.tag_field) or _TAG
        for index, item in enumerate(items):
            if len(self.ignored) >= MAX_IGNORED:
                break
            if shape.is_omitted(item):
                omitted = ignored_item(f"{where}[{index}]", item[tag_field], tag_field)
                self.ignored.setdefault((id(shape), item[tag_field]), omitted)
        items[:] = kept_items

    def _fit_object(self, value: dict[str, Any], fields: _StructFields, where: str) -> None:
        """Remove unknown fields from an object of the body, in place.

        Droppable fields are removed, too, if their value is wrong.
        """
        if fields.is_closed and (unknown := value.keys() - fields.names):
            for name in sorted(unknown) if len(unknown) <= MAX_IGNORED else unknown:
                refusal = partial(unknown_field, where, name, fields.names)
                if has_meaning(name, value.pop(name), where):
                    error = refusal()
                    reason = "is not a known field, and the answer depends on it: leave it out."
                    raise UnknownFieldError(f"{reason}{{hint}}", field=error.field, **error.facts)
                self._note(fields, name, where=where, refusal=refusal, is_known=False)
        for name, shape in fields.searchable.items():
            if name in value:
                value[name] = self.fit(value[name], shape, join_path(where, name))
        for name in fields.droppable_types:
            if name not in value:
                continue
            try:
                msgspec.convert(value[name], fields.droppable_types[name], str_keys=True)
            except msgspec.ValidationError as error:
                explanation = partial(
                    explain,
                    str(error),
                    fields.droppable_types[name],
                    body=value.pop(name),
                    where=join_path(where, name),
                )
                self._note(fields, name, where=where, refusal=explanation, is_known=True)

    def _note(
        self, fields: _StructFields, name: str, where: str, refusal: Any, *, is_known: bool
    ) -> None:
        key = (id(fields), name)
        if key not in self.ignored and len(self.ignored) < MAX_IGNORED:
            note = Ignored(join_path(where, name) or "''", refusal, is_known)
            is_hint = not is_known and note.name in KNOWN_HINTS
            self.ignored[key] = replace(note, is_known=True) if is_hint else note


def ignored_item(where: str, tag: str, tag_field: str = "type") -> Ignored:
    """Return the report that an item was removed from a request's list for its unknown type."""
    tag = tag[:MAX_NAME_LENGTH]

    def refusal() -> RequestError:
        reason = "is '{value}', which has no effect here: leave it out."
        return RequestError(reason, field=f"{where}.{tag_field}", value=tag)

    return Ignored(f"{where}.{tag}", refusal)


_TAG = "type"  # the tag field of lists whose items are not tagged structs
_CHANGEABLE_TYPES = (dict, list, float)


@cache
def _shape_of(kind: Any) -> _Shape | None:
    return _describe(type_of(kind), {})


def _describe(kind: inspect.Type, fields_by_struct: dict[type, _StructFields]) -> _Shape | None:
    """Return the shape of a field's type, for the removal of unknown fields.

    Returns None if no value of the field ever needs a change.
    """
    shape = _Shape()
    all_parts = list(union_members([kind]))
    for part in all_parts:
        if extra_of(part).get("leaves_out"):
            shape.omission_rules = extra_of(part)
        if isinstance(part, inspect.ListType):
            shape.item = _describe(part.item_type, fields_by_struct)
            shape.max_items = part.max_length
        elif isinstance(part, inspect.StructType):
            tag = None if part.tag is None else str(part.tag)
            shape.structs[tag] = _struct_fields(part, fields_by_struct)
            shape.tag_field = part.tag_field
    has_integer = any(isinstance(part, inspect.IntType) for part in all_parts)
    has_float = any(isinstance(part, inspect.FloatType) for part in all_parts)
    shape.is_integer = has_integer and not has_float
    has_effect = shape.item or shape.structs or shape.is_integer or shape.omission_rules
    return shape if has_effect else None


def _struct_fields(
    kind: inspect.StructType, fields_by_struct: dict[type, _StructFields]
) -> _StructFields:
    """Return the fields of a request struct, from `fields_by_struct` or by inspecting the type."""
    if kind.cls in fields_by_struct:
        return fields_by_struct[kind.cls]
    names = {struct_field.encode_name for struct_field in kind.fields}
    if kind.tag_field:
        names.add(kind.tag_field)
    fields = _StructFields(frozenset(names), kind.forbid_unknown_fields)
    fields_by_struct[kind.cls] = fields  # before its fields, which may contain the struct again
    annotations = {item.encode_name: item.type for item in msgspec.structs.fields(kind.cls)}
    for struct_field in kind.fields:
        name = struct_field.encode_name
        if (shape := _describe(struct_field.type, fields_by_struct)) is not None:
            fields.searchable[name] = shape
        if extra_of(struct_field.type).get("is_droppable"):
            fields.droppable_types[name] = annotations[name]
    return fields
