"""POST /completion: llama-server's own protocol, which continues texts, token ids, or both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.engine.client import Caller
from twostroke.engine.prompts import encode_parts
from twostroke.server.body import field
from twostroke.server.generation.job import Composed, Job
from twostroke.server.protocols.llama_server.fields import DEFAULTS, TextFields, to_bias, to_params
from twostroke.server.protocols.llama_server.post_sampling import scored_for_sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.model_card import ModelCard
    from twostroke.server.generation.job import Encoded
    from twostroke.server.generation.response_store import Tenant


class PromptObject(field.RequestObject):
    """A prompt as an object."""

    prompt_string: str
    multimodal_data: Annotated[Any, field.unsupported([])] = None


OnePrompt = str | list[int | str] | PromptObject


class LlamaRequest(TextFields, kw_only=True):
    """The body of a request."""

    prompt: Annotated[
        str | list[int | str | list[int | str] | PromptObject] | PromptObject,
        field.doc(
            "A text, a list of token ids and texts that follow each other, or several.", minItems=1
        ),
    ]
    parse_special: field.ParseSpecial = None


class LlamaJob(Job, kw_only=True):
    """A job of llama-server's protocol, with the request that the answer repeats."""

    asked: TextFields

    def encode(self, card: ModelCard, *, splits_reasoning: bool = True) -> Encoded:
        """Encode the job as others; the texts in `logit_bias` need the tokenizer."""
        encoded = super().encode(card, splits_reasoning=splits_reasoning)
        if self.asked.logit_bias:
            bias = to_bias(self.asked.logit_bias, card.tokenizer)
            encoded.params = replace(encoded.params, logit_bias=bias)
        if self.asked.post_sampling_probs and self.asked.n_probs:
            encoded.params = scored_for_sampling(encoded.params, self.asked.n_probs)
        return encoded


class Mixed(Frozen):
    """Texts and token ids that follow each other; `parse_special` as in `Job`."""

    parts: tuple[int | str, ...]
    parse_special: bool | None = None

    def encode(self, card: ModelCard) -> list[int]:
        """Return the token ids; a text at the beginning is begun as the model wants it.

        Raises:
            ContextLengthError: there are more tokens than the context has.
        """
        return encode_parts(card, self.parts, parse_special=self.parse_special)


def read(asked: LlamaRequest, tenant: Tenant) -> Job:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `field` names it.
    """
    prompts = [
        _composed(prompt, parse_special=asked.parse_special) for prompt in _prompts(asked.prompt)
    ]
    return to_job(asked, prompts, tenant)


def to_job(
    asked: TextFields, prompts: Sequence[Composed], tenant: Tenant, kind: type[LlamaJob] = LlamaJob
) -> Job:
    """Return the job of a request; raises as `read` does."""
    return kind(
        model=asked.model,
        prompts=tuple(prompts),
        params=to_params(asked),
        default_params=DEFAULTS,
        caller=Caller(tenant=tenant.name),
        stream=bool(asked.stream),
        shows_progress=bool(asked.stream and asked.return_progress),
        asked=asked,
    )


def _prompts(given: OnePrompt | list[int | str | list[int | str] | PromptObject]) -> list[Any]:
    """Return one prompt, or several: a list with a number in it is one prompt."""
    if not isinstance(given, list):
        return [given]
    if not given:
        raise RequestError("is an empty list: give at least one prompt.", field="prompt")
    if not any(isinstance(part, int) for part in given):
        return given
    if not all(isinstance(part, int | str) for part in given):
        reason = "mixes token ids with lists or objects: give one prompt or a list of prompts."
        raise RequestError(reason, field="prompt")
    return [given]


def _composed(prompt: OnePrompt, *, parse_special: bool | None) -> Mixed:
    if isinstance(prompt, PromptObject):
        prompt = prompt.prompt_string
    return Mixed((prompt,) if isinstance(prompt, str) else tuple(prompt), parse_special)
