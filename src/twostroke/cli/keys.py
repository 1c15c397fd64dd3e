"""`twostroke keys`: makes, lists, limits and revokes API keys in records or in a store."""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import asdict, replace

from twostroke.cli.help import CommandGroup, NumberOrWordParam, option
from twostroke.cli.key_storage import open_key_storage, storage_options
from twostroke.cli.terminal import show_table
from twostroke.core.errors import UsageError
from twostroke.core.message_text import counted_noun
from twostroke.server.auth import stored_keys
from twostroke.server.http.api_key import Key, KeyLimits
from twostroke.server.storage import open_database

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_HEAD: Final = (
    *("ID", "NAME", "TENANT", "CLASSES"),
    *("WEIGHT", "REQUESTS/MIN", "TOKENS/MIN", "PARALLEL", "OVERFLOW"),
)
_TIMES: Final = ("CREATED", "EXPIRES", "LAST USED", "STATE")
_UNIT_SECONDS: Final = {"h": 3600, "d": 86_400}
_NONE: Final = "none"


class ExpiryParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: the time at which an API key expires.

    It is a duration from now, a date, a date and time in UTC, or "none".
    """

    name = "when"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | str:
        """Return the time at which the key expires as Unix time, or "none"."""
        text = str(value)
        if text == _NONE:
            return text
        if match := re.fullmatch(r"(\d{1,5})([hd])", text):
            return time.time() + int(match[1]) * _UNIT_SECONDS[match[2]]
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.fail(f"'{text}' is not a time: write 90d, 12h, 2027-01-31 or none.", param, ctx)
        at_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if at_s <= time.time():
            self.fail(f"'{text}' is over.", param, ctx)
        return at_s


class ServiceTiersParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: service tiers that an API key may use, separated by commas, or all."""

    name = "classes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...] | str:
        """Return the names of the service tiers, or "none" if all are allowed."""
        del param, ctx
        if value == "all" or not isinstance(value, str):
            return _NONE if value == "all" else tuple(value)
        return tuple(dict.fromkeys(word.strip() for word in value.split(",")))


_as_json = option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
_COUNT: Final = NumberOrWordParam(_NONE)


def _limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that limit an API key to a command, `keys add` or `keys limit`."""
    options = [
        option("--requests-per-minute", type=_COUNT, help="Most requests per minute, or none."),
        option("--tokens-per-minute", type=_COUNT, help="Most tokens per minute, or none."),
        option("--parallel", type=_COUNT, help="Most requests at the same time, or none."),
        option(
            "--classes",
            type=ServiceTiersParam(),
            help="Classes of service that the key may use, such as default,flex, or all.",
        ),
        option(
            "--weight",
            type=float,
            help="The key's share of the engine under load, relative to other keys.",
        ),
        option(
            "--overflow/--no-overflow",
            default=None,
            help="Whether a router may send the key's requests to APIs of vendors [default: yes].",
        ),
        option(
            "--expires",
            type=ExpiryParam(),
            help="When the key expires: 90d, 12h, 2027-01-31 (UTC), or none.",
        ),
    ]
    for add_option in reversed(options):
        command = add_option(command)
    return command


@click.group("keys", cls=CommandGroup)
def command() -> None:
    """Make, list, limit and revoke the API keys of a server, whether it runs or not."""


@command.command("add")
@click.argument("name")
@storage_options
@option("--tenant", help="The tenant that the key belongs to [default: NAME].")
@_limit_options
@_as_json
def add_command(
    name: str,
    records: Path | None,
    store: str | None,
    tenant: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Make a key called NAME, and print it. It cannot be printed again."""
    facts = _changed_fields(Key(tenant="", digest=""), values)
    owner = name if tenant is None else tenant
    num_keyless, is_new = 0, False
    if records is not None and store is None:
        new_key, text, num_keyless, is_new = _add_to_records(records, name, owner, facts)
    else:
        with open_key_storage(records, store, writes=True) as storage:
            new_key, text = storage.add(name, owner, **facts)
    if as_json:
        click.echo(json.dumps(_printed_fields(new_key, None) | {"key": text}))
        return
    click.echo(text)
    if num_keyless:
        batches = counted_noun(num_keyless, "open batch was", "open batches were")
        warning = f"{batches} made without a key. From now on requests need one:"
        click.echo(f"{warning} unless TWOSTROKE_API_KEY is set, they are cancelled.", err=True)
    note = (
        f"Key {new_key.id} of the tenant {new_key.tenant}. Store it now: only its digest is kept."
    )
    click.echo(f"{note} The folder {records} is new." if is_new else note, err=True)


def _add_to_records(
    records: Path, name: str, tenant: str, facts: dict[str, Any]
) -> tuple[Key, str, int, bool]:
    """Add an API key to a server's database.

    Returns the key, its text, the number of open batches that no key has created, and whether the
    folder `records` is new. The number is only counted if this is the first key.
    """
    is_new, mark = not _may_exist(records), stored_keys.keys_marker(records)
    with ExitStack() as undo:
        with open_database(records, writes=True, creates=True) as db:
            is_first = not stored_keys.newest_change(db)
            new_key, text = stored_keys.add(db, name, tenant, **facts)
            keyless = "SELECT count(*) FROM batches WHERE is_open AND tenant = ''"
            [num_keyless] = db.execute(keyless).fetchone() if is_first else [0]
            if not mark.is_there:
                undo.callback(mark.remove)
            mark.make()  # if this fails, the new key is dropped, since it was not printed
        undo.pop_all()
    return new_key, text, num_keyless, is_new


@command.command("list")
@storage_options
@option("--all", "has_all", is_flag=True, help="Show revoked keys as well.")
@_as_json
def list_command(records: Path | None, store: str | None, has_all: bool, as_json: bool) -> None:
    """List the keys: their names and limits, not the secrets."""
    with open_key_storage(records, store) as storage:
        keys = storage.all_keys()
    listed = [(key, used) for key, used in keys if has_all or key.revoked_at is None]
    if as_json:
        click.echo(json.dumps([_printed_fields(key, used) for key, used in listed]))
        return
    if listed:
        show_table(
            [(*_HEAD, *_TIMES), *(_row(key, used) for key, used in listed)], right={4, 5, 6, 7}
        )
        return
    click.echo("All keys are revoked: servers refuse everybody." if keys else "There are no keys.")


@command.command("limit")
@click.argument("key")
@storage_options
@_limit_options
@_as_json
def limit_command(
    key: str, records: Path | None, store: str | None, as_json: bool, **values: Any
) -> None:
    """Change the limits of KEY, which is an id or a name."""
    if all(value is None for value in values.values()):
        raise UsageError("Give at least one limit to change, such as --requests-per-minute 60.")
    with open_key_storage(records, store, writes=True) as storage:
        old = storage.find(key)
        new = storage.change(old, **_changed_fields(old, values))
    if as_json:
        click.echo(json.dumps(_printed_fields(new, None)))
    else:
        show_table([_HEAD, _row(new, None)[: len(_HEAD)]], right={4, 5, 6, 7})


@command.command("revoke")
@click.argument("key")
@storage_options
@_as_json
def revoke_command(key: str, records: Path | None, store: str | None, as_json: bool) -> None:
    """Revoke KEY, which is an id or a name, for ever."""
    with open_key_storage(records, store, writes=True) as storage:
        revoked = storage.change(storage.find(key), revoked_at=time.time())
    if as_json:
        click.echo(json.dumps(_printed_fields(revoked, None)))
    else:
        click.echo(f"Revoked {revoked.id} ({revoked.name}): servers refuse it within a second.")


def _may_exist(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # reported when the path is used
        return True


def _changed_fields(key: Key, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an API key that the command's options change.

    Raises:
        UsageError: a limit is 0 or out of range.
    """
    named = {name: value for name, value in values.items() if value is not None}
    values = {name: None if value == _NONE else value for name, value in named.items()}
    facts: dict[str, Any] = {}
    for name in KeyLimits.__struct_fields__:
        if values.get(name) == 0:
            option = f"--{name.replace('_', '-')}"
            reason = (
                "must be at least 1, or none for no limit; `twostroke keys revoke` refuses a key."
            )
            raise UsageError(f"{option} {reason}")
    try:
        if "weight" in values:
            facts["weight"] = replace(key, weight=values.pop("weight")).weight
        if "overflow" in values:
            facts["overflow"] = values.pop("overflow")
        if "expires" in values:
            facts["expires_at"] = values.pop("expires")
        if "classes" in values:
            facts["classes"] = replace(key, classes=values.pop("classes")).classes
        return facts | ({"limits": replace(key.limits, **values)} if values else {})
    except UsageError as error:
        raise UsageError(error.sentence(lambda field: f"--{field.replace('_', '-')}")) from None


def _printed_fields(key: Key, last_used: int | None) -> dict[str, Any]:
    """Return the fields of an API key as --json prints them, without the key's digest."""
    facts = asdict(key) | {"limits": asdict(key.limits), "last_used": last_used}
    del facts["digest"]
    return facts | {"state": key.state}


def _row(key: Key, last_used: int | None) -> tuple[str, ...]:
    limits = [getattr(key.limits, name) for name in KeyLimits.__struct_fields__]
    times = (key.created_at, key.expires_at, last_used)
    counts = ("-" if limit is None else f"{limit:,}" for limit in limits)
    identity = (key.id, key.name, key.tenant, ",".join(key.classes or ("all",)), f"{key.weight:g}")
    overflow = "yes" if key.overflow else "no"
    return (*identity, *counts, overflow, *map(_day, times), key.state)


def _day(at_s: float | None) -> str:
    return "-" if at_s is None else f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M}"
