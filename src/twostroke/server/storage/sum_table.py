"""Database tables that sum up counts by day and owner, and notice damaged rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twostroke.server.storage.row_digests import digest_in_sql, is_intact_in_sql, row_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from sqlite3 import Connection


class SumTable:
    """A database table with sums of counts, one row for each owner.

    An owner is a tuple whose first value is a day, for example a day, a tenant and a model. In
    `row_digests.COLUMNS`, the columns of the owner come first, and then the counts.
    """

    def __init__(
        self, name: str, owner_columns: tuple[str, ...], count_columns: tuple[str, ...]
    ) -> None:
        """Prepare the SQL statements for the table `name`."""
        columns = ", ".join((*owner_columns, *count_columns))
        placeholders = ", ".join("?" for _ in (*owner_columns, *count_columns, "row_digest"))
        increments = ", ".join(f"{count} = {count} + excluded.{count}" for count in count_columns)
        sums = ", ".join(
            (
                *(f"CAST({name}.{column} AS BLOB)" for column in owner_columns),
                *(f"CAST({name}.{count} + excluded.{count} AS BLOB)" for count in count_columns),
            )
        )
        self._num_owner_columns = len(owner_columns)
        # A sum with a damaged count stays damaged.
        self._insert = f"""
            INSERT INTO {name} ({columns}, row_digest) VALUES ({placeholders})
            ON CONFLICT DO UPDATE SET {increments},
                row_digest = CASE WHEN {name}.row_digest = {digest_in_sql(name)}
                    THEN row_digest({sums}) ELSE {name}.row_digest END
        """  # noqa: S608 constants
        self._select = f"""
            SELECT {columns}, {is_intact_in_sql(name)} FROM {name}
            WHERE day BETWEEN ? AND ? ORDER BY {", ".join(owner_columns)}
        """  # noqa: S608 constants

    def add(
        self, db: Connection, rows: Iterable[tuple[tuple[str | int, ...], Iterable[int]]]
    ) -> None:
        """Add counts to the sums of their owners; `rows` are pairs of an owner and its counts."""
        values = [(*owner, *counts) for owner, counts in rows]
        db.executemany(self._insert, [(*row, row_digest(row)) for row in values])

    def read(
        self, db: Connection, since: str, until: str, *, is_damaged: bool = False
    ) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Yield the owner and the counts of each row from the day `since` to the day `until`.

        Without `is_damaged`, damaged rows are left out; with it, intact rows are left out.
        """
        for row in db.execute(self._select, (since, until)):
            owner, counts = row[: self._num_owner_columns], row[self._num_owner_columns : -1]
            is_intact = bool(row[-1]) and all(isinstance(count, int) for count in counts)
            if is_intact is not is_damaged:
                yield owner, counts
