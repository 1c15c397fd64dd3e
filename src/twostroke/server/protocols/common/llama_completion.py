"""llama-server's form of a complete answer, also used as `__verbose` in OpenAI's responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from twostroke.core.request import FinishReason
from twostroke.server.generation.events import SchemaMiss
from twostroke.server.protocols.common.timings import LlamaTimings, final_timings

if TYPE_CHECKING:
    from twostroke.core.sampling import SamplingParams
    from twostroke.server.generation.events import ChoiceEnded, ChoiceStarted
    from twostroke.server.generation.protocol import ResponseInfo

RANDOM_SEED: Final = 2**32 - 1  # llama-server reports the seed -1 as this
NO_SLOT: Final = -1
# By a sampler's name: the letter that selects it in a text, and the values that turn it off.
SAMPLERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "penalties": (
        "e",
        {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    ),
    "temperature": ("t", {"temperature": 1.0}),
    "top_k": ("k", {"top_k": 0}),
    "min_p": ("m", {"min_p": 0.0}),
    "top_p": ("p", {"top_p": 1.0}),
}


class LikelyToken(msgspec.Struct, kw_only=True, frozen=True):
    """One of the likeliest tokens at a position of an answer, in llama-server's form.

    `bytes` is exact even if the token ends inside a character. If the request sets
    `post_sampling_probs`, the entry has `prob` instead of `logprob`.
    """

    id: int
    token: str
    bytes: list[int]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


class ScoredToken(LikelyToken, kw_only=True, frozen=True):
    """A token of an answer with its probability and alternatives, in llama-server's form."""

    top_logprobs: list[LikelyToken] | UnsetType = UNSET
    top_probs: list[LikelyToken] | UnsetType = UNSET


def _always(value: object) -> Meta:
    """Describe a response field whose value never changes, for the OpenAPI document."""
    return Meta(extra_json_schema={"const": value})


class GenerationSettings(msgspec.Struct, kw_only=True, frozen=True):
    """The sampling settings that a response repeats; samplers that are not supported are off."""

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


class LlamaCompletion(msgspec.Struct, kw_only=True, frozen=True):
    """A complete answer of `/completion`, or a stream's last event, which leaves the text out.

    `tokens_evaluated` counts the prompt's tokens, `tokens_cached` the tokens of prompt and answer.
    """

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: Annotated[bool, Meta(extra_json_schema={"const": True})] = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: GenerationSettings
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    tokens_cached: int
    timings: LlamaTimings
    completion_probabilities: list[ScoredToken] | UnsetType = UNSET
    schema_miss: SchemaMiss = UNSET


class VerboseAnswers:
    """Builds `__verbose` of OpenAI's responses, which repeats an answer in llama-server's form."""

    def __init__(self, info: ResponseInfo) -> None:
        """Prepare for the answers of one response; `info` has its job, prompts and tokenizer."""
        self._info = info
        self._tokens: dict[int, list[int]] = {}  # by choice

    def begin(self, event: ChoiceStarted) -> None:
        """Note that an answer begins; its list `event.tokens` grows until the answer ends."""
        self._tokens[event.choice] = event.tokens

    def body(self, event: ChoiceEnded) -> LlamaCompletion | UnsetType:
        """Return a complete answer in llama-server's form, with its prompt and special tokens.

        Returns UNSET, which leaves the field out, if the request does not set `verbose`.
        """
        info = self._info
        job = info.job
        if not job.is_verbose:
            return UNSET
        tokenizer = info.tokenizer
        tokens = self._tokens[event.choice]
        usage = event.usage
        if tokens and tokens[-1] in tokenizer.eos_ids:
            tokens = tokens[:-1]
        text = tokenizer.decode(tokens, skip_special=False)
        limit = -1 if job.params.max_tokens is None else job.params.max_tokens
        settings = settings_of(
            job.params,
            limit=limit,
            stream=job.stream,
            num_probs=job.params.logprobs or 0,
            samplers=list(SAMPLERS),
            timings_per_token=job.llama_timings,
        )
        is_cut = event.reason is FinishReason.LENGTH
        word = event.stop if isinstance(event.stop, str) else ""
        return LlamaCompletion(
            index=event.choice,
            content=text,
            tokens=tokens,
            id_slot=NO_SLOT,
            model=info.model,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            generation_settings=settings,
            prompt=tokenizer.decode(info.prompts[event.choice // job.params.n], skip_special=False),
            has_new_line="\n" in text,
            truncated=is_cut and usage.completion_tokens != limit,
            stop_type="limit" if is_cut else "word" if word else "eos",
            stopping_word=word,
            tokens_cached=usage.prompt_tokens + usage.completion_tokens,
            timings=final_timings(usage, event.timings),
        )


def settings_of(
    params: SamplingParams,
    *,
    limit: int,
    stream: bool,
    num_probs: int,
    samplers: list[str],
    timings_per_token: bool,
    post_sampling_probs: bool = False,
) -> GenerationSettings:
    """Build the `generation_settings` of a response, which llama-server's clients read.

    Args:
        params: the sampling parameters of the answer.
        limit: the maximum number of tokens; -1 for no limit.
        stream: whether the answer is streamed.
        num_probs: the number of likely tokens that are reported for each token.
        samplers: the names of the samplers that are on, in the order of their use.
        timings_per_token: whether each event of a stream has the timings so far.
        post_sampling_probs: whether probabilities are reported after all samplers.
    """
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
        stream=stream,
        n_probs=num_probs,
        post_sampling_probs=post_sampling_probs,
        grammar=constraint.text if constraint and constraint.notation == "grammar" else "",
        samplers=samplers,
        timings_per_token=timings_per_token,
    )
