"""Tables of the request fields that limit the number of answers and answer tokens, by API path.

The server and the router use these tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SUMMARY_TOKENS: Final = 1024  # of /v1/responses/compact
DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's


class AnswerFields(Frozen):
    """The request fields of one API path that limit the number of answers and answer tokens.

    Attributes:
        limits: fields with the maximum number of answer tokens; the first field that is set
            counts.
        counts: fields with the number of answers per prompt; the first field that is set
            counts.
        has_best_of: whether the field `best_of`, if the server accepts it, may raise the number
            of answers.
        inside: the field whose object has the fields of `limits`, such as Ollama's `options`;
            empty if these are fields of the request itself.
        default: the maximum number of answer tokens if no field is set; None for no limit but the
            context length.
        min_tokens: the maximum number of answer tokens is raised to at least this number.
        zero_is_unlimited: whether a maximum of 0 means no limit; negative numbers always mean
            no limit.
        has_several_prompts: whether the field `prompt` may have several prompts.
    """

    limits: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    has_best_of: bool = False
    inside: str = ""
    default: int | None = None
    min_tokens: int = 0
    zero_is_unlimited: bool = False
    has_several_prompts: bool = False

    def first_limit(self, request: object) -> int | None:
        """Return the maximum number of tokens per answer that a decoded request sets.

        The fields named in `limits` are read as attributes of `request`. If all are None, the
        result is `default`.
        """
        return self._first(self.limits, lambda name: getattr(request, name))

    def num_tokens(self, values: Mapping[str, int], context_length: int) -> int:
        """Return the maximum number of tokens that an answer may have, at most `context_length`.

        `values` has the values of the request's fields by name. Without a limit, the result is
        `context_length`.
        """
        limit = self._first(self.limits, values.get)
        if limit is None or limit < 0 or (limit == 0 and self.zero_is_unlimited):
            return context_length
        return min(max(limit, self.min_tokens), context_length)

    def _first(self, names: tuple[str, ...], value_of: Any) -> int | None:
        values = (value_of(name) for name in names)
        return next((value for value in values if value is not None), self.default)

    def num_answers(self, values: Mapping[str, int]) -> int:
        """Return how many answers per prompt a request asks for, from the values of its fields."""
        counts = (values[name] for name in self.counts if name in values)
        return max(1, next(counts, 1), values.get("best_of", 1) if self.has_best_of else 1)


CHAT: Final = AnswerFields(
    limits=("n_predict", "max_completion_tokens", "max_tokens"), counts=("n",), has_best_of=True
)
COMPLETIONS: Final = AnswerFields(
    limits=("n_predict", "max_tokens"),
    counts=("n",),
    has_best_of=True,
    default=DEFAULT_COMPLETION_TOKENS,
    has_several_prompts=True,
)
RESPONSES: Final = AnswerFields(limits=("max_output_tokens",))
COMPACT: Final = AnswerFields(default=MAX_SUMMARY_TOKENS)
MESSAGES: Final = AnswerFields(limits=("max_tokens",))
LLAMA: Final = AnswerFields(
    limits=("n_predict", "max_completion_tokens", "max_tokens"),
    counts=("n_cmpl", "n"),
    min_tokens=1,
    has_several_prompts=True,
)
OLLAMA: Final = AnswerFields(limits=("num_predict",), inside="options", zero_is_unlimited=True)
ANSWER_FIELDS: Final[dict[str, AnswerFields]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/responses/compact": COMPACT,
    "/v1/messages": MESSAGES,
    "/completion": LLAMA,
    "/infill": LLAMA,
    "/api/chat": OLLAMA,
    "/api/generate": OLLAMA,
}
