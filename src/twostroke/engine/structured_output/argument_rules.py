"""Helpers for writing grammars of tool call arguments, shared by all notations."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.lark import to_lark
from twostroke.engine.structured_output.schema.patterns import whole_text_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Schema = dict[str, Any]
    AnySchema = Schema | bool

_MAX_INTEGER: Final = 9 * 10**18  # `schema.scalars` gives this limit to integers without limits


class PreparedSchema:
    """A rewritten JSON schema, whose references and alternatives are resolved on demand."""

    def __init__(self, schema: Schema, json_form: Mapping[str, Any]) -> None:
        """Read a schema that `prepare` has rewritten.

        `json_form` has llguidance's options for how JSON values are written.
        """
        self._definitions = {
            f"#/$defs/{name}": inner for name, inner in schema.get("$defs", {}).items()
        }
        self.root = {key: value for key, value in schema.items() if key != "$defs"}
        self._json_form = json_form

    def branches(self, schema: AnySchema) -> list[Schema]:
        """Return the schemas, without references and `anyOf`, whose union is `schema`."""
        branches: list[Schema] = []
        waiting: list[Any] = [schema]
        seen: set[str] = set()
        while waiting:
            inner = waiting.pop(0)
            if isinstance(inner, bool):
                branches += [{}] if inner else []
            elif "$ref" in inner:
                if inner["$ref"] not in seen:
                    seen.add(inner["$ref"])
                    waiting.insert(0, self._definitions[inner["$ref"]])
            elif "anyOf" in inner:
                waiting = [*inner["anyOf"], *waiting]
            else:
                branches.append(inner)
        return branches

    def to_json_rule(self, schemas: Sequence[Schema]) -> str:
        """Return a grammar expression for JSON values that fit at least one of the schemas."""
        schema: Schema = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
        used: dict[str, Any] = {}
        waiting = list(_references(schema))
        while waiting:
            reference = waiting.pop()
            name = reference.removeprefix("#/$defs/")
            if name not in used:
                used[name] = self._definitions[reference]
                waiting += _references(used[name])
        definitions = {"$defs": used} if used else {}
        return f"%json {json.dumps({**schema, **definitions, 'x-guidance': self._json_form})}"


def _references(value: object) -> Iterator[str]:
    """Yield the references in a rewritten schema."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


class RuleList:
    """Collects the grammar rules, in Lark's notation, for the arguments of one function."""

    def __init__(self, name: str, special_ids: Mapping[str, int]) -> None:
        """Begin without rules. All names begin with `name`, the name of the first rule.

        `special_ids` are the token ids of the notation's marks that are special tokens, by mark.
        """
        self.rules: list[str] = []
        self._name = name
        self._special_ids = special_ids

    def begin(self, expression: str) -> None:
        """Add the first rule, which has the name of the list."""
        self.rules.insert(0, f"{self._name}: {expression}")

    def with_end(self, pattern: str, end: str, *, is_lazy: bool = False) -> str:
        """Return an expression for a text that matches `pattern`, followed by the text `end`.

        `end` is the closing mark of a value, and the text may contain parts of this mark. So both
        are one terminal: with two terminals, the grammar could not tell where the text ends.
        """
        marks = [mark for mark in self._special_ids if mark in end]
        body = self.add_terminal(pattern)
        if not marks:
            return self.add_terminal(f"{body} {self.literal(end)}", is_lazy=is_lazy)
        index = min(end.index(mark) for mark in marks)
        if index:
            body = self.add_terminal(f"{body} {self.literal(end[:index])}")
        return f"{body} {self.literal(end[index:])}"

    def literal(self, text: str) -> str:
        """Return the grammar expression of a literal text, in which marks become special tokens."""
        return to_lark(text, self._special_ids)

    def reserve_name(self) -> str:
        """Return the name of a rule that is added later, by `add_named`."""
        self.rules.append("")
        return f"{self._name}_{len(self.rules) - 1}"

    def add_named(self, name: str, expression: str) -> None:
        """Add a rule whose name was reserved."""
        self.rules[int(name.removeprefix(f"{self._name}_"))] = f"{name}: {expression}"

    def add_rule(self, expression: str) -> str:
        """Add a rule, and return its name."""
        name = f"{self._name}_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def add_terminal(self, expression: str, *, is_lazy: bool = False) -> str:
        """Add a terminal, and return its name; an `is_lazy` terminal has the shortest match."""
        name = f"{self._name}_{len(self.rules)}"
        name = f"{name}[lazy]" if is_lazy else name.upper()
        self.rules.append(f"{name}: {expression}")
        return name.removesuffix("[lazy]")


def object_schemas(branch: Schema) -> Iterator[Schema]:
    """Yield a schema with the members of each kind of object that a branch of a schema allows.

    Objects that an `enum` lists get a schema each.
    """
    if branch.get("type") == "object":
        yield branch
    elif not branch:
        yield {"type": "object"}
    for value in branch.get("enum", ()):
        if isinstance(value, dict):
            members = {name: {"enum": [inner]} for name, inner in value.items()}
            yield {"properties": members, "required": [*value], "additionalProperties": False}


def is_unlimited(branch: Schema) -> bool:
    """Whether a schema of numbers has no limits, apart from the limit that all integers have."""
    limits = branch.keys() - {"type"}
    return all(
        name in {"minimum", "maximum"} and abs(branch[name]) == _MAX_INTEGER for name in limits
    )


def to_lark_pattern(text: str) -> str:
    """Return a rewritten schema's pattern in Lark's notation, such that it matches whole texts.

    Raises:
        ValueError: the pattern has anchors inside.
    """
    pattern = whole_text_pattern(text)
    if pattern is None:
        raise ValueError("a pattern with inner anchors cannot be kept in this form of tool calls")
    return f"/{pattern}/"


def escape(text: str) -> str:
    """Return a regular expression of a literal text, for use between slashes in Lark."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def escape_in_set(character: str) -> str:
    """Escape a character, where necessary, for use inside `[...]` of a regular expression."""
    return f"\\{character}" if character in "]^-\\[/" else character
