"""Writes grammars for tool call arguments that stand between tags, from a JSON schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.argument_rules import (
    PreparedSchema,
    RuleList,
    escape,
    escape_in_set,
    is_unlimited,
    object_schemas,
    to_lark_pattern,
)
from twostroke.engine.structured_output.notations import (
    BLANKS,
    CDATA,
    TYPE,
    TYPES,
    TagNotation,
    to_json_literal,
    type_name,
)
from twostroke.engine.structured_output.schema.argument_types import (
    ALL_TYPES,
    STRING_ONLY,
    ArgumentTypes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
_MAX_KEY_CHARS: Final = 200


class TagWriter:
    """Writes the grammar rules for arguments in a `TagNotation`, from their JSON schema."""

    def __init__(
        self,
        notation: TagNotation,
        schema: PreparedSchema,
        types: ArgumentTypes,
        rules: RuleList,
    ) -> None:
        """Prepare to add rules to `rules`, for the arguments of one function.

        `types` are the types by which the reader of calls decides whether a value is a string.
        """
        self._notation = notation
        self._schema = schema
        self._types = types
        self._rules = rules

    def write(self) -> None:
        """Add the rules for the arguments to the list.

        Raises:
            ValueError: the notation cannot hold the schema.
        """
        objects = [
            members
            for branch in self._schema.branches(self._schema.root)
            for members in object_schemas(branch)
        ]
        self._rules.begin(" | ".join([self._members(schema) for schema in objects]))

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
        """Return the expression of one member that the schema does not name; empty if forbidden."""
        patterns = schema.get("patternProperties", {})
        others = schema.get("additionalProperties", True)
        named = "|".join(map(escape, members))
        excluded = [f"/{named}/"] if named else []
        expressions = []
        for pattern, inner in patterns.items():
            if inner is not False:
                key = [self._key_text, to_lark_pattern(pattern), *(f"~{text}" for text in excluded)]
                expressions.append(self._free_argument(key, inner))
            excluded.append(to_lark_pattern(pattern))
        if others is not False:
            key = [self._key_text, *(f"~{text}" for text in excluded)]
            expressions.append(self._free_argument(key, others))
        return " | ".join(expressions)

    @property
    def _key_text(self) -> str:
        """The pattern of names that the schema does not list; they must not contain `key_end`."""
        stop = self._notation.key_end.strip(BLANKS)[0]
        return rf"/[^\n{escape_in_set(stop)}]{{1,{_MAX_KEY_CHARS}}}/"

    def _free_argument(self, key: Sequence[str], schema: AnySchema) -> str:
        terminal = self._rules.add_terminal(" & ".join(key))
        begin = self._rules.literal(self._notation.key_begin)
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
        begin = self._rules.literal(notation.key_begin + name)
        return f"{begin} {self._after_key(schema, self._types.of(name))}"

    def _after_key(self, schema: AnySchema, types: frozenset[str]) -> str:
        """Return the name of a rule for the rest of an argument, after the argument's name.

        The rest is the text after the name, the value and the closing mark. `types` are the types
        that the reader of calls may give to the value.
        """
        notation = self._notation
        branches = self._schema.branches(schema)
        if notation.other_key_end:
            alternatives = []
            if texts := self._strings(branches, STRING_ONLY):
                key_end = self._rules.literal(notation.key_end)
                alternatives.append(f"{key_end} ({' | '.join(texts)})")
            for name in TYPES if TYPE in notation.other_key_end else ("",):
                typed_branches = [*_of_type(branches, name)] if name else branches
                if others := self._others(typed_branches, ALL_TYPES - STRING_ONLY):
                    key_end = self._rules.literal(notation.other_key_end.replace(TYPE, name))
                    alternatives.append(f"{key_end} ({' | '.join(others)})")
            if not alternatives:
                raise ValueError("a value cannot be written in this model's form of tool calls")
            return self._rules.add_rule(" | ".join(alternatives))
        alternatives = [*self._strings(branches, types)]
        if types != STRING_ONLY and {} not in branches:
            alternatives += self._others(branches, types)
        if not alternatives:
            raise ValueError("a value cannot be written in this model's form of tool calls")
        return self._rules.add_rule(
            f"{self._rules.literal(notation.key_end)} ({' | '.join(alternatives)})"
        )

    def _strings(self, branches: Sequence[Schema], types: frozenset[str]) -> list[str]:
        """Return expressions of the strings that some schemas allow, each with the closing mark."""
        # Any text fits a schema without limits, whatever type it is read as.
        read_types = frozenset() if {} in branches else _literal_types(types)
        has_limits = any(
            branch.get("type") in {"integer", "number"} and not is_unlimited(branch)
            for branch in branches
        )
        excluded = _literals(read_types, has_limits=has_limits)
        end = self._notation.value_end
        expressions: list[str] = []
        for branch in branches:
            if not branch or branch.get("type") == "string":
                patterns = self._string_patterns(branch, self._notation.closing_mark) + excluded
                if self._notation.has_cdata:
                    expressions.append(self._cdata(branch))
                    patterns.append(r"/[^<&\n]*/")
                expressions.append(self._rules.with_end(" & ".join(patterns), end, is_lazy=True))
            for value in branch.get("enum", ()):
                if not isinstance(value, str) or self._notation.closing_mark in value:
                    continue
                if to_json_literal(value, read_types) is None:
                    expressions.append(self._rules.literal(self._notation.text(value) + end))
        return expressions

    def _cdata(self, branch: Schema) -> str:
        """Return the expression of a string in a `CDATA` section, with the closing mark."""
        begin, end = CDATA
        pattern = " & ".join(self._string_patterns(branch, end))
        body = self._rules.with_end(pattern, end + self._notation.value_end, is_lazy=True)
        return f"{self._rules.literal(begin)} {body}"

    def _string_patterns(self, branch: Schema, end: str) -> list[str]:
        """Return patterns that a string before the text `end` must match, in Lark's notation."""
        patterns = [rf"~/(.|\n)*{escape(end)}(.|\n)*/"]
        low, high = branch.get("minLength", 0), branch.get("maxLength")
        count = f"{{{low},{'' if high is None else high}}}" if low or high is not None else "*"
        patterns.insert(0, rf"/(.|\n){count}/")
        texts = [branch["pattern"]] if "pattern" in branch else []
        texts += [inner["pattern"] for inner in branch.get("allOf", ())]
        return patterns + [to_lark_pattern(text) for text in texts]

    def _others(self, branches: Sequence[Schema], types: frozenset[str]) -> list[str]:
        """Return expressions of the values that are not strings, each with the closing mark.

        `types` are the types that the reader of calls may give to the value. If a string may begin
        like the value, the value and the closing mark are one terminal.
        """
        end = self._notation.value_end
        expressions: list[str] = []
        as_json: list[Schema] = []
        for branch in branches:
            kind = branch.get("type", "")
            if not branch:
                as_json += [{"type": name} for name in ("object", "array", "number")]
                words = [*_WORDS["boolean"], *_WORDS["null"]]
                expressions += [self._rules.literal(word + end) for word in words]
            elif "enum" in branch:
                values = [value for value in branch["enum"] if not isinstance(value, str)]
                expressions += [self._rules.literal(word + end) for word in _written(values)]
            elif kind in _WORDS:
                expressions += [self._rules.literal(word + end) for word in _WORDS[kind]]
            elif kind in {"integer", "number"} and "string" in types and is_unlimited(branch):
                pattern = _INTEGER if kind == "integer" else _NUMBER
                expressions.append(self._rules.with_end(f"/{pattern}/", end))
            elif kind in {"array", "object"} and types == ALL_TYPES:
                continue  # the reader takes it for a text, which a mark in a string would end
            elif kind != "string":
                as_json.append(branch)
        if as_json:
            rule = self._rules.add_rule(self._schema.to_json_rule(as_json))
            expressions.append(f"{rule} {self._rules.literal(end)}")
        return expressions


def _of_type(branches: Sequence[Schema], name: str) -> Iterator[Schema]:
    """Yield the schemas that allow values of type `name`, restricted to these values."""
    for branch in branches:
        if not branch:
            yield {"type": name}
        elif "enum" in branch:
            values = [value for value in branch["enum"] if not isinstance(value, str)]
            yield {**branch, "enum": [value for value in values if type_name(value) == name]}
        elif branch.get("type") == name or (name == "number" and branch.get("type") == "integer"):
            yield branch


def _literal_types(types: frozenset[str]) -> frozenset[str]:
    """Return the types of JSON literals that the reader of calls does not read as strings.

    `types` are the possible types of the value. If a string is not possible, each JSON literal is
    read as JSON.
    """
    return types - STRING_ONLY if "string" in types else ALL_TYPES


def _literals(types: frozenset[str], *, has_limits: bool) -> list[str]:
    """Return patterns that match no text that is read as a literal of one of `types`.

    Texts that begin like an array, an object or a quoted string are excluded as well, because the
    grammar could not tell strings from these before their end. With `has_limits`, texts that begin
    like a number are excluded, too.
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


def _written(values: Sequence[object]) -> Iterator[str]:
    """Yield the texts by which models write values other than strings: JSON, `True`, `None`, ..."""
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        yield text
        if text in {"true", "false", "null"}:
            yield str(value)
