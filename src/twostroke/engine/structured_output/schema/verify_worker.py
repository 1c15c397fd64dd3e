"""The program of the process that checks finished answers; `verify` starts it.

Each line of input is a JSON list: a schema and an answer, both as text. The first line of output
says whether the answer is valid. For an invalid answer, a second line has the reason. The second
line comes later, because finding the reason takes longer: every alternative is tried. A check that
takes too much time or memory ends the process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from decimal import Decimal
from typing import Any

import jsonschema_rs

_OPTIONS: dict[str, Any] = {"offline": True, "validate_formats": True}
# Formats that draft 7 does not define. Grammars enforce them in every draft.
_NEW_FORMATS = {
    name: jsonschema_rs.Draft202012Validator({"format": name}, **_OPTIONS).is_valid
    for name in ("duration", "uuid")
}
_CPU_LIMIT_S = 2.0
_MAX_MEMORY_BYTES = 1 << 30
_NICENESS = 10
_MAX_EXPONENT = 400
_MAX_CHARS = 200  # of a name or a path in the output
# Validators by a part of the identifier in `$schema`.
_DRAFTS = {
    "draft-03": jsonschema_rs.Draft4Validator,
    "draft-04": jsonschema_rs.Draft4Validator,
    "draft-06": jsonschema_rs.Draft6Validator,
    "draft-07": jsonschema_rs.Draft7Validator,
    "2019-09": jsonschema_rs.Draft201909Validator,
}
# For a schema without `$schema`, the first validator that accepts it: it may follow an old draft.
_DEFAULT_DRAFTS = (
    jsonschema_rs.Draft202012Validator,
    jsonschema_rs.Draft7Validator,
    jsonschema_rs.Draft4Validator,
)


def main() -> None:
    """Check the answers that arrive on standard input, until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    os.nice(_NICENESS)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, _CPU_LIMIT_S)
        _check(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _check(schema: str, answer: str | None) -> None:
    """Check an answer against its JSON schema or, without an answer, the schema itself.

    The result is written to standard output.
    """
    try:
        validator = _validator(schema)
        if answer is None:
            _write({"is_valid": True})
            return
        value = _read(answer, _unique)
        is_valid = validator.is_valid(value)
    except _RepeatedError as error:
        _write({"is_valid": False})
        _write({"keyword": "repeated member", "name": error.name[:_MAX_CHARS]})
        return
    except json.JSONDecodeError:
        _write({"is_valid": False})
        _write({"keyword": "JSON"})
        return
    except (ValueError, ArithmeticError, RecursionError) as error:
        _write({"error": str(error).partition("\n")[0][:_MAX_CHARS] or type(error).__name__})
        return
    _write({"is_valid": is_valid})
    if not is_valid:
        first = next(iter(validator.iter_errors(value)))
        location = "/".join(map(str, ["", *first.schema_path]))
        path = list(first.instance_path)
        if first.kind.name == "uniqueItems":
            path = [*path, *_repeated_item(value, path)]
        _write({"keyword": first.kind.name, "location": location[:_MAX_CHARS], "path": path})


def _repeated_item(value: Any, path: list[str | int]) -> list[int]:
    """Find the first array item that equals an earlier item, in the array at a path.

    Returns a list with the item's index; empty if all items are different.
    """
    for step in path:
        value = value[step]
    same = jsonschema_rs.Draft202012Validator({"uniqueItems": True}).is_valid
    return next(([end] for end in range(len(value)) if not same(value[: end + 1])), [])


def _validator(text: str) -> Any:
    """Return the validator of a JSON schema, which fetches no schemas from other places.

    Raises:
        ValueError: the text is not a schema, or a pattern or a reference in it cannot be used.
    """
    schema = _read(text, _without_contents)
    name = str(schema.pop("$schema", "")) if isinstance(schema, dict) else ""
    named = [draft for part, draft in _DRAFTS.items() if part in name]
    *others, last = named or _DEFAULT_DRAFTS
    for draft in others:
        try:
            return draft(schema, formats=_NEW_FORMATS, **_OPTIONS)
        except jsonschema_rs.ValidationError as error:
            if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Referencing):
                raise
    return last(schema, formats=_NEW_FORMATS, **_OPTIONS)


def _without_contents(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Drop keywords from an object of a JSON schema that only draft 7's validators check.

    These are `contentEncoding` and `contentMediaType`, which Twostroke does not check.
    """
    return {
        name: value
        for name, value in pairs
        if not (isinstance(value, str) and name in {"contentEncoding", "contentMediaType"})
    }


class _RepeatedError(Exception):
    """An object in a finished answer has two members of the same name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise _RepeatedError(name)
        members[name] = value
    return members


def _read(text: str, make_object: Any) -> Any:
    """Parse a JSON text with exact numbers; `make_object` builds each object from its members."""
    return json.loads(text, parse_float=_number, object_pairs_hook=make_object)


def _number(text: str) -> Decimal:
    """Return a JSON number exactly.

    Huge exponents are reduced, because no schema has limits of this size.
    """
    digits, _, exponent = text.lower().partition("e")
    return Decimal(f"{digits}e{max(-_MAX_EXPONENT, min(_MAX_EXPONENT, int(exponent or 0)))}")


def _write(line: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
