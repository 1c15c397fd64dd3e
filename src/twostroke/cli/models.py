"""`twostroke models`: lists, shows, verifies, removes and cleans up models."""

from __future__ import annotations

import copy
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli import pull
from twostroke.cli.help import CommandGroup, option
from twostroke.cli.terminal import TerminalProgressBar, printable, show_table
from twostroke.core.errors import ModelFormatError, TwostrokeError, UsageError
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun, format_bytes
from twostroke.model import hub as fetch
from twostroke.model.families import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.model.hub import Leftover, ModelRecord

_HEAD = ("NAME", "FAMILY", "FORMAT", "SIZE", "LICENCE", "LAST USED", "GOOD FOR")
_as_json = option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
_yes = option("--yes", "-y", is_flag=True, help="Delete without asking.")


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
    """List the models in the cache, and the models that can be fetched by a short name."""
    records = fetch.list_models()
    if as_json:
        _print_json([_facts(record) for record in records])
        return
    cached_records = [record for record in records if record.is_here]
    rows = [
        _HEAD,
        *map(_row, cached_records),
        *(_row(record) for record in records if not record.is_here),
    ]
    show_table(rows, right={_HEAD.index("SIZE")})
    total = format_bytes(sum(record.num_bytes for record in cached_records))
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
    names = models or [record.name for record in fetch.list_models() if record.is_partly_here]
    faults: dict[str, TwostrokeError] = {}
    for name in names:
        try:
            with TerminalProgressBar() as bar:
                fetch.verify(name, pull.progress_watcher(bar, name))
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
        raise ModelFormatError(
            f"{len(faults)} of {counted_noun(len(names), 'model')} failed: {', '.join(faults)}."
        )


@command.command("remove")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@_yes
@_as_json
def remove_command(models: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete MODEL from the cache, after asking; scripts need --yes."""
    total = sum(record.num_bytes for record in map(fetch.find, models) if record.is_here)
    if total and not yes:
        _confirm(f"{', '.join(models)} ({format_bytes(total)})")
    freed = {name: fetch.remove(name) for name in models}
    if as_json:
        _print_json([{"name": name, "freed_bytes": size} for name, size in freed.items()])
        return
    for name, size in freed.items():
        result = (
            f"{format_bytes(size)} freed." if size else "other programs or models use its files."
        )
        click.echo(printable(f"Removed {name}: {result}"))


@command.command("clean")
@option("--partial", is_flag=True, help="Delete unfinished downloads; this is the default.")
@option(
    "--unused", type=float, metavar="DAYS", help="Delete models that were not used for DAYS days."
)
@_yes
@_as_json
def clean_command(partial: bool, unused: float | None, yes: bool, as_json: bool) -> None:
    """Delete unfinished downloads or unused models, after asking; scripts need --yes."""
    unused_records = [] if unused is None else fetch.unused(unused)
    unfinished = fetch.leftovers() if partial or unused is None else []
    if unfinished or unused_records:
        total = _show_waste(unfinished, unused_records)
        if not yes:
            _confirm(f"these {format_bytes(total)}")
    freed = sum(leftover.num_bytes for leftover in unfinished)
    for leftover in unfinished:
        fetch.remove_leftover(leftover)
    freed += sum(fetch.remove(record.name) for record in unused_records)
    fetch.forget_missing()
    if as_json:
        removed = [str(leftover.path) for leftover in unfinished]
        removed += [record.name for record in unused_records]
        _print_json({"removed": removed, "freed_bytes": freed})
    else:
        is_clean = not unfinished and not unused_records
        click.echo("There is nothing to clean." if is_clean else f"{format_bytes(freed)} freed.")


_ALIASES = {"rm": remove_command, "pull": pull.command}
for _alias, _original in _ALIASES.items():
    _hidden = copy.copy(_original)
    _hidden.hidden = True
    command.add_command(_hidden, _alias)


def _show_waste(unfinished: Sequence[Leftover], unused_records: Sequence[ModelRecord]) -> int:
    """Print the unfinished downloads and unused models that `models clean` would delete.

    Returns their size in bytes.
    """
    rows = [
        (leftover.num_bytes, f"{leftover.path} (an unfinished download)") for leftover in unfinished
    ]
    rows += [
        (record.num_bytes, f"{record.name}, last used {_ago(record.last_used)}")
        for record in unused_records
    ]
    for size, text in rows:
        click.echo(printable(f"{format_bytes(size):>10}  {text}"), err=True)
    return sum(size for size, _ in rows)


def _confirm(description: str) -> None:
    """Ask the user whether to delete files; without a terminal, raise UsageError.

    `description` names the files.
    """
    if not sys.stdin.isatty():
        raise UsageError(f"This would delete {description}: confirm it with --yes.")
    click.confirm(f"Delete {description}?", abort=True, err=True)


def _facts(record: ModelRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "title": record.title,
        "good_for": record.good_for,
        "family": record.family,
        "file_bytes": record.num_bytes,
        "licence": record.licence,
        "source": list(record.source),
        "path": str(record.path) if record.is_here else None,
        "last_used": record.last_used if record.is_here else None,
        "format": record.number_format,
        "runs": _runs(record),
    }


def _runs(record: ModelRecord) -> bool:
    return record.family is None or record.family in ARCHITECTURES


def _row(record: ModelRecord) -> tuple[str, ...]:
    used = _ago(record.last_used) if record.is_here else "not here"
    used = used if _runs(record) else "not supported yet"
    licence = (record.licence or "unknown").split(" (")[0]
    size = format_bytes(record.num_bytes)
    format_ = record.number_format or "?"
    return (record.name, record.family or "?", format_, size, licence, used, record.good_for or "")


def _print_json(value: object) -> None:
    click.echo(encode_json(value).decode())


def _ago(moment: float | None) -> str:
    if moment is None:
        return "?"
    days = int((time.time() - moment) // 86400)
    return ("today", "yesterday")[days] if 0 <= days < 2 else f"{counted_noun(days, 'day')} ago"
