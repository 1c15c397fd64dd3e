"""Prepares a JSON schema for llguidance, which turns schemas into grammars.

A schema is rewritten into states, which are conjunctions of its subschemas. Each state becomes a
union of simple schemas of one type. These use only keywords that llguidance enforces exactly; other
keywords are recorded as unenforced.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
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

# Answers have the form of `json.dumps`. If any number of blanks were allowed, weak models would
# fill their answers with blanks.
JSON_FORM: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    # The grammar would not recognize a name with other escapes, such as "r\\u006fle" for `role`.
    "json_allowed_escapes": 'nrbtf\\"',
}

_MAX_STATES: Final = 10_000
_MAX_TEXT_CHARS: Final = 1_000_000
_MAX_CACHED_SCHEMAS: Final = 32
_MAX_NESTING: Final = 24  # schemas nested deeper get names
_MAX_REPEATED_CHARS: Final = 200  # a larger schema that is used twice gets a name
_MAX_UNENFORCED_KEYWORDS: Final = 20
_MAX_NAMED_KEYWORDS: Final = 4  # in an error
_NO_DEADLINE: Final = Deadline()
_REPEATED_NAMES: Final = "additionalProperties (names that repeat)"


class Prepared(Frozen):
    r"""A JSON schema in the form that llguidance compiles, and the keywords that are not enforced.

    Attributes:
        text: the schema for llguidance.
        unenforced_keywords: keywords that are not enforced, each with its JSON pointer, such as
            `uniqueItems (/properties/tags)`. If there are any, the finished answer must be checked
            against the original schema. Otherwise each value that the grammar allows is valid.
        escapes: whether strings may have escaped control characters, such as `\u0007`.
    """

    text: str
    unenforced_keywords: tuple[str, ...] = ()
    escapes: bool = False

    @property
    def json_form(self) -> Mapping[str, Any]:
        """The options of llguidance for how answers write JSON, such as white space and escapes."""
        return with_escapes(JSON_FORM) if self.escapes else JSON_FORM


def with_escapes(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return llguidance's options for the form of JSON, with escaped control characters allowed."""
    allowed = form.get("json_allowed_escapes", "u")
    return {**form, "json_allowed_escapes": allowed if "u" in allowed else f"{allowed}u"}


@lru_cache(_MAX_CACHED_SCHEMAS)
def prepare(text: str, deadline: Deadline = _NO_DEADLINE) -> Prepared:
    """Rewrite a JSON schema in the form that llguidance compiles exactly.

    llguidance supports only some keywords. The others are rewritten, or listed as
    unenforced, and only a check of the finished answer covers them.

    Raises:
        ValueError: the text is not a schema, the schema is too complex, or no value fits it.
        TimeoutError: the deadline is over.
    """
    try:
        document = Document(text)
        rewriter = _Rewriter(document, deadline)
        schema = rewriter.rewrite()
        escapes = needs_escapes(schema)
        if escapes and with_plain_strings(schema):
            rewriter.unenforced_keywords[_REPEATED_NAMES] = None
        prepared_text = json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if len(prepared_text) > _MAX_TEXT_CHARS:
        raise ValueError(
            f"its grammar has {counted_noun(len(prepared_text), 'character', form=',')}, and may "
            f"have {_MAX_TEXT_CHARS:,}: it has too many members, or alternatives that combine"
        )
    return Prepared(
        prepared_text, tuple(rewriter.unenforced_keywords)[:_MAX_UNENFORCED_KEYWORDS], escapes
    )


class _Rewriter:
    """Rewrites a JSON schema for llguidance, one state after another.

    A state is a set of schemas that a value must all fit. Rewritten schemas refer to other states
    by number, until all are nested into one schema.
    """

    def __init__(self, document: Document, deadline: Deadline) -> None:
        self.unenforced_keywords: dict[str, None] = {}
        self._expander = Expander(document, deadline)
        self._deadline = deadline
        self._root = document.root
        self._numbers: dict[State, int] = {}
        self._schemas: list[Schema | bool] = []

    def rewrite(self) -> Schema:
        """Return the document's whole JSON schema in llguidance's form.

        Raises:
            ValueError: the schema is too complex, or no value fits it.
        """
        root = self._child([(SchemaItem(self._root),)])
        if root is False:
            raise ValueError(self._why_empty([(SchemaItem(self._root),)]))
        states: list[State] = []
        while len(self._schemas) < len(self._numbers):
            states = list(self._numbers)[len(self._schemas) :]
            for state in states:
                self._schemas.append(self._rewrite_state(state))
            if len(self._numbers) > _MAX_STATES:
                keywords = ", ".join(self._expander.keywords(states[-1])[:_MAX_NAMED_KEYWORDS])
                raise ValueError(
                    f"its schemas have over {_MAX_STATES:,} combinations; the last: {keywords}"
                )
        first_empty = [state for state, schema in self._states() if schema is False]
        self._drop_empty()
        if self._schemas and self._schemas[0] is False:
            raise ValueError(self._why_empty(first_empty))
        layout = _Layout(self._schemas)
        schema = layout.nested()
        if layout.has_free_names:
            self.unenforced_keywords[_REPEATED_NAMES] = None
        return schema

    def _states(self) -> Iterator[tuple[State, Schema | bool]]:
        return zip(self._numbers, self._schemas, strict=True)

    def _why_empty(self, empty: Sequence[State]) -> str:
        """Return an error message that says why no value fits the JSON schema.

        `empty` are the states (sets of schemas) that no value fits.
        """
        if not empty:
            return "no value fits it: each value would have to contain another value, without end"
        values = [
            value
            for branch in self._expander.branches(empty[0])
            for value in branch.allowed() or ()
            if not (can_be_written(value) if isinstance(value, str) else is_exact(value))
        ]
        named = (
            ", ".join(self._expander.keywords(empty[0])[:_MAX_NAMED_KEYWORDS]) or "the schema (#)"
        )
        if not values:
            return f"no value fits it: {named} exclude every value"
        if isinstance(values[0], str):
            return f"no value fits it: {ascii(values[0])[:80]} in {named} has a lone surrogate"
        number = f"{values[0]:,}"[:80]
        return f"no value fits it: {number} in {named} has more digits than float64 can hold"

    def _child(self, states: Sequence[State | None]) -> Schema | bool:
        """Return the schema of a member or item that must fit all of some states (sets of schemas).

        Usually the result is a reference to the state's schema by its number; False if no value
        fits.
        """
        state = self._expander.state(states)
        if state is None:
            return False
        if not state:
            return {}
        return {"$ref": self._numbers.setdefault(state, len(self._numbers))}

    def _rewrite_state(self, state: State) -> Schema | bool:
        """Return llguidance's schema of a state (a set of schemas): a union of simple schemas.

        False if no value fits.
        """
        choice = self._expander.alternatives(state)
        if choice is not None:
            if not choice.is_exact:
                self.unenforced_keywords[choice.location] = None
            own_reference = {"$ref": self._numbers[state]}
            alternatives = [self._child([inner]) for inner, _ in choice.alternatives]
            return _any_of(
                [
                    schema
                    for schema in alternatives
                    if not isinstance(schema, bool) and schema != own_reference
                ]
            )
        schemas: list[Schema] = []
        for branch in self._expander.branches(state):
            schemas += self._branch(branch)
        return _any_of(schemas)

    def _branch(self, branch: SchemaBranch) -> Iterator[Schema]:
        if branch.kinds == frozenset(KINDS) and _is_free(branch):
            self._add_unenforced_keywords(branch)
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
                branch.add_gap("not (of objects or arrays)")
        self._add_unenforced_keywords(branch)

    def _add_unenforced_keywords(self, branch: SchemaBranch) -> None:
        """Record the keywords of a branch that the grammar does not enforce.

        Keywords about types of values that the branch does not allow are left out.
        """
        for location, kind in branch.unenforced_keywords.items():
            # Listed values satisfy all keywords but patterns of strings.
            is_listed = branch.values is not None and kind != "string"
            if not kind or (kind in branch.kinds and not is_listed):
                self.unenforced_keywords[location] = None

    def _drop_empty(self) -> None:
        """Replace rewritten schemas that no finite value fits by False.

        At first all schemas count as empty (without values), because a schema that requires itself
        has no finite value. Then each schema that requires only schemas that are not empty is
        marked as not empty; this is repeated until nothing changes.
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
    """Whether no value fits a rewritten schema; `empty` are the states that no value fits."""
    if isinstance(schema, bool):
        return not schema
    if "$ref" in schema:
        return schema["$ref"] in empty
    if "anyOf" in schema:
        return all(_is_empty(inner, empty) for inner in schema["anyOf"])
    if schema.get("type") == "object" and "properties" in schema:
        members = schema["properties"]
        return any(_is_empty(members[name], empty) for name in schema["required"])
    if schema.get("type") == "array" and "items" in schema:
        first = schema.get("prefixItems", ())
        low = schema.get("minItems", 0)
        if any(_is_empty(item, empty) for item in first[:low]):
            return True
        return low > len(first) and _is_empty(schema["items"], empty)
    return False


class _Layout:
    """Nests rewritten schemas into one schema for llguidance.

    The rewritten schemas refer to each other by number. Schemas that are used several times get
    names in `$defs`; the others replace their reference.
    """

    def __init__(self, schemas: list[Schema | bool]) -> None:
        self._schemas = schemas
        self._uses = [0] * len(schemas)
        self._is_small = [False] * len(schemas)
        for number, schema in enumerate(schemas):
            inner = list(_references(schema))
            for used_number in inner:
                self._uses[used_number] += 1
            self._is_small[number] = not inner and len(json.dumps(schema)) < _MAX_REPEATED_CHARS
        self.has_free_names = False  # objects may have a member twice
        self._open: set[int] = set()
        self._named: dict[int, None] = {}
        self._numbers: dict[str, str] = {}  # names of schemas of numbers, by their text

    def nested(self) -> Schema:
        """Return the first rewritten schema, with the named schemas in its `$defs`."""
        schema = self._nest(self._schemas[0], 0) if self._schemas else {}
        assert isinstance(schema, dict)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(self._named):
            number = list(self._named)[len(definitions)]
            definitions[f"s{number}"] = self._nest(self._schemas[number], 0)
        definitions |= {name: json.loads(text) for text, name in self._numbers.items()}
        return {**schema, "$defs": definitions} if definitions else schema

    def _nest(self, schema: AnySchema, depth: int) -> Schema | bool:
        """Return a rewritten schema in which references by number are replaced.

        A reference becomes the nested schema, or the name of a schema that is used several times.
        """
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema:
            return self._inner(schema["$ref"], depth)
        if schema.get("type") in {"integer", "number"} and len(schema) > 1:
            # llguidance compiles bounds in a millisecond, so equal bounds share a name.
            name = self._numbers.setdefault(json.dumps(schema), f"n{len(self._numbers)}")
            return {"$ref": f"#/$defs/{name}"}
        self.has_free_names = self.has_free_names or _has_free_names(schema)
        nested: Schema = {}
        for keyword, value in schema.items():
            if keyword in {"anyOf", "prefixItems"}:
                nested[keyword] = [self._nest(inner, depth + 1) for inner in value]
            elif keyword in {"properties", "patternProperties"}:
                nested[keyword] = {
                    name: self._nest(inner, depth + 1) for name, inner in value.items()
                }
            elif keyword in {"items", "additionalProperties"}:
                nested[keyword] = self._nest(value, depth + 1)
            elif value != []:
                nested[keyword] = value
        return nested

    def _inner(self, number: int, depth: int) -> Schema | bool:
        schema = self._schemas[number]
        is_nested = self._uses[number] == 1 or self._is_small[number]
        if schema is False or (is_nested and number not in self._open and depth < _MAX_NESTING):
            self._open.add(number)
            nested = self._nest(schema, depth)
            self._open.discard(number)
            return nested
        self._named.setdefault(number)
        return {"$ref": f"#/$defs/s{number}"}


def _has_free_names(schema: Schema) -> bool:
    """Whether a rewritten schema allows two or more members that it does not name.

    The grammar cannot keep such members from having the same name.
    """
    if schema.get("type") != "object":
        return not schema
    is_free = schema["additionalProperties"] is not False or "patternProperties" in schema
    return is_free and schema.get("maxProperties", math.inf) > len(schema["required"]) + 1


def _references(schema: AnySchema) -> Iterator[int]:
    """Yield the numbers of the states to which a rewritten schema refers."""
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
    """Return the union of schemas, as `anyOf` where necessary; False if there are none."""
    if {} in schemas:
        return {}
    return {"anyOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else False


def _is_free(branch: SchemaBranch) -> bool:
    """Whether a branch sets no limits on values, so that its schema is empty."""
    defaults = vars(SchemaBranch())
    return all(
        value == defaults[name]
        for name, value in vars(branch).items()
        if name not in {"unenforced_keywords", "is_touched", "seen"}
    )
