"""Prices of APIs: what a request costs by cached tokens, context, hour of day and patience."""

from __future__ import annotations

import csv
import re
from importlib import resources
from io import StringIO
from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.errors import UsageError, nearest
from twostroke.core.files import read_small_file
from twostroke.core.frozen import Frozen, check_range

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_STALE_MONTHS: Final = 6
_DATE: Final = re.compile(r"20\d\d-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?")
_SPAN: Final = re.compile(r"(\d{1,2})-(\d{1,2})")


class ApiPrice(Frozen, forbid_unknown_fields=True, kw_only=True):
    """A vendor's prices for a million tokens.

    `batch_share` is what a request that can wait costs of the others, `tier_...` are prices of
    requests with more than `tier_tokens` of input, and `peak_factor` multiplies in `peak_hours_utc`
    (such as "1-4 6-10"; an end is not included).
    """

    model: str
    input_usd_per_1m: float
    output_usd_per_1m: float
    source_date: str
    cached_input_usd_per_1m: float | None = None
    cache_write_usd_per_1m: float | None = None
    batch_share: float = 1.0
    tier_tokens: int | None = None
    tier_input_usd_per_1m: float | None = None
    tier_cached_usd_per_1m: float | None = None
    tier_output_usd_per_1m: float | None = None
    peak_hours_utc: str = ""
    peak_factor: float = 1.0
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse what is not a price."""
        check_range(self, "input_usd_per_1m", "peak_factor", most=1e6)
        check_range(self, "output_usd_per_1m", "cached_input_usd_per_1m", least=0, most=1e6)
        check_range(self, "tier_input_usd_per_1m", "tier_output_usd_per_1m", most=1e6)
        check_range(self, "cache_write_usd_per_1m", "tier_cached_usd_per_1m", least=0, most=1e6)
        check_range(self, "batch_share", least=0, most=1)
        check_range(self, "tier_tokens", least=1, most=1 << 40)
        if not _DATE.fullmatch(self.source_date):
            reason = f"must be a month such as 2026-07, got '{self.source_date}'."
            raise UsageError(reason, field="source_date")
        if not all(0 <= first < end <= 24 for first, end in self._spans()):
            reason = f"must be hours such as 1-4 or 22-24 0-2, got '{self.peak_hours_utc}'."
            raise UsageError(reason, field="peak_hours_utc")

    def hour_usd(self, hour: int, requests: float, prompt: int, cached: int, output: int) -> float:
        """Return the price of an hour's requests, `cached` tokens of each prompt being shared.

        They are written once an hour and read by the other requests.
        """
        is_long = self.tier_tokens is not None and prompt > self.tier_tokens
        fresh, read = self.input_usd_per_1m, self.cached_input_usd_per_1m
        answer = self.output_usd_per_1m
        if is_long:
            fresh = self.tier_input_usd_per_1m or fresh
            read = read if self.tier_cached_usd_per_1m is None else self.tier_cached_usd_per_1m
            answer = self.tier_output_usd_per_1m or answer
        usd = requests * ((prompt - cached) * fresh + output * answer) / 1e6
        if requests > 0 and cached:
            share = 1.0 if read is None else read / fresh
            write = (self.cache_write_usd_per_1m or self.input_usd_per_1m) / self.input_usd_per_1m
            if requests < 1:  # not even one an hour: all are written
                usd += requests * cached * fresh * write / 1e6
            else:
                usd += cached_prompt_usd(
                    num_tokens=cached,
                    calls=requests,
                    usd_per_million=fresh,
                    read_share=share,
                    write_share=write,
                )
        return usd * (self.peak_factor if hour in self._peak_hours else 1.0)

    @property
    def _peak_hours(self) -> set[int]:
        return {hour for first, end in self._spans() for hour in range(first, end)}

    def _spans(self) -> list[tuple[int, int]]:
        """Return the first hour of each span and the one after its last; (0, 0) for no span."""
        found = [_SPAN.fullmatch(one) for one in self.peak_hours_utc.split()]
        return [(int(one[1]), int(one[2])) if one else (0, 0) for one in found]

    def months_old(self, today: str) -> int:
        """Return the months from its date to `today` (year-month)."""
        (year, month), (then, month_then) = (
            map(int, one.split("-")[:2]) for one in (today, self.source_date)
        )
        return 12 * (year - then) + month - month_then

    def is_stale(self, today: str) -> bool:
        """Whether it is so old that it has probably changed."""
        return self.months_old(today) > _STALE_MONTHS


def known_prices(path: Path | None = None) -> dict[str, ApiPrice]:
    """Return the prices of the table, or those of a user's CSV file with its columns, by model.

    Raises:
        UsageError: the file has a wrong line.
        ModelFormatError: it cannot be read.
    """
    if path is None:
        source = resources.files("twostroke.lab.planner").joinpath("prices.csv")
        return _read(source.read_text("utf-8"), "prices.csv")
    try:
        return _read(read_small_file(path).decode(), path.name)
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is not UTF-8 text.") from None


def find_price(name: str, known: Mapping[str, ApiPrice]) -> ApiPrice:
    """Return the price called `name`, in upper or lower case; UsageError if there is none."""
    found = {key.lower(): price for key, price in known.items()}.get(name.lower())
    if found is None:
        reason = f"must be one of {', '.join(known)}; got '{{value}}'.{nearest(name, known)}"
        raise UsageError(reason, field="apis", value=name)
    return found


def _read(text: str, name: str) -> dict[str, ApiPrice]:
    rows = csv.DictReader(StringIO(text))
    try:
        return _read_rows(rows, name)
    except csv.Error as error:
        raise UsageError(f"{name}, line {rows.reader.line_num}: {error}.") from None


def _read_rows(reader: csv.DictReader[str], name: str) -> dict[str, ApiPrice]:
    found = dict[str, ApiPrice]()
    fields = ApiPrice.__struct_fields__
    for column in reader.fieldnames or ():
        if column not in fields:
            hint = nearest(column, fields)
            raise UsageError(f"{name}, line 1: there is no column '{column}'.{hint}")
    for row in reader:
        place = f"{name}, line {reader.line_num}"
        if None in row:
            raise UsageError(f"{place}: there are more values than columns.")
        given = {key: value for key, value in row.items() if value}
        try:
            price = msgspec.convert(given, ApiPrice, strict=False)
        except UsageError as error:  # of __post_init__
            raise UsageError(f"{place}: {error}") from None
        except msgspec.ValidationError as error:
            text = f"{place}: {error}. It needs a model, input_usd_per_1m, output_usd_per_1m and "
            raise UsageError(f"{text}source_date (2026-07); numbers such as 2.5 or 1e1.") from None
        if found.setdefault(price.model, price) is not price:
            raise UsageError(f"{place}: there is another line for '{price.model}'.")
    if not found:
        raise UsageError(f"{name} has no prices.")
    return found


def usd_per_million_tokens(usd_per_hour: float, tokens_per_s: float) -> float:
    """Return the price of a million tokens on devices that cost `usd_per_hour`."""
    return usd_per_hour / 3600 / tokens_per_s * 1e6


def cached_prompt_usd(
    *, num_tokens: int, calls: float, usd_per_million: float, read_share: float, write_share: float
) -> float:
    """Return the price of a cached prefix: the first call writes it, the other calls read it.

    `read_share` and `write_share` are the prices of a cache read and a cache write, as shares of
    the price of uncached input (`usd_per_million`).
    """
    usd = num_tokens * usd_per_million / 1e6
    return usd * (write_share + read_share * (calls - 1))
