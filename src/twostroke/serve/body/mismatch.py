"""Finds the first value of a request body that does not fit its type, and explains the error.

msgspec checks bodies quickly, but its errors are sentences for developers, whose wording changes
between its versions. So a body that msgspec refuses is compared with msgspec's description of the
expected type once more, and the error is written here.
"""

from __future__ import annotations

import re
from mmap import mmap
from typing import Any, Final

import msgspec
from msgspec import inspect

from twostroke.core.errors import RequestError, nearest
from twostroke.http.errors import MissingFieldError
from twostroke.serve.body.explain import (
    MAX_NAME_LENGTH,
    extra_of,
    join,
    parts,
    type_of,
    unknown_field,
)

# The types of JSON values, in the order in which an error names them.
_TYPE_WORDS: Final = {
    "null": "null",
    "bool": "a boolean",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "list": "a list",
    "dict": "an object",
}
_ACCEPTED_JSON_TYPES: Final[dict[type[inspect.Type], tuple[str, ...]]] = {
    inspect.NoneType: ("null",),
    inspect.BoolType: ("bool",),
    inspect.IntType: ("int",),
    inspect.FloatType: ("float",),
    inspect.StrType: ("str",),
    inspect.LiteralType: ("str",),
    inspect.ListType: ("list",),
    inspect.DictType: ("dict",),
    inspect.StructType: ("dict",),
}
# Every value fits these types here: it is decoded later, or checked by the type itself.
_UNCHECKED: Final = (inspect.AnyType, inspect.RawType, inspect.CustomType)

_FIRST_CHARACTER: Final = re.compile(rb"[ \t\r\n]*+(.)", re.DOTALL)


def explain(reason: str, kind: Any, body: Any, where: str = "") -> RequestError:
    """Return the error about the first value of a body that does not fit its type.

    Args:
        reason: msgspec's error, which is quoted if no such value is found.
        kind: the type of the body.
        body: the body, decoded or as JSON. JSON is decoded no deeper than needed.
        where: the body's path inside the whole request.
    """
    try:
        mismatch = _find_mismatch(body, [type_of(kind)], where)
    except (msgspec.DecodeError, RecursionError):  # not JSON after the value that msgspec refused
        mismatch = None
    return mismatch or _error("is not valid: {why}.", path=where, why=reason)


def _find_mismatch(body: Any, kinds: list[inspect.Type], path: str) -> RequestError | None:
    """Return the error about a value, or about the first wrong value inside it."""
    kinds = list(parts(kinds))
    if any(isinstance(kind, _UNCHECKED) for kind in kinds):
        return None
    try:
        value = _decode_one_level(body)
    except msgspec.ValidationError:  # msgspec holds no number above 1e308
        limit = next(filter(None, map(_limits, kinds)), "be a smaller number")
        return _error(f"must {limit}.", path=path)
    fitting = [kind for kind in kinds if _accepts(kind, value)]
    if not fitting:
        return _type_error(value, kinds, path)
    if isinstance(value, dict):
        return _find_in_object(value, fitting, path)
    if isinstance(value, str) and not any(isinstance(kind, inspect.StrType) for kind in fitting):
        return _word_error(value, kinds, path)
    if limits := _exceeded_limits(value, fitting):
        return _error(f"must {limits}, got {_size(value)}.", path=path)
    return _find_in_list(value, fitting, path) if isinstance(value, list) else None


def _find_in_list(value: list[Any], kinds: list[inspect.Type], path: str) -> RequestError | None:
    """Return the error about the first wrong item of a list."""
    item_types = [kind.item_type for kind in kinds if isinstance(kind, inspect.ListType)]
    for index, item in enumerate(value):
        if mismatch := _find_mismatch(item, item_types, join(path, f"[{index}]")):
            return mismatch
    return None


def _find_in_object(
    value: dict[str, Any], kinds: list[inspect.Type], path: str
) -> RequestError | None:
    """Return the error about the first wrong key or value of a JSON object, or a missing field."""
    structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
    if structs:
        struct, mismatch = _choose_struct(value, structs, path)
        return mismatch if struct is None else _find_in_struct(value, struct, path)
    dict_types = [kind for kind in kinds if isinstance(kind, inspect.DictType)]
    value_types = [kind.value_type for kind in dict_types]
    key_types = list(parts(kind.key_type for kind in dict_types))
    for key, inner in value.items():
        if limits := _exceeded_limits(key, key_types):
            return _error(f"A key of {{field}} must {limits}.", path=path)
        if mismatch := _find_mismatch(inner, value_types, join(path, "[...]")):
            return mismatch
    if limits := _exceeded_limits(value, [*dict_types]):
        return _error(f"must {limits}, got {len(value)}.", path=path)
    return None


def _choose_struct(
    value: dict[str, Any], structs: list[inspect.StructType], path: str
) -> tuple[inspect.StructType | None, RequestError | None]:
    """Return the struct that an object's tag names, or the error about a missing or unknown tag."""
    tag_field = structs[0].tag_field
    if tag_field is None or (len(structs) == 1 and tag_field not in value):
        return structs[0], None
    tag_path = join(path, tag_field)
    if tag_field not in value:
        return None, MissingFieldError("is missing.", field=tag_path)
    tag = _decode_one_level(value[tag_field])
    for struct in structs:
        if tag == struct.tag:
            return struct, None
    tags: list[inspect.Type] = []
    for struct in structs:
        advice = getattr(struct.cls, "other_types", {})
        literal = inspect.LiteralType((str(struct.tag),))
        tags.append(inspect.Metadata(literal, extra={"advice": advice}))
    return None, _find_mismatch(tag, tags, tag_path)


def _find_in_struct(
    value: dict[str, Any], struct: inspect.StructType, path: str
) -> RequestError | None:
    types = {field.encode_name: field.type for field in struct.fields}
    for name, inner in value.items():
        if name not in types and name != struct.tag_field and struct.forbid_unknown_fields:
            return unknown_field(path, name, types)
        if name in types and (mismatch := _find_mismatch(inner, [types[name]], join(path, name))):
            return mismatch
    for field in struct.fields:
        if field.required and field.encode_name not in value:
            return MissingFieldError("is missing.", field=join(path, field.encode_name))
    return None


def _decode_one_level(body: Any) -> Any:
    """Decode a JSON text; items of lists and objects stay JSON. Other values return unchanged."""
    if not isinstance(body, bytes | mmap | msgspec.Raw):
        return body
    start = _FIRST_CHARACTER.match(memoryview(body))
    levels = {b"{": dict[str, msgspec.Raw], b"[": list[msgspec.Raw]}
    return msgspec.json.decode(body, type=levels.get(start[1], Any) if start else Any)


def _accepts(kind: inspect.Type, value: Any) -> bool:
    """Whether a type accepts values of this JSON type; limits and contents may not fit."""
    name = _json_type(value)
    if isinstance(kind, inspect.FloatType) and name == "int":
        return True
    if isinstance(kind, inspect.LiteralType):
        return name in {type(known_value).__name__ for known_value in kind.values}
    return name in _ACCEPTED_JSON_TYPES.get(type(kind), ())


def _json_type(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _type_error(value: Any, kinds: list[inspect.Type], path: str) -> RequestError:
    """Return the error about a value of a JSON type that the field does not accept."""
    if value is None and path and not path.endswith("]"):
        return MissingFieldError("is missing.", field=path)
    accepted = {name for kind in kinds for name in _ACCEPTED_JSON_TYPES.get(type(kind), ())}
    words = [word for name, word in _TYPE_WORDS.items() if name in accepted and name != "null"]
    expected = " or ".join(words) or "null"
    name = _json_type(value)
    actual = value if name == "float" else _TYPE_WORDS.get(name, name)
    return _error(f"must be {expected}, got {actual}.", path=path)


def _word_error(word: str, kinds: list[inspect.Type], path: str) -> RequestError | None:
    """Return the error about a word where a field accepts certain words only."""
    literals = [kind for kind in kinds if isinstance(kind, inspect.LiteralType)]
    words = dict.fromkeys(str(value) for literal in literals for value in literal.values)
    if word in words:
        return None
    word = word[:MAX_NAME_LENGTH]
    advice: dict[str, str] = {}
    for kind in kinds:
        advice |= extra_of(kind).get("advice", {})
    special = advice.get(word, advice.get("*"))
    hint = f" {special}" if special else nearest(word, words)
    listed = ", ".join(words) if len(words) == 1 else f"one of {', '.join(words)}"
    reason = "must be {known}, got '{value}'.{hint}"
    return _error(reason, path=path, known=listed, value=word, hint=hint)


def _exceeded_limits(value: Any, kinds: list[inspect.Type]) -> str:
    """Return in words the limits that a number or a length exceeds; empty if all are kept."""
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
    """Return a number itself, and the length of anything else."""
    return value if isinstance(value, int | float) else len(value)


def _range(kind: inspect.Type) -> tuple[float | None, float | None]:
    """Return the least and the greatest number or length that a type accepts."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return kind.ge, kind.le
    if isinstance(kind, inspect.StrType | inspect.ListType | inspect.DictType):
        return kind.min_length, kind.max_length
    return None, None


def _limits(kind: inspect.Type) -> str:
    """Return the limits of a type in words; empty without limits."""
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


def _error(reason: str, *, path: str, **facts: object) -> RequestError:
    has_subject = path or reason.startswith("A key")
    return RequestError(
        reason if has_subject else f"The body {reason}", field=path or None, **facts
    )
