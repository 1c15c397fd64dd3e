"""Schemas as unions of branches: references, alternatives, conditions and negations resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.schema.branch import (
    Alternatives,
    ArrayPart,
    Contains,
    ObjectPart,
    SchemaBranch,
    SchemaItem,
    Unevaluated,
)
from twostroke.engine.structured_output.schema.document import NAMED_SCHEMAS, SCHEMAS
from twostroke.engine.structured_output.schema.limits import LIMITS, PLACED_LIMITS
from twostroke.engine.structured_output.schema.negate import (
    NOT_ENUM,
    NOT_PATTERN,
    NOT_TYPE,
    denials,
)
from twostroke.engine.structured_output.schema.overlap import exclusive
from twostroke.engine.structured_output.schema.patterns import RegexPattern, translated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from twostroke.engine.structured_output.schema.branch import Scope, State
    from twostroke.engine.structured_output.schema.document import Deadline, Document, Node

    AnySchema = dict[str, Any] | bool

MOST_BRANCHES: Final = 64  # of one state; a choice that would make more is left out, with a gap
_MOST_CHOICES: Final = 100
_MOST_MEMBERS: Final = 4000  # of the branches of a state, together
_MOST_WORK: Final = 200_000  # keywords and members that are looked at, in all
_OBJECT: Final = frozenset(("properties", "patternProperties", "additionalProperties"))
_ARRAY: Final = frozenset(("prefixItems", "items", "additionalItems"))
_IN_PLACE: Final = frozenset(("$dynamicRef", "$recursiveRef", "$ref", "allOf", "not"))
_CHOICES: Final = frozenset(
    ("anyOf", "dependencies", "dependentRequired", "dependentSchemas", "if", "oneOf")
)
# All that says something about values; the rest are annotations, or unknown.
_SAYS: Final = (
    (SCHEMAS | NAMED_SCHEMAS) - {"$defs", "definitions", "then", "else"}
    | {"$dynamicRef", "$recursiveRef", "$ref", "const", "dependentRequired", "enum", "format"}
    | {"exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maxProperties", "maximum"}
    | {"minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "required"}
    | {"type", "uniqueItems", NOT_ENUM, NOT_PATTERN, NOT_TYPE}
)


class Expander:
    """Finds the branches of states, each once."""

    def __init__(self, document: Document, deadline: Deadline) -> None:
        """Begin with nothing known."""
        self.document, self._deadline = document, deadline
        self.work = 0
        self._latest = "$schema (/)"  # keyword with its place, for errors
        self._known: dict[State, list[SchemaBranch]] = {}
        self._started: dict[State, SchemaBranch] = {}
        self._open: set[State] = set()
        self._applications = 0

    def state(self, states: Iterable[State | None]) -> State | None:
        """Return the state of values that fit all of these, in its simplest form."""
        found: dict[SchemaItem, None] = {}
        seen: set[SchemaItem] = set()
        waiting: list[SchemaItem | None] = []
        for state in reversed(list(states)):
            waiting += [None] if state is None else reversed(state)
        while waiting:
            item = waiting.pop()
            if item is None:
                return None
            if item in seen:
                continue
            seen.add(item)
            self._spend()
            inner = self._inner(item)
            if inner is None:
                found[item] = None
            else:
                waiting += reversed(inner)
        return tuple(found)

    def _inner(self, item: SchemaItem) -> list[SchemaItem | None] | None:
        """Return what a schema consists of that only refers to others; None if it says more."""
        node, holds = item
        schema = node.schema
        says = [keyword for keyword in schema if keyword in _SAYS]
        if node.resource.is_old and "$ref" in schema:
            says = ["$ref"]
        if not says:
            return [] if holds else [None]
        if len(says) > 1:
            return None
        match says[0]:
            case "$ref":
                return [self._item(self.document.referred(node, schema["$ref"]), node, holds=holds)]
            case "not":
                return [self._item(schema["not"], node, holds=not holds)]
            case "allOf" | "anyOf" if len(schema[says[0]]) == 1 or (holds and says[0] == "allOf"):
                return [self._item(one, node, holds=holds) for one in schema[says[0]]]
        return None

    def _item(self, schema: AnySchema, near: Node, *, holds: bool = True) -> SchemaItem | None:
        """Return the item of a schema in another one; None if no value fits."""
        if isinstance(schema, bool):
            return None if schema is not holds else SchemaItem(self.document.made({}, near, "any"))
        return SchemaItem(self.document.node(schema, near), holds)

    def keywords(self, state: State) -> list[str]:
        """Return the keywords of a state's schemas, each with its JSON pointer."""
        return [
            item.node.place(keyword)
            for item in state
            for keyword in item.node.schema
            if keyword in _SAYS
        ]

    def one(self, schema: AnySchema, near: Node) -> State | None:
        """Return the state of one schema in another."""
        item = self._item(schema, near)
        return None if item is None else (item,)

    def branches(self, state: State) -> list[SchemaBranch]:
        """Return branches: a value fits the state if it fits one of them."""
        if state not in self._known:
            self._open.add(state)
            self._known[state] = []  # for a state whose overlaps depend on itself
            self._known[state] = self._expanded(state)
            self._open.discard(state)
        return self._known[state]

    def alternatives(self, state: State) -> Alternatives | None:
        """Return the one choice that a state consists of, if it does."""
        branch = self._first(state)
        if branch.is_touched or len(branch.choices) != 1 or branch.unevaluated or branch.gaps:
            return None
        return branch.choices[0]

    def _first(self, state: State) -> SchemaBranch:
        """Return what a state says before any choice is made."""
        if state not in self._started:
            self._started[state] = SchemaBranch()
            self._apply(self._started[state], [(item, ()) for item in state])
        return self._started[state]

    def _expanded(self, state: State) -> list[SchemaBranch]:
        first = self._first(state).copy()
        for choice in first.choices[_MOST_CHOICES:]:
            first.gap(choice.place)
        del first.choices[_MOST_CHOICES:]
        waiting, done = [first], []
        while waiting:
            branch = waiting.pop()
            if not self._is_possible(branch):
                continue
            if not branch.choices:
                done.append(branch)
                continue
            choice = branch.choices.pop(0)
            most = max(2, min(MOST_BRANCHES, _MOST_MEMBERS // (len(branch.known) + 1)))
            if len(done) + len(waiting) + len(choice.alternatives) > most:
                branch.gap(choice.place)
                waiting.append(branch)
                continue
            if not choice.is_exact:
                branch.gap(choice.place)
            for items, scope in reversed(choice.alternatives):
                other = branch.copy()
                self._spend(len(other.known) + len(other.choices) + len(other.objects))
                self._apply(other, [(item, scope) for item in items])
                waiting.append(other)
        return done

    def _is_possible(self, branch: SchemaBranch) -> bool:
        """Return whether a value may fit a branch, as far as its required members show."""
        if not branch.is_possible():
            return False
        if "object" not in branch.kinds:
            return True
        parts = branch.object_parts()
        for name in branch.required:
            self._spend(1 + len(parts))
            state = self.state(branch.member(name, parts))
            if state is None or (len(state) > 1 and self._is_empty(state)):
                branch.kinds -= {"object"}
                break
        return bool(branch.kinds)

    def _is_empty(self, state: State) -> bool:
        """Return whether a state has no branch; one that is being looked at has."""
        return state not in self._open and not self.branches(state)

    def _apply(self, branch: SchemaBranch, items: Sequence[tuple[SchemaItem, Scope]]) -> None:
        """Add schemas, and those that they refer to, to a branch."""
        tasks: list[tuple[Node, str | None, Scope, bool]] = [
            (item.node, None, scope, item.holds) for item, scope in reversed(items)
        ]
        while tasks:
            node, keyword, scope, holds = tasks.pop()
            if keyword is not None:
                self._latest = node.place(keyword)
            self._spend()
            if keyword is not None:
                inner = self._keyword(branch, node, keyword, scope)
                tasks += [(item.node, None, scope, item.holds) for item in reversed(inner)]
                continue
            if (SchemaItem(node, holds), scope) in branch.seen:
                continue
            branch.seen.add((SchemaItem(node, holds), scope))
            if not holds:
                self._deny(branch, node)
                continue
            keywords = [one for one in node.schema if one in _SAYS]
            if node.resource.is_old and "$ref" in node.schema:
                keywords = ["$ref"]
            for one in ("unevaluatedItems", "unevaluatedProperties"):
                if one in keywords:
                    self._applications += 1
                    state = self.one(node.schema[one], node)
                    is_of_objects = one == "unevaluatedProperties"
                    branch.unevaluated.append(
                        Unevaluated(self._applications, state, is_of_objects, scope)
                    )
                    branch.is_touched = True
                    scope = (*scope, self._applications)
            tasks += [(node, one, scope, True) for one in reversed(keywords)]

    def _keyword(
        self, branch: SchemaBranch, node: Node, keyword: str, scope: Scope
    ) -> list[SchemaItem]:
        """Add one keyword to a branch, and return the schemas that it adds in place."""
        value = node.schema[keyword]
        if keyword in _IN_PLACE:
            found = self._in_place(branch, node, keyword)
            if None in found:
                branch.kinds = frozenset()
            return [item for item in found if item is not None]
        if keyword in _CHOICES:
            branch.choices += self._choices(node, keyword, scope)
            return []
        if keyword in {"const", "enum"}:
            values = value if keyword == "enum" else [value]
            if any(isinstance(one, list | dict) for one in values):
                branch.choices.append(self._spelled(node, keyword, values))
                return []
            branch.limit_values(values)
        branch.is_touched = True
        if keyword in LIMITS:
            LIMITS[keyword](branch, value)
        elif keyword in PLACED_LIMITS:
            PLACED_LIMITS[keyword](branch, node)
        else:
            self._parts(branch, node, keyword, scope)
        return []

    def _parts(self, branch: SchemaBranch, node: Node, keyword: str, scope: Scope) -> None:
        """Add what a keyword says of members or items: once for those that belong together."""
        for group in (_OBJECT, _ARRAY):
            if keyword in group and keyword != next(one for one in node.schema if one in group):
                return
        if keyword in _OBJECT:
            branch.add_part(self._object_part(branch, node, scope))
        elif keyword in _ARRAY:
            branch.arrays += self._array_part(node, scope)
        elif keyword == "propertyNames":
            item = self._item(node.schema[keyword], node)
            branch.names += [item] if item is not None else []
            branch.members = branch.members.narrowed(0, 0 if item is None else None)
        elif keyword == "contains":
            item = self._item(node.schema[keyword], node)
            counts = {} if node.resource.is_old else node.schema
            least, most = counts.get("minContains", 1), counts.get("maxContains")
            if item is not None:
                branch.contains.append(Contains(item, least, most, node.place(keyword), scope))
            elif least:
                branch.kinds -= {"array"}

    def _in_place(self, branch: SchemaBranch, node: Node, keyword: str) -> list[SchemaItem | None]:
        """Return the schemas that a value must fit as well."""
        value = node.schema[keyword]
        match keyword:
            case "allOf":
                return [self._item(one, node) for one in value]
            case "not":
                return [self._item(value, node, holds=False)]
            case "$ref":
                return [self._item(self.document.referred(node, value), node)]
        found = self.document.dynamic(node, value)
        if found is None:
            branch.gap(node.place(keyword))
            return []
        return [self._item(found, node)]

    def _choices(self, node: Node, keyword: str, scope: Scope) -> Iterator[Alternatives]:
        """Yield the choices that a keyword leaves."""
        value, place = node.schema[keyword], node.place(keyword)
        match keyword:
            case "anyOf":
                items = [self._item(one, node) for one in value]
                yield Alternatives(
                    tuple(((one,), scope) for one in items if one is not None), place
                )
            case "oneOf":
                items = [self._item(one, node) for one in value]
                known = [one for one in items if one is not None]
                alternatives, is_exact = exclusive(known, self)
                yield Alternatives(tuple((one, scope) for one in alternatives), place, is_exact)
            case "if":
                yield from self._condition(node, scope)
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                for name, needed in value.items():
                    needs = {"required": needed} if isinstance(needed, list) else needed
                    own = (id(node), keyword, name)
                    without = self._made({"properties": {name: False}}, node, own)
                    presence = {"type": "object", "required": [name]}
                    given = self._made(presence, node, (*own, "given"))
                    item = (
                        self._made(needs, node, (*own, "needs"))
                        if isinstance(needed, list)
                        else self._item(needs, node)
                    )
                    other = [] if item is None else [((given, item), scope)]
                    yield Alternatives((*other, ((without,), ())), place)

    def _made(self, schema: dict[str, Any], node: Node, own: object) -> SchemaItem:
        return SchemaItem(self.document.made(schema, node, own))

    def _spelled(self, node: Node, keyword: str, values: Sequence[Any]) -> Alternatives:
        """Return the choice of one of several values, with objects and arrays as schemas."""
        scalars = [one for one in values if not isinstance(one, list | dict)]
        schemas: list[dict[str, Any]] = [{"enum": scalars}] if scalars else []
        for one in values:
            if isinstance(one, list):
                items = [{"const": inner} for inner in one]
                limits = {"minItems": len(one), "maxItems": len(one)}
                schemas.append({"type": "array", "items": items, **limits})
            elif isinstance(one, dict):
                members = {name: {"const": inner} for name, inner in one.items()}
                others = {"required": list(one), "additionalProperties": False}
                schemas.append({"type": "object", "properties": members, **others})
        made = [
            self.document.made(schema, node, ("spelled", id(node), number))
            for number, schema in enumerate(schemas)
        ]
        return Alternatives(tuple(((SchemaItem(one),), ()) for one in made), node.place(keyword))

    def _condition(self, node: Node, scope: Scope) -> Iterator[Alternatives]:
        """Yield the choice between a condition with what then holds, and its opposite."""
        schema = node.schema
        if "then" not in schema and "else" not in schema:
            return
        alternatives: list[tuple[State, Scope]] = []
        for holds, keyword in ((True, "then"), (False, "else")):
            condition = self._item(schema["if"], node, holds=holds)
            rest = self._item(schema.get(keyword, True), node)
            if condition is not None and rest is not None:
                alternatives.append(((condition, rest), scope))
        yield Alternatives(tuple(alternatives), node.place("if"))

    def _object_part(self, branch: SchemaBranch, node: Node, scope: Scope) -> ObjectPart:
        schema = node.schema
        named = schema.get("properties", {})
        patterns: dict[RegexPattern, State | None] = {}
        for source, inner in schema.get("patternProperties", {}).items():
            pattern = translated(source)
            if pattern is None or pattern.other_texts:
                branch.gap(node.place("patternProperties"), "object")
            else:
                patterns[pattern] = self.one(inner, node)
        self._spend(len(named) + len(patterns))
        is_open = "additionalProperties" not in schema
        others = self.one(schema.get("additionalProperties", True), node)
        names = {name: self.one(inner, node) for name, inner in named.items()}
        return ObjectPart(names, patterns, others, is_open, scope)

    def _array_part(self, node: Node, scope: Scope) -> list[ArrayPart]:
        schema = node.schema
        if isinstance(schema.get("items"), list):  # before 2020
            first, rest = schema["items"], "additionalItems"
        else:
            first, rest = [] if node.resource.is_old else schema.get("prefixItems", []), "items"
        if rest not in schema and not first:
            return []
        self._spend(len(first))
        states = tuple(self.one(one, node) for one in first)
        others = self.one(schema.get(rest, True), node)
        return [ArrayPart(states, others, rest not in schema, scope)]

    def _deny(self, branch: SchemaBranch, node: Node) -> None:
        """Add that a schema does not fit."""
        found = list(denials(self.document, node))
        exact = all(one.is_exact for one in found)
        branch.choices.append(
            Alternatives(tuple(((one.item,), ()) for one in found), node.place("not"), exact)
        )

    def _spend(self, count: int = 1) -> None:
        self.work += count
        self._deadline.check()
        if self.work > _MOST_WORK:
            raise ValueError(
                f"its alternatives and members combine to more than {_MOST_WORK:,} cases; the last "
                f"is of {self._latest}"
            )
