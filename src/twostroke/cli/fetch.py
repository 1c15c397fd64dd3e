"""Fetches and loads a model, with a progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.cli.terminal import Bar
from twostroke.core.config import PARTNER

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.core.config import EngineOptions
    from twostroke.engine.build import Engine
    from twostroke.engine.client import ModelCard
    from twostroke.fetch import Progress, Watcher

_PHASES: Final = {
    "wait": "Waiting for another download of",
    "download": "Downloading",
    "unpack": "Unpacking",
    "verify": "Verifying",
}
_PATIENCE_S = 0.4  # small models load faster than a bar can be read


def fetch(model: str, *, quiet: bool = False) -> Path:
    """Return the path of `model`, after fetching it if it is not here; errors as `pull`."""
    from twostroke.engine.loading import pull

    with Bar(quiet=quiet) as bar:
        return pull(model, watcher(bar, model))


def open_engine(
    model: str,
    options: EngineOptions,
    *,
    quiet: bool = False,
    accept: Callable[[ModelCard], None] | None = None,
) -> Engine:
    """Return an engine for `model`, which is fetched first if it is not here, as is its draft.

    `accept` may refuse the model before its weights are read. Errors as `pull` and `build`.
    """
    from twostroke.engine.build import build

    label = f"Loading {fetch(model, quiet=quiet).name}"
    if options.speculation.draft not in {None, PARTNER}:
        fetch(str(options.speculation.draft), quiet=quiet)
    with Bar(patience_s=_PATIENCE_S, quiet=quiet) as bar:
        return build(model, options, lambda done, total: bar.show(label, done, total), accept)


def watcher(bar: Bar, model: str) -> Watcher:
    """Return a function that shows progress on `bar`."""

    def watch(progress: Progress) -> None:
        if progress.note is not None:
            bar.say(progress.note)
            return
        label = f"{_PHASES[progress.phase]} {model}"
        bar.show(label, progress.done_bytes, progress.total_bytes)

    return watch
