"""`twostroke models`: list, verify and remove models."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from twostroke.cli.fetch import ProgressBar


@click.group("models", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the models that can be named, and those that are here; or act on one."""
    if ctx.invoked_subcommand is not None:
        return
    from twostroke.weights import list_models

    listings = list_models()
    if as_json:
        rows = [asdict(one) | {"path": str(one.path) if one.path else None} for one in listings]
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("NAME", "MODEL", "SIZE", "LICENCE", "HERE"):
        table.add_column(heading, justify="right" if heading == "SIZE" else "left")
    for one in listings:
        size = f"{one.file_bytes / 1e6:,.0f} MB"
        table.add_row(one.name, one.title, size, one.licence or "", "yes" if one.path else "")
    Console().print(table)


@command.command("verify")
@click.argument("model")
def verify_command(model: str) -> None:
    """Hash MODEL's file again and compare it with its checksum."""
    from twostroke.weights import verify

    with ProgressBar(model) as bar:
        verify(model, bar.watch)
    click.echo(f"{model} matches its checksum.")


@command.command("remove")
@click.argument("model")
def remove_command(model: str) -> None:
    """Delete MODEL's file from the cache."""
    from twostroke.weights import remove

    freed = remove(model)
    click.echo(f"Removed {model}: {freed / 1e6:,.0f} MB are free again.")
