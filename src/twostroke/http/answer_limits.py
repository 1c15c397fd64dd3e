"""The fields that limit an answer, by path, as a server and its router both read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SUMMARY_TOKENS: Final = 1024  # of /v1/responses/compact
DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's


class AnswerFields(Frozen):
    """How a path limits its answers.

    Attributes:
        limits: fields with the most tokens of an answer; the first that is given holds.
        counts: fields with the number of answers to each prompt; the first that is given holds.
        has_best_of: whether `best_of`, where a server takes it, may be a larger number.
        inside: the object with the fields of `limits`; empty for the request itself.
        default: the limit without any of these fields; None for all that the context holds.
        min_tokens: the fewest tokens that a limit of 0 stands for.
        zero_is_unlimited: whether 0 is no limit, as negative numbers are.
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
        """Return the limit that holds of a request with these fields as attributes."""
        return self._first(self.limits, lambda name: getattr(request, name))

    def num_tokens(self, values: Mapping[str, int], context_length: int) -> int:
        """Return the most tokens that an answer may have, from the values that are given."""
        limit = self._first(self.limits, values.get)
        if limit is None or limit < 0 or (limit == 0 and self.zero_is_unlimited):
            return context_length
        return min(max(limit, self.min_tokens), context_length)

    def _first(self, names: tuple[str, ...], value_of: Any) -> int | None:
        values = (value_of(name) for name in names)
        return next((value for value in values if value is not None), self.default)

    def num_answers(self, values: Mapping[str, int]) -> int:
        """Return how many answers each prompt gets, from the values that are given."""
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
