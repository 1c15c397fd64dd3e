"""Finds the first value that does not fit its type, in decoded data or in JSON.

msgspec checks data quickly, but its error messages are for developers, and their wording changes
between versions. So data that msgspec refuses is compared here with msgspec's description of the
expected type. Callers write their own sentences about the mismatch.
"""

from __future__ import annotations

import re
from functools import cache
from mmap import mmap
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import inspect

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

JSON_TYPES: Final = ("null", "bool", "int", "float", "str", "list", "dict")
_ACCEPTED_JSON_TYPES: Final[dict[type[inspect.Type], tuple[str, ...]]] = {
    inspect.NoneType: ("null",),
    inspect.BoolType: ("bool",),
    inspect.IntType: ("int",),
    inspect.FloatType: ("float",),
    inspect.StrType: ("str",),
    inspect.LiteralType: ("str",),
    inspect.ListType: ("list",),
    inspect.VarTupleType: ("list",),
    inspect.DictType: ("dict",),
    inspect.StructType: ("dict",),
}
_LIST_TYPES: Final = (inspect.ListType, inspect.VarTupleType)
# Every value fits these types here: it is decoded later, or checked by the type itself.
_UNCHECKED: Final = (inspect.AnyType, inspect.RawType, inspect.CustomType)
_ENCODED: Final = (bytes, mmap, msgspec.Raw)
_NUMBER_LIMIT: Final = "be a smaller number"
_FIRST_CHARACTER: Final = re.compile(rb"[ \t\r\n]*+(.)", re.DOTALL)

Problem = Literal["missing", "unknown", "type", "word", "limits", "key limits"]


class Mismatch(Frozen):
    """The first value of some data that does not fit its expected type (see `find_mismatch`).

    Attributes:
        path: where the value is, such as `models[2].name`; for a missing or unknown field, where
            the field would be.
        problem: "missing" for a required field, "unknown" for a field that the type does not have,
            "type" for a value of another JSON type, "word" for a text that is not one of the
            accepted words, "limits" for a number or a length out of range, and "key limits" for the
            length of a key.
        expected: the accepted JSON types, the accepted words, or the known fields.
        actual: the wrong value itself, if it is a word, a number or the name of an unknown field;
            the JSON type of other values of a wrong type; the length of a text, list or object that
            is out of range. None if unknown.
        limits: the limits in words, such as `be from 0 to 2`.
        advice: for some wrong words, the text to write instead; the key `*` is for all other words.
    """

    path: str
    problem: Problem
    expected: tuple[str, ...] = ()
    actual: str | float | None = None
    limits: str = ""
    advice: dict[str, str] = msgspec.field(default_factory=dict)


def find_mismatch(kind: Any, data: Any, path: str = "") -> Mismatch | None:
    """Return the first value of some data that does not fit a type; None if all values fit.

    Servers and file readers use this after msgspec refuses data, to write their own error about the
    value.

    Args:
        kind: the expected type, such as a msgspec struct.
        data: decoded data, or JSON as bytes, a mapped file or `msgspec.Raw`. JSON is decoded no
            deeper than needed.
        path: the path of `data` in a larger document; the mismatch's path begins with it.
    """
    try:
        return _find(data, [type_of(kind)], path)
    except (msgspec.DecodeError, RecursionError):  # not JSON after the value that msgspec refused
        return None


def _find(data: Any, kinds: list[inspect.Type], path: str) -> Mismatch | None:
    """Return the first mismatch of a value, or of a value inside it, with the types `kinds`.

    The result is None if the value fits one of the types.
    """
    kinds = list(union_members(kinds))
    if any(isinstance(kind, _UNCHECKED) for kind in kinds):
        is_decoded_now = any(isinstance(kind, inspect.AnyType) for kind in kinds)
        return _find_huge_number(data, path) if is_decoded_now else None
    try:
        value = _decode_one_level(data)
    except msgspec.ValidationError:  # msgspec holds no number above 1e308
        limit = next(filter(None, map(_limits, kinds)), _NUMBER_LIMIT)
        return Mismatch(path=path, problem="limits", limits=limit)
    fitting = [kind for kind in kinds if _accepts(kind, value)]
    if not fitting:
        return _type_mismatch(value, kinds, path)
    if isinstance(value, dict):
        return _find_in_object(value, fitting, path)
    if isinstance(value, str) and not any(isinstance(kind, inspect.StrType) for kind in fitting):
        return _word_mismatch(value, kinds, path)
    if limits := _exceeded_limits(value, fitting):
        return Mismatch(path=path, problem="limits", limits=limits, actual=_size(value))
    return _find_in_list(value, fitting, path) if isinstance(value, list) else None


def _find_huge_number(data: Any, path: str) -> Mismatch | None:
    """Return the mismatch of the first number in JSON that no float can hold, such as 1e999."""
    if not isinstance(data, _ENCODED):
        return None
    try:
        value = _decode_one_level(data)
    except msgspec.ValidationError:
        return Mismatch(path=path, problem="limits", limits=_NUMBER_LIMIT)
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        items = (("[...]", inner) for inner in value.values())
    elif isinstance(value, list):
        items = ((f"[{index}]", inner) for index, inner in enumerate(value))
    for name, inner in items:
        if mismatch := _find_huge_number(inner, join_path(path, name)):
            return mismatch
    return None


def _find_in_list(value: list[Any], kinds: list[inspect.Type], path: str) -> Mismatch | None:
    """Return the mismatch of the first wrong item of a JSON list; None if all items fit."""
    item_types = [kind.item_type for kind in kinds if isinstance(kind, _LIST_TYPES)]
    for index, item in enumerate(value):
        if mismatch := _find(item, item_types, join_path(path, f"[{index}]")):
            return mismatch
    return None


def _find_in_object(value: dict[str, Any], kinds: list[inspect.Type], path: str) -> Mismatch | None:
    """Return the mismatch of an object's first wrong key or value, or of a missing field."""
    structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
    if structs:
        struct, mismatch = _choose_struct(value, structs, path)
        return mismatch if struct is None else _find_in_struct(value, struct, path)
    dict_types = [kind for kind in kinds if isinstance(kind, inspect.DictType)]
    value_types = [kind.value_type for kind in dict_types]
    key_types = list(union_members(kind.key_type for kind in dict_types))
    for key, inner in value.items():
        if limits := _exceeded_limits(key, key_types):
            return Mismatch(path=path, problem="key limits", limits=limits, actual=len(key))
        if mismatch := _find(inner, value_types, join_path(path, "[...]")):
            return mismatch
    if limits := _exceeded_limits(value, [*dict_types]):
        return Mismatch(path=path, problem="limits", limits=limits, actual=len(value))
    return None


def _choose_struct(
    value: dict[str, Any], structs: list[inspect.StructType], path: str
) -> tuple[inspect.StructType | None, Mismatch | None]:
    """Choose the struct type of a JSON object by its tag, or return the mismatch of the tag.

    The tag is the field that tells the structs of a union apart. Returns (struct type, None), or
    (None, mismatch) for a missing or unknown tag.
    """
    tag_field = structs[0].tag_field
    if tag_field is None or (len(structs) == 1 and tag_field not in value):
        return structs[0], None
    tag_path = join_path(path, tag_field)
    if tag_field not in value:
        return None, Mismatch(path=tag_path, problem="missing")
    tag = _decode_one_level(value[tag_field])
    for struct in structs:
        if tag == struct.tag:
            return struct, None
    tags: list[inspect.Type] = []
    for struct in structs:
        advice = getattr(struct.cls, "other_types", {})
        literal = inspect.LiteralType((str(struct.tag),))
        tags.append(inspect.Metadata(literal, extra={"advice": advice}))
    return None, _find(tag, tags, tag_path)


def _find_in_struct(
    value: dict[str, Any], struct: inspect.StructType, path: str
) -> Mismatch | None:
    types = {field.encode_name: field.type for field in struct.fields}
    for name, inner in value.items():
        if name not in types and name != struct.tag_field and struct.forbid_unknown_fields:
            return Mismatch(
                path=join_path(path, name), problem="unknown", expected=tuple(types), actual=name
            )
        if name in types and (mismatch := _find(inner, [types[name]], join_path(path, name))):
            return mismatch
    for field in struct.fields:
        if field.required and field.encode_name not in value:
            return Mismatch(path=join_path(path, field.encode_name), problem="missing")
    return None


def _decode_one_level(data: Any) -> Any:
    """Decode the outermost list or object of JSON; the values inside stay encoded.

    Data that is not encoded JSON is returned unchanged.
    """
    if not isinstance(data, _ENCODED):
        return data
    start = _FIRST_CHARACTER.match(memoryview(data))
    levels = {b"{": dict[str, msgspec.Raw], b"[": list[msgspec.Raw]}
    return msgspec.json.decode(data, type=levels.get(start[1], Any) if start else Any)


def _accepts(kind: inspect.Type, value: Any) -> bool:
    """Return whether a type accepts values of this value's JSON type, such as a text or a list.

    Limits and the values inside are not checked.
    """
    name = _json_type(value)
    if isinstance(kind, inspect.FloatType) and name == "int":
        return True
    if isinstance(kind, inspect.LiteralType):
        return name in {type(known_value).__name__ for known_value in kind.values}
    return name in _ACCEPTED_JSON_TYPES.get(type(kind), ())


def _json_type(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _type_mismatch(value: Any, kinds: list[inspect.Type], path: str) -> Mismatch:
    """Return the mismatch of a value whose JSON type is not accepted by any of `kinds`."""
    if value is None and path and not path.endswith("]"):
        return Mismatch(path=path, problem="missing")
    accepted = {name for kind in kinds for name in _ACCEPTED_JSON_TYPES.get(type(kind), ())}
    expected = tuple(name for name in JSON_TYPES if name in accepted)
    actual = value if isinstance(value, float) else _json_type(value)
    return Mismatch(path=path, problem="type", expected=expected, actual=actual)


def _word_mismatch(word: str, kinds: list[inspect.Type], path: str) -> Mismatch | None:
    """Return the mismatch of a text that is not an accepted word; None if it is accepted."""
    literals = [kind for kind in kinds if isinstance(kind, inspect.LiteralType)]
    words = tuple(dict.fromkeys(str(value) for literal in literals for value in literal.values))
    if word in words:
        return None
    advice: dict[str, str] = {}
    for kind in kinds:
        advice |= extra_of(kind).get("advice", {})
    return Mismatch(path=path, problem="word", expected=words, actual=word, advice=advice)


def _exceeded_limits(value: Any, kinds: list[inspect.Type]) -> str:
    """Return the limits, as text, that a number or a length exceeds; empty if it is accepted."""
    if value is None or isinstance(value, bool):
        return ""
    size = _size(value)
    limits = ""
    for kind in kinds:
        low, high = _range(kind)
        if (low is None or size >= low) and (high is None or size <= high):
            return ""
        limits = limits or _limits(kind)
    return limits


def _size(value: Any) -> Any:
    """Return the number to which a type's limits apply: a number itself, else a value's length."""
    return value if isinstance(value, int | float) else len(value)


def _range(kind: inspect.Type) -> tuple[float | None, float | None]:
    """Return the least and the greatest number or length that a type accepts; None for no bound."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return kind.ge, kind.le
    if isinstance(
        kind, inspect.StrType | inspect.DictType | inspect.ListType | inspect.VarTupleType
    ):
        return kind.min_length, kind.max_length
    return None, None


def _limits(kind: inspect.Type) -> str:
    """Return a type's limits as text, such as "be from 0 to 2"; empty without limits."""
    low, high = _range(kind)
    is_number = isinstance(kind, inspect.IntType | inspect.FloatType)
    unit = "" if is_number else " characters" if isinstance(kind, inspect.StrType) else " items"
    verb = "be" if is_number else "have"
    if low is not None and high is not None:
        return f"{verb} from {low} to {high}{unit}"
    if high is not None:
        return f"{verb} at most {high}{unit}"
    unit = unit.rstrip("s") if low == 1 else unit
    return f"{verb} at least {low}{unit}" if low is not None else ""


@cache
def type_of(kind: Any) -> inspect.Type:
    """Return msgspec's description of a type; it is cached, because it is slow to make."""
    return inspect.type_info(kind)


def union_members(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """Yield types, with each union replaced by the types that it joins."""
    for kind in kinds:
        if isinstance(kind, inspect.Metadata):
            yield kind
            yield from union_members([kind.type])
        elif isinstance(kind, inspect.UnionType):
            yield from union_members(kind.types)
        else:
            yield kind


def extra_of(kind: inspect.Type) -> dict[str, Any]:
    """Return the `extra` values of a type that is annotated with msgspec's `Meta`, by name.

    The result is empty for other types.
    """
    return (kind.extra or {}) if isinstance(kind, inspect.Metadata) else {}


def join_path(path: str, name: str) -> str:
    """Return the path of a field inside a value, such as `models[2].name`, for errors.

    An index such as `[3]` is added without a dot.
    """
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name
