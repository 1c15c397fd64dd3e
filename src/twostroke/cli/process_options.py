"""The options of `serve` and `route` about logs and records, and the messages at their stop."""

from __future__ import annotations

import logging
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from twostroke.core.message_text import counted_noun
from twostroke.core.option_schema import Option, OptionStruct, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.server.storage import Records

_logger = logging.getLogger("twostroke.serve")


class ProcessOptions(OptionStruct):
    """The options of `serve` and `route` about logs and records."""

    records: Annotated[
        Path | None,
        Option(
            "--records",
            form="path",
            metavar="DIR",
            default="none are kept",
            help="Keep API keys, with their limits and usage, in this folder, across restarts; "
            "`serve` also keeps files and batches there. `route` needs TWOSTROKE_REPLICA_KEY, "
            "here and at its replicas.",
        ),
    ] = None
    require_keys: Annotated[
        bool,
        Option(
            "--require-keys",
            help="Refuse every request while there is no API key, such as with a new folder of "
            "records.",
        ),
    ] = False
    log_format: Annotated[
        str,
        Option(
            "--log-format",
            section="Observing",
            choices=("text", "json"),
            help="Format of log lines.",
        ),
    ] = "text"
    log_level: Annotated[
        str,
        Option(
            "--log-level",
            section="Observing",
            choices=("debug", "info", "warning", "error"),
            help="Lowest level that is logged.",
        ),
    ] = "info"

    def __post_init__(self) -> None:
        """Raise UsageError if the options are not valid."""
        check(self)


@contextmanager
def open_records(path: Path | None) -> Iterator[Records | None]:
    """Open the database of files, keys and usage in a folder during the `with` block.

    Yields None if `path` is None.
    """
    if path is None:
        yield None
        return
    from twostroke.server.storage import Records

    with closing(Records(path)) as records:
        yield records


def announce_stop(num_running: int, *, log_format: str) -> None:
    """Tell the user that the server stops after its `num_running` running answers.

    The message is printed, or logged if `log_format` is JSON.
    """
    text = "Stopping."
    if num_running:
        answers = counted_noun(num_running, "running answer")
        text = f"Stopping after {answers}; Ctrl-C again cuts them off."
    if log_format == "json":
        _logger.info(text)
    else:
        print_to_stderr(text)


def print_to_stderr(text: str) -> None:
    """Print a line to standard error; ignore a failure, such as a full disk."""
    with suppress(OSError):
        click.echo(text, err=True)
