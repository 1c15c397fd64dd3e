"""POST /completion: llama-server's own protocol, which continues texts and token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.engine.client import Caller
from twostroke.server.body import field
from twostroke.server.generation.job import ComposedPrompt, Job
from twostroke.server.protocols.common.prompts import MixedPrompt
from twostroke.server.protocols.llama_server.fields import (
    DEFAULTS,
    TextFields,
    to_logit_bias,
    to_params,
)
from twostroke.server.protocols.llama_server.post_sampling import scored_for_sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.model_card import ModelCard
    from twostroke.server.generation.job import EncodedJob
    from twostroke.server.generation.response_store import Tenant


class PromptObject(field.RequestObject):
    """A prompt that a client sends as an object with a text."""

    prompt_string: str
    multimodal_data: Annotated[Any, field.unsupported([])] = None


OnePrompt = str | list[int | str] | PromptObject


class LlamaRequest(TextFields, kw_only=True):
    """The body of a request to `/completion`."""

    prompt: Annotated[
        str | list[int | str | list[int | str] | PromptObject] | PromptObject,
        field.doc(
            "A text, a list of token ids and texts that are joined, or a list of such prompts.",
            minItems=1,
        ),
    ]
    parse_special: field.ParseSpecial = None


class LlamaJob(Job, kw_only=True):
    """The engine job of a `/completion` or `/infill` request.

    The job has the request, because the response repeats the request's settings.
    """

    request: TextFields

    def encode(self, card: ModelCard, **defaults: Any) -> EncodedJob:
        """Tokenize the job's prompts, and complete the sampling parameters that need the tokenizer.

        These are the biases of texts in `logit_bias`, and the settings for `post_sampling_probs`.
        Raises the errors of `Job.encode`.
        """
        encoded = super().encode(card, **defaults)
        if self.request.logit_bias:
            bias = to_logit_bias(self.request.logit_bias, card.tokenizer)
            encoded.params = replace(encoded.params, logit_bias=bias)
        if self.request.post_sampling_probs and self.request.n_probs:
            encoded.params = scored_for_sampling(encoded.params, self.request.n_probs)
        return encoded


def read(request: LlamaRequest, tenant: Tenant) -> Job:
    """Translate the body of a `/completion` request into a job that the engine can run.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    prompts = [
        _to_mixed_prompt(prompt, parse_special=request.parse_special)
        for prompt in _split_prompts(request.prompt)
    ]
    return to_job(request, prompts, tenant=tenant)


def to_job(
    request: TextFields,
    prompts: Sequence[ComposedPrompt],
    tenant: Tenant,
    job_type: type[LlamaJob] = LlamaJob,
) -> Job:
    """Build the engine job of a `/completion` or `/infill` request from its prompts.

    `job_type` is the class of the job.

    Raises:
        RequestError: a sampling parameter is out of bounds or not supported.
    """
    return job_type(
        model=request.model,
        prompts=tuple(prompts),
        params=to_params(request),
        default_params=DEFAULTS,
        caller=Caller(tenant=tenant.name),
        stream=bool(request.stream),
        shows_progress=bool(request.stream and request.return_progress),
        request=request,
    )


def _split_prompts(
    value: OnePrompt | list[int | str | list[int | str] | PromptObject],
) -> list[Any]:
    """Return the prompts of the field `prompt`, which takes one prompt or a list of prompts.

    A list with a token id is one prompt; other lists are lists of prompts.

    Raises:
        RequestError: the list is empty, or mixes token ids with lists or objects.
    """
    if not isinstance(value, list):
        return [value]
    if not value:
        raise RequestError("is an empty list: give at least one prompt.", field="prompt")
    if not any(isinstance(part, int) for part in value):
        return value
    if not all(isinstance(part, int | str) for part in value):
        reason = "mixes token ids with lists or objects: give one prompt or a list of prompts."
        raise RequestError(reason, field="prompt")
    return [value]


def _to_mixed_prompt(prompt: OnePrompt, *, parse_special: bool | None) -> MixedPrompt:
    if isinstance(prompt, PromptObject):
        prompt = prompt.prompt_string
    return MixedPrompt((prompt,) if isinstance(prompt, str) else tuple(prompt), parse_special)
