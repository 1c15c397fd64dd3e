"""A JSON Schema as this project follows it: its grammar, and the check of finished answers."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.engine.structured_output.schema.verify import UncheckedError
from twostroke.model.loader import build_tokenizer, load

if TYPE_CHECKING:
    from twostroke.engine.structured_output.grammar import GrammarMatcher
    from twostroke.model.tokenizer import Tokenizer

_DETAIL = re.compile(r" \([^()]*\)|(?<=')\w+:[^']*(?=')|(?<=/)[^/ ]+(?=/)|(?<=: )\[.*|\d+| Did .*")


class Forms:
    """Makes forms for one model's tokens."""

    def __init__(self, model: str) -> None:
        loaded = load(model)
        self.tokenizer: Tokenizer = build_tokenizer(loaded)
        self._grammars = Grammars(self.tokenizer, loaded.spec.vocab_size)

    def form(self, schema: object) -> Form:
        """Compile a schema.

        Raises:
            RequestError: it is refused.
        """
        return Form(self._grammars, self.tokenizer, json.dumps(schema))


class Form:
    """One compiled schema."""

    def __init__(self, grammars: Grammars, tokenizer: Tokenizer, schema: str) -> None:
        self._constraint = Constraint("json_schema", schema)
        self._grammars, self._tokenizer = grammars, tokenizer
        matcher = grammars.compile(self._constraint)
        self.unenforced_keywords = matcher.unenforced_keywords
        self.num_words = matcher.num_words

    def matcher(self) -> GrammarMatcher:
        """Return a matcher for one answer."""
        return self._grammars.matcher(self._constraint)

    def takes(self, text: str) -> bool:
        """Return whether the grammar allows a whole answer."""
        matcher, tokens = self.matcher(), self._tokenizer.encode(text)
        if matcher.count_allowed((), tokens) < len(tokens):
            return False
        mask = np.zeros((1, self.num_words), np.uint32)
        try:
            matcher.masks(tokens, (), (), mask)
        except RequestError:
            return False
        return any(mask[0, token // 32] >> (token % 32) & 1 for token in matcher.ends)

    def passes(self, text: str) -> bool:
        """Return whether the check of a finished answer, if it has one, finds nothing."""
        verifier = self._grammars.verifier
        try:
            return (
                not self.unenforced_keywords or verifier.fault(self._constraint.text, text) is None
            )
        except UncheckedError:
            return True


def reason(error: RequestError) -> str:
    """Return why a schema was refused, without its own names and numbers."""
    why = str(error.facts.get("why", error)).removeprefix("The JSON schema cannot be used: ")
    return _DETAIL.sub("", why)[:100]
