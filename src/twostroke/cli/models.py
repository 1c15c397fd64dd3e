"""`twostroke models`: list, show, verify, remove and clean up models."""

from __future__ import annotations

import copy
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli import pull
from twostroke.cli.fetch import watcher
from twostroke.cli.help import Group
from twostroke.cli.terminal import Bar, printable
from twostroke.core.errors import ModelFormatError, TwostrokeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.fetch import Leftover, ModelListing

_HEAD = ("NAME", "FAMILY", "FORMAT", "SIZE", "LICENCE", "LAST USED")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
_yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


@click.group("models", cls=Group, invoke_without_command=True)
@_as_json
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the models that are here, and those that can be fetched; or act on one."""
    if ctx.invoked_subcommand is None:
        _list(as_json=as_json)


@command.command("list")
@_as_json
def list_command(as_json: bool) -> None:
    """List the models that are here, and those that can be fetched by a short name."""
    _list(as_json=as_json)


@command.command("show")
@click.argument("model")
@_as_json
def show_command(model: str, as_json: bool) -> None:
    """Show all that is known of MODEL: its licence, where it came from, where it lies."""
    from twostroke.fetch import find

    facts = _facts(find(model))
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    used = facts.pop("last_used")
    shown = facts | {"last_used": _ago(used), "file_bytes": f"{facts['file_bytes']:,}"}
    width = max(map(len, shown))
    for key, value in shown.items():
        lines = value if isinstance(value, list) else ["-" if value is None else value]
        for index, line in enumerate(lines):
            click.echo(printable(f"{key if index == 0 else '':<{width}}  {line}"))


@command.command("verify")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--all", "everything", is_flag=True, help="Every model that is here.")
@_as_json
def verify_command(models: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Hash the files of MODEL again and compare them with their checksums."""
    from twostroke.fetch import list_models, verify

    if everything == bool(models):
        raise UsageError("Name the models to verify, or give --all.")
    # Also those of which only a part is left: they were used once.
    names = models or [one.name for one in list_models() if one.path or one.last_used]
    faults: dict[str, TwostrokeError] = {}
    for name in names:
        try:
            with Bar() as bar:
                verify(name, watcher(bar, name))
        except TwostrokeError as error:
            if len(names) == 1 and not as_json:
                raise
            faults[name] = error
        if not as_json:
            said = faults[name].message if name in faults else "matches its checksum."
            click.echo(printable(f"{name}: {said}" if name in faults else f"{name} {said}"))
    if as_json:
        rows = [{"name": n, "error": faults[n].message if n in faults else None} for n in names]
        click.echo(json.dumps(rows, ensure_ascii=False))
    if faults:
        raise ModelFormatError(f"{len(faults)} of {len(names)} models failed: {', '.join(faults)}.")


@command.command("remove")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@_yes
@_as_json
def remove_command(models: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete MODEL from the cache; asks first on a terminal."""
    from twostroke.fetch import find, remove

    listings = [find(name) for name in models]
    total = sum(one.file_bytes for one in listings if one.path)
    if sys.stdin.isatty() and not yes and total:
        click.confirm(f"Delete {', '.join(models)} ({_size(total)})?", abort=True, err=True)
    rows = []
    for name in models:
        freed = remove(name)
        rows.append({"name": name, "freed_bytes": freed})
        if not as_json:
            rest = f"{_size(freed)} are free again."
            if not freed:
                rest = "its files stay, since other programs or models use them."
            click.echo(printable(f"Removed {name}: {rest}"))
    if as_json:
        click.echo(json.dumps(rows, ensure_ascii=False))


_short = copy.copy(remove_command)
_short.hidden = True
command.add_command(_short, "rm")


_pull = copy.copy(pull.command)
_pull.hidden = True
command.add_command(_pull, "pull")


@command.command("clean")
@click.option("--partial", is_flag=True, help="What broken downloads left [the default].")
@click.option("--unused", type=float, metavar="DAYS", help="Models not used for so many days.")
@_yes
@_as_json
def clean_command(partial: bool, unused: float | None, yes: bool, as_json: bool) -> None:
    """Delete what broken downloads have left, or models that nobody uses; asks first."""
    from twostroke import fetch

    old = [] if unused is None else fetch.unused(unused)
    left = fetch.leftovers() if partial or unused is None else []
    total = sum(one.num_bytes for one in left) + sum(one.file_bytes for one in old)
    if left or old:
        _agree(left, old, total, yes=yes)
    freed = sum(one.num_bytes for one in left)
    for leftover in left:
        fetch.drop(leftover)
    freed += sum(fetch.remove(one.name) for one in old)
    fetch.forget_missing()
    if as_json:
        removed = [str(one.path) for one in left] + [one.name for one in old]
        click.echo(json.dumps({"removed": removed, "freed_bytes": freed}, ensure_ascii=False))
    elif left or old:
        click.echo(f"{_size(freed)} are free again.")
    else:
        click.echo("There is nothing to clean.")


def _agree(left: Sequence[Leftover], old: Sequence[ModelListing], total: int, *, yes: bool) -> None:
    """Show what would go, and ask; a script has to say --yes beforehand."""
    for leftover in left:
        line = f"{_size(leftover.num_bytes):>10}  {leftover.path} (an unfinished download)"
        click.echo(printable(line), err=True)
    for one in old:
        line = f"{_size(one.file_bytes):>10}  {one.name}, last used {_ago(one.last_used)}"
        click.echo(printable(line), err=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"This would delete {_size(total)}: confirm it with --yes.")
    click.confirm(f"Delete these {_size(total)}?", abort=True, err=True)


def _list(*, as_json: bool) -> None:
    from twostroke.fetch import list_models

    listings = list_models()
    if as_json:
        click.echo(json.dumps([_facts(one) for one in listings], ensure_ascii=False))
        return
    here = [one for one in listings if one.path]
    others = [one for one in listings if not one.path]
    widths = _widths([_HEAD, *map(_row, listings)])
    if here:
        _table([_HEAD, *map(_row, here)], widths)
        total = _size(sum(one.file_bytes for one in here))
        click.echo(f"{total} in all. 'twostroke models show NAME' tells where a model lies.")
    else:
        click.echo("No model is here yet.")
    if others:
        click.echo("\nCan be fetched with 'twostroke pull NAME':")
        _table(map(_row, others), widths)
    click.echo("Any other: a path, or hf:owner/repo for a model of the Hugging Face hub.")


def _facts(one: ModelListing) -> dict[str, Any]:
    path = str(one.path) if one.path else None
    facts = asdict(one) | {"path": path, "source": list(one.source)}
    facts["format"] = facts.pop("number_format")
    facts["runs"] = _runs(one)
    return facts


def _runs(one: ModelListing) -> bool:
    from twostroke.models import ARCHITECTURES

    return one.family is None or one.family in ARCHITECTURES


def _row(one: ModelListing) -> tuple[str, ...]:
    used = _ago(one.last_used) if one.path else ""
    used = used if _runs(one) else "cannot run yet"
    size = _size(one.file_bytes) if one.file_bytes else "?"
    licence = (one.licence or "unknown").split(" (")[0]
    return (one.name, one.family or "?", one.number_format or "?", size, licence, used)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]


def _table(rows: Any, widths: Sequence[int]) -> None:
    for row in rows:
        cells = [
            cell.rjust(width) if heading == "SIZE" else cell.ljust(width)
            for cell, width, heading in zip(row, widths, _HEAD, strict=True)
        ]
        click.echo(printable("  ".join(cells).rstrip()))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**10 else f"{num_bytes / 1e6:,.0f} MB"


def _ago(moment: float | None) -> str:
    if moment is None:
        return "?"
    days = int((time.time() - moment) // 86400)
    return ("today", "yesterday")[days] if 0 <= days < 2 else f"{days} days ago"
