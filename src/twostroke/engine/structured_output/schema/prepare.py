"""Prepares a JSON schema for llguidance, which makes grammars of schemas.

A schema is rewritten as states, each the conjunction of some of its schemas, and each state as a
union of plain schemas of one type. These use only what llguidance holds exactly; what they cannot
say is noted as a gap.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen
from twostroke.engine.structured_output.schema.arrays import arrays
from twostroke.engine.structured_output.schema.branch import KINDS, SchemaBranch, SchemaItem
from twostroke.engine.structured_output.schema.document import Deadline, Document
from twostroke.engine.structured_output.schema.escapes import needs_escapes, with_plain_strings
from twostroke.engine.structured_output.schema.expand import Expander
from twostroke.engine.structured_output.schema.objects import objects
from twostroke.engine.structured_output.schema.scalars import can_be_written, is_exact, scalars

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twostroke.engine.structured_output.schema.branch import State

    Schema = dict[str, Any]
    AnySchema = Schema | bool

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}

# JSON is written as json.dumps does. A schema allows any number of blanks, and a weak model
# would fill its answer with them.
JSON_FORM: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    # A name written with escapes would not be recognized: `{"r\\u006fle": 1}` has a `role`.
    "json_allowed_escapes": 'nrbtf\\"',
}

_MOST_STATES: Final = 10_000
_MOST_TEXT: Final = 1_000_000  # characters
_MOST_KNOWN: Final = 32  # schemas that are kept prepared
_DEEPEST: Final = 24  # schemas in one another, before they get names
_SMALL: Final = 200  # characters of a schema that is repeated rather than named
_MOST_GAPS: Final = 20
_MOST_NAMED: Final = 4  # keywords in an error
_ENDLESS: Final = Deadline()
_REPEATED: Final = "additionalProperties (names that repeat)"


class Prepared(Frozen):
    r"""A schema in llguidance's form, and the keywords that its grammar cannot enforce.

    Each of `gaps` is such a keyword with its JSON pointer, as in `uniqueItems (/properties/tags)`.
    If there are any, the finished answer must be checked against the whole schema. Otherwise, each
    value that the grammar allows is valid. With `escapes`, control characters are written as
    `\u0007`.
    """

    text: str
    gaps: tuple[str, ...] = ()
    escapes: bool = False

    @property
    def json_form(self) -> Mapping[str, Any]:
        """The options for llguidance about the form of JSON."""
        return with_escapes(JSON_FORM) if self.escapes else JSON_FORM


def with_escapes(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options about the form of JSON that also allow escaped control characters."""
    allowed = form.get("json_allowed_escapes", "u")
    return {**form, "json_allowed_escapes": allowed if "u" in allowed else f"{allowed}u"}


@lru_cache(_MOST_KNOWN)
def prepare(text: str, deadline: Deadline = _ENDLESS) -> Prepared:
    """Return a JSON schema, rewritten for llguidance.

    Raises:
        ValueError: it is not a schema, cannot be followed, or no value fits; the sentence says why.
        TimeoutError: the deadline is over.
    """
    try:
        document = Document(text)
        rewriter = _Rewriter(document, deadline)
        schema = rewriter.whole()
        escapes = needs_escapes(schema)
        if escapes and with_plain_strings(schema):
            rewriter.gaps[_REPEATED] = None
        found = json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if len(found) > _MOST_TEXT:
        raise ValueError(
            f"its grammar has {len(found):,} characters, and may have {_MOST_TEXT:,}: it has too "
            "many members, or alternatives that combine"
        )
    return Prepared(found, tuple(rewriter.gaps)[:_MOST_GAPS], escapes)


class _Rewriter:
    """Rewrites states as schemas, in which the number of another state stands for it."""

    def __init__(self, document: Document, deadline: Deadline) -> None:
        self.gaps: dict[str, None] = {}
        self._expander, self._deadline = Expander(document, deadline), deadline
        self._root = document.root
        self._numbers: dict[State, int] = {}
        self._schemas: list[Schema | bool] = []

    def whole(self) -> Schema:
        """Return the whole schema."""
        root = self._child([(SchemaItem(self._root),)])
        if root is False:
            raise ValueError(self._why_empty([(SchemaItem(self._root),)]))
        states: list[State] = []
        while len(self._schemas) < len(self._numbers):
            states = list(self._numbers)[len(self._schemas) :]
            for state in states:
                self._schemas.append(self._written(state))
            if len(self._numbers) > _MOST_STATES:
                keywords = ", ".join(self._expander.keywords(states[-1])[:_MOST_NAMED])
                raise ValueError(
                    f"its schemas have over {_MOST_STATES:,} combinations; the last: {keywords}"
                )
        first_empty = [state for state, schema in self._states() if schema is False]
        self._drop_empty()
        if self._schemas and self._schemas[0] is False:
            raise ValueError(self._why_empty(first_empty))
        layout = _Layout(self._schemas)
        found = layout.whole()
        if layout.has_free_names:
            self.gaps[_REPEATED] = None
        return found

    def _states(self) -> Iterator[tuple[State, Schema | bool]]:
        return zip(self._numbers, self._schemas, strict=True)

    def _why_empty(self, empty: Sequence[State]) -> str:
        """Return why no value fits the schema; `empty` are its states that no value fits."""
        if not empty:
            return "no value fits it: each value would have to contain another value, without end"
        values = [
            value
            for branch in self._expander.branches(empty[0])
            for value in branch.allowed() or ()
            if not (can_be_written(value) if isinstance(value, str) else is_exact(value))
        ]
        named = ", ".join(self._expander.keywords(empty[0])[:_MOST_NAMED]) or "the schema (#)"
        if not values:
            return f"no value fits it: no value is left by {named}"
        if isinstance(values[0], str):
            return f"no value fits it: {ascii(values[0])[:80]} in {named} has half of a character"
        number = f"{values[0]:,}"[:80]
        return f"no value fits it: {number} in {named} has more digits than float64 can hold"

    def _child(self, states: Sequence[State | None]) -> Schema | bool:
        """Return a schema that stands for values that fit all states."""
        state = self._expander.state(states)
        if state is None:
            return False
        if not state:
            return {}
        return {"$ref": self._numbers.setdefault(state, len(self._numbers))}

    def _written(self, state: State) -> Schema | bool:
        """Return the schema of a state."""
        choice = self._expander.alternatives(state)
        if choice is not None:
            if not choice.is_exact:
                self.gaps[choice.place] = None
            own = {"$ref": self._numbers[state]}
            others = [self._child([inner]) for inner, _ in choice.alternatives]
            return _any_of([one for one in others if not isinstance(one, bool) and one != own])
        found: list[Schema] = []
        for branch in self._expander.branches(state):
            found += self._branch(branch)
        return _any_of(found)

    def _branch(self, branch: SchemaBranch) -> Iterator[Schema]:
        if branch.kinds == frozenset(KINDS) and _is_free(branch):
            self._note(branch)
            yield {}
            return
        branch = branch.copy()
        yield from scalars(branch)
        if "array" in branch.kinds and branch.values is None:
            yield from arrays(branch, self._expander, self._child)
        if "object" in branch.kinds and branch.values is None:
            yield from objects(branch, self._expander, self._child)
        for kind in ("array", "object"):
            if kind in branch.kinds and any(
                isinstance(value, list if kind == "array" else dict)
                for value in branch.excluded.values()
            ):
                branch.gap("not (of objects or arrays)")
        self._note(branch)

    def _note(self, branch: SchemaBranch) -> None:
        """Note the gaps that are about values that a branch allows."""
        for place, of in branch.gaps.items():
            is_listed = branch.values is not None and of != "string"  # whose patterns count
            if not of or (of in branch.kinds and not is_listed):
                self.gaps[place] = None

    def _drop_empty(self) -> None:
        """Replace the schemas that no value fits, as far as that follows from others.

        A schema that needs itself has no finite value, so each begins as empty.
        """
        empty = set(range(len(self._schemas)))
        num_before = len(empty) + 1
        while len(empty) < num_before:
            num_before = len(empty)
            for number in sorted(empty, reverse=True):
                self._deadline.check()
                if not _is_empty(self._schemas[number], empty):
                    empty.remove(number)
        for number in empty:
            self._schemas[number] = False


def _is_empty(schema: AnySchema, empty: set[int]) -> bool:
    """Return whether no value fits a schema, if none fits the states of `empty`."""
    if isinstance(schema, bool):
        return not schema
    if "$ref" in schema:
        return schema["$ref"] in empty
    if "anyOf" in schema:
        return all(_is_empty(one, empty) for one in schema["anyOf"])
    if schema.get("type") == "object" and "properties" in schema:
        members = schema["properties"]
        return any(_is_empty(members[name], empty) for name in schema["required"])
    if schema.get("type") == "array" and "items" in schema:
        first, low = schema.get("prefixItems", ()), schema.get("minItems", 0)
        if any(_is_empty(one, empty) for one in first[:low]):
            return True
        return low > len(first) and _is_empty(schema["items"], empty)
    return False


class _Layout:
    """Puts schemas together: inside one another, or by name where they are repeated."""

    def __init__(self, schemas: list[Schema | bool]) -> None:
        self._schemas = schemas
        self._uses = [0] * len(schemas)
        self._is_small = [False] * len(schemas)
        for number, schema in enumerate(schemas):
            inner = list(_references(schema))
            for one in inner:
                self._uses[one] += 1
            self._is_small[number] = not inner and len(json.dumps(schema)) < _SMALL
        self.has_free_names = False  # two of which could be the same
        self._open: set[int] = set()
        self._named: dict[int, None] = {}
        self._numbers: dict[str, str] = {}  # the schemas of numbers, and their names

    def whole(self) -> Schema:
        """Return the first schema, with all that it needs."""
        found = self._laid(self._schemas[0], 0) if self._schemas else {}
        assert isinstance(found, dict)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(self._named):
            number = list(self._named)[len(definitions)]
            definitions[f"s{number}"] = self._laid(self._schemas[number], 0)
        definitions |= {name: json.loads(text) for text, name in self._numbers.items()}
        return {**found, "$defs": definitions} if definitions else found

    def _laid(self, schema: AnySchema, depth: int) -> Schema | bool:
        """Return a schema in which names and schemas stand for numbers."""
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema:
            return self._inner(schema["$ref"], depth)
        if schema.get("type") in {"integer", "number"} and len(schema) > 1:
            # llguidance takes a millisecond for bounds, so those that are repeated have a name.
            name = self._numbers.setdefault(json.dumps(schema), f"n{len(self._numbers)}")
            return {"$ref": f"#/$defs/{name}"}
        self.has_free_names = self.has_free_names or _has_free_names(schema)
        found: Schema = {}
        for keyword, value in schema.items():
            if keyword in {"anyOf", "prefixItems"}:
                found[keyword] = [self._laid(one, depth + 1) for one in value]
            elif keyword in {"properties", "patternProperties"}:
                found[keyword] = {name: self._laid(one, depth + 1) for name, one in value.items()}
            elif keyword in {"items", "additionalProperties"}:
                found[keyword] = self._laid(value, depth + 1)
            elif value != []:
                found[keyword] = value
        return found

    def _inner(self, number: int, depth: int) -> Schema | bool:
        schema = self._schemas[number]
        is_inside = self._uses[number] == 1 or self._is_small[number]
        if schema is False or (is_inside and number not in self._open and depth < _DEEPEST):
            self._open.add(number)
            found = self._laid(schema, depth)
            self._open.discard(number)
            return found
        self._named.setdefault(number)
        return {"$ref": f"#/$defs/s{number}"}


def _has_free_names(schema: Schema) -> bool:
    """Return whether a schema allows two members that it does not name, or any value."""
    if schema.get("type") != "object":
        return not schema
    is_free = schema["additionalProperties"] is not False or "patternProperties" in schema
    return is_free and schema.get("maxProperties", math.inf) > len(schema["required"]) + 1


def _references(schema: AnySchema) -> Iterator[int]:
    """Yield the numbers of the states in a schema."""
    if isinstance(schema, bool):
        return
    if "$ref" in schema:
        yield schema["$ref"]
    for keyword in ("anyOf", "prefixItems"):
        for inner in schema.get(keyword, ()):
            yield from _references(inner)
    for keyword in ("properties", "patternProperties"):
        for inner in schema.get(keyword, {}).values():
            yield from _references(inner)
    for keyword in ("items", "additionalProperties"):
        yield from _references(schema.get(keyword, True))


def _any_of(schemas: list[Schema]) -> Schema | bool:
    """Return the union of schemas."""
    if {} in schemas:
        return {}
    return {"anyOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else False


def _is_free(branch: SchemaBranch) -> bool:
    """Return whether a branch says nothing that could be written."""
    free = vars(SchemaBranch())
    return all(
        value == free[name]
        for name, value in vars(branch).items()
        if name not in {"gaps", "is_touched", "seen"}
    )
