"""Checks a tokenizer.json: the fields of its normalizers, pre-tokenizers and decoder."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from twostroke.core.errors import ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Step = dict[str, Any]

MAX_NESTING: Final = 20  # sequences inside sequences
_BEHAVIORS: Final = ("Removed", "Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext")
_SCHEMES: Final = ("always", "first", "never")
_MAX_TEXT: Final = 1 << 15  # characters


class _Field(NamedTuple):
    """The expected type of a field in a tokenizer.json; error messages call it `type_name`.

    An optional field may be null.
    """

    type_name: str
    is_valid: Callable[[Any], bool]
    is_optional: bool = False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _is_character(value: object) -> bool:
    return isinstance(value, str) and len(value) == 1


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _is_pattern(value: object) -> bool:
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((kind, pattern),) = value.items()
    return kind in ("String", "Regex") and isinstance(pattern, str)


def _is_base64(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        base64.b64decode(value)
    except (binascii.Error, ValueError):
        return False
    return True


def _is_token_and_id(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_text(value[0]) and _is_id(value[1])


def _is_template(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_template_item, value))


def _is_template_item(item: object) -> bool:
    if not isinstance(item, dict) or len(item) != 1:
        return False
    ((kind, content),) = item.items()
    is_named = isinstance(content, dict) and isinstance(content.get("id"), str)
    return kind in ("Sequence", "SpecialToken") and is_named


def _is_token_table(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(token, dict)
        and isinstance(token.get("ids"), list)
        and all(map(_is_id, token["ids"]))
        for token in value.values()
    )


_TEXT: Final = _Field(f"a text of at most {_MAX_TEXT} characters", _is_text)
_CHARACTER: Final = _Field("one character", _is_character)
_BOOL: Final = _Field("true or false", lambda value: isinstance(value, bool))
_OPTIONAL_BOOL: Final = _BOOL._replace(is_optional=True)
_COUNT: Final = _Field("a whole number from 0", _is_id, is_optional=True)
_PATTERN: Final = _Field('{"String": text} or {"Regex": text}', _is_pattern)
_BEHAVIOR: Final = _Field(f"one of {', '.join(_BEHAVIORS)}", lambda value: value in _BEHAVIORS)
_SCHEME: Final = _Field(
    f"one of {', '.join(_SCHEMES)}", lambda value: value in _SCHEMES, is_optional=True
)
_TOKEN_AND_ID: Final = _Field("a text and an id", _is_token_and_id)
_METASPACE: Final = {
    "replacement": _CHARACTER._replace(is_optional=True),
    "prepend_scheme": _SCHEME,
    "add_prefix_space": _OPTIONAL_BOOL,
    "split": _OPTIONAL_BOOL,
}
_REPLACE: Final = {"pattern": _PATTERN, "content": _TEXT}
_BYTE_LEVEL: Final = dict.fromkeys(
    ("add_prefix_space", "use_regex", "trim_offsets"), _OPTIONAL_BOOL
)
_BERT: Final = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
# The fields of a step, by the kind of the step and by its type.
_FIELDS: Final[dict[str, dict[str, Mapping[str, _Field]]]] = {
    "normalizer": {
        "Prepend": {"prepend": _TEXT},
        "Replace": _REPLACE,
        "Strip": {"strip_left": _BOOL, "strip_right": _BOOL},
        "BertNormalizer": dict.fromkeys(_BERT, _OPTIONAL_BOOL),
        "Precompiled": {"precompiled_charsmap": _Field("a text in base64", _is_base64)},
    },
    "pre-tokenizer": {
        "ByteLevel": _BYTE_LEVEL,
        "Split": {"pattern": _PATTERN, "behavior": _BEHAVIOR, "invert": _OPTIONAL_BOOL},
        "Digits": {"individual_digits": _OPTIONAL_BOOL},
        "Metaspace": _METASPACE,
        "Punctuation": {"behavior": _BEHAVIOR._replace(is_optional=True)},
        "CharDelimiterSplit": {"delimiter": _CHARACTER},
        "FixedLength": {"length": _COUNT},
    },
    "decoder": {
        "ByteLevel": _BYTE_LEVEL,
        "Replace": _REPLACE,
        "Strip": {
            "content": _CHARACTER._replace(is_optional=True),
            "start": _COUNT,
            "stop": _COUNT,
        },
        "Metaspace": _METASPACE,
    },
    "post-processor": {
        "ByteLevel": _BYTE_LEVEL,
        "BertProcessing": {"sep": _TOKEN_AND_ID, "cls": _TOKEN_AND_ID},
        "RobertaProcessing": {"sep": _TOKEN_AND_ID, "cls": _TOKEN_AND_ID},
        "TemplateProcessing": {
            "single": _Field("a list of tokens and sequences", _is_template),
            "special_tokens": _Field("an object of tokens with ids", _is_token_table),
        },
    },
}
_MEMBERS: Final = {
    "normalizer": ("normalizer", "normalizers"),
    "pre-tokenizer": ("pre_tokenizer", "pretokenizers"),
    "decoder": ("decoder", "decoders"),
    "post-processor": ("post_processor", "processors"),
}
_TOKEN_FLAGS: Final = ("special", "normalized", "lstrip", "rstrip", "single_word")


def check_steps(description: Step) -> None:
    """Check the fields of a tokenizer.json: its normalizers, pre-tokenizers, decoder and tokens.

    Later code reads these fields without checks.

    Raises:
        ModelFormatError: a field is missing or wrong; the error names the step and the field.
    """
    for kind, fields_by_type in _FIELDS.items():
        member, key = _MEMBERS[kind]
        for step in flatten_steps(description.get(member), key, kind):
            fields = fields_by_type.get(step["type"], {})
            check_fields(step, fields, f"its {kind} {step['type']}")
    tokens = description.get("added_tokens")
    if not isinstance(tokens, list | None):
        raise ModelFormatError("it is damaged: added_tokens is not a list.")
    fields = {"content": _TEXT, **dict.fromkeys(_TOKEN_FLAGS, _OPTIONAL_BOOL)}
    for index, token in enumerate(tokens or ()):
        check_fields(token, fields, f"its added token {index}")


def check_fields(step: object, fields: Mapping[str, _Field], where: str) -> None:
    """Check that a step, such as a pre-tokenizer, has the `fields` of its kind.

    Raises ModelFormatError for the first field that is missing or of another type; `where` names
    the step in the error.
    """
    if not isinstance(step, dict):
        raise ModelFormatError(f"{where} is damaged: it is not an object.")
    for name, field in fields.items():
        value = step.get(name)
        if value is None and field.is_optional:
            continue
        if name not in step:
            raise ModelFormatError(f"{where} is damaged: its field {name} is missing.")
        if not field.is_valid(value):
            raise ModelFormatError(
                f"{where} is damaged: its field {name} is not {field.type_name}."
            )


def flatten_steps(
    description: Any, key: str, kind: str = "step", nesting: int = 0
) -> Iterator[Step]:
    """Yield the steps of a tokenizer.json's normalizer, pre-tokenizer or decoder, in order.

    A step of type Sequence is replaced by the steps that it has at `key`. Sequences may be nested.
    """
    if description is None:
        return
    if not isinstance(description, dict) or not isinstance(description.get("type"), str):
        raise ModelFormatError(f"its {kind} is damaged: it is not an object with a type.")
    if description["type"] != "Sequence":
        yield description
        return
    steps = description.get(key)
    if not isinstance(steps, list):
        raise ModelFormatError(f"its {kind} Sequence is damaged: its field {key} is not a list.")
    if nesting == MAX_NESTING:
        raise ModelFormatError(f"its {kind} has more than {MAX_NESTING} sequences in each other.")
    for step in steps:
        yield from flatten_steps(step, key, kind, nesting + 1)


def check_characters(value: object) -> None:
    """Refuse a tokenizer.json that contains half of a surrogate pair, which is no character.

    Raises:
        ModelFormatError: a text has half of a surrogate pair; the error names the path of the
            text.
    """
    pending: list[tuple[str, object]] = [("", value)]
    while pending:
        path, current = pending.pop()
        if isinstance(current, str):
            if not current.isascii() and any("\ud800" <= char <= "\udfff" for char in current):
                where = f" in {path}" if path else ""
                raise ModelFormatError(f"half of a surrogate pair{where} is not a character.")
        elif isinstance(current, dict):
            start = f"{path}." if path else ""
            pending += [(f"the names of {path or 'the file'}", name) for name in current]
            pending += [(f"{start}{name}"[:200], item) for name, item in current.items()]
        elif isinstance(current, list):
            pending += [(f"{path}[{index}]"[:200], item) for index, item in enumerate(current)]
