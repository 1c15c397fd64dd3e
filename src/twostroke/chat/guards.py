"""The operations of a chat template that can grow without bound, each with its check."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import SecurityError
from jinja2.filters import do_indent, do_round
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.utils import Cycler, Joiner, Namespace, pass_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from twostroke.chat.meter import Meter

# A key that no template can spell as a variable.
METER = "<meter>"
_MAX_INT_BITS = 4096
# Widths and precisions of four and more digits, `*`, and fields inside fields.
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)")
_WIDE_BRACES = re.compile(r"\d{4}|\{[^{}]*\{")
_STRING_METHODS = """
    capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower
    isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace
    rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
"""
_SAFE_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STRING_METHODS.split()),
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
}
_SAFE_BOUND = {LoopContext: frozenset({"cycle", "changed"}), Cycler: frozenset({"next", "reset"})}


class TemplateNamespace(Namespace):
    """Jinja's namespace, which prints as its name: printing one inside another has no bound."""

    def __repr__(self) -> str:
        return "<Namespace>"


class StringFormat:
    """`str.format` of one string, with its result's size checked before it is built."""

    def __init__(self, source: str, run: Callable[..., str]) -> None:
        self.source = source
        self.run = run


def meter_of(context: Context) -> Meter:
    """Return the meter of the rendering that `context` belongs to."""
    meter: Meter = context.parent[METER]
    return meter


def guarded_call(
    context: Context,
    known: frozenset[int],
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call `target` if it is of a kind that templates may call; `known` holds ids of globals.

    Raises SecurityError for anything else.
    """
    meter = meter_of(context)
    # Jinja hands a loop's variables to functions that ask for the context; none here does.
    kwargs = {name: kwargs[name] for name in kwargs if name not in {"_loop_vars", "_block_vars"}}
    weight = sum(map(meter.weigh, args)) + sum(map(meter.weigh, kwargs.values()))
    meter.fit(weight)
    meter.charge(1 + weight // 256)
    if isinstance(target, StringFormat):
        _check_format(meter, target.source, "{", weight)
        return target.run(*args, **kwargs)
    owner = getattr(target, "__self__", None)
    if isinstance(target, (Macro, LoopContext, Joiner)) or id(target) in known:
        return context.call(target, *args, **kwargs)
    name = getattr(target, "__name__", "")
    for kind, names in _SAFE_BOUND.items():
        if isinstance(owner, kind) and name in names:
            return context.call(target, *args, **kwargs)
    for kind, names in _SAFE_METHODS.items():
        if isinstance(owner, kind) and name in names:
            return _method(meter, owner, name, args, kwargs)
    raise SecurityError(f"{name or type(target).__name__!r} may not be called in a chat template")


def guarded_binop(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too large; charge for the rest."""
    size = meter.weigh(left) + meter.weigh(right)
    meter.charge(1 + size // 256)
    if operator == "+":
        meter.fit(size)
    elif operator == "*":
        _check_product(meter, left, right)
    elif operator == "**":
        if _is_int(left) and _is_int(right):
            _check_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(meter, left, "%", meter.weigh(right))


@pass_context
def charge(context: Context, value: Any) -> Any:
    """Charge for the size of `value` and hand it on."""
    meter_of(context).charge_for(value)
    return value


@pass_context
def enter(context: Context, num_steps: int) -> None:
    """Charge for one pass through the body of a loop or macro."""
    meter_of(context).charge(num_steps)


@pass_context
def settle(context: Context, value: Iterable[Any]) -> list[Any]:
    """Turn what a lazy filter returned into a list now, so that laziness hides no work."""
    settled = list(value)
    meter_of(context).charge_for(settled)
    return settled


@pass_context
def concat(context: Context, parts: list[Any]) -> str:
    """Return the parts as one string: Jinja's `~`."""
    meter = meter_of(context)
    meter.charge_for(parts)
    return "".join([str(part) for part in parts])


@pass_context
def output(context: Context, value: Any) -> str:
    """Return what `{{ value }}` writes."""
    meter = meter_of(context)
    meter.weigh(value)
    text = str(value)
    meter.write(len(text))
    return text


@pass_context
def guarded_join(
    context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    """Jinja's `join` filter."""
    meter = meter_of(context)
    items = list(value)
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    meter.fit(sum(map(meter.weigh, items)) + len(str(d)) * len(items))
    return str(d).join([str(item) for item in items])


@pass_context
def guarded_replace(context: Context, s: Any, old: Any, new: Any, count: int = -1) -> str:
    """Jinja's `replace` filter."""
    text: str = _method(meter_of(context), str(s), "replace", (str(old), str(new), count), {})
    return text


@pass_context
def guarded_indent(
    context: Context,
    s: Any,
    width: int | str = 4,
    first: bool = False,  # noqa: FBT001, FBT002 (Jinja's own signature)
    blank: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Jinja's `indent` filter."""
    text = str(s)
    size = width if isinstance(width, int) else len(width)
    meter_of(context).fit(len(text) + (text.count("\n") + 2) * size)
    indented: str = do_indent(text, width, first, blank)
    return indented


@pass_context
def guarded_format(context: Context, value: str, *args: Any, **kwargs: Any) -> str:
    """Jinja's `format` filter: `"%s" | format(x)`."""
    values: Any = kwargs or args
    guarded_binop(meter_of(context), "%", str(value), values)
    text: str = str(value) % values
    return text


@pass_context
def guarded_list(context: Context, value: Iterable[Any]) -> list[Any]:
    """Jinja's `list` filter."""
    meter_of(context).charge_for(value)
    return list(value)


def guarded_round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Jinja's `round` filter, with a precision that a number can have."""
    if not -400 <= precision <= 400:
        raise SecurityError("the precision of round must be between -400 and 400")
    return do_round(value, precision, method)


@pass_context
def guarded_sum(
    context: Context, value: Iterable[Any], attribute: str | int | None = None, start: float = 0
) -> Any:
    """Jinja's `sum` filter, of numbers only: a sum of lists takes quadratic time."""
    items = list(value)
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    if not all(isinstance(item, (int, float)) for item in (*items, start)):
        raise SecurityError("sum adds numbers only in a chat template")
    return sum(items, start)


@pass_context
def to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (as transformers' filter has it)
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """JSON as chat templates expect it: no HTML escapes, other scripts as they are."""
    meter = meter_of(context)
    weight = meter.weigh(value)
    meter.charge(1 + weight // 16)
    if indent is not None:
        size = indent if isinstance(indent, int) else len(indent)
        if size > 16:
            raise SecurityError("the indent of tojson may be 16 at most")
    for separator in separators or ():
        meter.fit(weight * len(separator))
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _method(
    meter: Meter, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    meter.charge_for(owner)
    if isinstance(owner, str) and name == "join":
        items = list(args[0])
        meter.fit(sum(map(meter.weigh, items)) + len(owner) * len(items))
        return owner.join([str(item) for item in items])
    if isinstance(owner, str) and name == "replace":
        old, new = args[0], args[1]
        meter.fit(len(owner) + owner.count(old) * len(new))
    return getattr(owner, name)(*args, **kwargs)


def _check_product(meter: Meter, left: Any, right: Any) -> None:
    if _is_int(left) and _is_int(right):
        _check_bits(left.bit_length() + right.bit_length())
    elif _is_int(right):
        meter.fit(meter.weigh(left) * right)
    elif _is_int(left):
        meter.fit(meter.weigh(right) * left)


def _check_format(meter: Meter, source: str, sign: str, weight: int) -> None:
    """Refuse a format whose fields, each as large as all values, or 999 wide, do not fit."""
    wide = _WIDE_PERCENT if sign == "%" else _WIDE_BRACES
    if wide.search(source):
        raise SecurityError("a format's width may have three digits at most")
    meter.fit(len(source) + source.count(sign) * (1000 + weight))


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_INT_BITS:
        raise SecurityError(f"a chat template's numbers may have {_MAX_INT_BITS} bits at most")


def _is_int(value: object) -> bool:
    return isinstance(value, int)
