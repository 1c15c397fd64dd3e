"""Refuses numbers that are out of range, in the same words everywhere."""

from __future__ import annotations

from typing import Final

from twostroke.core.errors import UsageError

_MAX_SHOWN: Final = 40  # digits of an integer, which may be too large for a float


def check_range(owner: object, *fields: str, most: float, least: float | None = None) -> None:
    """Check that fields of `owner` are numbers as `check_number` wants them; None passes.

    Raises:
        UsageError: a field is out of range.
    """
    for field in fields:
        value = getattr(owner, field)
        if value is not None:
            check_number(field, value, most=most, least=least)


def check_number(field: str, value: float, *, most: float, least: float | None = None) -> None:
    """Check that a number is from `least` to `most`, or without `least` above 0; nan never is.

    Raises:
        UsageError: it is out of range.
    """
    if not (value > 0 if least is None else value >= least) or not value <= most:
        low = "greater than 0 and at most" if least is None else f"from {_text(least)} to"
        got = f"{value:.15g}" if isinstance(value, float) else str(value)[:_MAX_SHOWN]
        raise UsageError(f"must be {low} {_text(most)}, got {got}.", field=field)


def _text(bound: float) -> str:
    return f"{bound:,.12g}"
