"""Prices of APIs, by cached tokens, context length, hour of the day and batch discount."""

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

_MAX_AGE_MONTHS: Final = 6  # older prices have probably changed
_DATE: Final = re.compile(r"20\d\d-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?")
_HOUR_RANGE: Final = re.compile(r"(\d{1,2})-(\d{1,2})")


class ApiPrice(Frozen, forbid_unknown_fields=True, kw_only=True):
    """A vendor's prices for an API model, in $ per million tokens.

    Attributes:
        model: name of the API's model.
        input_usd_per_1m, output_usd_per_1m: prices of input and output.
        source_date: month or day of the prices, such as 2026-07.
        cached_input_usd_per_1m: price of input from the prompt cache; None if there is no
            cache.
        cache_write_usd_per_1m: price of input that is written to the cache; None for the price
            of input.
        batch_share: price of batch requests as a share of the usual price.
        tier_tokens: requests with more input have the prices `tier_...`; None without a tier.
        peak_hours_utc: hours such as "1-4 6-10", without the last hour, in which all prices are
            multiplied by `peak_factor`.
        note: a remark.
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
        """Raise UsageError, with the field, if a price or its format is not valid."""
        check_range(self, "input_usd_per_1m", "peak_factor", high=1e6)
        check_range(self, "output_usd_per_1m", "cached_input_usd_per_1m", low=0, high=1e6)
        check_range(self, "tier_input_usd_per_1m", "tier_output_usd_per_1m", high=1e6)
        check_range(self, "cache_write_usd_per_1m", "tier_cached_usd_per_1m", low=0, high=1e6)
        check_range(self, "batch_share", low=0, high=1)
        check_range(self, "tier_tokens", low=1, high=1 << 40)
        if not _DATE.fullmatch(self.source_date):
            reason = f"must be a month such as 2026-07, got '{self.source_date}'."
            raise UsageError(reason, field="source_date")
        if not all(0 <= first < end <= 24 for first, end in self._hour_ranges()):
            reason = f"must be hours such as 1-4 or 22-24 0-2, got '{self.peak_hours_utc}'."
            raise UsageError(reason, field="peak_hours_utc")

    def hour_usd(
        self, hour: int, requests: float, *, prompt: int, cached: int, output: int
    ) -> float:
        """Return the API's price in $ for the requests of one hour of the day.

        `cached` tokens of each prompt are a shared prefix: the first request of the hour writes it
        to the cache, the other requests read it.
        """
        is_long = self.tier_tokens is not None and prompt > self.tier_tokens
        input_usd = self.input_usd_per_1m
        cached_usd = self.cached_input_usd_per_1m
        output_usd = self.output_usd_per_1m
        if is_long:
            input_usd = self.tier_input_usd_per_1m or input_usd
            if self.tier_cached_usd_per_1m is not None:
                cached_usd = self.tier_cached_usd_per_1m
            output_usd = self.tier_output_usd_per_1m or output_usd
        usd = requests * ((prompt - cached) * input_usd + output * output_usd) / 1e6
        if requests > 0 and cached:
            read_share = 1.0 if cached_usd is None else cached_usd / input_usd
            write_usd = self.cache_write_usd_per_1m or self.input_usd_per_1m
            write_share = write_usd / self.input_usd_per_1m
            if requests < 1:  # less than one request per hour: all requests write the prefix
                usd += requests * cached * input_usd * write_share / 1e6
            else:
                usd += cached_prompt_usd(
                    num_tokens=cached,
                    calls=requests,
                    usd_per_million=input_usd,
                    read_share=read_share,
                    write_share=write_share,
                )
        return usd * (self.peak_factor if hour in self._peak_hours else 1.0)

    @property
    def _peak_hours(self) -> set[int]:
        return {hour for first, end in self._hour_ranges() for hour in range(first, end)}

    def _hour_ranges(self) -> list[tuple[int, int]]:
        """Return the first hour and the end of each range of peak hours.

        A range that cannot be read is (0, 0).
        """
        matches = [_HOUR_RANGE.fullmatch(text) for text in self.peak_hours_utc.split()]
        return [(int(match[1]), int(match[2])) if match else (0, 0) for match in matches]

    def months_old(self, today: str) -> int:
        """Return the price's age in months, from `source_date` to `today` (such as 2026-07)."""
        year, month = map(int, today.split("-")[:2])
        source_year, source_month = map(int, self.source_date.split("-")[:2])
        return 12 * (year - source_year) + month - source_month

    def is_stale(self, today: str) -> bool:
        """Whether the API's price is so old that it has probably changed."""
        return self.months_old(today) > _MAX_AGE_MONTHS


def load_prices(path: Path | None = None) -> dict[str, ApiPrice]:
    """Return API prices by model, from the built-in table or a user's CSV file.

    The file has the columns of the table.

    Raises:
        UsageError: a line of the file is wrong.
        ModelFormatError: the file cannot be read.
    """
    if path is None:
        source = resources.files("twostroke.lab.planner").joinpath("prices.csv")
        return _read(source.read_text("utf-8"), "prices.csv")
    try:
        return _read(read_small_file(path).decode(), path.name)
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is not UTF-8 text.") from None


def find_price(name: str, prices: Mapping[str, ApiPrice]) -> ApiPrice:
    """Return the price of the API model called `name`, in any case; UsageError if there is none."""
    by_lower_name = {key.lower(): price for key, price in prices.items()}
    if name.lower() not in by_lower_name:
        reason = f"must be one of {', '.join(prices)}; got '{{value}}'.{nearest(name, prices)}"
        raise UsageError(reason, field="apis", value=name)
    return by_lower_name[name.lower()]


def _read(text: str, name: str) -> dict[str, ApiPrice]:
    rows = csv.DictReader(StringIO(text))
    try:
        return _read_rows(rows, name)
    except csv.Error as error:
        raise UsageError(f"{name}, line {rows.reader.line_num}: {error}.") from None


def _read_rows(reader: csv.DictReader[str], name: str) -> dict[str, ApiPrice]:
    prices = dict[str, ApiPrice]()
    fields = ApiPrice.__struct_fields__
    for column in reader.fieldnames or ():
        if column not in fields:
            hint = nearest(column, fields)
            raise UsageError(f"{name}, line 1: there is no column '{column}'.{hint}")
    for row in reader:
        line = f"{name}, line {reader.line_num}"
        if None in row:
            raise UsageError(f"{line}: there are more values than columns.")
        values = {key: value for key, value in row.items() if value}
        try:
            price = msgspec.convert(values, ApiPrice, strict=False)
        except UsageError as error:  # of __post_init__
            raise UsageError(f"{line}: {error}") from None
        except msgspec.ValidationError as error:
            text = f"{line}: {error}. It needs a model, input_usd_per_1m, output_usd_per_1m and "
            raise UsageError(f"{text}source_date (2026-07); numbers such as 2.5 or 1e1.") from None
        if prices.setdefault(price.model, price) is not price:
            raise UsageError(f"{line}: there is another line for '{price.model}'.")
    if not prices:
        raise UsageError(f"{name} has no prices.")
    return prices


def usd_per_million_tokens(usd_per_hour: float, tokens_per_s: float) -> float:
    """Return the price of a million tokens on devices that cost `usd_per_hour`."""
    return usd_per_hour / 3600 / tokens_per_s * 1e6


def cached_prompt_usd(
    *, num_tokens: int, calls: float, usd_per_million: float, read_share: float, write_share: float
) -> float:
    """Return the price in $ of a cached prefix: the first call writes it, the other calls read it.

    `read_share` and `write_share` are the prices of a cache read and a cache write, as shares of
    the price of uncached input (`usd_per_million`).
    """
    usd = num_tokens * usd_per_million / 1e6
    return usd * (write_share + read_share * (calls - 1))
