"""`twostroke cache`: lists, fills, checks and cleans the folder of a page cache."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import to_builtins

from twostroke.cli.help import Command, CommandGroup, NumberParam, TextFileParam, option
from twostroke.cli.options import MACHINE_PARAMS, click_params, engine_options
from twostroke.cli.pull import open_engine
from twostroke.cli.terminal import show_table
from twostroke.core.distributed_options import OffloadOptions
from twostroke.core.errors import UsageError
from twostroke.core.message_text import counted_noun, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.engine.engine import Engine

_DAY_S: Final = 86_400.0
_FLUSH_TIMEOUT_S: Final = 600.0
_HEAD: Final = (
    *("MODEL", "KV", "ARITHMETIC", "PAGES", "TOKENS"),
    *("SIZE", "SAVES", "LAST USED (UTC)", "KEPT", "KEPT UNTIL (UTC)"),
)
_folder = click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
_as_json = option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@click.group("cache", cls=CommandGroup)
def command() -> None:
    """List, fill, check and clean DIR, the --page-cache of servers, while they run or not."""


@command.command("ls")
@_folder
@_as_json
def list_command(folder: Path, as_json: bool) -> None:
    """Show the stored pages by model, format and arithmetic, and the time that they save."""
    from twostroke.engine.kv_offload.folder import read_folder

    kinds = read_folder(folder, time.time())
    if as_json:
        click.echo(json.dumps([to_builtins(kind) for kind in kinds], indent=1))
        return
    rows = [
        (
            *(kind.model, kind.kv_format, kind.arithmetic),
            *(f"{kind.num_pages:,}", f"{kind.num_pages * kind.page_size:,}"),
            *(format_bytes(kind.num_bytes), f"{kind.saved_s:,.1f} s", _date(kind.used_s)),
            *(f"{kind.num_kept:,} of {kind.num_pages:,}", _date(kind.kept_until_s)),
        )
        for kind in kinds
    ]
    show_table([_HEAD, *rows], right=(3, 4, 5, 6, 8))


def _date(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M") if time_s else "-"


@command.command("verify")
@_folder
def verify_command(folder: Path) -> int:
    """Read all pages, and remove damaged ones."""
    from twostroke.engine.kv_offload.folder import read_folder, verify

    num_pages = sum(kind.num_pages for kind in read_folder(folder, time.time()))
    count = 0
    for path, fault, why in verify(folder):
        count += 1
        done = f"Not removed ({why}):" if why else "Removed"
        click.echo(f"{done} {path}: {fault}")
    click.echo(f"Read {counted_noun(num_pages, 'page', form=',')}; {count:,} were damaged.")
    return int(count > 0)


@command.command("clean")
@_folder
@option("--model", help="Remove pages of this model only, by its name in `ls`.")
@option(
    "--days", type=NumberParam(min=0), help="Remove pages that were not used for this many days."
)
@option(
    "--all", "is_all", is_flag=True, help="Remove all pages, also pages that are kept until a date."
)
def clean_command(folder: Path, model: str | None, days: float | None, is_all: bool) -> int:
    """Remove pages: all, pages of one model, or pages that were not used for some days."""
    from twostroke.engine.kv_offload.folder import clean

    if not is_all and days is None and model is None:
        raise UsageError("Name the pages to remove: --all, --days or --model.")
    before_s = time.time() - days * _DAY_S if days is not None else float("inf")
    count, num_bytes, why = clean(folder, model, before_s)
    others = f" Others cannot be removed: {why}." if why else ""
    click.echo(
        f"Removed {counted_noun(count, 'page', form=',')}, {format_bytes(num_bytes)}.{others}"
    )
    return int(bool(why))


@command.command(
    "warm",
    cls=Command,
    params=[*MACHINE_PARAMS, *click_params(OffloadOptions, without=("page_cache",))],
)
@click.argument("model")
@_folder
@option(
    "--system",
    "systems",
    type=TextFileParam(),
    multiple=True,
    help="File with a system prompt; repeatable.",
)
@option(
    "--prompt",
    "prompts",
    type=TextFileParam(),
    multiple=True,
    help="File with a whole prompt; repeatable.",
)
@option("--days", type=NumberParam(min=0), default=30.0, help="Days for which the pages are kept.")
def warm_command(model: str, folder: Path, **values: Any) -> int:
    """Compute prompts with MODEL, and store their KV pages in DIR before a server needs them.

    Give the same options as to the server, which can use only pages that match its options.
    """
    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams

    systems = values.pop("systems")
    prompts = values.pop("prompts")
    days = values.pop("days")
    if not systems and not prompts:
        raise UsageError("Name a prompt: --system FILE, or --prompt FILE.")
    values["page_cache"] = str(folder)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    with open_engine(model, engine_options(values, model)) as engine:
        num_tokens, are_written = 0, True
        for tokens in _prompts_to_warm(engine, systems, prompts):
            hints = Hints(keep_s=days * _DAY_S, shared_lengths=(len(tokens),))
            engine.client.generate(tokens, params, hints=hints).wait()
            num_tokens += len(tokens)
            are_written &= engine.client.loop.pages.flush(_FLUSH_TIMEOUT_S)
    where = f"their pages are in {folder}" if are_written else "their pages could not be written"
    click.echo(f"Read {counted_noun(num_tokens, 'token', form=',')}; {where}.")
    return int(not are_written)


def _prompts_to_warm(
    engine: Engine, systems: tuple[str, ...], prompts: tuple[str, ...]
) -> Iterator[list[int]]:
    """Yield the token sequences whose KV pages `twostroke cache warm` computes and stores.

    For each system prompt, these are the tokens with which all conversations with this system
    prompt begin. For each prompt, they are the prompt's tokens.
    """
    from twostroke.engine.prompts import encode_chat, encode_text

    for system in systems:
        # Two conversations that differ in the first character of the user's message.
        conversations = [
            encode_chat(
                engine.card,
                [{"role": "system", "content": system}, {"role": "user", "content": text}],
            )
            for text in ("a", "1")
        ]
        pairs = enumerate(zip(*conversations, strict=False))
        num_shared = next((index for index, (left, right) in pairs if left != right), 0)
        yield conversations[0][: max(1, num_shared)]
    for prompt in prompts:
        yield encode_text(engine.card, prompt)
