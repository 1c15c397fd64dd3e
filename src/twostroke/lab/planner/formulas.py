"""Formulas of planning, each as it stands in papers; a plan prints them with their numbers."""

from __future__ import annotations


def tokens_a_round(acceptance: float, drafts: int) -> float:
    """Return the expected tokens of a round of speculation.

    `acceptance` is the chance that a draft is right if those before it were (Leviathan et al.,
    2023, equation 1).
    """
    if acceptance >= 1:
        return drafts + 1.0
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def usd_per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    """Return the price of a million tokens."""
    return usd_per_hour / 3600 / tokens_per_s * 1e6


def cached_prompt_usd(
    num_tokens: int, calls: float, usd_per_million: float, read: float, write: float
) -> float:
    """Return the price of a prefix that is written once and then read by the other calls.

    `read` and `write` are shares of the price of input, as vendors state them.
    """
    usd = num_tokens * usd_per_million / 1e6
    return usd * (write + read * (calls - 1))
