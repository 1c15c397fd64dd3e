"""SentencePiece's way with spaces: marked as U+2581, and where a text may be cut at them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.tokenize.vocabulary import Vocabulary
    from twostroke.tokenize.words import Cut

SPACE = "\u2581"


def marking(*, prefix: bool) -> Cut:
    """Return what leaves a text whole and writes spaces as U+2581; `prefix` puts one before it."""
    start = SPACE if prefix else ""
    return lambda text: [start + text.replace(" ", SPACE)]


def cut_before_spaces(vocabulary: Vocabulary) -> Cut:
    """Return what cuts a marked text before its spaces, where no token reaches across.

    Merging the words one by one then gives what merging the whole text would, and words come
    again where whole texts do not.
    """
    across = re.escape(vocabulary.before(SPACE))
    joined = f"(?:(?<=[{across}]){SPACE}+[^{SPACE}]*)*" if across else ""
    words = re.compile(f"{SPACE}*[^{SPACE}]+{joined}|{SPACE}+")
    return words.findall
