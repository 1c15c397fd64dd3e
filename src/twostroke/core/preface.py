"""Text before an answer that does not belong to it."""

from __future__ import annotations

from twostroke.core.frozen import Frozen


class ReasoningSection(Frozen):
    """A model's reasoning before its answer; constraints and stop strings do not apply to it.

    `begin` is the text that opens it, at the beginning of the output; empty if the prompt has
    opened it already. Without that text there is no preface. `end` is the text that closes it.
    """

    begin: str
    end: str
