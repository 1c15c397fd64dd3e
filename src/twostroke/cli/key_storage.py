"""The options of `keys` and `usage` that name where keys and usage are stored."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli.help import option
from twostroke.core.errors import UsageError
from twostroke.server.auth import costs, stored_keys, usage
from twostroke.server.storage import open_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.server.auth.costs import CostAmount, CostOwner
    from twostroke.server.auth.usage import Amount, Owner
    from twostroke.server.http.api_key import Key


class KeyStorage:
    """API keys and their usage, in a server's database or in the store of several routers.

    The methods are the functions of `server/auth/stored_keys.py`, `usage.py` and `costs.py`, or of
    `fleet/shared_records/stored.py` and `stored_costs.py`, without their argument for the database
    or store.
    """

    def __init__(self, keys: Any, usage: Any, costs: Any, connection: Any) -> None:
        """Bind the functions of three modules to a database or to a connection to Redis."""
        self.add: Callable[..., tuple[Key, str]] = partial(keys.add, connection)
        self.find: Callable[[str], Key] = partial(keys.find, connection)
        self.change: Callable[..., Key] = partial(keys.change, connection)
        self.all_keys: Callable[[], list[tuple[Key, int | None]]] = partial(
            keys.all_keys, connection
        )
        self.amounts: Callable[[str, str], list[Amount]] = partial(usage.amounts, connection)
        self.damaged_owners: Callable[[str, str], list[Owner]] = partial(
            usage.damaged_owners, connection
        )
        self.costs: Callable[[str, str], list[CostAmount]] = partial(costs.amounts, connection)
        self.damaged_costs: Callable[[str, str], list[CostOwner]] = partial(
            costs.damaged_owners, connection
        )


def storage_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options `--records` and `--store` to a command."""
    records = option(
        "--records",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="The folder of records of a server or of a single router.",
    )
    store = option(
        "--store",
        metavar="URL",
        help="The Redis server of several routers, such as redis://HOST:6379/0.",
    )
    decorated: Callable[..., Any] = records(store(command))
    return decorated


@contextmanager
def open_key_storage(
    records: Path | None, store: str | None, *, writes: bool = False
) -> Iterator[KeyStorage]:
    """Open the keys and the usage that the options name.

    `writes` locks a database for changes; the store needs no lock.

    Raises:
        UsageError: none or both of the options are given, or the store is not usable.
        RecordsError: the database cannot be read.
        StoreError: the store does not answer.
    """
    if (records is None) == (store is None):
        raise UsageError("Give either --records DIR or --store URL.")
    if records is not None:
        with open_database(records, writes=writes) as db:
            yield KeyStorage(stored_keys, usage, costs, db)
        return
    assert store is not None
    from twostroke.fleet.shared_records import stored, stored_costs
    from twostroke.fleet.shared_records.store import open_store

    with open_store(store) as client:
        yield KeyStorage(stored, stored, stored_costs, client)
