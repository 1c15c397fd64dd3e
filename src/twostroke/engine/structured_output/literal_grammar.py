"""Writes grammars for tool call arguments that are written as names and literals."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.argument_rules import (
    escape,
    object_schemas,
    to_lark_pattern,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.engine.structured_output.argument_rules import PreparedSchema, RuleList
    from twostroke.engine.structured_output.notations import LiteralNotation

    Schema = dict[str, Any]
    AnySchema = Schema | bool

_MAX_NAME_CHARS: Final = 200
_MAX_COUNT: Final = 1000
# A name that no quotes surround, and characters of such names.
_NAME: Final = re.compile(rf"[\w.$@/-]{{1,{_MAX_NAME_CHARS}}}")
_NAME_CHARACTERS: Final = "[0-9A-Za-z_.$@/-]"
_ANY_TYPES: Final = ("string", "number", "boolean", "null", "array", "object")
_TOO_MANY: Final = "counts of items or members above {limit:,} cannot be kept in this form of calls"


class LiteralWriter:
    """Writes the grammar rules for arguments in a `LiteralNotation`, from their JSON schema."""

    def __init__(self, notation: LiteralNotation, schema: PreparedSchema, rules: RuleList) -> None:
        """Prepare to add rules to `rules`, for the arguments of one function."""
        self._notation = notation
        self._schema = schema
        self._rules = rules
        self._separator = rules.literal(notation.separator)
        self._named: dict[str, str] = {}  # rules by the reference or the schema that they hold

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
        self._rules.begin(" | ".join([self._members(schema, is_root=True) for schema in objects]))

    def _value(self, schema: AnySchema) -> str:
        """Return the name of a rule for the values that fit a schema."""
        key = json.dumps(schema)
        if key not in self._named:
            name = self._named[key] = self._rules.reserve_name()
            alternatives = [
                text for branch in self._schema.branches(schema) for text in self._branch(branch)
            ]
            if not alternatives:
                raise ValueError("a value cannot be written in this model's form of tool calls")
            self._rules.add_named(name, " | ".join(alternatives))
        return self._named[key]

    def _branch(self, branch: Schema) -> list[str]:
        """Return expressions of the values that fit a schema without references and `anyOf`."""
        words = self._notation.words
        if "enum" in branch:
            return [text for value in branch["enum"] for text in self._listed(value)]
        match branch.get("type"):
            case None:
                return [self._value({"type": name}) for name in _ANY_TYPES]
            case "string":
                return self._strings(branch)
            case "boolean":
                return [self._rules.literal(word) for word in (*words[:2], "true", "false")]
            case "null":
                return [self._rules.literal(word) for word in (words[2], "null")]
            case "array":
                return [self._array(branch)]
            case "object":
                members = self._members(branch, is_root=False)
                return [f'"{{" {members} "}}"']
            case _:
                return [self._rules.add_rule(self._schema.to_json_rule([branch]))]

    def _listed(self, value: object) -> list[str]:
        """Return expressions of a value in an `enum`; empty if the notation cannot write it."""
        notation = self._notation
        if isinstance(value, str):
            quotes = [
                quote for quote in notation.quotes if notation.has_escapes or quote not in value
            ]
            return [self._rules.literal(notation.quoted(value, quote)) for quote in quotes]
        text = notation.literal(value)
        if not notation.has_escapes and any(quote in json.dumps(value) for quote in notation.marks):
            return []
        texts = [text] if text == json.dumps(value) or isinstance(value, (list, dict)) else []
        if value is None or isinstance(value, bool):
            texts = [text, json.dumps(value)]
        return [self._rules.literal(each) for each in texts or [text]]

    def _strings(self, branch: Schema) -> list[str]:
        """Return expressions of the strings that fit a schema, with their quotes.

        A string with limits has no escapes, so that the limits hold for its text.
        """
        low, high = branch.get("minLength", 0), branch.get("maxLength")
        patterns = [branch["pattern"]] if "pattern" in branch else []
        patterns += [inner["pattern"] for inner in branch.get("allOf", ())]
        limits = [to_lark_pattern(pattern) for pattern in patterns]
        if low or high is not None:
            limits.append(rf"/(.|\n){{{low},{'' if high is None else high}}}/")
        expressions = []
        for quote in self._notation.quotes:
            begin = self._rules.literal(quote)
            if not self._notation.has_escapes:
                texts = [r"/(.|\n)*/", rf"~/(.|\n)*{escape(quote)}(.|\n)*/", *limits]
                expressions.append(f"{begin} {self._rules.with_end(' & '.join(texts), quote)}")
                continue
            escapes = "" if limits else r"|\\[\\'\"nrt]"
            content = " & ".join([rf"/([^{quote}\\]{escapes})*/", *limits])
            body = self._rules.add_terminal(content)
            expressions.append(self._rules.add_terminal(f"{begin} {body} {begin}"))
        return expressions

    def _array(self, branch: Schema) -> str:
        """Return the expression of the arrays that fit a schema."""
        first = branch.get("prefixItems", ())
        low, high = branch.get("minItems", 0), branch.get("maxItems")
        items = branch.get("items", True)
        if max(low, high or 0) > _MAX_COUNT:
            raise ValueError(_TOO_MANY.format(limit=_MAX_COUNT))
        rest = ""  # after the items that are listed
        if items is not False and (high is None or high > len(first)):
            item = self._value(items)
            count = self._count(low - len(first), None if high is None else high - len(first))
            if not first:
                return f'"[" {self._run(item, low, high)} "]"'
            rest = f"({self._separator} {item}){count}"
        for index in range(len(first) - 1, -1, -1):
            before = f"{self._separator} " if index else ""
            rest = f"{before}{self._value(first[index])} {rest}"
            rest = rest if index < low else f"({rest})?"
        return f'"[" {rest} "]"'

    def _run(self, item: str, low: int, high: int | None) -> str:
        """Return the expression of `low` to `high` items with separators between them.

        `item` is the expression of one item. There is no upper limit if `high` is None.
        """
        if high == 0:
            return ""
        count = self._count(low - 1, None if high is None else high - 1)
        run = f"{item} ({self._separator} {item}){count}"
        return run if low else f"({run})?"

    @staticmethod
    def _count(low: int, high: int | None) -> str:
        low = max(low, 0)
        return "*" if not low and high is None else f"{{{low},{'' if high is None else high}}}"

    def _members(self, schema: Schema, *, is_root: bool) -> str:
        """Return the expression of an object's members, in the order of the notation.

        With `is_root`, the members are the arguments of the call.
        """
        members: Mapping[str, Any] = schema.get("properties", {})
        names = [name for name, inner in members.items() if inner is not False]
        if self._notation.is_sorted:
            names.sort(key=str.lower)
        required = schema.get("required", ())
        entries = [
            (self._member(name, members[name], is_root=is_root), name in required) for name in names
        ]
        free = self._free_members(schema, members, is_root=is_root)
        low, high = schema.get("minProperties", 0), schema.get("maxProperties")
        if max(low, high or 0) > _MAX_COUNT:
            raise ValueError(_TOO_MANY.format(limit=_MAX_COUNT))
        if (low or high is not None) and (entries or not free):
            raise ValueError(
                "minProperties or maxProperties beside named members cannot be kept in this "
                "model's form of tool calls"
            )
        if not entries:
            return self._run(free, low, high) if free else '""'
        return self._sequence(entries, free)

    def _sequence(self, entries: Sequence[tuple[str, bool]], free: str) -> str:
        """Return the expression of an object's named members, followed by unnamed members.

        `entries` has the expression of each named member, and whether the member is required.
        `free` is the expression of one unnamed member; empty if there may be none.
        """
        rest = f"({self._separator} {free})*" if free else '""'  # if a member was written
        first = self._run(free, 0, None) if free else '""'  # if none was
        for member, is_required in reversed(entries):
            begin = f"{member} {rest}"
            first = self._rules.add_rule(begin if is_required else f"{begin} | {first}")
            separated = f"{self._separator} {member}"
            separated = separated if is_required else f"({separated})?"
            rest = self._rules.add_rule(f"{separated} {rest}")
        return first

    def _member(self, name: str, schema: AnySchema, *, is_root: bool) -> str:
        """Return the expression of a named member."""
        notation = self._notation
        if is_root or not notation.has_quoted_names:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"the argument {json.dumps(name)[:_MAX_NAME_CHARS]} has a name that this "
                    "model's form of tool calls cannot write"
                )
            sign = notation.equals if is_root else notation.colon
            return f"{self._rules.literal(name + sign)} {self._value(schema)}"
        quoted = " | ".join(
            self._rules.literal(notation.quoted(name, quote) + notation.colon)
            for quote in notation.quotes
        )
        return f"({quoted}) {self._value(schema)}"

    def _free_members(self, schema: Schema, members: Mapping[str, Any], *, is_root: bool) -> str:
        """Return the rule of one member that the schema does not name; empty if not allowed."""
        others = schema.get("additionalProperties", True)
        excluded = [f"~/{'|'.join(map(escape, members))}/"] if members else []
        alternatives = []
        for pattern, inner in schema.get("patternProperties", {}).items():
            if inner is not False:
                texts = [to_lark_pattern(pattern), *excluded]
                alternatives.append(self._free_member(texts, inner, is_root=is_root))
            excluded.append(f"~{to_lark_pattern(pattern)}")
        if others is not False:
            alternatives.append(self._free_member(excluded, others, is_root=is_root))
        return self._rules.add_rule(" | ".join(alternatives)) if alternatives else ""

    def _free_member(self, patterns: Sequence[str], schema: AnySchema, *, is_root: bool) -> str:
        notation = self._notation
        has_quotes = not is_root and notation.has_quoted_names
        characters = "[^'\"\\\\\\n]" if has_quotes else _NAME_CHARACTERS
        content = " & ".join([f"/{escape_slash(characters)}{{1,{_MAX_NAME_CHARS}}}/", *patterns])
        name = self._rules.add_terminal(content)
        if has_quotes:
            quote = self._rules.literal(notation.quotes[0])
            name = self._rules.add_terminal(f"{quote} {name} {quote}")
        sign = self._rules.literal(notation.equals if is_root else notation.colon)
        return f"{name} {sign} {self._value(schema)}"


def escape_slash(pattern: str) -> str:
    """Return a regular expression that may stand between slashes."""
    return pattern.replace("/", r"\/")
