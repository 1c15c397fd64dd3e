"""Numbers as texts that keep their leading digits, however small they are."""

from __future__ import annotations

from math import floor, log10


def digits(value: float) -> str:
    """Return a number with at least three significant digits and one decimal, such as 0.0123."""
    if not value:
        return "0"
    return f"{value:,.{max(1, 2 - floor(log10(abs(value))))}f}"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, without the unit."""
    return digits(seconds * 1e3)
