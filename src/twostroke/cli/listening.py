"""The options of `serve` and `route` about their address and their clients, and what both do."""

from __future__ import annotations

import logging
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli.help import option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.server.storage import Records

_logger = logging.getLogger("twostroke.serve")


def listening(*, port: int, records: str) -> Callable[[Any], Any]:
    """Return a decorator that adds the options; `records` is what a folder is for."""
    options = [
        option("--host", default="127.0.0.1", help="Address to listen at."),
        option("--port", type=int, default=port, help="Port to listen at; 0 takes a free one."),
        option(
            "--api-keys",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Demand an API key. Each line of FILE is KEY or TENANT KEY; the key in "
            "TWOSTROKE_API_KEY is accepted as well [default: no key is needed].",
        ),
        option(
            "--require-keys",
            is_flag=True,
            help="Refuse everybody while there is no API key, such as on a new folder of records.",
        ),
        option("--records", type=click.Path(path_type=Path), metavar="DIR", help=records),
        option(
            "--cors-origin",
            "cors_origins",
            multiple=True,
            metavar="ORIGIN",
            help="Let web pages of this origin, such as https://app.example, use the server; "
            "repeatable. '*' allows all, with keys.",
        ),
        option(
            "--allowed-host",
            "allowed_hosts",
            multiple=True,
            metavar="NAME",
            help="Answer to this host name, too, such as that of a proxy; repeatable. With keys "
            "any name is answered, unless this is given.",
        ),
        option(
            "--drain",
            "drain_s",
            type=float,
            default=30.0,
            help="Seconds, up to a day, that running answers may take when the server is stopped.",
        ),
    ]

    def add(command: Any) -> Any:
        for one in reversed(options):
            command = one(command)
        return command

    return add


@contextmanager
def open_records(path: Path | None) -> Iterator[Records | None]:
    """Open the records before the model is loaded, so that a fault is reported at once."""
    if path is None:
        yield None
        return
    from twostroke.server.storage import Records

    with closing(Records(path)) as records:
        yield records


def say_stop(num_running: int, *, form: str) -> None:
    """Say that the server stops, once the running answers are out."""
    text = "Stopping."
    if num_running:
        answers = "1 running answer" if num_running == 1 else f"{num_running} running answers"
        text = f"Stopping after {answers}; Ctrl-C again cuts them off."
    if form == "json":
        _logger.info(text)
    else:
        tell(text)


def tell(text: str) -> None:
    """Print to standard error; a log on a full disk must not stop the server."""
    with suppress(OSError):
        click.echo(text, err=True)
