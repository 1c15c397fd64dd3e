"""The Jinja environment of chat templates: no way out, and no way to run for long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner

from twostroke.chat import guards
from twostroke.chat.template_tree import INNER_FILTERS, guard_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2 import Template, nodes
    from jinja2.parser import Parser
    from jinja2.runtime import Context

# Filters as Jinja has them, which do work in proportion to their input and no more. What pads,
# draws at random or writes HTML is left out: no chat template needs it.
_PLAIN_FILTERS = """
    abs attr capitalize count d default dictsort e escape first float groupby int items last
    length lower map max min reject rejectattr reverse safe select selectattr sort string title
    trim truncate unique upper wordcount
"""
_GUARDED_FILTERS: dict[str, Callable[..., Any]] = {
    "format": guards.guarded_format,
    "indent": guards.guarded_indent,
    "join": guards.guarded_join,
    "list": guards.guarded_list,
    "replace": guards.guarded_replace,
    "round": guards.guarded_round,
    "sum": guards.guarded_sum,
    "tojson": guards.to_json,
}


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with every operation on a meter.

    The meter is `context[guards.METER]`. Operations that could build something large are checked
    before they run; loops and macros are charged for each pass; only known methods and functions
    can be called.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            finalize=guards.output,
            cache_size=0,
            optimized=False,  # folding constants would run filters before there is a meter
        )
        self.filters = {name: self.filters[name] for name in _PLAIN_FILTERS.split()}
        self.filters.update(_GUARDED_FILTERS)
        self.filters.update(INNER_FILTERS)
        self.globals = {
            "range": safe_range,
            "dict": dict,
            "namespace": guards.TemplateNamespace,
            "cycler": Cycler,
            "joiner": Joiner,
            **functions,
        }
        self._known = frozenset(map(id, self.globals.values()))

    def guarded(self, tree: nodes.Template, mark: Callable[[str], str]) -> Template:
        """Compile `tree` with its guards; `mark` rewrites the texts that the template writes.

        Raises jinja2.TemplateError, or whatever else compiling a hostile source raises.
        """
        return self.from_string(guard_tree(tree, mark))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063
        """Call on behalf of a template (Jinja's name for the hook)."""
        return guards.guarded_call(__context, __self._known, __obj, args, kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator on behalf of a template (Jinja's name for the hook)."""
        guards.guarded_binop(guards.meter_of(context), operator, left, right)
        return self.binop_table[operator](left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a stand-in for `str.format` that `call` knows (Jinja's name for the hook)."""
        run = super().wrap_str_format(value)
        if run is None:
            return None
        return cast("Callable[..., str]", guards.StringFormat(value.__self__, run))


class _GenerationTag(Extension):
    """`{% generation %}` marks what a trainer learns from; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
