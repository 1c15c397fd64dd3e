"""Constraints on the text of an answer, and the interface of their matchers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol

from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

NOTATIONS: Final = ("json_schema", "regex", "choice", "grammar", "lark")
MAX_CONSTRAINT = 256 * 1024  # characters


class ReasoningSection(Frozen):
    """A model's reasoning before its answer; constraints and stop strings do not apply to it.

    `begin` is the text that opens it, at the beginning of the output; empty if the prompt has
    opened it already. Without that text there is no preface. `end` is the text that closes it.
    """

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class Excluded:
    """A text that an answer must not begin with; with `is_whole`, that must not be all of it.

    The first `start` bytes come before the wrong value. They are unchanged from the earlier answer.
    """

    text: str
    start: int
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """A set of texts, one of which the answer will be.

    `notation` says how `text` describes them: "json_schema" (a JSON Schema), "regex" (a regular
    expression for the whole answer), "choice" (a JSON list of texts), "lark" (Lark's notation, as
    llguidance extends it) or "grammar" (the same, or llama.cpp's GBNF). `param` is the caller's
    name of it, for errors. The answer may also be one of the texts of `alternative`. A `preface`
    may precede the text. An answer with its preface never begins with one of the `excluded`
    texts. If the schema `is_strict`, an answer that breaks it is an error.

    Raises:
        RequestError: the notation is unknown, or the text is too long or not valid Unicode.
    """

    notation: str
    text: str
    param: str = field(default="constraint", compare=False)
    preface: ReasoningSection | None = None
    alternative: Constraint | None = None
    excluded: tuple[Excluded, ...] = field(default=(), compare=False)
    is_strict: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        """Check the notation and the text."""
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

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, object] | type | str, *, is_strict: bool = False
    ) -> Constraint:
        """Return a constraint to JSON that matches a schema.

        `schema` is a dictionary, its JSON text, or a class with `model_json_schema()`, such as a
        Pydantic model. With `is_strict` an answer that breaks the schema, also after it was drawn
        again, is a `SchemaMissError`.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema, "json_schema", is_strict=is_strict)
        make = getattr(schema, "model_json_schema", None)
        values = make() if isinstance(schema, type) and make is not None else schema
        if not isinstance(values, Mapping):
            reason = "must be a JSON schema: an object, its text, or a Pydantic model."
            raise RequestError(reason, field="json_schema")
        try:
            text = json.dumps(dict(values))
        except (TypeError, ValueError) as error:
            reason = "is not JSON: {why}."
            raise RequestError(reason, field="json_schema", why=error) from None
        return cls("json_schema", text, "json_schema", is_strict=is_strict)

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Return a constraint to texts that a regular expression matches from start to end."""
        return cls("regex", pattern, "regex")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """Return a constraint to one of the given texts."""
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise RequestError("must be a list of texts.", field="choice")
        return cls("choice", json.dumps(list(texts), ensure_ascii=False), "choice")

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """Return a constraint to texts of a grammar, in Lark's notation or in GBNF."""
        return cls("grammar", text, "grammar")

    def after(self, preface: ReasoningSection) -> Constraint:
        """Return the same constraint on the text after `preface`."""
        return replace(self, preface=preface)


class Matcher(Protocol):
    """Which tokens keep one request's answer within its constraint.

    Every call passes all output tokens so far; the matcher keeps its state between calls and reads
    only the new ones. A mask has a bit for each token of the vocabulary in `num_words` words, the
    lowest bit of the first for token 0; no bit is set beyond the last token.
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

        Draft `i` follows `drafts[parents[i]]` (or `ROOT`). Drafts are in depth-first order: the
        parent of each is the previous draft or an ancestor of it. The mask after a draft that is
        not allowed is empty.

        Raises:
            RequestError: the constraint cannot be followed after `output`.
        """

    def count_allowed(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of the first `tokens` may follow `output`, one after another.

        It never fails, nor does `forced`: the next call of `masks` raises the error.
        """

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Return tokens that must follow `output`; perhaps not all of them."""
