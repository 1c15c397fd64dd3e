"""Drops what a decoded body has beyond its struct, so that an unknown field fails no request."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect
from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.core.mismatch import extra_of, join, parts, type_of
from twostroke.server.body.explain import MAX_NAME_LENGTH, explain, unknown_field
from twostroke.server.body.well_known import KNOWN_HINTS, has_meaning
from twostroke.server.http.errors import UnknownFieldError
from twostroke.server.http.ignored import MAX_IGNORED, Ignored

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_WHOLE = 2**53  # larger numbers with a fraction are not exact


@dataclass(slots=True)
class _StructFields:
    """The fields of a struct, by their names in JSON.

    `inner` are those with something inside to look at, `droppable` have the types of those that may
    be dropped. `is_closed` structs do not keep unknown fields.
    """

    names: frozenset[str]
    is_closed: bool
    inner: dict[str, _Shape] = field(default_factory=dict)
    droppable: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Shape:
    """The lists, structs and integers that may stand at one place of a body.

    `structs` are by the value of their tag, the field `tag_field`; one without a tag is at None.
    A list with more than `max_items` is not searched, since it is refused anyway. From a list with
    `left_out`, items of unknown types are removed.
    """

    item: _Shape | None = None
    max_items: int | None = None
    structs: dict[str | None, _StructFields] = field(default_factory=dict)
    tag_field: str | None = None
    is_integer: bool = False
    left_out: Mapping[str, Any] | None = None

    def is_left_out(self, item: Any) -> bool:
        """Whether an item of this list has an unknown type and may be left out."""
        if self.left_out is None or type(item) is not dict:
            return False
        shape = self.item or _Shape()
        tag = item.get(shape.tag_field or _TAG)
        if not isinstance(tag, str) or tag in shape.structs or tag in self.left_out["known"]:
            return False
        return not any(word in tag for word in self.left_out["refused"])

    def fields_of(self, value: Mapping[str, Any]) -> _StructFields | None:
        """Return the fields that an object may have; None if its tag is not known."""
        tag = value.get(self.tag_field) if self.tag_field is not None else None
        if tag is None and len(self.structs) == 1:
            return next(iter(self.structs.values()))
        return self.structs.get(tag) if isinstance(tag, str) else None


def drop_unknown(value: Any, kind: Any, where: str = "") -> list[Ignored]:
    """Remove the unknown fields of `kind` from a decoded body, in place, and return them.

    Fields that may be dropped go if their value is wrong, and whole numbers that are written with a
    fraction (15.0) become integers. Takes time in proportion to the body.

    Raises:
        UnknownFieldError: a field that would change the meaning of the answer.
    """
    fitting = _Fitting()
    if (shape := _shape_of(kind)) is not None:
        fitting.fit(value, shape, where)
    return list(fitting.found.values())


class _Fitting:
    """One walk through a body; a field that comes several times is reported once."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], Ignored] = {}

    def fit(self, value: Any, shape: _Shape, where: str) -> Any:
        """Return a value without unknown fields; lists and objects are changed in place."""
        if type(value) is dict:
            if (fields := shape.fields_of(value)) is not None:
                self._fit_object(value, fields, where)
        elif type(value) is list:
            if shape.left_out is not None:
                self._leave_out(value, shape, where)
            if shape.item is not None and len(value) <= (shape.max_items or len(value)):
                for place, item in enumerate(value):
                    if type(item) in _FITTED:
                        value[place] = self.fit(item, shape.item, f"{where}[{place}]")
        elif type(value) is float and shape.is_integer:
            return int(value) if value.is_integer() and abs(value) < _MAX_WHOLE else value
        return value

    def _leave_out(self, items: list[Any], shape: _Shape, where: str) -> None:
        """Remove the items of unknown types from a list, and note each type once."""
        kept_items = [item for item in items if not shape.is_left_out(item)]
        if len(kept_items) == len(items):
            return
        tag_field = (shape.item and shape.item.tag_field) or _TAG
        for index, item in enumerate(items):
            if len(self.found) >= MAX_IGNORED:
                break
            if shape.is_left_out(item):
                left_out = left_out_item(f"{where}[{index}]", item[tag_field], tag_field)
                self.found.setdefault((id(shape), item[tag_field]), left_out)
        items[:] = kept_items

    def _fit_object(self, value: dict[str, Any], fields: _StructFields, where: str) -> None:
        if fields.is_closed and (unknown := value.keys() - fields.names):
            for name in sorted(unknown) if len(unknown) <= MAX_IGNORED else unknown:
                refusal = partial(unknown_field, where, name, fields.names)
                if has_meaning(name, value.pop(name), where):
                    error = refusal()
                    reason = "is not a known field, and the answer depends on it: leave it out."
                    raise UnknownFieldError(f"{reason}{{hint}}", field=error.field, **error.facts)
                self._note(fields, name, where, refusal, is_known=False)
        for name, shape in fields.inner.items():
            if name in value:
                value[name] = self.fit(value[name], shape, join(where, name))
        for name in fields.droppable:
            if name not in value:
                continue
            try:
                msgspec.convert(value[name], fields.droppable[name], str_keys=True)
            except msgspec.ValidationError as error:
                why = (str(error), fields.droppable[name], value.pop(name), join(where, name))
                self._note(fields, name, where, partial(explain, *why), is_known=True)

    def _note(
        self, fields: _StructFields, name: str, where: str, refusal: Any, *, is_known: bool
    ) -> None:
        key = (id(fields), name)
        if key not in self.found and len(self.found) < MAX_IGNORED:
            found = Ignored(join(where, name) or "''", refusal, is_known)
            is_hint = not is_known and found.name in KNOWN_HINTS
            self.found[key] = replace(found, is_known=True) if is_hint else found


def left_out_item(where: str, tag: str, tag_field: str = "type") -> Ignored:
    """Return the report of an item that is left out because of its type."""
    tag = tag[:MAX_NAME_LENGTH]

    def refusal() -> RequestError:
        reason = "is '{value}', which has no effect here: leave it out."
        return RequestError(reason, field=f"{where}.{tag_field}", value=tag)

    return Ignored(f"{where}.{tag}", refusal)


_TAG = "type"  # the field with the type of items that are not tagged structs
_FITTED = (dict, list, float)


@cache
def _shape_of(kind: Any) -> _Shape | None:
    return _describe(type_of(kind), {})


def _describe(kind: inspect.Type, known: dict[type, _StructFields]) -> _Shape | None:
    """Return the shape of a type; None if nothing in it could be dropped or changed."""
    shape = _Shape()
    all_parts = list(parts([kind]))
    for part in all_parts:
        if extra_of(part).get("leaves_out"):
            shape.left_out = extra_of(part)
        if isinstance(part, inspect.ListType):
            shape.item, shape.max_items = _describe(part.item_type, known), part.max_length
        elif isinstance(part, inspect.StructType):
            tag = None if part.tag is None else str(part.tag)
            shape.structs[tag], shape.tag_field = _fields_in(part, known), part.tag_field
    has_integer = any(isinstance(part, inspect.IntType) for part in all_parts)
    has_float = any(isinstance(part, inspect.FloatType) for part in all_parts)
    shape.is_integer = has_integer and not has_float
    has_effect = shape.item or shape.structs or shape.is_integer or shape.left_out
    return shape if has_effect else None


def _fields_in(kind: inspect.StructType, known: dict[type, _StructFields]) -> _StructFields:
    if kind.cls in known:
        return known[kind.cls]
    names = {one.encode_name for one in kind.fields} | {kind.tag_field or ""} - {""}
    fields = known[kind.cls] = _StructFields(frozenset(names), kind.forbid_unknown_fields)
    types = {one.encode_name: one.type for one in msgspec.structs.fields(kind.cls)}
    for one in kind.fields:
        if (inner := _describe(one.type, known)) is not None:
            fields.inner[one.encode_name] = inner
        if extra_of(one.type).get("is_droppable"):
            fields.droppable[one.encode_name] = types[one.encode_name]
    return fields
