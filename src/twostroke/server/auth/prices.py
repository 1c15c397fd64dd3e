"""Price tables in TOML files: the cost of tokens for each model."""

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
    """One model's prices for a million tokens, in the price table's currency.

    Attributes:
        input: the price of prompt tokens.
        output: the price of answer tokens.
        cached: the price of prompt tokens from the prefix cache; None for the price of `input`.
        batch_discount: the discount of batch requests, from 0 to 1.
    """

    input: float
    output: float
    cached: float | None = None
    batch_discount: float = 0.0

    def __post_init__(self) -> None:
        """Check the prices of the model.

        Raises:
            UsageError: a price or the batch discount is out of range.
        """
        check_range(self, "input", "output", "cached", low=0, high=1e9)
        check_range(self, "batch_discount", low=0, high=1)

    def cost(self, amount: Amount) -> float:
        """Return the cost of the tokens that an API key has used of this model."""
        cached = self.input if self.cached is None else self.cached
        price = (amount.input - amount.cached) * self.input + amount.cached * cached
        price = (price + amount.output * self.output) / 1e6
        return price * (1 - self.batch_discount) if amount.owner.is_batch else price


class Prices(Frozen, forbid_unknown_fields=True, kw_only=True):
    """The prices of all models, in one currency."""

    currency: str = "USD"
    models: dict[str, TokenPrice]

    def cost(self, amount: Amount) -> float:
        """Return the cost of the tokens that an API key has used of a model.

        Raises:
            UsageError: the model has no price.
        """
        model = amount.owner.model
        if model not in self.models:
            raise UsageError(
                f"The price table has no model '{model}', which was used: add [models.\"{model}\"] "
                "with input and output, the prices of a million tokens."
            )
        return self.models[model].cost(amount)


class _PriceTable(Frozen):
    models: dict[str, Any]


def read_prices(path: Path) -> Prices:
    """Read a price table from a TOML file.

    Raises:
        UsageError: the file is not TOML, or a price is missing or not valid.
        ModelFormatError: the file cannot be read.
    """
    location = ""
    try:
        table = tomllib.loads(read_small_file(path).decode())
        prices = {}
        for name, price in msgspec.convert(table, _PriceTable).models.items():
            location = f" at model '{name}'"
            prices[name] = msgspec.convert(price, TokenPrice)
        location = ""
        return msgspec.convert({**table, "models": prices}, Prices)
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is not a price table: it is not UTF-8.") from None
    except (ValueError, RecursionError, UsageError) as error:  # of TOML, msgspec and prices
        raise UsageError(f"{path.name} is not a price table{location}: {error}.") from None
