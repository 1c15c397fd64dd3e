"""Expands schemas into branches: resolves references, alternatives, conditions and negations."""

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
    negations,
)
from twostroke.engine.structured_output.schema.overlap import make_exclusive
from twostroke.engine.structured_output.schema.patterns import RegexPattern, translate_pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from twostroke.engine.structured_output.schema.branch import Scope, State
    from twostroke.engine.structured_output.schema.document import Deadline, Document, Node

    AnySchema = dict[str, Any] | bool

MAX_BRANCHES: Final = 64  # of one state; a choice that would make more becomes a gap
_MAX_CHOICES: Final = 100
_MAX_MEMBERS: Final = 4000  # of all branches of a state
_MAX_WORK: Final = 200_000  # visits of keywords and members
_OBJECT: Final = frozenset(("properties", "patternProperties", "additionalProperties"))
_ARRAY: Final = frozenset(("prefixItems", "items", "additionalItems"))
_IN_PLACE: Final = frozenset(("$dynamicRef", "$recursiveRef", "$ref", "allOf", "not"))
_CHOICES: Final = frozenset(
    ("anyOf", "dependencies", "dependentRequired", "dependentSchemas", "if", "oneOf")
)
# Keywords about values. All other keywords are annotations, or unknown.
_ASSERTIONS: Final = (
    (SCHEMAS | NAMED_SCHEMAS) - {"$defs", "definitions", "then", "else"}
    | {"$dynamicRef", "$recursiveRef", "$ref", "const", "dependentRequired", "enum", "format"}
    | {"exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maxProperties", "maximum"}
    | {"minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "required"}
    | {"type", "uniqueItems", NOT_ENUM, NOT_PATTERN, NOT_TYPE}
)


class Expander:
    """Expands the schemas of a JSON schema document into branches, and caches the results.

    A state is a set of schemas that a value must all fit. A branch is a set of limits that a value
    must all fit. A value fits a state if it fits any of the state's branches.
    """

    def __init__(self, document: Document, deadline: Deadline) -> None:
        """Prepare to expand a document's schemas; methods raise TimeoutError after the deadline."""
        self.document = document
        self._deadline = deadline
        self.work = 0
        self._last_keyword = "$schema (/)"  # with its location, for errors
        self._branches: dict[State, list[SchemaBranch]] = {}
        self._started: dict[State, SchemaBranch] = {}
        self._open: set[State] = set()
        self._applications = 0

    def state(self, states: Iterable[State | None]) -> State | None:
        """Combine states (sets of schemas) into the state of the values that fit all of them.

        References and `allOf` are replaced by the schemas that they refer to, so that states with
        the same meaning are more often equal. None if no value fits.
        """
        items: dict[SchemaItem, None] = {}
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
            inner = self._simplified(item)
            if inner is None:
                items[item] = None
            else:
                waiting += reversed(inner)
        return tuple(items)

    def _simplified(self, item: SchemaItem) -> list[SchemaItem | None] | None:
        """Return the schemas that replace a schema with a single keyword such as `$ref` or `allOf`.

        Returns None if the schema must stay as it is. An empty list means that every value fits the
        schema; an element None means that no value fits.
        """
        node, holds = item
        schema = node.schema
        keywords = [keyword for keyword in schema if keyword in _ASSERTIONS]
        if node.resource.is_old and "$ref" in schema:
            keywords = ["$ref"]
        if not keywords:
            return [] if holds else [None]
        if len(keywords) > 1:
            return None
        match keywords[0]:
            case "$ref":
                return [self._item(self.document.resolve(node, schema["$ref"]), node, holds=holds)]
            case "not":
                return [self._item(schema["not"], node, holds=not holds)]
            case "allOf" | "anyOf":
                inner = schema[keywords[0]]
                if len(inner) == 1 or (holds and keywords[0] == "allOf"):
                    return [self._item(each, node, holds=holds) for each in inner]
        return None

    def _item(self, schema: AnySchema, outer: Node, *, holds: bool = True) -> SchemaItem | None:
        """Return a subschema as an item that must fit or, without `holds`, must not fit.

        `schema` may be true or false. `outer` is the node of the schema around it. None if no value
        fits.
        """
        if isinstance(schema, bool):
            return (
                None if schema is not holds else SchemaItem(self.document.derived({}, outer, "any"))
            )
        return SchemaItem(self.document.node(schema, outer), holds)

    def keywords(self, state: State) -> list[str]:
        """Return the keywords of a state's schemas with their JSON pointers, for error messages."""
        return [
            item.node.location(keyword)
            for item in state
            for keyword in item.node.schema
            if keyword in _ASSERTIONS
        ]

    def state_of(self, schema: AnySchema, outer: Node) -> State | None:
        """Return the state with a single subschema; None if no value fits.

        `outer` is the node of the schema around it.
        """
        item = self._item(schema, outer)
        return None if item is None else (item,)

    def branches(self, state: State) -> list[SchemaBranch]:
        """Return the branches of a state (a set of schemas); each value of the state fits a branch.

        Raises:
            ValueError: there are too many combinations of alternatives.
            TimeoutError: the deadline is over.
        """
        if state not in self._branches:
            self._open.add(state)
            self._branches[state] = []  # a state may depend on itself
            self._branches[state] = self._expanded(state)
            self._open.discard(state)
        return self._branches[state]

    def alternatives(self, state: State) -> Alternatives | None:
        """Return the alternatives of a state whose only keyword is `anyOf` or a similar keyword.

        The caller then writes them as a union, without combining them with other keywords. A state
        is a set of schemas. None if the state has other keywords.
        """
        branch = self._unexpanded(state)
        if (
            branch.is_touched
            or len(branch.choices) != 1
            or branch.unevaluated
            or branch.unenforced_keywords
        ):
            return None
        return branch.choices[0]

    def _unexpanded(self, state: State) -> SchemaBranch:
        """Return a state's limits as one branch, in which `anyOf` and similar are not resolved."""
        if state not in self._started:
            self._started[state] = SchemaBranch()
            self._add_schemas(self._started[state], [(item, ()) for item in state])
        return self._started[state]

    def _expanded(self, state: State) -> list[SchemaBranch]:
        first = self._unexpanded(state).copy()
        for choice in first.choices[_MAX_CHOICES:]:
            first.add_gap(choice.location)
        del first.choices[_MAX_CHOICES:]
        waiting, done = [first], []
        while waiting:
            branch = waiting.pop()
            if not self._is_possible(branch):
                continue
            if not branch.choices:
                done.append(branch)
                continue
            choice = branch.choices.pop(0)
            limit = max(2, min(MAX_BRANCHES, _MAX_MEMBERS // (len(branch.member_names) + 1)))
            if len(done) + len(waiting) + len(choice.alternatives) > limit:
                branch.add_gap(choice.location)
                waiting.append(branch)
                continue
            if not choice.is_exact:
                branch.add_gap(choice.location)
            for items, scope in reversed(choice.alternatives):
                other = branch.copy()
                self._spend(len(other.member_names) + len(other.choices) + len(other.objects))
                self._add_schemas(other, [(item, scope) for item in items])
                waiting.append(other)
        return done

    def _is_possible(self, branch: SchemaBranch) -> bool:
        """Return whether any value may fit a branch, from its limits and its required members.

        Disallows objects in the branch if a required member has no possible value.
        """
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
        """Whether no value fits a state (a set of schemas).

        A state that contains itself, and is still being expanded, counts as not empty.
        """
        return state not in self._open and not self.branches(state)

    def _add_schemas(self, branch: SchemaBranch, items: Sequence[tuple[SchemaItem, Scope]]) -> None:
        """Add the limits of schemas, and of the schemas that they refer to, to a branch.

        Each item comes with its scope: the numbers of the outer `unevaluated*` keywords for which
        its members and items count as evaluated.
        """
        tasks: list[tuple[Node, str | None, Scope, bool]] = [
            (item.node, None, scope, item.holds) for item, scope in reversed(items)
        ]
        while tasks:
            node, keyword, scope, holds = tasks.pop()
            if keyword is not None:
                self._last_keyword = node.location(keyword)
            self._spend()
            if keyword is not None:
                inner = self._add_keyword(branch, node, keyword, scope)
                tasks += [(item.node, None, scope, item.holds) for item in reversed(inner)]
                continue
            if (SchemaItem(node, holds), scope) in branch.seen:
                continue
            branch.seen.add((SchemaItem(node, holds), scope))
            if not holds:
                self._add_negation(branch, node)
                continue
            keywords = [name for name in node.schema if name in _ASSERTIONS]
            if node.resource.is_old and "$ref" in node.schema:
                keywords = ["$ref"]
            for name in ("unevaluatedItems", "unevaluatedProperties"):
                if name in keywords:
                    self._applications += 1
                    state = self.state_of(node.schema[name], node)
                    is_of_objects = name == "unevaluatedProperties"
                    branch.unevaluated.append(
                        Unevaluated(self._applications, state, is_of_objects, scope)
                    )
                    branch.is_touched = True
                    scope = (*scope, self._applications)
            tasks += [(node, name, scope, True) for name in reversed(keywords)]

    def _add_keyword(
        self, branch: SchemaBranch, node: Node, keyword: str, scope: Scope
    ) -> list[SchemaItem]:
        """Add one keyword of a schema to a branch.

        Returns further schemas that the value must fit, such as the elements of `allOf`, for the
        caller to add.
        """
        value = node.schema[keyword]
        if keyword in _IN_PLACE:
            items = self._in_place_schemas(branch, node, keyword)
            if None in items:
                branch.kinds = frozenset()
            return [item for item in items if item is not None]
        if keyword in _CHOICES:
            branch.choices += self._choices(node, keyword, scope)
            return []
        if keyword in {"const", "enum"}:
            values = value if keyword == "enum" else [value]
            if any(isinstance(listed, list | dict) for listed in values):
                branch.choices.append(self._choice_of_values(node, keyword, values))
                return []
            branch.limit_values(values)
        branch.is_touched = True
        if keyword in LIMITS:
            LIMITS[keyword](branch, value)
        elif keyword in PLACED_LIMITS:
            PLACED_LIMITS[keyword](branch, node)
        else:
            self._add_member_or_item_keyword(branch, node, keyword, scope)
        return []

    def _add_member_or_item_keyword(
        self, branch: SchemaBranch, node: Node, keyword: str, scope: Scope
    ) -> None:
        """Add a schema's keyword about members of objects or items of arrays to a branch.

        Keywords that depend on each other, such as `properties` and `additionalProperties`, are
        added together, at the first of them.
        """
        for group in (_OBJECT, _ARRAY):
            if keyword in group and keyword != next(name for name in node.schema if name in group):
                return
        if keyword in _OBJECT:
            branch.add_part(self._object_part(branch, node, scope))
        elif keyword in _ARRAY:
            branch.arrays += self._array_part(node, scope)
        elif keyword == "propertyNames":
            item = self._item(node.schema[keyword], node)
            branch.name_items += [item] if item is not None else []
            branch.num_members = branch.num_members.narrowed(0, 0 if item is None else None)
        elif keyword == "contains":
            item = self._item(node.schema[keyword], node)
            counts = {} if node.resource.is_old else node.schema
            min_count = counts.get("minContains", 1)
            if item is not None:
                branch.contains.append(
                    Contains(
                        item=item,
                        min_count=min_count,
                        max_count=counts.get("maxContains"),
                        location=node.location(keyword),
                        scope=scope,
                    )
                )
            elif min_count:
                branch.kinds -= {"array"}

    def _in_place_schemas(
        self, branch: SchemaBranch, node: Node, keyword: str
    ) -> list[SchemaItem | None]:
        """Return the schemas that the same value must fit because of `allOf`, `not` or a reference.

        None in the list means that no value fits.
        """
        value = node.schema[keyword]
        match keyword:
            case "allOf":
                return [self._item(schema, node) for schema in value]
            case "not":
                return [self._item(value, node, holds=False)]
            case "$ref":
                return [self._item(self.document.resolve(node, value), node)]
        schema = self.document.resolve_dynamic(node, value)
        if schema is None:
            branch.add_gap(node.location(keyword))
            return []
        return [self._item(schema, node)]

    def _choices(self, node: Node, keyword: str, scope: Scope) -> Iterator[Alternatives]:
        """Yield the alternatives of a schema's keyword such as `anyOf`: a value must fit one."""
        value = node.schema[keyword]
        location = node.location(keyword)
        match keyword:
            case "anyOf":
                items = [self._item(schema, node) for schema in value]
                yield Alternatives(
                    tuple(((item,), scope) for item in items if item is not None), location
                )
            case "oneOf":
                items = [self._item(schema, node) for schema in value]
                possible = [item for item in items if item is not None]
                alternatives, is_exact = make_exclusive(possible, self)
                yield Alternatives(
                    tuple((state, scope) for state in alternatives), location, is_exact
                )
            case "if":
                yield from self._condition(node, scope)
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                for name, dependency in value.items():
                    key = (id(node), keyword, name)
                    absent = self._derived_item({"properties": {name: False}}, node, key)
                    presence = {"type": "object", "required": [name]}
                    present = self._derived_item(presence, node, (*key, "given"))
                    item: SchemaItem | None
                    if isinstance(dependency, list):
                        required = {"required": dependency}
                        item = self._derived_item(required, node, (*key, "needs"))
                    else:
                        item = self._item(dependency, node)
                    with_member = [] if item is None else [((present, item), scope)]
                    yield Alternatives((*with_member, ((absent,), ())), location)

    def _derived_item(self, schema: dict[str, Any], node: Node, key: object) -> SchemaItem:
        return SchemaItem(self.document.derived(schema, node, key))

    def _choice_of_values(self, node: Node, keyword: str, values: Sequence[Any]) -> Alternatives:
        """Return the alternatives of an `enum` or `const` that lists objects or arrays.

        Each object or array becomes a schema that allows only this value.
        """
        scalars = [value for value in values if not isinstance(value, list | dict)]
        schemas: list[dict[str, Any]] = [{"enum": scalars}] if scalars else []
        for value in values:
            if isinstance(value, list):
                items = [{"const": inner} for inner in value]
                limits = {"minItems": len(value), "maxItems": len(value)}
                schemas.append({"type": "array", "items": items, **limits})
            elif isinstance(value, dict):
                members = {name: {"const": inner} for name, inner in value.items()}
                others = {"required": list(value), "additionalProperties": False}
                schemas.append({"type": "object", "properties": members, **others})
        nodes = [
            self.document.derived(schema, node, ("spelled", id(node), number))
            for number, schema in enumerate(schemas)
        ]
        alternatives = tuple(((SchemaItem(inner),), ()) for inner in nodes)
        return Alternatives(alternatives, node.location(keyword))

    def _condition(self, node: Node, scope: Scope) -> Iterator[Alternatives]:
        """Yield the two cases of `if`: values that fit `if` and `then`, or `else` and not `if`.

        Nothing is yielded without `then` and `else`, since `if` alone restricts nothing.
        """
        schema = node.schema
        if "then" not in schema and "else" not in schema:
            return
        alternatives: list[tuple[State, Scope]] = []
        for holds, keyword in ((True, "then"), (False, "else")):
            condition = self._item(schema["if"], node, holds=holds)
            rest = self._item(schema.get(keyword, True), node)
            if condition is not None and rest is not None:
                alternatives.append(((condition, rest), scope))
        yield Alternatives(tuple(alternatives), node.location("if"))

    def _object_part(self, branch: SchemaBranch, node: Node, scope: Scope) -> ObjectPart:
        schema = node.schema
        named = schema.get("properties", {})
        patterns: dict[RegexPattern, State | None] = {}
        for source, inner in schema.get("patternProperties", {}).items():
            pattern = translate_pattern(source)
            if pattern is None or pattern.other_texts:
                branch.add_gap(node.location("patternProperties"), "object")
            else:
                patterns[pattern] = self.state_of(inner, node)
        self._spend(len(named) + len(patterns))
        is_open = "additionalProperties" not in schema
        others = self.state_of(schema.get("additionalProperties", True), node)
        names = {name: self.state_of(inner, node) for name, inner in named.items()}
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
        states = tuple(self.state_of(item, node) for item in first)
        others = self.state_of(schema.get(rest, True), node)
        return [ArrayPart(states, others, rest not in schema, scope)]

    def _add_negation(self, branch: SchemaBranch, node: Node) -> None:
        """Add the alternatives of a negated schema to a branch: each way to break the schema."""
        broken = list(negations(self.document, node))
        branch.choices.append(
            Alternatives(
                alternatives=tuple(((negation.item,), ()) for negation in broken),
                location=node.location("not"),
                is_exact=all(negation.is_exact for negation in broken),
            )
        )

    def _spend(self, count: int = 1) -> None:
        self.work += count
        self._deadline.check()
        if self.work > _MAX_WORK:
            raise ValueError(
                f"its alternatives and members combine to more than {_MAX_WORK:,} cases; the last "
                f"keyword was {self._last_keyword}"
            )
