"""Counts in messages."""

from __future__ import annotations

from twostroke.core.message_text import counted_noun


def test_a_count_of_one_has_a_noun_in_the_singular() -> None:
    assert counted_noun(1, "byte") == "1 byte"
    assert counted_noun(0, "byte") == "0 bytes"
    assert counted_noun(3, "process") == "3 processes"
    assert counted_noun(2, "batch") == "2 batches"
    assert counted_noun(1.0, "request waits", "requests wait", form=".0f") == "1 request waits"
    assert counted_noun(1024, "request waits", "requests wait", form=",") == "1,024 requests wait"
