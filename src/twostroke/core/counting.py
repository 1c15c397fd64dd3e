"""Counts in messages: a number with its noun in the singular or plural."""

from __future__ import annotations


def counted_noun(count: float, noun: str, plural: str | None = None, *, form: str = "") -> str:
    """Return a count with its noun: "1 byte", "2 bytes", "0 replicas".

    Args:
        count: the number.
        noun: the noun in the singular; words may stand before it, as in "open file".
        plural: the noun in the plural; `noun` with an s by default. Verbs may follow both nouns,
            as in "request waits" and "requests wait".
        form: the format of the number, such as ",".
    """
    return f"{count:{form}} {noun if count == 1 else plural or f'{noun}s'}"
