"""The Jinja sandbox of chat templates, with limits on time and size.

A template comes with a model's files and may be hostile. The size of each value that it builds is
measured. Each operation that could multiply the sizes of its inputs is checked before it runs.
Loops, macros, filters and calls check the time.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Sequence,
    ValuesView,
)
from typing import TYPE_CHECKING, Any, Final

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, do, loopcontrols
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from jinja2.visitor import NodeTransformer

from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser

# Names that no template can use: of a variable of the context, and of filters.
METER: Final = "<meter>"
_ENTER: Final = "<enter>"
_BUILT: Final = "<built>"
_CONCAT: Final = "<concat>"

_QUADRATIC_FILTERS: Final = frozenset(("urlize", "striptags"))  # in the worst case
_MAX_COLUMNS: Final = 10_000  # of `batch` and `slice`
# Filters whose integers are values. Integers of other filters may be widths or counts.
_TAKING_VALUES = {"d", "default", "float", "groupby", "int", "join", "map", "max", "min"}
_TAKING_VALUES |= {"reject", "rejectattr", "replace", "select", "selectattr", "sort", "sum"}
_TAKING_VALUES |= {"truncate", "unique", "xmlattr"}
# Methods by which a template changes its lists and dictionaries. `sort` would call its key.
_CHANGES: Final[dict[type, frozenset[str]]] = {
    list: frozenset(("append", "clear", "extend", "insert", "pop", "remove", "reverse")),
    dict: frozenset(("clear", "pop", "popitem", "setdefault", "update")),
}
_VIEWS: Final = (KeysView, ValuesView, ItemsView)  # of dictionaries
_MAX_WEIGHTS: Final = 100_000  # of structures that are remembered
_MAX_GROWTH_RATIO: Final = 16  # of the result of one operation, over `max_chars`
_MAX_INT_BITS: Final = 4096
_MAX_WIDTH: Final = 1000  # of a field in a format
# Widths and precisions of four and more digits, `*`, and fields inside fields.
_WIDE_PERCENT: Final = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)")
_WIDE_BRACES: Final = re.compile(r"\d{4}|\{[^{}]*\{")


class RenderBudget(Frozen):
    """The limits on time and size of one rendering of a chat template.

    `max_chars` bounds every string or structure that a template builds, and the prompt. `max_cpu_s`
    is time of the rendering thread alone, so a busy machine does not fail a good template.
    """

    max_chars: int = 4_000_000
    max_cpu_s: float = 1.0


class BudgetError(RequestError):
    """A chat template needs more time or size than its budget allows."""


class RenderMeter:
    """Measures one rendering of a chat template, and raises BudgetError above its limits."""

    def __init__(self, budget: RenderBudget) -> None:
        """Start to measure the time of a rendering."""
        self._budget = budget
        self._num_written = 0
        self._deadline_s = time.thread_time() + budget.max_cpu_s
        # Weights of structures by id. The structure is kept, so that its id is not used again.
        self._weights: dict[int, tuple[object, int]] = {}
        self._nested_ids: set[int] = set()  # of structures whose weight is a part of another's

    def check_time(self) -> None:
        """Raise BudgetError if the rendering has used up its time."""
        if time.thread_time() > self._deadline_s:
            raise _too_much(f"{self._budget.max_cpu_s:g} s of processor time", "max_cpu_s")

    def check_operation(self, values: Iterable[object], counts: Iterable[object] = ()) -> None:
        """Raise BudgetError before an operation of a template whose result could be too large.

        The result is taken to be at most as large as the product of the two largest inputs. The
        size of each of `values` is an input. Of an integer in `counts`, the value itself is an
        input, because it may be a width or a number of repetitions.
        """
        self.check_time()
        sizes = [self.weigh(value) for value in values]
        sizes += [abs(count) if isinstance(count, int) else self.weigh(count) for count in counts]
        first, second = sorted([1, 1, *sizes])[-2:]
        if first * second > _MAX_GROWTH_RATIO * self._budget.max_chars:
            raise self._too_big()

    def built(self, value: Any) -> Any:
        """Check the limits after a template expression was evaluated; return the value.

        A generator or a view of a dictionary becomes a list.
        """
        if isinstance(value, (Iterator, *_VIEWS)) and not isinstance(value, LoopContext):
            value = list(value)
        self.check_time()
        if len(self._weights) > _MAX_WEIGHTS:
            self._forget_weights()
        self.weigh(value)
        return value

    def grow(self, structure: list[Any] | dict[Any, Any], parts: list[Any]) -> None:
        """Count parts that a template adds to a structure; raise BudgetError if it gets too large.

        Parts that are removed later still count.
        """
        self.check_time()
        weight = self._fitting(self.weigh(structure) + self.weigh(parts))
        if id(structure) in self._nested_ids:  # the weights of other structures change, too
            self._forget_weights()
        else:
            self._weights[id(structure)] = (structure, weight)

    def write(self, text: str) -> str:
        """Count text that the template writes, into the prompt or a variable; return the text."""
        self._num_written += len(text)
        if self._num_written > 4 * self._budget.max_chars:
            raise self._too_big()
        return text

    def weigh(self, value: object) -> int:
        """Estimate how many characters a template's value would print; BudgetError if too many.

        A part that occurs several times in a structure counts each time, since it would be printed
        each time.
        """
        if isinstance(value, (str, bytes, range)):
            weight = len(value)
        elif isinstance(value, int):
            weight = 1 + value.bit_length() // 3
            if value.bit_length() > _MAX_INT_BITS:
                raise self._too_big()
        elif isinstance(value, (list, tuple, dict)):
            return self._weigh_parts(value)
        elif isinstance(value, _VIEWS):
            return self._weigh_parts(list(value))
        else:
            return 1
        return self._fitting(weight)

    def _weigh_parts(self, value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> int:
        cached = self._weights.get(id(value))
        if cached is not None:
            return cached[1]
        weight = 2
        parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        for part in parts:
            weight = self._fitting(weight + 2 + self.weigh(part))
            if isinstance(part, (list, tuple, dict)):
                self._nested_ids.add(id(part))
        self._weights[id(value)] = (value, weight)
        return weight

    def _forget_weights(self) -> None:
        self._weights.clear()
        self._nested_ids.clear()

    def _fitting(self, weight: int) -> int:
        if weight > self._budget.max_chars:
            raise self._too_big()
        return weight

    def _too_big(self) -> BudgetError:
        return _too_much(counted_noun(self._budget.max_chars, "character", form=","), "max_chars")


def _too_much(limit: str, field: str) -> BudgetError:
    return BudgetError(
        f"Rendering the chat template needs more than {limit} (RenderBudget.{field})."
    )


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja sandbox in which chat templates run, within limits of time and size.

    The `RenderMeter` of the rendering is in its Jinja context, as `context[METER]`.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        """Give templates `functions` in addition to Jinja's own functions."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, do, _GenerationTag],
            finalize=_written,
            cache_size=0,
            optimized=False,  # folding constants would run filters before there is a meter
        )
        unmetered = self.filters | {"sum": _sum, "tojson": _to_json, "random": _first_item}
        self.filters = {name: _metered(run, name) for name, run in unmetered.items()}
        self.filters |= {_ENTER: _enter, _BUILT: _built, _CONCAT: _concat}
        self.globals = {
            "range": safe_range,
            "dict": _Dict(),
            "namespace": _Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            **functions,
        }

    def guarded(self, tree: nodes.Template, mark: Callable[[nodes.Node], None]) -> Template:
        """Compile a chat template's syntax tree, with checks of the limits added.

        `mark` is called with each literal text, and may change it. Raises jinja2.TemplateError, or
        any other error for a hostile source.
        """
        guarded = _Guard(mark).visit(tree)
        guarded.set_environment(self)
        return self.from_string(guarded)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute; Jinja calls this hook.

        Unlike in Jinja's own sandbox, a template may change lists and dictionaries, as Kimi K2's
        does with a list of its own. A rendering has its own copies of messages and variables.
        """
        is_change = attr in _CHANGES.get(type(obj), ())
        return is_change or super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063
        """Check the limits around a function call of a chat template; Jinja calls this hook."""
        meter = _meter_of(__context)
        named = {name: kwargs[name] for name in kwargs.keys() - {"_loop_vars", "_block_vars"}}
        arguments = [*args, *named.values()]
        if isinstance(__obj, Macro):
            meter.built(arguments)
        else:
            method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
            owner = getattr(method, "__self__", None)
            if isinstance(owner, str) and method.__name__ in {"format", "format_map"}:
                _check_format(meter, owner, arguments, _WIDE_BRACES)
            elif isinstance(owner, (list, dict)) and method.__name__ in _CHANGES.get(
                type(owner), ()
            ):
                args = _copied_arguments(method.__name__, args)
                meter.grow(owner, [*args, named])
            elif isinstance(owner, (list, tuple, dict)):
                meter.check_operation([owner, *arguments])
            elif owner is not None:
                meter.check_operation([owner], counts=arguments)
        return meter.built(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the limits around a binary operator of a chat template; Jinja calls this hook."""
        meter = _meter_of(context)
        if operator == "%" and isinstance(left, str):
            _check_format(meter, left, [right], _WIDE_PERCENT)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _MAX_INT_BITS:
                raise SecurityError(f"numbers may have at most {_MAX_INT_BITS} bits")
        elif operator == "*" and not (_is_number(left) and _is_number(right)):
            meter.check_operation((), counts=[left, right])
        return meter.built(self.binop_table[operator](left, right))


class _Guard(NodeTransformer):
    """Adds checks of time and size to the syntax tree of a chat template.

    Checks surround expressions that build values, and begin each loop and macro.
    """

    def __init__(self, mark: Callable[[nodes.Node], None]) -> None:
        self._mark = mark

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Add checks around a node of the template's syntax tree, after its children.

        In this order no check is put around another check.
        """
        super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.TemplateData():
                self._mark(node)
                # A constant is counted when it is written; template data would not be.
                return nodes.Const(node.data, lineno=node.lineno)
            case nodes.Const():
                self._mark(node)
            case nodes.For() | nodes.Macro() | nodes.CallBlock():
                check = _filtered(_ENTER, nodes.Const(None, lineno=node.lineno))
                node.body.insert(0, nodes.ExprStmt(check, lineno=node.lineno))
                if isinstance(node, nodes.For) and isinstance(node.test, nodes.Expr):
                    node.test = _filtered(_ENTER, node.test)
            case nodes.Concat():
                return _filtered(_CONCAT, nodes.List(node.nodes, lineno=node.lineno))
            case nodes.List() | nodes.Dict():
                return _filtered(_BUILT, node)
            case nodes.Tuple(ctx="load"):
                return _filtered(_BUILT, node)
        return node


def _filtered(name: str, node: nodes.Expr) -> nodes.Filter:
    filter_ = nodes.Filter(lineno=node.lineno)
    filter_.node = node
    filter_.name = name
    filter_.args = []
    filter_.kwargs = []
    filter_.dyn_args = None
    filter_.dyn_kwargs = None
    return filter_


class _Namespace(Namespace):
    """Jinja's `namespace` object for chat templates; it prints as its name only.

    The contents of nested namespaces could be printed at any length.
    """

    def __repr__(self) -> str:
        return "<Namespace>"


class _Dict:
    """The function `dict` of chat templates.

    Python's type `dict` itself would give templates all of its methods.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return a new dictionary, as `dict` does."""
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """Return a dictionary with one value for all keys, as `dict.fromkeys` does."""
        return dict.fromkeys(keys, value)


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks text for trainers; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags, so that they are rendered as usual."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _metered(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a Jinja filter so that its inputs and its result are checked against the limits."""

    @pass_context
    def metered(context: Context, *args: Any, **kwargs: Any) -> Any:
        meter = _meter_of(context)
        arguments = [*args, *kwargs.values()]
        if name == "format":
            _check_format(meter, str(args[0]), arguments[1:], _WIDE_PERCENT)
        if name in _QUADRATIC_FILTERS:
            meter.check_operation([*args[:1], *args[:1]])
        elif name == "format" or name in _TAKING_VALUES:
            meter.check_operation(arguments)
        else:
            meter.check_operation(arguments[:1], counts=arguments[1:])
        if name in {"batch", "slice"} and any(
            isinstance(value, int) and value > _MAX_COLUMNS for value in arguments[1:]
        ):
            raise SecurityError(f"{name} makes at most {_MAX_COLUMNS:,} columns")
        # Jinja's `context.call` also passes the context or the environment, if the filter takes it.
        return meter.built(context.call(run, *args, **kwargs))

    return metered


def _copied_arguments(method: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a method that changes a structure, with a copy of added parts.

    The parts may come from a loop over the same structure, which would never end.
    """
    copies: dict[str, Callable[[Any], Any]] = {"extend": list, "update": dict}
    if method not in copies or not arguments:
        return arguments
    return (copies[method](arguments[0]), *arguments[1:])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _check_format(
    meter: RenderMeter, text: str, values: Iterable[object], wide: re.Pattern[str]
) -> None:
    if wide.search(text):
        raise SecurityError("a format's width may have three digits at most")
    meter.check_operation([text, _MAX_WIDTH])
    for value in values:
        meter.check_operation([text, value])


def _meter_of(context: Context) -> RenderMeter:
    meter: RenderMeter = context.parent[METER]
    return meter


@pass_context
def _enter(context: Context, value: Any) -> Any:
    _meter_of(context).check_time()
    return value


@pass_context
def _built(context: Context, value: Any) -> Any:
    return _meter_of(context).built(value)


@pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    _meter_of(context).weigh(parts)
    return "".join([str(part) for part in parts])


@pass_context
def _written(context: Context, value: Any) -> str:
    meter = _meter_of(context)
    meter.weigh(value)
    return meter.write(str(value))


@pass_context
def _sum(
    context: Context, value: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    """Jinja's `sum` filter for numbers or lists, without the quadratic time of Python's `sum`."""
    items = list(value)
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    if all(isinstance(item, list) for item in (*items, start)):
        return [inner for item in (start, *items) for inner in item]
    if not all(isinstance(item, (int, float)) for item in (*items, start)):
        raise SecurityError("the filter sum of a chat template adds only numbers or lists")
    return sum(items, start)


def _first_item(items: Sequence[Any]) -> Any:
    """Jinja's `random` filter: returns the first item, so equal requests have equal prompts."""
    return items[0] if items else ""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (as transformers' filter has it)
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Jinja's `tojson` filter as chat templates expect it: HTML and Unicode are not escaped.

    Other options of `json.dumps` are not accepted, because some would call an object of the
    template.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
