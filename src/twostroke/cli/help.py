"""Parts of commands: help with options in sections, and option types with clear errors."""

from __future__ import annotations

import errno
import math
import re
import shlex
import sys
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.core.errors import UsageError, nearest
from twostroke.core.files import read_regular_file
from twostroke.core.frozen import check_number
from twostroke.core.json_io import parse_json
from twostroke.core.message_text import without_passwords

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twostroke.core.option_schema import OptionField

_DECIMAL: Final = {letter: 1000**power for power, letter in enumerate(("", *"kmgt"))}
_BINARY: Final = {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)}
_UNITS: Final = _DECIMAL | _BINARY
_MAX_COUNT: Final = 1 << 20
# A text that was given in place of the name of its file: JSON, a grammar or a template.
_INLINE_TEXT: Final = re.compile(r"^\s*[\[{]|\n|::=|:\s|\{\{|\{%")
_MAX_SHOWN_CHARS: Final = 40  # of a text that was given in place of a file
_ARGUMENTS: Final = "twostroke.arguments"  # of a command, in click's context
_PATHS: Final = {"model", "models", "draft", "heads"}
# What messages about wrong values call a type, by click's name of it.
_TYPES_IN_MESSAGES: Final = {
    "integer range": "integer",
    "float range": "number",
    "float": "number",
}
_NUMBERS: Final = {"integer": "N", "integer range": "N", "float": "X", "float range": "X"}


class CommandGroup(click.Group):
    """A click group of commands; its error about an unknown command names the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand that the command-line arguments name."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            hint = nearest(args[0], names)
            ctx.fail(f"There is no command '{args[0]}'.{hint} Commands: {', '.join(names)}.")
        return super().resolve_command(ctx, args)


class CommandOption(click.Option):
    """A command-line option that the help lists in a section, with its default."""

    def __init__(self, names: Any, section: str = "Options", **attributes: Any) -> None:
        """Create an option; its heading in the help is `section`.

        The other arguments are as for `click.Option`.
        """
        attributes.setdefault("show_default", attributes.get("default") is not None)
        super().__init__(names, **attributes)
        self.section = section
        self.declaration: OptionField | None = None  # if the option is a declared field
        if self.metavar is None:
            self.metavar = _NUMBERS.get(self.type.name)
        if self.type.name in _TYPES_IN_MESSAGES:
            self.type = copy(self.type)  # click's own types are shared
            self.type.name = _TYPES_IN_MESSAGES[self.type.name]


def option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds a `CommandOption` with these arguments to a command."""
    return click.option(*names, cls=CommandOption, **attributes)


def verbose_option(command: Any) -> Any:
    """Add the option `--verbose` to a command, which gets it as the parameter `is_verbose`."""
    text = "Print more details about the backend when the model is ready."
    return option("-v", "--verbose", "is_verbose", is_flag=True, help=text)(command)


class Command(click.Command):
    """A click command whose help groups its options by section."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; keep the original arguments for the function `command_line`."""
        ctx.meta[_ARGUMENTS] = (*ctx.command_path.split(), *args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of the options, a list for each section, "Options" first."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        """Check that the command's text arguments are UTF-8, and run the command.

        Paths may be any bytes.
        """
        for param in self.params:
            value = ctx.params.get(param.name or "")
            if param.type is click.STRING and param.name not in _PATHS:
                for text in (value,) if isinstance(value, str) else value or ():
                    _check_text(text, param)
        return super().invoke(ctx)


def command_line() -> str:
    """Return the running command, quoted for a shell; passwords in URLs are masked."""
    words = click.get_current_context().meta[_ARGUMENTS]
    return shlex.join([without_passwords(word) for word in words])


class WordParam(click.Choice[str]):
    """An option type: one of a few words; the error about another word names the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the option's word; fail if it is not one of the words."""
        words = list(self.choices)
        if value not in words:
            hint = nearest(value, words)
            self.fail(f"'{value}' is not one of {', '.join(words)}.{hint}", param, ctx)
        return str(value)


class NamedValueParam(WordParam):
    """An option type: a word that stands for a Python value, which the command gets."""

    def __init__(self, values: Mapping[str, object]) -> None:
        """Accept the words that are keys of `values`."""
        super().__init__(list(values))
        self._values = values

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value for which the option's word stands."""
        if not isinstance(value, str):  # the default
            return value
        return self._values[super().convert(value, param, ctx)]


class NumberOrWordParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: a whole number, or one particular word such as "auto"."""

    name = "integer"

    def __init__(self, word: str) -> None:
        """Accept `word` in place of a number."""
        self._word = word

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Return the option's whole number, or the word."""
        return self._word if value == self._word else int(click.INT.convert(value, param, ctx))


class NumberParam(click.FloatRange):
    """An option type: a finite number within a range."""

    name = "number"  # in messages of click

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the option's number; fail if it is out of range."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):  # click's comparisons let `nan` pass
            self.fail(f"'{value}' is not a finite number.", param, ctx)
        return number


class CountListParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: one or more whole numbers separated by commas, such as 1,16."""

    name = "N,N"

    def __init__(self, low: int = 1, high: int = _MAX_COUNT) -> None:
        """Accept whole numbers from `low` to `high`."""
        self._low, self._high = low, high

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the option's whole numbers."""
        if isinstance(value, tuple):  # the default
            return value
        words = str(value).split(",")
        low, high = self._low, self._high
        if not all(word.strip().isdecimal() and low <= int(word) <= high for word in words):
            reason = f"'{value}' is not a list of numbers from {low} to {high}, such as 1,16."
            self.fail(reason, param, ctx)
        return tuple(map(int, words))


class NumberListParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: one or more positive numbers separated by commas, such as 0.5,2."""

    name = "X,X"

    def __init__(self, high: float) -> None:
        """Accept numbers above 0 up to `high`."""
        self._high = high

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Return the option's numbers."""
        if isinstance(value, tuple):  # the default
            return value
        try:
            numbers = tuple(float(word) for word in str(value).split(","))
        except ValueError:
            self.fail(f"'{value}' is not a list of numbers, such as 0.5,2.", param, ctx)
        for number in numbers:
            check_number((param and param.name) or "value", number, high=self._high)
        return numbers


class WordListParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: several of a few words, separated by commas, or "all"."""

    name = "list"

    def __init__(self, words: Callable[[], Sequence[str]]) -> None:
        """Accept the words that `words` returns; it is called when an option is read."""
        self._words = words

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        """Return the words that the option lists."""
        words = list(self._words())
        if value == "all":
            return words
        word_type = WordParam(words)
        return [word_type.convert(word.strip(), param, ctx) for word in str(value).split(",")]


class ByteSizeParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: a number of bytes, such as 512M, 2GB or 1GiB, or a word such as auto."""

    name = "size"

    def __init__(self, words: Mapping[str, Any] | None = None) -> None:
        """Accept numbers of bytes, and `words`, which maps each word to its number of bytes."""
        self._words = dict(words or {})

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the option's number of bytes."""
        if str(value).strip().lower() in self._words:
            return int(self._words[str(value).strip().lower()])
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", str(value).strip().lower())
        if match is None or match[2] not in _UNITS:
            *others, last = ["512M", "2GB", "1GiB", *self._words]
            sizes = f"{', '.join(others)} or {last}"
            self.fail(f"'{value}' is not a size: write {sizes}.", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


class JsonObjectParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: a JSON object as text."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        """Return the option's JSON object as a dictionary."""
        try:
            parsed = parse_json(value)
        except ValueError as error:
            self.fail(f"'{value}' is not JSON: {error}.", param, ctx)
        except RecursionError:
            self.fail("the value is nested too deeply.", param, ctx)
        if not isinstance(parsed, dict):
            reason = 'is not a JSON object, such as {"temperature": 0.6}.'
            self.fail(f"'{value}' {reason}", param, ctx)
        return parsed


class TextFileParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: a file whose text is the value; - is standard input."""

    name = "file"

    def __init__(self, *, may_be_empty: bool = False) -> None:
        """Refuse a file without text, unless it `may_be_empty`."""
        self._may_be_empty = may_be_empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text of the option's file."""
        del ctx
        flag = "" if param is None else max(param.opts, key=len)
        text = read_text(str(value), flag)
        if not self._may_be_empty and not text.strip():
            source = "Standard input" if value == "-" else f"The file '{value}'"
            raise UsageError(f"{flag}: {source} has no text.")
        return text


def _check_text(text: str, param: click.Parameter) -> None:
    """Raise UsageError if the text of a command-line argument is not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        name = max(param.opts, key=len) if isinstance(param, CommandOption) else "The text"
        byte = ord(text[error.start]) - 0xDC00
        message = f"{name} is not UTF-8 text: its character {error.start} is 0x{byte:02x}."
        raise UsageError(message) from None


def read_text(path: str, flag: str = "") -> str:
    """Return the text of a file, or of standard input if the path is -.

    Raises:
        UsageError: the file cannot be read, or is not UTF-8. The error names the option `flag`.
    """
    prefix = f"{flag}: " if flag else ""
    source, data = "Standard input" if path == "-" else path, b""
    try:
        data = sys.stdin.buffer.read() if path == "-" else read_regular_file(Path(path))
        return data.decode()
    except OSError as error:
        if _INLINE_TEXT.search(path) or error.errno == errno.ENAMETOOLONG:
            is_long = len(path) > _MAX_SHOWN_CHARS
            text = f"{path[:_MAX_SHOWN_CHARS]}..." if is_long else path
            message = f"The name of a file or - is expected, not a text, got {text!r}."
            raise UsageError(f"{prefix}{message}") from None
        raise UsageError(f"{prefix}The file '{path}' cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        message = f"{source} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}."
        raise UsageError(f"{prefix}{message}") from None
