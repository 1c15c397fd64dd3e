"""Writes docs/reference/options.md from the declarations of options; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.cli.model_pool import ModelPoolOptions
from twostroke.cli.process_options import ProcessOptions
from twostroke.core.distributed_options import (
    DisaggregationOptions,
    OffloadOptions,
    ParallelOptions,
)
from twostroke.core.option_schema import option_fields
from twostroke.core.options import (
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    GenerationOptions,
    SpeculationOptions,
)
from twostroke.core.sampling import SamplingParams
from twostroke.fleet.router.options import RouteOptions
from twostroke.server.http_options import HttpOptions
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from twostroke.core.option_schema import OptionField, OptionStruct

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "options.md"
STRUCTS: list[tuple[type[OptionStruct], str]] = [
    (SamplingParams, "How the next token is chosen, and where an answer ends."),
    (ComputeOptions, "The backend and its precision: `EngineOptions.compute`."),
    (CacheOptions, "The KV cache: `EngineOptions.cache`."),
    (BatchOptions, "How requests share steps: `EngineOptions.batch`."),
    (SpeculationOptions, "How tokens are drafted ahead: `EngineOptions.speculation`."),
    (ParallelOptions, "Several processes, GPUs or machines: `EngineOptions.parallel`."),
    (GenerationOptions, "Default sampling values: `EngineOptions.generation`."),
    (OffloadOptions, "Where KV pages are kept besides memory: `EngineOptions.offload`."),
    (
        DisaggregationOptions,
        "Prefill and decode in different engines: `EngineOptions.disaggregation`.",
    ),
    (EngineOptions, "Other options of an engine."),
    (HttpOptions, "`serve` and `route`: the address and the clients."),
    (ProcessOptions, "`serve` and `route`: records and logs."),
    (ServeOptions, "`serve` only."),
    (ModelPoolOptions, "`serve` with several models."),
    (RouteOptions, "`route` only."),
]
HEAD = """# Options

`make tables` writes this page from the declarations in the source. Every option has the same name,
range and default on the command line, in Python and in the YAML files of fleets, where the dashes
at its beginning are left out. `twostroke COMMAND --help` lists the options of one command.

In Python, each heading is a class: `EngineOptions(cache=CacheOptions(context_length=4096))`, or in
short `LLM("smollm2", context_length=4096)`. A field without an option is set only in Python. An
unknown name is an error that names the nearest option; for options of vLLM, SGLang, llama.cpp and
Ollama the error names the option of Twostroke.
"""


def main() -> int:
    """Write the page, or return 1 if it has to be written."""
    page = "\n".join([HEAD, *(_section(struct, text) for struct, text in STRUCTS)])
    if "--check" in sys.argv:
        return int(not PAGE.exists() or PAGE.read_text() != page)
    PAGE.write_text(page)
    return 0


def _section(struct: type[OptionStruct], text: str) -> str:
    """Return the table of a struct's own options; those that it inherits have their own table."""
    inherited = option_fields(struct.__mro__[1]) if struct.__mro__[1] is HttpOptions else {}
    rows = [
        f"| {_flags(field)} | `{name}` | {_values(field)} | {_default(field)} | {_help(field)} |"
        for name, field in option_fields(struct).items()
        if name not in inherited or field.default != inherited[name].default
    ]
    head = [
        f"## {struct.__name__}",
        "",
        text,
        "",
        "| option | field | values | default | meaning |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def _flags(field: OptionField) -> str:
    flags = [f"`{flag}`" for flag in field.option.flag.split("/") if flag]
    return ", ".join(flags) or "-"


def _values(field: OptionField) -> str:
    """Return the values that a field can have, in words."""
    option = field.option
    if option.flag_value:
        return f"`{option.flag_value}` with the option"
    words = [word for word, _ in option.named_values] or list(map(str, option.choices))
    if words:
        return ", ".join(f"`{word}`" for word in words)
    if field.types == (bool,):
        return "yes or no"
    kind = {"size": "size", "path": "path", "json": "JSON object", "file": "file"}.get(option.form)
    if kind is None:
        kinds = {int: "integer", float: "number"}
        kind = kinds.get(field.item_type or field.number_type or str, "text")
    if field.item_type is not None:
        kind = f"{kind}s" if field.item_type is int else f"{kind}, repeatable"
    return ", ".join(filter(None, [kind, option.range_text()]))


def _default(field: OptionField) -> str:
    """Return the default in words; a value of the command line as such."""
    option = field.option
    if option.default:
        return _cell(option.default)
    for word, value in option.named_values:
        if value == field.default:
            return f"`{word}`"
    if isinstance(field.default, bool):
        return "yes" if field.default else "no"
    return "none" if field.default in (None, (), {}) else f"`{field.default}`"


def _help(field: OptionField) -> str:
    return _cell(field.option.help)


def _cell(text: str) -> str:
    """Return text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
