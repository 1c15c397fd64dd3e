"""`twostroke models`: list, verify and remove models."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from twostroke.cli.fetch import watcher
from twostroke.cli.help import Group
from twostroke.cli.terminal import Bar, printable


@click.group("models", cls=Group, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the models that can be named, and those that are here; or act on one."""
    if ctx.invoked_subcommand is None:
        _list(as_json=as_json)


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def list_command(as_json: bool) -> None:
    """List the models that can be named, and those that are here."""
    _list(as_json=as_json)


@command.command("verify")
@click.argument("model")
def verify_command(model: str) -> None:
    """Hash MODEL's file again and compare it with its checksum."""
    from twostroke.weights import verify

    with Bar() as bar:
        verify(model, watcher(bar, model))
    click.echo(f"{model} matches its checksum.")


@command.command("remove")
@click.argument("model")
def remove_command(model: str) -> None:
    """Delete MODEL's file from the cache."""
    from twostroke.weights import remove

    freed = remove(model)
    click.echo(f"Removed {model}: {freed / 1e6:,.0f} MB are free again.")


def _list(*, as_json: bool) -> None:
    from twostroke.weights import list_models

    listings = list_models()
    if as_json:
        rows = [asdict(one) | {"path": str(one.path) if one.path else None} for one in listings]
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    table = [("NAME", "MODEL", "SIZE", "LICENCE", "HERE")]
    for one in listings:
        size = f"{one.file_bytes / 1e6:,.0f} MB" if one.file_bytes else "?"
        here = "yes" if one.path else "no" if one.runs else "not supported yet"
        table.append((one.name, one.title, size, one.licence or "", here))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [
            cell.rjust(width) if heading == "SIZE" else cell.ljust(width)
            for cell, width, heading in zip(row, widths, table[0], strict=True)
        ]
        click.echo(printable("  ".join(cells).rstrip()))
