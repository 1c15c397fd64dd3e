"""Rewrites a chat template's syntax tree: guards around what can grow, marks on what it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from jinja2 import nodes
from jinja2.meta import find_undeclared_variables
from jinja2.visitor import NodeTransformer

from twostroke.chat import guards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Filters under names that a template cannot spell.
_CHARGE, _CONCAT, _ENTER, _SETTLE = "<charge>", "<concat>", "<enter>", "<settle>"
INNER_FILTERS: dict[str, Callable[..., Any]] = {
    _CHARGE: guards.charge,
    _CONCAT: guards.concat,
    _ENTER: guards.enter,
    _SETTLE: guards.settle,
}
_LAZY_FILTERS = {
    "items",
    "map",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "unique",
}
# Methods whose arguments are looked for in a text; of replace, only the first is.
_SEARCHES = {"split", "rsplit", "strip", "lstrip", "rstrip", "partition", "rpartition"}
_SEARCHES |= {"startswith", "endswith", "removeprefix", "removesuffix"}
_SEARCHES |= {"find", "rfind", "index", "rindex", "count"}
# About as many nodes of a body cost what one step does.
_NODES_A_STEP = 16


def guard_tree(tree: nodes.Template, mark: Callable[[str], str]) -> nodes.Template:
    """Return `tree` with guards; `mark` rewrites every literal text that the template writes.

    Literals that are only looked for (compared with, split at, used as keys) stay as they are.
    """
    searched = {id(node) for node in _searched(tree)}
    guarded = _Guard(mark, searched).visit(tree)
    assert isinstance(guarded, nodes.Template)
    return guarded.set_environment(tree.environment)  # type: ignore[return-value,arg-type]


def written_texts(tree: nodes.Template) -> list[str]:
    """Return the literal texts that the template writes."""
    searched = {id(node) for node in _searched(tree)}
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    consts = (node for node in tree.find_all(nodes.Const) if id(node) not in searched)
    return texts + [node.value for node in consts if isinstance(node.value, str)]


def reads_parts(tree: nodes.Template) -> bool:
    """Whether the template walks over the parts of a message's content, or takes only strings."""
    for loop in tree.find_all(nodes.For):
        for node in (loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Getitem))):
            name = node.attr if isinstance(node, nodes.Getattr) else None
            if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
                name = node.arg.value
            if name == "content":
                return True
    return False


def read_variables(tree: nodes.Template) -> frozenset[str]:
    """Return the names of the variables that the template wants to be given."""
    return frozenset(find_undeclared_variables(tree))


def read_keys(tree: nodes.Template) -> frozenset[str]:
    """Return the names under which the template looks into things, such as messages."""
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    items = [node.arg for node in tree.find_all(nodes.Getitem)]
    items += [arg for call in tree.find_all(nodes.Call) for arg in call.args[:1]]
    consts = [node.value for node in items if isinstance(node, nodes.Const)]
    return frozenset(names | {value for value in consts if isinstance(value, str)})


def _searched(tree: nodes.Template) -> Iterator[nodes.Node]:
    for compare in tree.find_all(nodes.Compare):
        yield compare.expr
        for operand in compare.ops:
            yield operand.expr
            if isinstance(operand.expr, (nodes.List, nodes.Tuple)):
                yield from operand.expr.items
    for test in tree.find_all(nodes.Test):
        yield from test.args
    for item in tree.find_all(nodes.Getitem):
        yield item.arg
    for pair in tree.find_all(nodes.Pair):
        yield pair.key
    for apply in tree.find_all(nodes.Filter):
        if apply.name == "replace":
            yield from apply.args[:1]
    for call in tree.find_all(nodes.Call):
        method = call.node.attr if isinstance(call.node, nodes.Getattr) else ""
        if method in _SEARCHES:
            yield from call.args
        elif method == "replace":
            yield from call.args[:1]


class _Guard(NodeTransformer):
    """Visits children first, so that a guard never guards another."""

    def __init__(self, mark: Callable[[str], str], searched: set[int]) -> None:
        self._mark = mark
        self._searched = searched

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        # A constant goes through `finalize`, where it is counted; template data would not.
        return nodes.Const(self._mark(node.data), lineno=node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        if isinstance(node.value, str) and id(node) not in self._searched:
            node.value = self._mark(node.value)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        _charge_body(node)
        if node.test is not None:
            node.test = _apply(_CHARGE, cast("nodes.Expr", node.test))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        _charge_body(node)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        _charge_body(node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _apply(_CONCAT, nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _charged(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _charged(node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _charged(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _charged(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _charged(node.expr)
        for operand in node.ops:
            operand.expr = _charged(operand.expr)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.node is not None:  # None: the filter of a block, whose text was counted
            node.node = _charged(node.node)
        return _apply(_SETTLE, node) if node.name in _LAZY_FILTERS else node


def _charge_body(node: nodes.For | nodes.Macro | nodes.CallBlock) -> None:
    num_nodes = sum(1 for part in node.body for _ in _descendants(part))
    steps = nodes.Const(1 + num_nodes // _NODES_A_STEP, lineno=node.lineno)
    node.body.insert(0, nodes.ExprStmt(_apply(_ENTER, steps), lineno=node.lineno))


def _charged(node: nodes.Expr) -> nodes.Expr:
    """Wrap an expression in a charge for its value's size; literals are small as they stand."""
    if isinstance(node, (nodes.Const, nodes.TemplateData)):
        return node
    if isinstance(node, nodes.Filter) and node.name == _CHARGE:
        return node
    return _apply(_CHARGE, node)


def _apply(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _descendants(node: nodes.Node) -> Iterator[nodes.Node]:
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(current.iter_child_nodes())
