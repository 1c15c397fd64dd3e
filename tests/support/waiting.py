"""Waits for conditions; one in vain says what it waited for, and the values that it last saw."""

from __future__ import annotations

import ast
import asyncio
import inspect
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MAX_LENGTH = 500  # characters of a value that are shown


def wait_for(condition: Callable[[], Any], timeout_s: float = 120) -> None:
    """Wait until `condition` returns something true; fail after `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s} s in vain for {describe(condition)}")
        time.sleep(0.005)


async def until(condition: Callable[[], Any], timeout_s: float = 120) -> None:
    """Wait as `wait_for` does, and let other tasks run meanwhile."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s} s in vain for {describe(condition)}")
        await asyncio.sleep(0.005)


def describe(condition: Callable[[], Any]) -> str:
    """Return the source of a condition and the values of its parts, if it is a lambda."""
    function = _lambda_of(condition)
    if function is None:
        return getattr(condition, "__qualname__", repr(condition))
    variables = inspect.getclosurevars(condition)
    names = {**variables.builtins, **condition.__globals__, **variables.nonlocals}
    for parameter in inspect.signature(condition).parameters.values():
        names[parameter.name] = parameter.default
    values = [f"\n  {ast.unparse(part)} = {_value(part, names)}" for part in _parts(function.body)]
    return ast.unparse(function.body) + "".join(values)


def _lambda_of(condition: Callable[[], Any]) -> ast.Lambda | None:
    """Return the syntax tree of a lambda; None if its file cannot be read."""
    code = getattr(condition, "__code__", None)
    if code is None or code.co_name != "<lambda>":
        return None
    try:
        tree = ast.parse(Path(code.co_filename).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    return next((node for node in lambdas if node.lineno == code.co_firstlineno), None)


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts of a condition whose values explain it."""
    match node:
        case ast.BoolOp(values=operands):
            parts = operands
        case ast.UnaryOp(operand=operand):
            parts = [operand]
        case ast.Compare(left=left, comparators=comparators):
            parts = [left, *comparators]
        case ast.GeneratorExp(generators=generators) | ast.ListComp(generators=generators):
            parts = [generators[0].iter]
        case ast.Call(args=[argument]) if not isinstance(argument, ast.Constant):
            yield node
            parts = [argument]
        case ast.Constant():
            return
        case _:
            yield node
            return
    for part in parts:
        yield from _parts(part)


def _value(node: ast.expr, names: dict[str, Any]) -> str:
    """Evaluate a part of a condition once more; return its value, or the error that it raised."""
    try:
        value = eval(compile(ast.Expression(node), "<condition>", "eval"), names)
        text = repr(value)
    except Exception as error:  # noqa: BLE001 the failure that is told is another one
        text = repr(error)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
