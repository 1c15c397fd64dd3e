"""Writes the grammar of tool call arguments that are not one JSON object, from a JSON schema."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.frozen import Frozen
from twostroke.engine.structured_output.argument_values import to_json_literal
from twostroke.engine.structured_output.lark import to_lark
from twostroke.engine.structured_output.notations import BLANKS, Notation, TagNotation
from twostroke.engine.structured_output.schema.argument_types import (
    ALL_TYPES,
    STRING_ONLY,
    ArgumentTypes,
)
from twostroke.engine.structured_output.schema.patterns import whole_text_pattern
from twostroke.engine.structured_output.schema.prepare import JSON_FORM, prepare, with_escapes
from twostroke.engine.structured_output.schema.size import forces_little

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twostroke.engine.structured_output.schema.document import Deadline

    Schema = dict[str, Any]
    AnySchema = Schema | bool

# JSON as values that are not strings have it, with Python's words for true, false and null.
_WORDS: Final[Mapping[str, Sequence[str]]] = {
    "boolean": ("true", "false", "True", "False"),
    "null": ("null", "None"),
}
_NUMBER: Final = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_INTEGER: Final = r"-?(0|[1-9][0-9]{0,17})"
_ANY_INTEGER: Final = r"-?(0|[1-9][0-9]*)"
_FIRST_CHARACTERS: Final = {"array": r"\[", "object": r"\{", "string": '"', "number": "-0-9"}
_MAX_INTEGER: Final = 9 * 10**18  # `schema.scalars` gives this limit to integers without limits
_MAX_KEY_CHARS: Final = 200


class ArgumentsRule(Frozen):
    """A grammar rule for the arguments of one function, which is written when it is compiled.

    Attributes:
        notation: how the model writes the arguments.
        schema: the JSON schema of the arguments.
        special_ids: token ids of marks that are special tokens, by mark.
    """

    notation: Notation
    schema: dict[str, Any]
    special_ids: dict[str, int]

    def to_text(self) -> str:
        """Return the rule as JSON, to stand in a grammar after `%arguments`."""
        return msgspec.json.encode(self).decode()


class WrittenRules(Frozen):
    """Grammar rules for the arguments of one function.

    Attributes:
        rules: the rules in Lark's notation.
        unenforced_keywords: the schema's keywords that the rules do not enforce.
        is_short: whether the rules force only little text.
    """

    rules: str
    unenforced_keywords: tuple[str, ...]
    is_short: bool


def write_arguments_rule(name: str, text: str, deadline: Deadline) -> WrittenRules:
    """Return the grammar rules for a function's arguments; `name` is the name of the first.

    `text` is an `ArgumentsRule` as JSON.

    Raises:
        ValueError: the schema cannot be used, or the notation cannot hold it.
        TimeoutError: the deadline is over.
    """
    rule = msgspec.json.decode(text, type=ArgumentsRule)
    prepared = prepare(json.dumps({"type": "object", **rule.schema}), deadline)
    schema = json.loads(prepared.text)
    json_form = dict(with_escapes(JSON_FORM) if prepared.escapes else JSON_FORM)
    assert isinstance(rule.notation, TagNotation)
    writer = _TagWriter(name, rule, schema, json_form)
    writer.write()
    return WrittenRules(
        "\n".join(writer.rules),
        (*prepared.unenforced_keywords, *writer.unenforced_keywords),
        forces_little(schema),
    )


class PreparedSchema:
    """A rewritten JSON schema, whose references and alternatives are resolved on demand."""

    def __init__(self, schema: Schema, json_form: Mapping[str, Any]) -> None:
        """Read a schema in the form that `prepare` returns; `json_form` is its form of JSON."""
        self._definitions = {
            f"#/$defs/{name}": inner for name, inner in schema.get("$defs", {}).items()
        }
        self.root = {key: value for key, value in schema.items() if key != "$defs"}
        self._json_form = json_form

    def branches(self, schema: AnySchema) -> list[Schema]:
        """Return the schemas without references and alternatives that a schema is the union of."""
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
        """Return a grammar expression for JSON that fits one of some schemas."""
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


class _TagWriter:
    """Writes the grammar rules of arguments that stand between marks."""

    def __init__(
        self, name: str, rule: ArgumentsRule, schema: Schema, json_form: Mapping[str, Any]
    ) -> None:
        assert isinstance(rule.notation, TagNotation)
        self.rules: list[str] = []
        self.unenforced_keywords: list[str] = []
        self._name = name
        self._notation = rule.notation
        self._special_ids = rule.special_ids
        self._schema = PreparedSchema(schema, json_form)
        self._types = ArgumentTypes(rule.schema)
        self._num_rules = 0

    def write(self) -> None:
        """Write the rules; the first has the writer's name."""
        objects = [
            members
            for branch in self._schema.branches(self._schema.root)
            for members in _objects(branch)
        ]
        alternatives = [self._members(schema) for schema in objects]
        self.rules.insert(0, f"{self._name}: {' | '.join(alternatives)}")

    def _members(self, schema: Schema) -> str:
        """Return the grammar expression of one object's members, in the order of the schema."""
        members = schema.get("properties", {})
        required = schema.get("required", ())
        parts = []
        for name, inner in members.items():
            if inner is not False:
                expression = self._argument(name, inner)
                parts.append(expression if name in required else f"({expression})?")
        free = self._free_members(schema, members)
        low, high = schema.get("minProperties", 0), schema.get("maxProperties")
        if low or high is not None:
            if parts or not free:
                raise ValueError(
                    "minProperties or maxProperties beside named arguments cannot be kept in this "
                    "model's form of tool calls"
                )
            parts.append(f"({free}){{{low},{'' if high is None else high}}}")
        elif free:
            parts.append(f"({free})*")
        return " ".join(parts) or '""'

    def _free_members(self, schema: Schema, members: Mapping[str, Any]) -> str:
        """Return the expression of a member that the schema does not name; empty if none may be."""
        patterns = schema.get("patternProperties", {})
        others = schema.get("additionalProperties", True)
        named = "|".join(map(_escape, members))
        excluded = [f"/{named}/"] if named else []
        expressions = []
        for pattern, inner in patterns.items():
            if inner is not False:
                key = [self._key_text, _pattern(pattern), *(f"~{text}" for text in excluded)]
                expressions.append(self._free_argument(key, inner))
            excluded.append(_pattern(pattern))
        if others is not False:
            key = [self._key_text, *(f"~{text}" for text in excluded)]
            expressions.append(self._free_argument(key, others))
        return " | ".join(expressions)

    @property
    def _key_text(self) -> str:
        """The pattern of a name that the schema does not list: it cannot have the mark's begin."""
        stop = self._notation.key_end.strip(BLANKS)[0]
        return rf"/[^\n{_escape_in_set(stop)}]{{1,{_MAX_KEY_CHARS}}}/"

    def _free_argument(self, key: Sequence[str], schema: AnySchema) -> str:
        terminal = self._add_terminal(" & ".join(key))
        begin = self._literal(self._notation.key_begin)
        return f"{begin} {terminal} {self._after_key(schema, ALL_TYPES)}"

    def _argument(self, name: str, schema: AnySchema) -> str:
        """Return the expression of a named argument."""
        notation = self._notation
        has_mark = notation.key_end.strip(BLANKS)[0] in name or "\n" in name
        if has_mark or not 1 <= len(name) <= _MAX_KEY_CHARS:
            raise ValueError(
                f"the argument {json.dumps(name)[:_MAX_KEY_CHARS]} has a name that this model's "
                "form of tool calls cannot write"
            )
        begin = self._literal(notation.key_begin + name)
        return f"{begin} {self._after_key(schema, self._types.of(name))}"

    def _after_key(self, schema: AnySchema, types: frozenset[str]) -> str:
        """Return the name of a rule for an argument after its name.

        `types` are the types that the reader of calls takes the value for.
        """
        notation = self._notation
        branches = self._schema.branches(schema)
        if notation.other_key_end:
            texts = self._strings(branches, STRING_ONLY)
            others = self._others(branches, ALL_TYPES - STRING_ONLY)
            alternatives = []
            if texts:
                key_end = self._literal(notation.key_end)
                alternatives.append(f"{key_end} ({' | '.join(texts)})")
            if others:
                key_end = self._literal(notation.other_key_end)
                alternatives.append(f"{key_end} ({' | '.join(others)})")
            if not alternatives:
                raise ValueError("a value cannot be written in this model's form of tool calls")
            return self._add_rule(" | ".join(alternatives))
        alternatives = [*self._strings(branches, types)]
        if types != STRING_ONLY and {} not in branches:
            alternatives += self._others(branches, types)
        if not alternatives:
            raise ValueError("a value cannot be written in this model's form of tool calls")
        return self._add_rule(f"{self._literal(notation.key_end)} ({' | '.join(alternatives)})")

    def _strings(self, branches: Sequence[Schema], types: frozenset[str]) -> list[str]:
        """Return expressions of the strings of some schemas, with the text after the value."""
        # Any text fits a schema without limits, whatever type it is read as.
        read_types = frozenset() if {} in branches else _literal_types(types)
        has_limits = any(
            branch.get("type") in {"integer", "number"} and not _is_unlimited(branch)
            for branch in branches
        )
        excluded = _literals(read_types, has_limits=has_limits)
        expressions: list[str] = []
        for branch in branches:
            if not branch or branch.get("type") == "string":
                patterns = [*self._string_patterns(branch), *excluded]
                expressions.append(self._with_end(" & ".join(patterns), is_lazy=True))
            for value in branch.get("enum", ()):
                if not isinstance(value, str) or self._notation.closing_mark in value:
                    continue
                if to_json_literal(value, read_types) is None:
                    expressions.append(self._literal(value + self._notation.value_end))
        return expressions

    def _string_patterns(self, branch: Schema) -> list[str]:
        """Return patterns that a string must match as a whole, in Lark's notation."""
        mark = _escape(self._notation.closing_mark)
        patterns = [rf"~/(.|\n)*{mark}(.|\n)*/"]
        low, high = branch.get("minLength", 0), branch.get("maxLength")
        count = f"{{{low},{'' if high is None else high}}}" if low or high is not None else "*"
        patterns.insert(0, rf"/(.|\n){count}/")
        texts = [branch["pattern"]] if "pattern" in branch else []
        texts += [inner["pattern"] for inner in branch.get("allOf", ())]
        return patterns + [_pattern(text) for text in texts]

    def _others(self, branches: Sequence[Schema], types: frozenset[str]) -> list[str]:
        """Return expressions of the values that are not strings, with the text after the value.

        `types` are the types that the reader takes the value for: a terminal has the text after
        the value where a string could begin like the value.
        """
        end = self._notation.value_end
        expressions: list[str] = []
        as_json: list[Schema] = []
        for branch in branches:
            kind = branch.get("type", "")
            if not branch:
                as_json += [{"type": name} for name in ("object", "array", "number")]
                words = [*_WORDS["boolean"], *_WORDS["null"]]
                expressions += [self._literal(word + end) for word in words]
            elif "enum" in branch:
                values = [value for value in branch["enum"] if not isinstance(value, str)]
                expressions += [self._literal(word + end) for word in _written(values)]
            elif kind in _WORDS:
                expressions += [self._literal(word + end) for word in _WORDS[kind]]
            elif kind in {"integer", "number"} and "string" in types and _is_unlimited(branch):
                pattern = _INTEGER if kind == "integer" else _NUMBER
                expressions.append(self._with_end(f"/{pattern}/"))
            elif kind in {"array", "object"} and types == ALL_TYPES:
                continue  # the reader takes it for a text, which a mark in a string would end
            elif kind != "string":
                as_json.append(branch)
        if as_json:
            rule = self._add_rule(self._schema.to_json_rule(as_json))
            expressions.append(f"{rule} {self._literal(end)}")
        return expressions

    def _with_end(self, pattern: str, *, is_lazy: bool = False) -> str:
        """Return an expression of text that fits a pattern, with the text after a value.

        The text and the beginning of the mark are one terminal: the text may have parts of the
        mark, and a terminal that could go on would hide where it ends.
        """
        end = self._notation.value_end
        marks = [mark for mark in self._special_ids if mark in end]
        body = self._add_terminal(pattern)
        if not marks:
            return self._add_terminal(f"{body} {self._literal(end)}", is_lazy=is_lazy)
        index = min(end.index(mark) for mark in marks)
        if index:
            body = self._add_terminal(f"{body} {self._literal(end[:index])}")
        return f"{body} {self._literal(end[index:])}"

    def _literal(self, text: str) -> str:
        return to_lark(text, self._special_ids)

    def _add_rule(self, expression: str) -> str:
        self._num_rules += 1
        name = f"{self._name}_{self._num_rules}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _add_terminal(self, expression: str, *, is_lazy: bool = False) -> str:
        self._num_rules += 1
        name = f"{self._name}_{self._num_rules}"
        name = f"{name}[lazy]" if is_lazy else name.upper()
        self.rules.append(f"{name}: {expression}")
        return name.removesuffix("[lazy]")


def _objects(branch: Schema) -> Iterator[Schema]:
    """Yield schemas with `properties` for the objects that a branch of a schema allows."""
    if branch.get("type") == "object":
        yield branch
    elif not branch:
        yield {"type": "object"}
    for value in branch.get("enum", ()):
        if isinstance(value, dict):
            members = {name: {"enum": [inner]} for name, inner in value.items()}
            yield {"properties": members, "required": [*value], "additionalProperties": False}


def _literal_types(types: frozenset[str]) -> frozenset[str]:
    """Return the types of literals for which the reader of calls takes a value with some types.

    Without strings among the types, each JSON literal counts.
    """
    return types - STRING_ONLY if "string" in types else ALL_TYPES


def _literals(types: frozenset[str], *, has_limits: bool) -> list[str]:
    """Return patterns that exclude the texts that are read as literals of some types.

    Texts that begin like an array, an object or a quoted string are excluded: the grammar could
    not tell them apart before their end. So are texts that begin like a number, with `has_limits`.
    """
    words = [word for name, texts in _WORDS.items() if name in types for word in texts]
    if "number" in types:
        words.append(_NUMBER)
    elif "integer" in types:
        words.append(_ANY_INTEGER)
    firsts = [text for name, text in _FIRST_CHARACTERS.items() if name in types]
    if not has_limits and "number" in types:
        firsts.remove(_FIRST_CHARACTERS["number"])
    elif has_limits and "number" not in types:
        firsts.append(_FIRST_CHARACTERS["number"])
    blanks = r"[ \t\r\n]*"
    excluded = [f"~/{blanks}({'|'.join(words)}){blanks}/"] if words else []
    if firsts:
        excluded.append(rf"~/{blanks}[{''.join(firsts)}](.|\n)*/")
    return excluded


def _is_unlimited(branch: Schema) -> bool:
    """Whether a schema of numbers has no limits except the general limit of integers."""
    limits = branch.keys() - {"type"}
    return all(
        name in {"minimum", "maximum"} and abs(branch[name]) == _MAX_INTEGER for name in limits
    )


def _written(values: Sequence[object]) -> Iterator[str]:
    """Yield the texts of listed values that are not strings."""
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        yield text
        if text in {"true", "false", "null"}:
            yield str(value)


def _pattern(text: str) -> str:
    """Return a pattern of a rewritten schema as a pattern of a whole text, in Lark's notation.

    Raises:
        ValueError: the pattern has anchors inside.
    """
    pattern = whole_text_pattern(text)
    if pattern is None:
        raise ValueError("a pattern with inner anchors cannot be kept in this form of tool calls")
    return f"/{pattern}/"


def _escape(text: str) -> str:
    """Return a regular expression of a literal text that may stand between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def _escape_in_set(character: str) -> str:
    return f"\\{character}" if character in "]^-\\[/" else character
