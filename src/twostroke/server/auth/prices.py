"""Price tables: what tokens cost by model, read from TOML."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

import msgspec

from twostroke.core.errors import UsageError
from twostroke.core.files import read_small_file
from twostroke.core.frozen import Frozen, check_range

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.server.auth.usage import Amount


class TokenPrice(Frozen, forbid_unknown_fields=True, kw_only=True):
    """The price of a million tokens of a model.

    `cached` is that of prompt tokens found in the cache, without it that of the others; requests of
    batches are cheaper by the share `batch_discount`.
    """

    input: float
    output: float
    cached: float | None = None
    batch_discount: float = 0.0

    def __post_init__(self) -> None:
        """Raise UsageError for what is not a price."""
        check_range(self, "input", "output", "cached", low=0, high=1e9)
        check_range(self, "batch_discount", low=0, high=1)

    def cost(self, amount: Amount) -> float:
        """Return what an amount costs."""
        cached = self.input if self.cached is None else self.cached
        full = (amount.input - amount.cached) * self.input + amount.cached * cached
        full = (full + amount.output * self.output) / 1e6
        return full * (1 - self.batch_discount) if amount.owner.is_batch else full


class Prices(Frozen, forbid_unknown_fields=True, kw_only=True):
    """The prices of models, in one currency."""

    currency: str = "USD"
    models: dict[str, TokenPrice]

    def cost(self, amount: Amount) -> float:
        """Return what an amount costs; raises UsageError if its model has no price."""
        model = amount.owner.model
        if model not in self.models:
            raise UsageError(
                f"The price table has no model '{model}', which was used: add [models.\"{model}\"] "
                "with input and output, the prices of a million tokens."
            )
        return self.models[model].cost(amount)


class _Models(Frozen):
    models: dict[str, Any]


def read_prices(path: Path) -> Prices:
    """Return the prices in a file.

    Raises:
        UsageError: it is not TOML, or a price is missing or wrong.
        ModelFormatError: it cannot be read.
    """
    where = ""
    try:
        table = tomllib.loads(read_small_file(path).decode())
        prices = {}
        for name, price in msgspec.convert(table, _Models).models.items():
            where = f" at model '{name}'"
            prices[name] = msgspec.convert(price, TokenPrice)
        where = ""
        return msgspec.convert({**table, "models": prices}, Prices)
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is not a price table: it is not UTF-8.") from None
    except (ValueError, RecursionError, UsageError) as error:  # of TOML, msgspec and prices
        raise UsageError(f"{path.name} is not a price table{where}: {error}.") from None
