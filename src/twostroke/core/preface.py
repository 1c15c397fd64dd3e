"""The part of an answer that comes before what was asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preface:
    """A model's reasoning in front of its answer; no constraint and no stop string applies to it.

    `begin` is the text that opens it, as the first thing that is written, or empty where the prompt
    has opened it already; without that text there is none. `end` is the text that closes it.
    """

    begin: str
    end: str
