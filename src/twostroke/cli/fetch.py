"""Making a model ready, with a bar: fetching it if need be, then loading it."""

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
_PATIENCE_S = 0.4  # a small model is loaded before a bar could be read


def fetch(model: str, *, quiet: bool = False) -> Path:
    """Return where `model` lies; a catalogue model that is not in the cache is fetched first.

    Raises:
        ModelNotFoundError: neither a path nor a known name.
        DownloadError: it cannot be fetched whole.
    """
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
    """Fetch `model`, and its draft, if need be, load it, and start an engine for it.

    `accept` may refuse the model before its weights are read.

    Raises:
        TwostrokeError: as `fetch` and `engine.build.build`.
    """
    from twostroke.engine.build import build

    label = f"Loading {fetch(model, quiet=quiet).name}"
    if options.speculation.draft not in {None, PARTNER}:
        fetch(str(options.speculation.draft), quiet=quiet)
    with Bar(patience_s=_PATIENCE_S, quiet=quiet) as bar:
        return build(model, options, lambda done, total: bar.show(label, done, total), accept)


def watcher(bar: Bar, model: str) -> Watcher:
    """Return what shows a pull's or a check's progress on `bar`."""

    def watch(progress: Progress) -> None:
        if progress.note is not None:
            bar.say(progress.note)
            return
        label = f"{_PHASES[progress.phase]} {model}"
        bar.show(label, progress.done_bytes, progress.total_bytes)

    return watch
