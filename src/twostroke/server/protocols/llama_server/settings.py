"""The settings with which an answer was generated, as llama-server reports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from twostroke.server.protocols.llama_server.fields import RANDOM_SEED, num_predict, used_samplers

if TYPE_CHECKING:
    from twostroke.core.sampling import SamplingParams
    from twostroke.server.protocols.llama_server.fields import TextFields


def _always(value: object) -> Meta:
    """Annotate a field that has the same value in every response."""
    return Meta(extra_json_schema={"const": value})


class GenerationSettings(msgspec.Struct, kw_only=True, frozen=True):
    """The settings of an answer. Samplers that this server lacks are reported as off."""

    n_predict: int
    max_tokens: int
    seed: Annotated[int, Meta(description="The request's; 4294967295 for a random one.")]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int = -1
    presence_penalty: float
    frequency_penalty: float
    stop: list[str]
    ignore_eos: bool
    stream: bool
    n_probs: int
    grammar: str
    samplers: list[str]
    timings_per_token: bool
    n_keep: Annotated[int, _always(0)] = 0
    n_discard: Annotated[int, _always(0)] = 0
    min_keep: Annotated[int, _always(0)] = 0
    dynatemp_range: Annotated[float, _always(0)] = 0.0
    typical_p: Annotated[float, _always(1)] = 1.0
    top_n_sigma: Annotated[float, _always(-1)] = -1.0
    xtc_probability: Annotated[float, _always(0)] = 0.0
    dry_multiplier: Annotated[float, _always(0)] = 0.0
    mirostat: Annotated[int, _always(0)] = 0
    post_sampling_probs: bool
    lora: Annotated[list[dict[str, Any]], Meta(max_length=0)] = []


def settings_of(request: TextFields, params: SamplingParams) -> GenerationSettings:
    """Return the settings of a request, whose sampling parameters are `params`."""
    limit = num_predict(request)
    constraint = params.constraint
    values = params.values
    return GenerationSettings(
        n_predict=limit,
        max_tokens=limit,
        seed=RANDOM_SEED if params.seed is None else params.seed,
        temperature=values.temperature,
        top_k=values.top_k,
        top_p=values.top_p,
        min_p=values.min_p,
        repeat_penalty=values.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        stop=[*params.stop],
        ignore_eos=params.ignore_eos,
        stream=bool(request.stream),
        n_probs=request.n_probs or 0,
        post_sampling_probs=bool(request.post_sampling_probs),
        grammar=constraint.text if constraint and constraint.notation == "grammar" else "",
        samplers=used_samplers(request),
        timings_per_token=bool(request.timings_per_token),
    )
