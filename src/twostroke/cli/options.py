"""Options that several commands share, made from the declarations of `core/option_schema.py`.

`click_params` makes the options of the command line from a struct, and `take` makes the struct from
their values.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from twostroke.cli.help import (
    ByteSizeParam,
    CommandOption,
    CountListParam,
    JsonObjectParam,
    NamedValueParam,
    NumberOrWordParam,
    TextFileParam,
    WordParam,
    read_text,
)
from twostroke.core.constraint import Constraint
from twostroke.core.distributed_options import (
    DisaggregationOptions,
    OffloadOptions,
    ParallelOptions,
)
from twostroke.core.env import install_command
from twostroke.core.errors import BackendError, Field, UsageError
from twostroke.core.option_schema import OptionField, OptionStruct, option_fields
from twostroke.core.options import (
    PARTNER,
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    GenerationOptions,
    SpeculationOptions,
)
from twostroke.core.sampling import SamplingParams
from twostroke.model.built_in_templates import BUILT_IN, check_template

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

T = TypeVar("T", bound=OptionStruct)
NO_DRAFT: Final = "none"
PLOT_SUFFIXES: Final = (".svg", ".png")
_MAX_PATH: Final = 4096  # characters; longer texts are templates
_CONSTRAINTS: Final = ("json_schema", "regex", "choice", "grammar")  # notations of `Constraint`

_form = partial(CommandOption, section="Form of the answer")

# The options that `constraint` reads.
CONSTRAINT_PARAMS: Final = [
    _form(
        ["--json-schema"],
        type=TextFileParam(),
        help="Answer with JSON that follows the JSON Schema in this file.",
    ),
    _form(["--regex"], help="Answer with a text that matches this regular expression."),
    _form(["--choice"], multiple=True, help="Answer with one of these texts; repeatable."),
    _form(
        ["--grammar"],
        type=TextFileParam(),
        help="Answer with a text of the Lark or GBNF grammar in this file.",
    ),
]
_TEMPLATE_FILE: Final = CommandOption(
    ["--chat-template-file"],
    section="Conversations",
    type=TextFileParam(),
    help="File with the chat template to use.",
)


def click_params(
    struct: type[OptionStruct],
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    defaults: Mapping[str, object] | None = None,
) -> list[CommandOption]:
    """Return the command-line options for the fields of a struct of options.

    `take_struct` reads their values.

    Args:
        struct: the struct with the declarations.
        only: the fields to offer; empty for all.
        without: fields to leave out.
        defaults: defaults that differ from the struct's, by field.
    """
    defaults = defaults or {}
    return [
        _click_option(field, defaults.get(name, field.default))
        for name, field in option_fields(struct).items()
        if field.option.flag and name not in without and (not only or name in only)
    ]


def take_struct(struct: type[T], values: dict[str, Any], **fields: Any) -> T:
    """Build a struct of options from a command's `values`, and remove its fields from them.

    `fields` replace values from the command line. A field without any value keeps its default.
    """
    taken_values = {name: values.pop(name) for name in struct.__struct_fields__ if name in values}
    return struct(**{**taken_values, **fields})


def _click_option(field: OptionField, default: object) -> CommandOption:
    """Return click's option for a declared field of a struct of options."""
    declared = field.option
    attributes: dict[str, Any] = {"help": declared.help, "section": field.section}
    if declared.metavar is not None:
        attributes["metavar"] = declared.metavar
    is_plain_flag = field.types == (bool,) and "/" not in declared.flag
    if declared.flag_value:
        attributes |= {"flag_value": declared.flag_value, "default": default}
        attributes["show_default"] = False
    elif declared.named_values and declared.form != "size":
        attributes |= {"type": NamedValueParam(dict(declared.named_values)), "default": default}
        word = next(word for word, value in declared.named_values if value == default)
        attributes |= {"show_default": False, "help": f"{declared.help} [default: {word}]"}
    elif is_plain_flag:
        attributes["is_flag"] = True
    elif field.item_type not in {None, int}:
        attributes["multiple"] = True
    else:
        attributes["type"] = _click_type(field)
        attributes["default"] = default
        if declared.form == "json":
            attributes["default"] = None
    if declared.default and default == field.default:
        attributes["help"] += f" [default: {declared.default}]"
        attributes["show_default"] = False
    option = CommandOption([declared.flag, field.name], **attributes)
    option.declaration = field
    return option


def _click_type(field: OptionField) -> Any:
    """Return the click type that reads the values of a declared field."""
    declared = field.option
    size_param = ByteSizeParam(dict(declared.named_values))
    by_form = {"size": size_param, "file": TextFileParam(), "json": JsonObjectParam()}
    if declared.form in by_form:
        return by_form[declared.form]
    if declared.form == "path":
        return click.Path(path_type=Path)
    if field.item_type is int:
        return CountListParam(low=0)
    words = [choice for choice in declared.choices if isinstance(choice, str)]
    if words and field.number_type is not None:
        return NumberOrWordParam(words[0])
    if words:
        return WordParam(words)
    return field.types[0]


# The options of a model that a command loads: the fields of `ComputeOptions` and `CacheOptions`,
# and whether a model with bad output is used.
MACHINE_PARAMS: Final = [
    *click_params(ComputeOptions),
    *click_params(CacheOptions),
    *click_params(EngineOptions, only=("accept_quality",)),
]
PARALLEL_PARAMS: Final = click_params(ParallelOptions)
TEMPLATE_PARAMS: Final = [
    *click_params(EngineOptions, only=("chat_template",)),
    _TEMPLATE_FILE,
]
SAMPLING_PARAMS: Final = click_params(SamplingParams)


def speculation_params(draft: str = NO_DRAFT) -> list[CommandOption]:
    """Return the command-line options about speculation; `draft` is the default of --draft."""
    return click_params(SpeculationOptions, defaults={"draft": draft})


def engine_options(values: dict[str, Any], model: str) -> EngineOptions:
    """Build the options of an engine from a command's `values`, and remove them from `values`.

    Options that the command does not offer have their defaults.

    If a launcher has started this process as a rank other than 0, this call runs the rank, and
    exits when the rank ends.
    """
    draft = values.get("draft")
    if draft is not None and draft.lower() in {NO_DRAFT, PARTNER}:
        values["draft"] = None if draft.lower() == NO_DRAFT else PARTNER
    if values.get("override_generation_config") is None:
        values.pop("override_generation_config", None)
    template = _chat_template(values)
    options = take_struct(
        EngineOptions,
        values,
        compute=take_struct(ComputeOptions, values),
        cache=take_struct(CacheOptions, values),
        batch=take_struct(BatchOptions, values),
        speculation=take_struct(SpeculationOptions, values),
        parallel=take_struct(ParallelOptions, values),
        disaggregation=take_struct(DisaggregationOptions, values),
        offload=take_struct(OffloadOptions, values),
        generation=take_struct(GenerationOptions, values),
        chat_template=template,
    )
    if options.parallel.num_ranks > 1 and options.parallel.launcher == "auto":
        from twostroke.backends.parallel.launcher import follow_if_launched

        follow_if_launched(model, options.parallel)
    return options


def _chat_template(values: dict[str, Any]) -> str | None:
    """Return the chat template that the user gave, as text or name, or None.

    Removes its options (`TEMPLATE_PARAMS`) from a command's `values`.
    """
    named: str | None = values.pop("chat_template", None)
    text: str | None = values.pop("chat_template_file", None)
    if named is None or text is not None:
        if named is not None:
            reason = "cannot be combined with {other}: leave one of them out."
            raise UsageError(reason, field="chat_template", other=Field("chat_template_file"))
        return text
    is_file = named not in BUILT_IN and len(named) < _MAX_PATH and Path(named).is_file()
    template = read_text(named) if is_file else named
    check_template(template)
    return template


def sampling_params(values: dict[str, Any], constraint: Constraint | None = None) -> SamplingParams:
    """Build sampling parameters from a command's `values`, and remove them from `values`.

    `constraint` is the constraint of the answer.
    """
    return take_struct(SamplingParams, values, constraint=constraint)


def constraint(values: dict[str, Any]) -> Constraint | None:
    """Return the constraint of the answer that the user gave, or None.

    Removes its options (`CONSTRAINT_PARAMS`) from a command's `values`.

    Raises:
        UsageError: more than one constraint was given.
    """
    texts = {name: values.pop(name) for name in _CONSTRAINTS}
    texts["choice"] = json.dumps(texts["choice"], ensure_ascii=False) if texts["choice"] else None
    constraints = [Constraint(name, text, name) for name, text in texts.items() if text is not None]
    if len(constraints) > 1:
        first, second = constraints[:2]
        reason = "cannot be combined with {other}: leave one of them out."
        raise UsageError(reason, field=first.param, other=Field(second.param))
    return constraints[0] if constraints else None


def is_given_by_user(name: str) -> bool:
    """Whether the user gave an option on the command line; False if its default is used."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def check_effect(name: str, other: str, *, has_effect: bool, value: str = "") -> None:
    """Raise UsageError if the user gave an option that has no effect.

    `has_effect` tells whether the option has an effect. If not, the error says that the option
    needs the option `other`, or its value `value`.
    """
    if is_given_by_user(name) and not has_effect:
        reason = f"has no effect without {{other}}{value and ' '}{value}: add that, or leave "
        raise UsageError(f"{reason}{{this}} out.", field=name, other=Field(other), this=Field(name))


def check_batching(policy: str, *, is_server: bool = False) -> None:
    """Raise UsageError for options that have no effect with the batching policy.

    For a server (`is_server`), `--max-wait` also applies to static batches. Other commands know
    when their last request has come, so their static batches need no limit.
    """
    has_wait = policy == "dynamic" or (is_server and policy == "static")
    check_effect("batch_size", "policy", has_effect=policy != "continuous", value="dynamic")
    check_effect("max_wait_s", "policy", has_effect=has_wait, value="dynamic")


@contextmanager
def requires_torch(feature: str) -> Iterator[None]:
    """Raise BackendError if an import in the block fails because PyTorch is not installed.

    `feature` names the feature that needs PyTorch, for the error.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise BackendError(f"{feature} needs PyTorch: {install_command('train')}.") from None


def file_option(suffixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the click type and placeholder of an option for an output file.

    The file's suffix must be one of `suffixes`.
    """
    kind = click.Path(path_type=Path, dir_okay=False, writable=True)
    return {"type": kind, "metavar": "|".join(f"FILE{suffix}" for suffix in suffixes)}


def check_file(path: Path | None, field: str, suffixes: tuple[str, ...]) -> None:
    """Check before the work starts that a plot or report can be written to a file.

    Raises:
        UsageError: the suffix is not one of `suffixes`, or the folder or matplotlib is missing.
    """
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        reason = f"must end in {' or '.join(suffixes)}, got '{{value}}'."
        raise UsageError(reason, field=field, value=path.name)
    check_folder(path, field)
    from twostroke.lab.measure.plots import new_figure

    new_figure(1, 1)


def check_folder(path: Path, field: str) -> None:
    """Raise UsageError if the folder of an output file does not exist or cannot be written."""
    if not path.absolute().parent.is_dir():
        reason = "is in a folder that does not exist: '{value}'."
        raise UsageError(reason, field=field, value=path.parent)
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        reason = "is in a folder that cannot be written, '{value}': {why}."
        raise UsageError(reason, field=field, value=path.parent, why=error.strerror) from None
