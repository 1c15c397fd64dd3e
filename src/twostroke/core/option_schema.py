"""Options that are declared once, beside the fields that hold their values.

    class BatchOptions(OptionStruct):
        SECTION: ClassVar[str] = "Batching"

        token_budget: Annotated[
            int, Option("--token-budget", low=1, help="Most tokens that a step computes.")
        ] = 256

These are made from the declarations: the command line (`cli/options.py`), the checks of values
(`check`), options given by name in Python (`from_mapping`) and docs/reference/options.md
(`tools/options_page.py`).
"""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import Struct

from twostroke.core.errors import UsageError, nearest
from twostroke.core.foreign_options import foreign_hint
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from msgspec import StructMeta
else:
    StructMeta = type(Struct)  # msgspec exports it by name since 0.20

T = TypeVar("T", bound="OptionStruct")
_MEGABYTE: Final = 10**6


class Option(Frozen):
    """The declaration of a command-line option: its flag, range, default and help.

    Attributes:
        flag: the option of the command line, such as "--threads" or "--access-log/--no-access-
            log"; empty for a field that is set only in Python.
        help: the effect of the option, with units.
        default: the default in words, for fields whose default is None.
        section: the heading under which `--help` lists the option; empty for the heading
            `SECTION` of the options struct.
        low, high: the least and the greatest value; None for no bound.
        excludes_low: whether the value must be greater than `low`.
        choices: all allowed values, if there are only a few.
        named_values: pairs of a word that the command line accepts and the value that it means.
        flag_value: the value that the flag stands for, if the flag takes no value.
        metavar: the placeholder for the value in the help.
        form: how the command line reads a value: "size" (such as 2GB), "path", "file" (the text
            of a file), "json", or empty for the field's type.
    """

    flag: str
    help: str
    default: str = ""
    section: str = ""
    low: float | None = None
    high: float | None = None
    excludes_low: bool = False
    choices: tuple[str | int, ...] = ()
    named_values: tuple[tuple[str, object], ...] = ()
    flag_value: str = ""
    metavar: str | None = None
    form: str = ""

    @property
    def name(self) -> str:
        """The option's name in YAML files: the flag without its dashes."""
        return self.flag.partition("/")[0].removeprefix("--")

    def range_text(self) -> str:
        """Return the option's bounds as text, such as "from 1 to 24"; empty without bounds."""
        low = "" if self.low is None else self.number_text(self.low)
        high = "" if self.high is None else self.number_text(self.high)
        if self.excludes_low:
            return f"greater than {low} and at most {high}" if high else f"greater than {low}"
        if low and high:
            return f"from {low} to {high}"
        return f"at least {low}" if low else f"at most {high}" if high else ""

    def choices_text(self) -> str:
        """Return the allowed values as text, such as "8, 16 or 32"; empty if it has no choices."""
        if all(isinstance(choice, str) for choice in self.choices):
            return f"one of {', '.join(map(str, self.choices))}" if self.choices else ""
        *first_choices, last = self.choices
        return f"{', '.join(map(str, first_choices))} or {last}"

    def number_text(self, number: float) -> str:
        """Return a number of the option as text; whole megabytes of a size are written as 10MB."""
        if self.form == "size" and number and number % _MEGABYTE == 0:
            return f"{int(number) // _MEGABYTE}MB"
        return f"{number:.15g}" if isinstance(number, float) else str(number)


class OptionField(Frozen):
    """A field of an options struct whose type is annotated with an `Option`.

    Attributes:
        name: the name of the field.
        option: the declaration of the field.
        types: the Python types of the field's values, without None.
        item_type: the type of the items, if the field is a tuple or another sequence.
        accepts_none: whether the type of the field includes None.
        default: the default value of the field.
        section: the heading under which `--help` lists the option.
    """

    name: str
    option: Option
    types: tuple[type, ...]
    item_type: type | None
    accepts_none: bool
    default: Any
    section: str

    @property
    def number_type(self) -> type | None:
        """The type of the option's number, `int` or `float`; None if the value is not a number."""
        return next((kind for kind in (int, float) if kind in self.types), None)

    def check(self, value: object) -> None:
        """Check a value against the option's type, choices and range.

        Raises:
            UsageError: the value has the wrong type, is not one of the choices or is out of
                range.
        """
        if self.option.choices:
            self._check_choice(value)
        elif self.number_type is not None:
            self._check_number(value, self.number_type)
        elif self.types == (bool,) and not isinstance(value, bool):
            raise UsageError(f"must be true or false, got {value!r}.", field=self.name)

    def _check_choice(self, value: object) -> None:
        choices = self.option.choices
        if value in choices or not isinstance(value, str | int | float):
            return
        words = [choice for choice in choices if isinstance(choice, str)]
        hint = nearest(value, words) if isinstance(value, str) else ""
        quoted_value = "'{value}'" if len(words) == len(choices) else "{value}"
        reason = f"must be {self.option.choices_text()}, got {quoted_value}.{hint}"
        raise UsageError(reason, field=self.name, value=value)

    def _check_number(self, value: object, number_type: type) -> None:
        option = self.option
        accepted = int if number_type is int else int | float
        if not isinstance(value, accepted) or isinstance(value, bool):
            kind = "an integer" if number_type is int else "a number"
            raise UsageError(f"must be {kind}, got {value!r}.", field=self.name)
        low, high = option.low, option.high
        is_above = low is None or (value > low if option.excludes_low else value >= low)
        if not is_above or not (high is None or value <= high):  # not a number fails both
            got = str(value)[:40]
            raise UsageError(f"must be {option.range_text()}, got {got}.", field=self.name)
        if not math.isfinite(value):
            raise UsageError(f"must be a finite number, got {value}.", field=self.name)


class UnknownOptionError(UsageError, TypeError):
    """A call or a file names an option that does not exist."""


class _OptionMeta(StructMeta):
    """Metaclass of options structs: the error about an unknown keyword names the nearest field."""

    def __call__(cls, *values: Any, **named_values: Any) -> Any:  # noqa: N805
        """Create an options struct; raise UnknownOptionError for an unknown keyword."""
        try:
            return super().__call__(*values, **named_values)
        except TypeError:
            fields: tuple[str, ...] = cls.__struct_fields__
            for name in named_values:
                if name not in fields:
                    raise unknown_option(name, fields, owner=cls.__name__) from None
            raise


class OptionStruct(Frozen, metaclass=_OptionMeta):
    """The base of immutable options structs, whose fields declare command-line options.

    A call with an unknown keyword raises an error that names the nearest field.
    """


@cache
def option_fields(kind: type) -> dict[str, OptionField]:
    """Return the fields of an options struct that are annotated with an `Option`, by name."""
    annotations: dict[str, Any] = {}
    for owner in reversed(kind.__mro__):
        annotations |= _annotated_fields(owner)
    defaults = _defaults(kind)
    fields: dict[str, OptionField] = {}
    for name in kind.__struct_fields__:  # type: ignore[attr-defined]
        if name not in annotations:
            continue
        value_type, *metadata = get_args(annotations[name])
        option = next((item for item in metadata if isinstance(item, Option)), None)
        if option is None:
            continue
        types, item_type = _plain_types(value_type)
        fields[name] = OptionField(
            name=name,
            option=option,
            types=types,
            item_type=item_type,
            accepts_none=type(None) in get_args(value_type),
            default=_default_value(defaults.get(name)),
            section=option.section or getattr(kind, "SECTION", "Options"),
        )
    return fields


def check(options: OptionStruct) -> None:
    """Check all values of an options struct against the declarations of its fields.

    A field may be None only if its type includes None.

    Raises:
        UsageError: a value has the wrong type, is not one of the choices or is out of range.
    """
    for name, field in option_fields(type(options)).items():
        value = getattr(options, name)
        if value is not None or not field.accepts_none:
            field.check(value)


def from_mapping(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return an options struct from values by field name, such as the keywords of `LLM(...)`.

    A field of a nested struct, such as `num_threads` of `EngineOptions.compute`, is given by its
    own name, without the name of the nested struct.

    Raises:
        UsageError: there is no field of that name, or its value is wrong.
    """
    parts = {
        name: type(value)
        for name, default in _defaults(kind).items()
        if isinstance(value := _default_value(default), OptionStruct)
    }
    part_by_field = {
        field: part for part, part_type in parts.items() for field in part_type.__struct_fields__
    }
    plain_fields = [name for name in kind.__struct_fields__ if name not in parts]
    outer_values: dict[str, Any] = {}
    part_values: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name in part_by_field:
            part_values.setdefault(part_by_field[name], {})[name] = value
        elif name in plain_fields:
            outer_values[name] = value
        else:
            raise unknown_option(name, [*part_by_field, *plain_fields])
    for part, inner_values in part_values.items():
        outer_values[part] = parts[part](**inner_values)
    return kind(**outer_values)


def unknown_option(name: str, known_names: Iterable[str], *, owner: str = "") -> UnknownOptionError:
    """Return the error about an option that does not exist, with the nearest known option.

    `owner` is the name of the struct that was called; empty if there is none.
    """
    names = sorted(known_names)
    hint = foreign_hint(name, names) or nearest(name, names)
    of_owner = f" of {owner}" if owner else ""
    all_names = "" if hint else f" Options: {', '.join(names)}."
    return UnknownOptionError(f"There is no option '{name}'{of_owner}.{hint}{all_names}")


def _defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a struct's fields, by name; fields without a default are left out.

    A default may be a factory in msgspec's form; see `_default_value`.
    """
    names: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    defaults: tuple[Any, ...] = kind.__struct_defaults__  # type: ignore[attr-defined]
    return dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))


def _default_value(default: Any) -> Any:
    factory = getattr(default, "factory", None)  # of `msgspec.field(default_factory=...)`
    return default if factory is None else factory()


class _AnnotationNames(dict[str, Any]):
    """The names that a text annotation may use: the names of its module and the builtins.

    A name that the module imports only for type checkers is unknown at run time, and becomes
    `object`.
    """

    def __init__(self, module: str) -> None:
        super().__init__()
        self._names = {**vars(builtins), **vars(sys.modules[module])}

    def __missing__(self, name: str) -> Any:
        return self._names.get(name, object)


def _annotated_fields(owner: type) -> dict[str, Any]:
    """Return the types of the `Annotated[...]` fields that a class itself declares, by name."""
    texts = {
        name: text
        for name, text in vars(owner).get("__annotations__", {}).items()
        if isinstance(text, str) and text.startswith("Annotated[")
    }
    if not texts:
        return {}
    holder = SimpleNamespace(__annotations__=texts)
    names = _AnnotationNames(owner.__module__)
    return get_type_hints(holder, globalns={}, localns=names, include_extras=True)


def _plain_types(annotation: Any) -> tuple[tuple[type, ...], type | None]:
    """Return the Python types that an annotation accepts, without None, and its item type.

    The item type is None if the annotation is not a sequence.
    """
    is_union = get_origin(annotation) in {Union, UnionType}
    alternatives = get_args(annotation) if is_union else (annotation,)
    types: list[type] = []
    item_type = None
    for alternative in alternatives:
        origin = get_origin(alternative) or alternative
        if origin in {tuple, Sequence}:
            item_type = get_args(alternative)[0]
        if origin is not type(None):
            types.append(origin)
    return tuple(types), item_type
