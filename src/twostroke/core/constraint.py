"""Constraints on the text of an answer; a `Matcher` tells which tokens a constraint allows.

A `ReasoningSection` may precede the constrained text.
"""

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
    """The texts that enclose a model's reasoning, such as `<think>` and `</think>`.

    The reasoning comes before the answer. Constraints and stop strings do not apply to it.

    Attributes:
        begin: the text that opens the reasoning, at the start of the output. An output that does
            not begin with this text has no reasoning. Empty if the prompt already ends with the
            opening text.
        end: the text that closes the reasoning.
        closing: the text that the engine writes when the budget of the reasoning is used up: `end`
            with the white space that the model's chat template writes around it. If empty, this
            text is `end`.
        has_channels: whether the model's answers are messages in channels (harmony).
    """

    begin: str
    end: str
    closing: str = ""
    has_channels: bool = False


@dataclass(frozen=True, slots=True)
class ExcludedPrefix:
    """A text that a request's new answer must not begin with, because its last answer did.

    When an answer breaks its JSON schema, the answer is generated again. The beginning of the
    broken answer, up to and including the wrong value, is then excluded, so that the new answer
    differs.

    Attributes:
        text: the excluded text.
        start: how many bytes of `text` come before the wrong value.
        is_whole: whether only an answer that equals `text` is excluded; longer answers that
            begin with `text` are allowed.
    """

    text: str
    start: int
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that the text of an answer must follow.

    Attributes:
        notation: the language of `text`: "json_schema" (a JSON Schema), "regex" (a regular
            expression for the whole answer), "choice" (a JSON list of texts), "lark" (Lark's
            notation, as llguidance extends it) or "grammar" (Lark's notation, or llama.cpp's GBNF).
        text: the rule.
        param: the caller's name of the constraint, for errors.
        preface: a section of reasoning that may precede the text.
        alternative: another constraint that the answer may follow instead.
        begin: a text before the constrained text, such as the header of a channel.
        excluded: texts that the answer, with its preface, must not begin with.
        is_strict: whether an answer that breaks its JSON Schema is an error.

    Raises:
        RequestError: the notation is unknown, or the text is too long or not valid Unicode.
    """

    notation: str
    text: str
    param: str = field(default="constraint", compare=False)
    preface: ReasoningSection | None = None
    alternative: Constraint | None = None
    begin: str = ""
    excluded: tuple[ExcludedPrefix, ...] = field(default=(), compare=False)
    is_strict: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        """Raise RequestError if the constraint's notation is unknown or its text is not valid."""
        if self.notation not in NOTATIONS:
            notations = ", ".join(NOTATIONS)
            raise RequestError(f"A constraint is one of {notations}, not '{self.notation}'.")
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
        """Return a constraint that allows only JSON that matches a schema.

        `schema` is a dictionary, its JSON text, or a class with `model_json_schema()`, such as a
        Pydantic model. With `is_strict`, an answer that breaks the schema is generated again, a
        limited number of times, and `SchemaMissError` is raised if it still breaks the schema.
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
        """Return a constraint that allows only texts that match the whole regular expression."""
        return cls("regex", pattern, "regex")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """Return a constraint that allows only the given texts as answers."""
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise RequestError("must be a list of texts.", field="choice")
        return cls("choice", json.dumps(list(texts), ensure_ascii=False), "choice")

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """Return a constraint that allows only texts of a grammar in Lark's notation or in GBNF."""
        return cls("grammar", text, "grammar")

    def after(self, preface: ReasoningSection) -> Constraint:
        """Return a copy of the constraint that applies only after the model's reasoning.

        `preface` has the texts that open and close the reasoning.
        """
        return replace(self, preface=preface)


class Matcher(Protocol):
    """The state of one request's constraint: tells the sampler which tokens may come next.

    Every call passes all output tokens so far; the matcher keeps its state between calls and reads
    only the new tokens. A mask is an array of `num_words` 32-bit words with one bit for each token
    of the vocabulary: the lowest bit of the first word is token 0, and bits beyond the last token
    are 0.
    """

    num_words: int

    def masks(
        self,
        output: Sequence[int],
        drafts: Sequence[int],
        parents: Sequence[int],
        out: NDArray[np.uint32],
    ) -> None:
        """Write masks of the tokens that may follow a request's output and each of its drafts.

        Args:
            output: all output tokens so far.
            drafts: draft tokens in depth-first order: the parent of each draft is the previous
                draft or one of its ancestors.
            parents: the index of the draft that each draft follows, or `ROOT`.
            out: (1 + drafts, num_words) the masks. The first is for the token after `output`, and
                row 1 + i for the token after draft i. A mask is empty after a draft that the
                constraint does not allow.

        Raises:
            RequestError: the constraint cannot be followed after `output`.
        """

    def count_allowed(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of `tokens`, from the first one, the constraint allows after `output`.

        This method and `forced` never raise: the next call of `masks` raises the error.
        """

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Return the tokens that must come next after `output`: the constraint allows no others.

        The n-gram proposer takes them as drafts. The list may end before the last forced token.
        """
