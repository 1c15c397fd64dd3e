"""`twostroke models`: list, show, verify, remove and clean up models."""

from __future__ import annotations

import copy
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli import pull
from twostroke.cli.help import CommandGroup, option
from twostroke.cli.terminal import Bar, printable, show_table
from twostroke.core.errors import ModelFormatError, TwostrokeError, UsageError
from twostroke.core.files import megabytes
from twostroke.core.json_io import encode_json
from twostroke.model import hub as fetch
from twostroke.model.families import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.model.hub import Leftover, ModelRecord

_HEAD = ("NAME", "FAMILY", "FORMAT", "SIZE", "LICENCE", "LAST USED", "GOOD FOR")
_as_json = option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
_yes = option("--yes", "-y", is_flag=True, help="Do not ask.")


@click.group("models", cls=CommandGroup, invoke_without_command=True)
@_as_json
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List, show, verify and remove models."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_command, as_json=as_json)


@command.command("list")
@_as_json
def list_command(as_json: bool) -> None:
    """List the models in the cache, and those with a short name that can be fetched."""
    records = fetch.list_models()
    if as_json:
        _print_json([_facts(one) for one in records])
        return
    here = [one for one in records if one.is_here]
    rows = [_HEAD, *map(_row, here), *(_row(one) for one in records if not one.is_here)]
    show_table(rows, right={_HEAD.index("SIZE")})
    total = megabytes(sum(one.num_bytes for one in here))
    click.echo(f"The models here take {total}. 'twostroke models show NAME' shows where one is.")
    click.echo("'twostroke pull NAME' fetches one, 'twostroke pull hf:OWNER/REPO' one of the hub.")


@command.command("show")
@click.argument("model")
@_as_json
def show_command(model: str, as_json: bool) -> None:
    """Show the licence, the source and the path of MODEL."""
    facts = _facts(fetch.find(model))
    if as_json:
        _print_json(facts)
        return
    facts |= {"last_used": _ago(facts["last_used"]), "file_bytes": f"{facts['file_bytes']:,}"}
    width = max(map(len, facts))
    for key, value in facts.items():
        lines = value if isinstance(value, list) else ["-" if value is None else value]
        for index, line in enumerate(lines):
            click.echo(printable(f"{'' if index else key:<{width}}  {line}"))


@command.command("verify")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@option("--all", "everything", is_flag=True, help="Verify every model in the cache.")
@_as_json
def verify_command(models: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Compare the files of MODEL with their checksums."""
    if everything == bool(models):
        raise UsageError("Name the models to verify, or give --all.")
    names = models or [one.name for one in fetch.list_models() if one.is_partly_here]
    faults: dict[str, TwostrokeError] = {}
    for name in names:
        try:
            with Bar() as bar:
                fetch.verify(name, pull.watcher(bar, name))
        except TwostrokeError as error:
            if len(names) == 1 and not as_json:
                raise
            faults[name] = error
            result = f"{name}: {error}"
        else:
            result = f"{name} matches its checksum."
        if not as_json:
            click.echo(printable(result))
    if as_json:
        _print_json([{"name": n, "error": str(faults[n]) if n in faults else None} for n in names])
    if faults:
        raise ModelFormatError(f"{len(faults)} of {len(names)} models failed: {', '.join(faults)}.")


@command.command("remove")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@_yes
@_as_json
def remove_command(models: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete MODEL from the cache; asks first, and in scripts needs --yes."""
    total = sum(one.num_bytes for one in map(fetch.find, models) if one.is_here)
    if total and not yes:
        _confirm(f"{', '.join(models)} ({megabytes(total)})")
    freed = {name: fetch.remove(name) for name in models}
    if as_json:
        _print_json([{"name": name, "freed_bytes": size} for name, size in freed.items()])
        return
    for name, size in freed.items():
        result = f"{megabytes(size)} freed." if size else "other programs or models use its files."
        click.echo(printable(f"Removed {name}: {result}"))


@command.command("clean")
@option("--partial", is_flag=True, help="Delete unfinished downloads; this is the default.")
@option("--unused", type=float, metavar="DAYS", help="Delete models not used for DAYS.")
@_yes
@_as_json
def clean_command(partial: bool, unused: float | None, yes: bool, as_json: bool) -> None:
    """Delete unfinished downloads, or unused models; asks first."""
    old = [] if unused is None else fetch.unused(unused)
    left = fetch.leftovers() if partial or unused is None else []
    if left or old:
        total = _show_waste(left, old)
        if not yes:
            _confirm(f"these {megabytes(total)}")
    freed = sum(one.num_bytes for one in left)
    for leftover in left:
        fetch.drop(leftover)
    freed += sum(fetch.remove(one.name) for one in old)
    fetch.forget_missing()
    if as_json:
        removed = [str(one.path) for one in left] + [one.name for one in old]
        _print_json({"removed": removed, "freed_bytes": freed})
    else:
        click.echo(f"{megabytes(freed)} freed." if left or old else "There is nothing to clean.")


_ALIASES = {"rm": remove_command, "pull": pull.command}
for _alias, _original in _ALIASES.items():
    _hidden = copy.copy(_original)
    _hidden.hidden = True
    command.add_command(_hidden, _alias)


def _show_waste(left: Sequence[Leftover], old: Sequence[ModelRecord]) -> int:
    """Show what would be deleted; return its bytes."""
    rows = [(one.num_bytes, f"{one.path} (an unfinished download)") for one in left]
    rows += [(one.num_bytes, f"{one.name}, last used {_ago(one.last_used)}") for one in old]
    for size, text in rows:
        click.echo(printable(f"{megabytes(size):>10}  {text}"), err=True)
    return sum(size for size, _ in rows)


def _confirm(what: str) -> None:
    """Ask whether to delete something; a script must say --yes."""
    if not sys.stdin.isatty():
        raise UsageError(f"This would delete {what}: confirm it with --yes.")
    click.confirm(f"Delete {what}?", abort=True, err=True)


def _facts(one: ModelRecord) -> dict[str, Any]:
    return {
        "name": one.name,
        "title": one.title,
        "good_for": one.good_for,
        "family": one.family,
        "file_bytes": one.num_bytes,
        "licence": one.licence,
        "source": list(one.source),
        "path": str(one.path) if one.is_here else None,
        "last_used": one.last_used if one.is_here else None,
        "format": one.number_format,
        "runs": _runs(one),
    }


def _runs(one: ModelRecord) -> bool:
    return one.family is None or one.family in ARCHITECTURES


def _row(one: ModelRecord) -> tuple[str, ...]:
    used = _ago(one.last_used) if one.is_here else "not here"
    used = used if _runs(one) else "not supported yet"
    licence = (one.licence or "unknown").split(" (")[0]
    size = megabytes(one.num_bytes)
    format_ = one.number_format or "?"
    return (one.name, one.family or "?", format_, size, licence, used, one.good_for or "")


def _print_json(value: object) -> None:
    click.echo(encode_json(value).decode())


def _ago(moment: float | None) -> str:
    if moment is None:
        return "?"
    days = int((time.time() - moment) // 86400)
    return ("today", "yesterday")[days] if 0 <= days < 2 else f"{days} days ago"
