"""What `--help` shows, options in sections, and values that say what they may be."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.core.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNITS: Final = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_NUMBERS: Final = {"integer": "N", "float": "X"}


class Group(click.Group):
    """A group of commands that names the nearest to one that it does not have."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            hint = nearest(args[0], known)
            ctx.fail(f"There is no command '{args[0]}'.{hint} Commands: {', '.join(known)}.")
        return super().resolve_command(ctx, args)


class SectionOption(click.Option):
    """An option that stands under a heading of its own in the help."""

    def __init__(self, *names: Any, section: str = "Options", **attributes: Any) -> None:
        """Take what `click.Option` takes, and the heading."""
        super().__init__(*names, **attributes)
        self.section = section
        if self.metavar is None:
            self.metavar = _NUMBERS.get(self.type.name)


class SectionedCommand(click.Command):
    """A command whose help groups its options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of options for each section, in the order of their first options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class OneOf(click.ParamType):  # type: ignore[type-arg]
    """One of a few words."""

    name = "word"

    def __init__(self, words: Sequence[str]) -> None:
        """Accept `words`."""
        self._words = words

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the words, as the help shows them."""
        del param, ctx
        return f"[{'|'.join(self._words)}]"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the word."""
        text = str(value)
        if text not in self._words:
            hint = nearest(text, self._words)
            self.fail(f"'{text}' is not one of {', '.join(self._words)}.{hint}", param, ctx)
        return text


class ByteSize(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, such as 512M, 2GB or 1GiB."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number of bytes."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", str(value).strip().lower())
        if match is None or match[2] not in _UNITS:
            self.fail(f"'{value}' is not a size: write 512M, 2GB or 1GiB.", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])
