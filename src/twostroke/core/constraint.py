"""What an answer has to look like, and who says which tokens keep it so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from twostroke.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from twostroke.core.preface import Preface

NOTATIONS: Final = ("json_schema", "regex", "choice", "grammar", "lark")
MAX_CONSTRAINT = 256 * 1024  # characters


@dataclass(frozen=True, slots=True)
class Constraint:
    """A set of texts, one of which the answer will be.

    `notation` says how `text` describes them: "json_schema" (a JSON Schema), "regex" (a regular
    expression for the whole answer), "choice" (a JSON list of texts), "lark" (Lark's notation, as
    llguidance extends it) or "grammar" (the same, or llama.cpp's GBNF). `param` is what the caller
    calls it: errors name it. Before the text comes a `preface`, if there is one.

    Raises:
        RequestError: there is no such notation, the text is too long, or it is no Unicode text.
    """

    notation: str
    text: str
    param: str = field(default="constraint", compare=False)
    preface: Preface | None = None

    def __post_init__(self) -> None:
        """Refuse what nobody could read."""
        if self.notation not in NOTATIONS:
            known, word = ", ".join(NOTATIONS), self.notation
            raise RequestError(f"A constraint is one of {known}, not '{word}'.")
        if len(self.text) > MAX_CONSTRAINT:
            raise RequestError(f"takes at most {MAX_CONSTRAINT:,} characters.", field=self.param)
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            wrong = ascii(self.text[error.start])
            reason = f"contains {wrong}, which is half of a character: leave it out."
            raise RequestError(reason, field=self.param) from None


class Matcher(Protocol):
    """Which tokens keep one request's answer within its constraint.

    It is shown the output tokens so far at every call and knows the beginning of them already: it
    follows by itself, whatever became of the request in between. A mask has a bit for each token of
    the vocabulary in `num_words` words, the lowest bit of the first for token 0; none is set beyond
    the last token.
    """

    num_words: int

    def masks(
        self,
        output: Sequence[int],
        drafts: Sequence[int],
        parents: Sequence[int],
        out: NDArray[np.uint32],
    ) -> None:
        """Write which tokens may follow `output` into `out[0]`, and draft `i` into `out[1 + i]`.

        Each draft follows `drafts[parents[i]]` (or `ROOT`), and all before that one; they stand
        depth first, so that one follows the draft before it or one that that follows. Behind a
        draft that may not be there nothing may be drawn.

        Raises:
            RequestError: the constraint cannot be followed behind `output`.
        """

    def count_allowed(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of the first `tokens` may follow `output`, each behind the last.

        It never fails, nor does `forced`: the next mask will say what is wrong.
        """

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Return tokens that follow `output` as the text leaves nothing else; perhaps not all."""
